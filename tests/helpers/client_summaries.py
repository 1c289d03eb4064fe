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


def vllm(document: Mapping[str, Any], metrics=("ttft", "tpot", "itl", "e2el")) -> str:
    """``vllm bench serve --save-result --percentile-metrics ttft,tpot,itl,e2el``."""
    found = quantities(document)
    kept = {name: value for name, value in document.items() if name not in LISTS}
    return json.dumps(kept | _counts(document, found) | _named(found, {each: each for each in metrics}))


def vllm_by_default(document: Mapping[str, Any]) -> str:
    """``vllm bench serve --save-result``: nothing of E2EL."""
    return vllm(document, ("ttft", "tpot", "itl"))


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


def _distribution(of: np.ndarray, ranks, names: Mapping[str, str], spell="p{:g}") -> dict[str, float]:
    values = {"mean": of.mean(), "std": of.std(), "min": of.min(), "max": of.max(), "median": np.median(of)}
    found = {written: float(values[name]) for name, written in names.items()}
    return found | {spell.format(rank): float(np.percentile(of, rank)) for rank in ranks}


def aiperf(document: Mapping[str, Any]) -> str:
    """``profile_export_aiperf.json``."""
    found = quantities(document)
    requests, outputs, tokens = _throughputs(document, found)
    names = {"mean": "avg", "std": "std", "min": "min", "max": "max"}

    def metric(of: np.ndarray, unit: str) -> dict[str, Any]:
        return {"unit": unit} | _distribution(of, (1, 5, 10, 25, 50, 75, 90, 95, 99), names)

    limit = document["max_concurrency"]
    load = {"request_rate": document["request_rate"]} if limit is None else {"concurrency": limit}
    return json.dumps(
        {
            "schema_version": "1.1",
            "aiperf_version": "0.6.0",
            "request_throughput": {"unit": "requests/sec", "avg": requests},
            "output_token_throughput": {"unit": "tokens/sec", "avg": outputs},
            "total_token_throughput": {"unit": "tokens/sec", "avg": tokens},
            "request_count": {"unit": "requests", "avg": float(len(found["ttft"]))},
            "error_request_count": {"unit": "requests", "avg": float(sum(map(bool, document["errors"])))},
            "benchmark_duration": {"unit": "sec", "avg": document["duration"]},
            "input_sequence_length": metric(found["prompts"], "tokens"),
            "output_sequence_length": metric(found["outputs"], "tokens"),
            "time_to_first_token": metric(found["ttft"] * 1e3, "ms"),
            "inter_token_latency": metric(found["tpot"] * 1e3, "ms"),
            "request_latency": metric(found["e2el"] * 1e3, "ms"),
            "input_config": {"endpoint": {"model_names": [document["model_id"]]}, "loadgen": load},
        },
        indent=2,
    )


def guidellm(document: Mapping[str, Any]) -> str:
    """``benchmarks.json`` with --sample-requests 0."""
    found = quantities(document)
    names = {"mean": "mean", "std": "std_dev", "min": "min", "max": "max", "median": "median"}

    def metric(of: np.ndarray) -> dict[str, Any]:
        ranks = {f"p{rank:02d}": float(np.percentile(of, rank)) for rank in (1, 5, 10, 25, 50, 75, 90, 95, 99)}
        ranks |= {"p001": float(np.percentile(of, 0.1)), "p999": float(np.percentile(of, 99.9))}
        return {"successful": _distribution(of, (), names) | {"count": len(of), "percentiles": ranks}}

    rates = ("requests_per_second", "output_tokens_per_second", "tokens_per_second")
    limit, failed = document["max_concurrency"], sum(map(bool, document["errors"]))
    load = (
        {"type_": "poisson", "rate": document["request_rate"]}
        if limit is None
        else {"type_": "concurrent", "streams": limit}
    )
    metrics = {
        "request_totals": {"successful": len(found["ttft"]), "errored": failed, "incomplete": 0},
        "prompt_token_count": metric(found["prompts"]),
        "output_token_count": metric(found["outputs"]),
        "time_to_first_token_ms": metric(found["ttft"] * 1e3),
        "inter_token_latency_ms": metric(found["itl"] * 1e3),
        "request_latency": metric(found["e2el"]),
    } | {name: {"successful": {"mean": rate}} for name, rate in zip(rates, _throughputs(document, found), strict=True)}
    config = {"strategy": load, "backend": {"model": document["model_id"]}}
    kinds = {"successful": [], "errored": [], "incomplete": []}
    benchmark = {"config": config, "duration": document["duration"], "metrics": metrics, "requests": kinds}
    return json.dumps({"benchmarks": [benchmark]})


def inference_perf(document: Mapping[str, Any]) -> str:
    """``stage_0_lifecycle_metrics.json``."""
    found = quantities(document)
    names = {"mean": "mean", "min": "min", "max": "max", "median": "median"}
    requests, outputs, tokens = _throughputs(document, found)
    limit, failed = document["max_concurrency"], sum(map(bool, document["errors"]))

    def metric(of: np.ndarray) -> dict[str, Any]:
        return _distribution(of, (0.1, 1, 5, 10, 25, 75, 90, 95, 99, 99.9), names)

    latencies = {
        "request_latency": "e2el", "time_per_output_token": "tpot", "time_to_first_token": "ttft", "inter_token_latency": "itl",
    }  # fmt: skip
    load = (
        {"requested_rate": document["request_rate"]} if limit is None else {"requested_rate": 7.0, "concurrency": limit}
    )
    answered = {
        "count": len(found["ttft"]),
        "latency": {name: metric(found[of]) for name, of in latencies.items()},
        "throughput": {"requests_per_sec": requests, "output_tokens_per_sec": outputs, "total_tokens_per_sec": tokens},
        "prompt_tokens": metric(found["prompts"]) | {"total": float(found["prompts"].sum()), "cached": 0.0},
        "output_tokens": metric(found["outputs"]),
    }
    return json.dumps(
        {
            "benchmark_time_seconds": document["duration"],
            "load_summary": {"count": len(document["ttfts"])} | load,
            "successes": answered,
            "failures": {"count": failed},
        },
        indent=2,
    )


def inferencex(document: Mapping[str, Any]) -> str:
    """The result of a run with a tensor parallelism of 2."""
    found = quantities(document)
    _, outputs, tokens = _throughputs(document, found)
    names = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2el"}
    about = {
        "hw": "h200", "conc": document["max_concurrency"], "model": document["model_id"], "framework": "vllm", "precision": "fp8",
        "isl": int(found["prompts"].max()), "osl": int(found["outputs"].max()), "is_multinode": False, "disagg": False, "tp": 2,
        "ep": 1, "dp_attention": "false", "tput_per_gpu": tokens / 2, "output_tput_per_gpu": outputs / 2,
    }  # fmt: skip
    latencies = {name.removesuffix("_ms"): value / 1e3 for name, value in _named(found, names, (99, 99.9)).items()}
    return json.dumps(about | latencies, indent=2)
