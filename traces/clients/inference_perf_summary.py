"""inference-perf's ``summary_lifecycle_metrics.json`` and ``stage_N_lifecycle_metrics.json``: statistics, in seconds.

    {"load_summary": {"count": 3600, "requested_rate": 8.0, "achieved_rate": 7.9, "concurrency": 16, ...}, "benchmark_time_seconds": 60.2,
     "successes": {"count": 3600, "prompt_tokens": {"mean": ..., "min": ..., "median": ..., "p99": ..., "max": ...},
     "output_tokens": ..., "latency": {"request_latency": ..., "time_to_first_token": ..., "time_per_output_token": ...,
     "inter_token_latency": ...}, "throughput": {"requests_per_sec": ..., ...}}, "failures": {"count": 0, ...}}

Only the files of stages have the rate or the concurrency. The summary is of all stages together. Earlier releases name the lengths
``prompt_len`` and ``output_len``, counted from the text. Some count two tokens for one, so that TPOT and ITL are half of what E2EL says.

Source: kubernetes-sigs/inference-perf, inference_perf/reportgen/base.py (``summarize_requests``); an example is in
the documentation of llm-d-benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from .load import client_load
from .summary import OUTPUTS, REQUESTS, TOKENS, BenchmarkSummary, Fields, Statistics, known

_LATENCIES = {
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "itl": "inter_token_latency",
    "e2el": "request_latency",
}
_THROUGHPUTS = {REQUESTS: "requests_per_sec", OUTPUTS: "output_tokens_per_sec", TOKENS: "total_tokens_per_sec"}


def summary_of_inference_perf(path: str | PathLike[str], document: Mapping[str, Any]) -> BenchmarkSummary:
    """The summary in a report.

    Raises:
        TraceError: No request was answered, or a value is no number.
    """
    fields = Fields(path, document)
    answered, sent = fields.part("successes"), fields.part("load_summary")
    latency = answered.part("latency")
    about = {
        "duration": fields.number("benchmark_time_seconds") or None,
        "request_rate": sent.number("requested_rate") or sent.number("achieved_rate") or None,
        "max_concurrency": sent.number("concurrency") or None,
    }
    if about["max_concurrency"] is not None:
        # The rate of a stage with a concurrency is only that of its workers.
        about["request_rate"] = None
    is_stage = any(value is not None for name, value in about.items() if name != "duration")
    return BenchmarkSummary(
        "inference-perf",
        path,
        requests=int(answered.needed("count", remedy="are no answered requests; give another report")),
        failed=int(fields.part("failures").number("count") or 0),
        prompts=_first(answered, "prompt_tokens", "prompt_len"),
        outputs=_first(answered, "output_tokens", "output_len"),
        latencies={name: of for name, field in _LATENCIES.items() if (of := latency.part(field).statistics())},
        throughputs=known(**{name: answered.part("throughput").number(tag) for name, tag in _THROUGHPUTS.items()}),
        load=client_load(path, about),
        assumed=() if is_stage else ("all stages are one (stage_N_lifecycle_metrics.json has the rate of each)",),
    )


def _first(fields: Fields, *names: str) -> Statistics:
    """The first of these statistics that the file has."""
    return next((found for name in names if (found := fields.part(name).statistics())), Statistics())
