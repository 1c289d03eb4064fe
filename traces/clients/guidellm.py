"""GuideLLM's ``benchmarks.json``: one object with a benchmark per rate, which groups its requests by outcome.

    {"benchmarks": [{"type_": "generative_benchmark", "config": {"strategy": {"type_": "poisson", "rate": 4.0}},
     "requests": {"successful": [{"request_start_time": 1763847600.0, "prompt_tokens": 128, "output_tokens": 5,
     "time_to_first_token_ms": 50.0, "request_latency": 0.09, ...}], "incomplete": [...], "errored": [...]}, ...}]}

Releases before 0.4 name the start ``start_time`` and keep the strategy under ``args``. Times are seconds since 1970. The
file has no times of single tokens. With ``--sample-requests`` (default 10 in 0.4 and 0.5) the file has only a sample of
the requests, or none. A sample is not a trace: the statistics of all requests are then read, under ``metrics``:

    {"request_totals": {"successful": 512, ...}, "prompt_token_count": {"successful": {"mean": ..., "std_dev": ..., "min": ...,
     "max": ..., "percentiles": {"p001": ..., "p01": ..., "p99": ..., "p999": ...}}}, "output_token_count": ...,
     "request_latency": ..., "time_to_first_token_ms": ..., "inter_token_latency_ms": ..., "requests_per_second": ...}

``request_latency`` is in seconds. ``inter_token_latency_ms`` weights each request by its tokens: its mean is vLLM's mean ITL, and its
percentiles are those of means. ``time_per_output_token_ms`` includes the first token, and is not vLLM's TPOT.

Source: vllm-project/guidellm, releases 0.2.1 to 0.8.1: benchmark/benchmark.py, schemas/request_stats.py, schemas/statistics.py and
benchmark/schemas/generative/metrics.py; their classes wrote the samples in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from os import PathLike
from typing import Any

from ...sim.types.errors import TraceError
from ..parsing.form import ZERO, Form, lengths
from ..parsing.table import shown
from ..parsing.times import clock
from .load import EVEN, client_load
from .result import BenchmarkResult, Client, Latency, Request, in_order
from .summary import OUTPUTS, REQUESTS, TOKENS, BenchmarkSummary, Fields, Statistics, known

_START, _EARLIER_START = "request_start_time", "start_time"
_ANSWERED, _FAILED = "successful", ("errored", "incomplete")
GUIDELLM = Client(
    Form(
        "GuideLLM",
        {_START: clock("s", doubted=False)},
        lengths("prompt_tokens", "output_tokens"),
        content={},
        failures=ZERO,
    ),
    ttft=Latency("time_to_first_token_ms", 1e-3),
    e2el=Latency("request_latency", 1),
    gaps=None,
    streaming="streaming",
)


def read_guidellm(path: str | PathLike[str], document: Mapping[str, Any]) -> BenchmarkResult | BenchmarkSummary:
    """The requests of the benchmark in a report; its summary if it has only some of them.

    Raises:
        TraceError: The report has several benchmarks, or only some of the requests and no statistics.
    """
    benchmarks = document["benchmarks"]
    if not benchmarks:
        raise TraceError(path, None, "benchmarks", 0, "has no requests; give another result")
    if not isinstance(benchmarks, list):
        raise TraceError(path, None, "benchmarks", shown(benchmarks), "must be a list; fetch the file again")
    if len(benchmarks) != 1:
        remedy = "must be one benchmark; keep one, as by jq '.benchmarks |= .[2:3]' for the third"
        raise TraceError(path, None, "benchmarks", len(benchmarks), remedy)
    benchmark = benchmarks[0] if isinstance(benchmarks[0], dict) else {}
    kept, made = _within(benchmark, "requests").get(_ANSWERED) or (), _made(benchmark)
    answered = len(kept) if isinstance(kept, list) else 0
    if isinstance(benchmark.get("metrics"), dict) and (answered == 0 or made is not None and made > answered):
        return _summary(path, benchmark, made)
    return _of_requests(path, benchmark, made)


def _of_requests(path: str | PathLike[str], benchmark: Mapping[str, Any], made: int | None) -> BenchmarkResult:
    kinds = benchmark.get("requests")
    if not isinstance(kinds, dict) or not all(
        isinstance(kinds.get(kind) or [], list) for kind in (_ANSWERED, *_FAILED)
    ):
        remedy = "must be lists of successful, errored and incomplete requests; fetch the file again"
        raise TraceError(path, None, "requests", shown(kinds), remedy)
    answered = kinds.get(_ANSWERED) or []
    if made is not None and made > len(answered):
        remedy = f"is a sample of {made} requests, and no trace; run guidellm with --sample-requests {made}"
        raise TraceError(path, None, "requests.successful", len(answered), remedy)
    failed = [request for kind in _FAILED for request in kinds.get(kind) or []]
    requests = [_request(path, row, request, row > len(answered)) for row, request in enumerate(answered + failed, 1)]
    return BenchmarkResult(GUIDELLM, path, in_order(requests, _START), _about(benchmark))


def _made(benchmark: Mapping[str, Any]) -> int | None:
    """The number of answered requests; None if the file does not state it."""
    counts = _within(benchmark, "scheduler_metrics", "requests_made") or _within(benchmark, "request_totals")
    made = counts.get(_ANSWERED)
    return made if type(made) is int else None


def _summary(path: str | PathLike[str], benchmark: Mapping[str, Any], made: int | None) -> BenchmarkSummary:
    """The statistics of all requests.

    Raises:
        TraceError: The lengths are missing, or a value is no number.
    """
    metrics = Fields(path, _within(benchmark, "metrics"), "metrics.")
    totals = metrics.part("request_totals")
    requests = totals.number(_ANSWERED) or metrics.part("request_latency", _ANSWERED).number("count") or made
    if not requests:
        raise totals.error(_ANSWERED, requests, "are no answered requests; give another result")
    itl = _statistics(metrics, "inter_token_latency_ms")
    latencies = {
        "ttft": _statistics(metrics, "time_to_first_token_ms").times(1e-3),
        "itl": Statistics(itl.mean).times(1e-3),
        "e2el": _statistics(metrics, "request_latency"),
    }
    rates = {REQUESTS: "requests_per_second", OUTPUTS: "output_tokens_per_second", TOKENS: "tokens_per_second"}
    about = _about(benchmark)
    kind = _strategy(benchmark).get("type_")
    return BenchmarkSummary(
        GUIDELLM.form.title,
        path,
        requests=int(requests),
        failed=int(sum(totals.number(each) or 0 for each in _FAILED)),
        prompts=_statistics(metrics, "prompt_token_count"),
        outputs=_statistics(metrics, "output_token_count"),
        latencies={name: of for name, of in latencies.items() if of},
        throughputs=known(**{name: metrics.part(rate, _ANSWERED).number("mean") for name, rate in rates.items()}),
        load=client_load(path, about | ({"burstiness": EVEN} if kind == "constant" else {})),
    )


def _statistics(metrics: Fields, name: str) -> Statistics:
    """The statistics of the answered requests."""
    found = metrics.part(name, _ANSWERED)
    whole, ranks = found.statistics(), found.part("percentiles").statistics().percentiles
    return Statistics(whole.mean, whole.std, dict(sorted({**ranks, **whole.percentiles}.items())))


def _request(path: str | PathLike[str], row: int, request: Any, failed: bool) -> Request:
    if not isinstance(request, dict):
        raise TraceError(path, row, "requests", shown(request), "must be an object; fetch the file again", "row")
    start = request.get(_START, request.get(_EARLIER_START))
    return Request(row, {**request, _START: start}, failed)


def _about(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    strategy = _strategy(benchmark)
    # For a closed loop, the number of concurrent streams.
    kind = str(strategy.get("type_"))
    streams = {"synchronous": 1, "concurrent": strategy.get("streams")}.get(kind)
    return {
        "duration": benchmark.get("duration"),
        "request_rate": strategy.get("rate") if streams is None else inf,
        "max_concurrency": strategy.get("max_concurrency") if streams is None else streams,
        "model_id": _within(benchmark, "config", "backend").get("model"),
    }


def _strategy(benchmark: Mapping[str, Any]) -> Mapping[str, Any]:
    return _within(benchmark, "config", "strategy") or _within(benchmark, "args", "strategy")


def _within(document: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """A nested object; an empty one if a key is missing."""
    for name in names:
        inner = document.get(name)
        if not isinstance(inner, dict):
            return {}
        document = inner
    return document
