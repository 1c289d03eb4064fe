"""A benchmark client's measurements of each request, aligned with the trace of the same file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from os import PathLike
from typing import Any

import numpy as np

from ...sim.types.errors import TraceError
from ..clients.known import benchmark_result
from ..clients.result import BenchmarkResult, Latency, Request
from ..parsing.files import TraceFile
from ..parsing.reading import MOST_INFLATED_BYTES
from ..types.trace import Trace

#: Larger than any benchmark's value, in seconds or in requests.
_MOST = 1e12


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A benchmark of a server; arrays are in the order of its trace, and times in seconds.

    Attributes:
        ttft_s: Times to first token, float64 [n].
        e2el_s: End-to-end latencies, float64 [n].
        gaps_s: Float64 [gaps], the times between chunks of an answer, concatenated over requests; None if the
            client does not write them.
        duration_s: Time from the client's start to its end; None if the file has no value.
        request_rate: Target rate in requests/s, inf for all at once; None if the file has no value.
        burstiness: Burstiness of the gaps between requests.
        max_concurrency: Maximum number of requests in flight at the client; None for no limit.
        model_id: Name of the model; None if the file has no value.
    """

    ttft_s: np.ndarray
    e2el_s: np.ndarray
    gaps_s: np.ndarray | None
    duration_s: float | None
    request_rate: float | None
    burstiness: float
    max_concurrency: int | None
    model_id: str | None


def measured(path: str | PathLike[str], trace: Trace) -> Measured:
    """The measurements in a benchmark's result.

    Args:
        trace: Read from the same file. Neither the trace nor the result contains failed requests.

    Raises:
        TraceError: The file is not a benchmark result, was saved without details, or has an invalid time.
    """
    result = benchmark_result(TraceFile(path, MOST_INFLATED_BYTES))
    if result is None:
        remedy = "is not a result of vllm bench serve, SGLang's bench_serving, GuideLLM or AIPerf; give one"
        raise TraceError(path, None, None, None, remedy)
    client, requests = result.client, {request.row: request for request in result.requests}
    answered = [requests[trace.rows.number(row)] for row in range(len(trace))]
    ttft_s = _latencies(result, answered, client.ttft)
    if not ttft_s.any():
        remedy = f"is 0 throughout: the answers were not streamed; benchmark with {client.streaming}"
        raise TraceError(path, None, client.ttft.name, 0, remedy)
    gaps_s, e2el_s = None, ttft_s
    if client.gaps is not None and (client.e2el is None or _has(answered, client.gaps)):
        gaps_s, num_gaps = _gaps(result, answered, client.gaps)
        sums = np.bincount(np.repeat(np.arange(len(num_gaps)), num_gaps), gaps_s, len(num_gaps))
        e2el_s = ttft_s + sums
    if client.e2el is not None:
        e2el_s = _latencies(result, answered, client.e2el)
    limit = _number(result, "max_concurrency")
    return Measured(
        ttft_s=ttft_s,
        e2el_s=e2el_s,
        gaps_s=gaps_s,
        duration_s=_number(result, "duration"),
        request_rate=_rate(result),
        burstiness=_number(result, "burstiness") or 1.0,
        max_concurrency=None if limit is None else int(limit),
        model_id=result.about["model_id"] if isinstance(result.about.get("model_id"), str) else None,
    )


def _has(requests: Sequence[Request], latency: Latency) -> bool:
    return any(request.fields.get(latency.name) is not None for request in requests)


def _latencies(result: BenchmarkResult, requests: Sequence[Request], latency: Latency) -> np.ndarray:
    """One latency of each request, float64 [n], in seconds.

    Raises:
        TraceError: No request has the latency, or a time is invalid.
    """
    if not _has(requests, latency):
        raise _missing(result, latency)
    values = [request.fields.get(latency.name) for request in requests]
    for request, value in zip(requests, values, strict=True):
        _require_time(result, request.row, latency, value)
    return np.array(values, dtype=np.float64) * latency.unit_s


def _gaps(result: BenchmarkResult, requests: Sequence[Request], latency: Latency) -> tuple[np.ndarray, np.ndarray]:
    """All gaps, float64 [gaps], in seconds, and the number of gaps of each request, int64 [n]; 0 for an answer of one chunk.

    Raises:
        TraceError: No request has gaps, or a time is invalid.
    """
    if not _has(requests, latency):
        raise _missing(result, latency)
    lists = [[] if (gaps := request.fields.get(latency.name)) is None else gaps for request in requests]
    for request, gaps in zip(requests, lists, strict=True):
        if not isinstance(gaps, list):
            raise result.error(
                request.row, latency.name, gaps, f"must be a list of {latency.unit}; fetch the file again"
            )
        for gap in gaps:
            _require_time(result, request.row, latency, gap)
    flat = np.array([gap for gaps in lists for gap in gaps], dtype=np.float64)
    return flat * latency.unit_s, np.array([len(gaps) for gaps in lists], dtype=np.int64)


def _missing(result: BenchmarkResult, latency: Latency) -> TraceError:
    client = result.client
    return result.error(None, latency.name, None, f"is missing; run {client.form.title} with {client.streaming}")


def _require_time(result: BenchmarkResult, row: int, latency: Latency, value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < _MOST:
        remedy = f"must be {latency.unit}, 0 or more; correct the request or drop it"
        raise result.error(row, latency.name, value, remedy)


def _rate(result: BenchmarkResult) -> float | None:
    # vLLM writes the text "inf", SGLang the number.
    return inf if result.about.get("request_rate") in ("inf", inf) else _number(result, "request_rate")


def _number(result: BenchmarkResult, name: str) -> float | None:
    value = result.about.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < _MOST:
        raise result.error(None, name, value, "must be a number above 0; fetch the file again")
    return value
