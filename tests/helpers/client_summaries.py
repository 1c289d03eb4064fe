"""Summaries of a benchmark, as each client writes them: computed here from the lists of ``vllm bench serve``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors", "generated_texts")


def quantities(document: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Lengths in tokens and latencies in seconds of the answered requests; ``itl`` has all gaps together."""
    answered = [place for place, error in enumerate(document["errors"]) if not error]
    prompts, outputs, ttft = (
        np.array([document[name][place] for place in answered], float)
        for name in ("input_lens", "output_lens", "ttfts")
    )
    gaps = [document["itls"][place] for place in answered]
    e2el = ttft + [sum(each) for each in gaps]
    several = outputs > 1
    return {
        "prompts": prompts,
        "outputs": outputs,
        "ttft": ttft,
        "tpot": ((e2el - ttft)[several]) / (outputs[several] - 1),
        "itl": np.concatenate([np.array(each) for each in gaps]),
        "e2el": e2el,
    }


def _throughputs(document: Mapping[str, Any], found: Mapping[str, np.ndarray]) -> tuple[float, float, float]:
    prompts, outputs = found["prompts"].sum(), found["outputs"].sum()
    counts = (len(found["outputs"]), outputs, prompts + outputs)
    return tuple(float(count / document["duration"]) for count in counts)


def _named(found: Mapping[str, np.ndarray], names: Mapping[str, str], ranks=(99,)) -> dict[str, float]:
    values = {}
    for name, written in names.items():
        of = found[name] * 1e3
        values |= {
            f"mean_{written}_ms": of.mean(),
            f"median_{written}_ms": np.median(of),
            f"std_{written}_ms": of.std(),
        }
        values |= {f"p{rank}_{written}_ms": np.percentile(of, rank) for rank in ranks}
    return {name: float(value) for name, value in values.items()}


def _counts(document: Mapping[str, Any], found: Mapping[str, np.ndarray]) -> dict[str, Any]:
    requests, outputs, tokens = _throughputs(document, found)
    return {
        "completed": len(found["prompts"]),
        "total_input_tokens": int(found["prompts"].sum()),
        "total_output_tokens": int(found["outputs"].sum()),
        "request_throughput": requests,
        "output_throughput": outputs,
        "total_token_throughput": tokens,
    }


def vllm(document: Mapping[str, Any]) -> str:
    """``vllm bench serve --save-result``."""
    found = quantities(document)
    kept = {name: value for name, value in document.items() if name not in LISTS}
    return json.dumps(
        kept | _counts(document, found) | _named(found, {each: each for each in ("ttft", "tpot", "itl", "e2el")})
    )


def sglang(document: Mapping[str, Any]) -> str:
    """``bench_serving --output-file``, without details; of data that is not drawn by length."""
    found = quantities(document)
    counts = _counts(document, found)
    counts["total_throughput"] = counts.pop("total_token_throughput")
    about = {
        "backend": "sglang-oai", "dataset_name": "sharegpt", "request_rate": document["request_rate"],
        "max_concurrency": document["max_concurrency"], "server_info": {"model_path": document["model_id"]},
        "duration": document["duration"], "total_output_tokens_retokenized": counts["total_output_tokens"],
    }  # fmt: skip
    names = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e_latency"}
    return json.dumps(about | counts | _named(found, names, (90, 95, 99))) + "\n"
