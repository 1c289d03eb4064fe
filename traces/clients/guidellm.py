"""GuideLLM's ``benchmarks.json``: one object with a benchmark per rate, which groups its requests by outcome.

    {"benchmarks": [{"type_": "generative_benchmark", "config": {"strategy": {"type_": "poisson", "rate": 4.0}},
     "requests": {"successful": [{"request_start_time": 1763847600.0, "prompt_tokens": 128, "output_tokens": 5,
     "time_to_first_token_ms": 50.0, "request_latency": 0.09, ...}], "incomplete": [...], "errored": [...]}, ...}]}

Releases before 0.4 name the start ``start_time`` and keep the strategy under ``args``. Times are seconds since 1970. The
file has no times of single tokens. With ``--sample-requests`` (default 10 in 0.4 and 0.5) the file has only a sample of
the requests. The reader refuses it, since a sample is not a trace.

Source: vllm-project/guidellm, releases 0.2.1 to 0.8.1: benchmark/benchmark.py and schemas/request_stats.py; their
classes wrote the samples in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from os import PathLike
from typing import Any

from ...sim.types.errors import TraceError
from ..parsing.form import Form, lengths
from ..parsing.table import shown
from ..parsing.times import clock
from .result import BenchmarkResult, Client, Latency, Request, in_order

_START, _EARLIER_START = "request_start_time", "start_time"
_ANSWERED, _FAILED = "successful", ("errored", "incomplete")
GUIDELLM = Client(
    Form(
        "GuideLLM",
        frozenset({"benchmarks"}),
        {_START: clock("s", doubted=False)},
        lengths("prompt_tokens", "output_tokens"),
        content={},
        failures=True,
    ),
    ttft=Latency("time_to_first_token_ms", 1e-3),
    e2el=Latency("request_latency", 1),
    gaps=None,
    streaming="streaming",
)


def is_guidellm(document: Mapping[str, Any]) -> bool:
    """Whether an object is a report."""
    return isinstance(document.get("benchmarks"), list)


def read_guidellm(path: str | PathLike[str], document: Mapping[str, Any]) -> BenchmarkResult:
    """The requests of the benchmark in a report.

    Raises:
        TraceError: The report has several benchmarks, or only some of the requests.
    """
    benchmarks = document["benchmarks"]
    if not benchmarks:
        raise TraceError(path, None, "benchmarks", 0, "has no requests; give another result")
    if len(benchmarks) != 1:
        remedy = "must be one benchmark; keep one, as by jq '.benchmarks |= .[2:3]' for the third"
        raise TraceError(path, None, "benchmarks", len(benchmarks), remedy)
    benchmark = benchmarks[0]
    kinds = benchmark.get("requests") if isinstance(benchmark, dict) else None
    if not isinstance(kinds, dict) or not all(
        isinstance(kinds.get(kind) or [], list) for kind in (_ANSWERED, *_FAILED)
    ):
        remedy = "must be lists of successful, errored and incomplete requests; fetch the file again"
        raise TraceError(path, None, "requests", shown(kinds), remedy)
    answered = kinds.get(_ANSWERED) or []
    _require_all(path, benchmark, len(answered))
    failed = [request for kind in _FAILED for request in kinds.get(kind) or []]
    requests = [_request(path, row, request, row > len(answered)) for row, request in enumerate(answered + failed, 1)]
    return BenchmarkResult(GUIDELLM, path, in_order(requests, _START), _about(benchmark))


def _require_all(path: str | PathLike[str], benchmark: Mapping[str, Any], kept: int) -> None:
    counts = _within(benchmark, "scheduler_metrics", "requests_made") or _within(benchmark, "request_totals")
    made = counts.get(_ANSWERED)
    if type(made) is int and made > kept:
        remedy = f"is a sample of {made} requests, and no trace; run guidellm with --sample-requests {made}"
        raise TraceError(path, None, "requests.successful", kept, remedy)


def _request(path: str | PathLike[str], row: int, request: Any, failed: bool) -> Request:
    if not isinstance(request, dict):
        raise TraceError(path, row, "requests", shown(request), "must be an object; fetch the file again", "row")
    start = request.get(_START, request.get(_EARLIER_START))
    return Request(row, {**request, _START: start}, failed)


def _about(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    strategy = _within(benchmark, "config", "strategy") or _within(benchmark, "args", "strategy")
    # For a closed loop, the number of concurrent streams.
    kind = str(strategy.get("type_"))
    streams = {"synchronous": 1, "concurrent": strategy.get("streams")}.get(kind)
    return {
        "duration": benchmark.get("duration"),
        "request_rate": strategy.get("rate") if streams is None else inf,
        "max_concurrency": strategy.get("max_concurrency") if streams is None else streams,
        "model_id": _within(benchmark, "config", "backend").get("model"),
    }


def _within(document: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """A nested object; an empty one if a key is missing."""
    for name in names:
        inner = document.get(name)
        if not isinstance(inner, dict):
            return {}
        document = inner
    return document
