"""Results of InferenceX (InferenceMAX before): one flat object for each run of its client, in seconds.

    {"hw": "h200", "conc": 64, "model": ORG/NAME, "framework": "vllm", "precision": "fp8", "isl": 1024, "osl": 1024, "tp": 8,
     "ep": 1, "dp_attention": "false", "is_multinode": false, "disagg": false, "tput_per_gpu": ..., "output_tput_per_gpu": ...,
     "mean_ttft": ..., "median_tpot": ..., "p99_e2el": ..., "mean_intvty": ..., ...}

Its client is a copy of vLLM's with ``--dataset-name random --request-rate inf --max-concurrency CONC --ignore-eos``: a closed loop. It draws
lengths uniformly from a share of ``isl`` and ``osl`` to these. Neither that share nor the means nor the number of requests are in the
file. The mean output follows from the mean latencies, (E2EL - TTFT) / TPOT + 1, and the mean prompt from it and the throughputs; a
client sends ten requests for each of its users (``--num-prompts $((CONC * 10))``). Throughputs are given for each GPU.

Source: SemiAnalysisAI/InferenceX, utils/process_result.py, utils/bench_serving/benchmark_serving.py, benchmarks/benchmark_lib.sh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from os import PathLike
from typing import Any

from .load import client_load
from .summary import LATENCIES, OUTPUTS, TOKENS, BenchmarkSummary, Fields, Statistics

_TOTAL, _OUTPUT = "tput_per_gpu", "output_tput_per_gpu"
#: Requests of each user.
_TURNS = 10


def summary_of_inferencex(path: str | PathLike[str], document: Mapping[str, Any]) -> BenchmarkSummary:
    """The summary in a result.

    Raises:
        TraceError: The result is of several nodes, lacks a length or the concurrency, or a value is no number.
    """
    fields = Fields(path, document)
    for name in ("is_multinode", "disagg"):
        if str(fields.value(name)).lower() == "true":
            raise fields.error(
                name, fields.value(name), "is of several servers, and one is simulated; give a result of one"
            )
    users, gpus = (fields.needed(name, remedy="is missing; fetch the file again") for name in ("conc", "tp"))
    remedy = "is missing; add it to the file (earlier results have it in their names only)"
    longest_prompt, longest_output = (fields.needed(name, remedy=remedy) for name in ("isl", "osl"))
    latencies = {name: of for name in LATENCIES if (of := fields.statistics(after=f"_{name}"))}
    total, output = (fields.number(name) for name in (_TOTAL, _OUTPUT))
    outputs = _mean_output(latencies, longest_output)
    prompts = outputs * (total - output) / output if outputs and total and output else None
    return BenchmarkSummary(
        "InferenceX",
        path,
        requests=round(users) * _TURNS,
        failed=0,
        prompts=_uniform(prompts, longest_prompt),
        outputs=_uniform(outputs, longest_output),
        latencies=latencies,
        throughputs={name: value * gpus for name, value in ((OUTPUTS, output), (TOKENS, total)) if value is not None},
        load=client_load(
            path,
            {
                "request_rate": inf,
                "max_concurrency": users,
                "model_id": fields.text("model"),
                "backend": fields.text("framework"),
            },
        ),
        states={"tensor_parallel_size": int(gpus)},
        assumed=(*_words(fields, outputs),),
        ignores_eos=True,
    )


def _words(fields: Fields, mean_output: float | None) -> Iterator[str]:
    yield f"{_TURNS} requests for each user, as InferenceX sends"
    if mean_output is None:
        yield "all lengths are the longest ones"
    else:
        yield "mean lengths by E2EL, TTFT, TPOT and the throughputs"
    served = [
        fields.text("framework"), fields.text("hw"), fields.text("precision"),
        None if fields.text("spec_decoding") in (None, "none") else f"speculative decoding ({fields.text('spec_decoding')})",
    ]  # fmt: skip
    if any(served):
        yield f"the file is of {', '.join(each for each in served if each)}"


def _mean_output(latencies: Mapping[str, Statistics], longest: float) -> float | None:
    """Mean output by the mean latencies; None if the file lacks one, or they contradict the longest output."""
    means = [latencies[name].mean if name in latencies else None for name in ("e2el", "ttft", "tpot")]
    last, first, gap = means
    if last is None or first is None or not gap:
        return None
    mean = 1 + (last - first) / gap
    return mean if longest / 2 <= mean <= longest else None


def _uniform(mean: float | None, longest: float) -> Statistics:
    """Lengths with this mean that are uniform up to the longest; all as long if the mean is unknown or beyond it."""
    if mean is None or not longest / 2 <= mean <= longest:
        return Statistics(longest)
    return Statistics(mean, percentiles={0.0: max(1.0, 2 * mean - longest), 100.0: longest})
