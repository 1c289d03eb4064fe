"""A benchmark client's measurements: of each request, aligned with the trace of the same file, or statistics of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from os import PathLike
from typing import Any

import numpy as np

from ...sim.types.errors import TraceError
from ..clients.known import benchmark_result
from ..clients.load import MOST_VALUE, ClientLoad, client_load
from ..clients.result import BenchmarkResult, Latency, Request
from ..clients.summary import OUTPUTS, REQUESTS, TOKENS, BenchmarkSummary, Statistics
from ..parsing.files import TraceFile
from ..parsing.reading import MOST_INFLATED_BYTES
from ..synthesis.rebuilt import arrival_rate, has_spread, output_lengths
from ..types.trace import Trace

#: Share of the mean E2EL by which TTFT and the gaps of a mean output may differ from it: a TPOT is a mean over requests, whatever
#: their lengths.
_CONTRADICTS = 0.25
#: Share of the users of a closed loop that have a request in flight, at least.
_BUSY = 0.7


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured(ClientLoad):
    """A benchmark of a server; arrays are in the order of its trace, and times in seconds.

    Attributes:
        ttft_s: Times to first token, float64 [n].
        e2el_s: End-to-end latencies, float64 [n].
        gaps_s: Float64 [gaps], the times between chunks of an answer, concatenated over requests; None if the
            client does not write them.
    """

    ttft_s: np.ndarray
    e2el_s: np.ndarray
    gaps_s: np.ndarray | None


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredSummary(ClientLoad):
    """Statistics of a server's benchmark, for results without a list of requests.

    Attributes:
        latencies: Seconds, of ``ttft``, ``tpot``, ``itl`` and ``e2el`` if the file has them.
        throughputs: Per second, by vLLM's names.
        caveats: Sentences on statistics of the file that cannot be compared.
        states: Settings of the server that the file states, by their Python names.
    """

    latencies: Mapping[str, Statistics]
    throughputs: Mapping[str, float]
    caveats: tuple[str, ...]
    states: Mapping[str, object]


def measured(path: str | PathLike[str], trace: Trace) -> Measured | MeasuredSummary:
    """The measurements in a benchmark's result.

    Args:
        trace: Read from the same file. Neither the trace nor the result contains failed requests.

    Raises:
        TraceError: The file is not a benchmark result, or has an invalid time.
    """
    file = TraceFile(path, MOST_INFLATED_BYTES)
    result = benchmark_result(file)
    if result is None:
        file.form("benchmark", file.head())
        remedy = (
            "is not a result of vllm bench serve, SGLang's bench_serving, GuideLLM, AIPerf or inference-perf; give one"
        )
        raise TraceError(path, None, None, None, remedy)
    return _statistics(result) if isinstance(result, BenchmarkSummary) else _of_requests(result, trace)


def measured_requests(path: str | PathLike[str], trace: Trace) -> Measured:
    """The measurements of each request in a benchmark's result.

    Raises:
        TraceError: As ``measured``, or the file is a summary.
    """
    found = measured(path, trace)
    if isinstance(found, MeasuredSummary):
        remedy = "is a summary without its requests; run the client so that it saves them, as by --save-detailed"
        raise TraceError(path, None, None, None, remedy)
    return found


def _of_requests(result: BenchmarkResult, trace: Trace) -> Measured:
    """The measurements of each request of a trace.

    Raises:
        TraceError: A time is missing or invalid.
    """
    path = result.path
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
    load = client_load(path, result.about)
    return Measured(**vars(load), ttft_s=ttft_s, e2el_s=e2el_s, gaps_s=gaps_s)


def _statistics(summary: BenchmarkSummary) -> MeasuredSummary:
    """The statistics of a summary, without those that contradict the others.

    Raises:
        TraceError: It has no latency and no throughput.
    """
    found, caveats = {name: of for name, of in summary.latencies.items() if of}, []
    first, last = (found[name].mean if name in found else None for name in ("ttft", "e2el"))
    if first == 0:
        caveats.append("The answers were not streamed: TTFT, TPOT and ITL are left out.")
        found = {name: of for name, of in found.items() if name == "e2el"}
    for name in ("tpot", "itl"):
        gap, outputs = found[name].mean if name in found else None, summary.outputs.mean
        if first is None or last is None or gap is None or outputs is None:
            continue
        ends_s = first + gap * max(outputs - 1, 0)
        if abs(ends_s - last) > _CONTRADICTS * last:
            caveats.append(
                f"{name.upper()} is left out: with {gap * 1e3:,.4g} ms a token, {outputs:,.4g} tokens end after {ends_s:,.4g} s,"
                f" and E2EL is {last:,.4g} s."
            )
            del found[name]
    rate, throughputs = arrival_rate(summary), _throughputs(summary)
    if not has_spread(output_lengths(summary)):
        alike = "requests of a closed loop then begin and end together, which lengthens TTFT and shortens tails"
        caveats.append(f"Outputs have one length here: {alike if rate is None else 'tails of E2EL are missing'}.")
    limit, answered = summary.load.max_concurrency, throughputs.get(REQUESTS)
    if rate is None and limit is not None and answered and last and answered * last < _BUSY * limit:
        # Little's law.
        caveats.append(
            f"The file contradicts itself: of {limit:,} requests in flight {answered * last:,.3g} were, by requests/s times E2EL."
        )
    if not found and not throughputs:
        raise TraceError(summary.path, None, None, None, "has no latency and no throughput; give another result")
    load = replace(summary.load, request_rate=inf if rate is None else rate)
    return MeasuredSummary(
        **vars(load), latencies=found, throughputs=throughputs, caveats=tuple(caveats), states=summary.states
    )


def _throughputs(summary: BenchmarkSummary) -> dict[str, float]:
    """The throughputs; those that the file does not name follow from its counts and its duration."""
    found, seconds = dict(summary.throughputs), summary.load.duration_s
    prompts, outputs = (of.mean for of in (summary.prompts, summary.outputs))
    if seconds is not None:
        counts = {REQUESTS: 1.0} | ({} if outputs is None else {OUTPUTS: outputs})
        counts |= {} if outputs is None or prompts is None else {TOKENS: prompts + outputs}
        found = {name: summary.requests * count / seconds for name, count in counts.items()} | found
    return {name: found[name] for name in (REQUESTS, OUTPUTS, TOKENS) if name in found}


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
    if type(value) not in (int, float) or not 0 <= value < MOST_VALUE:
        remedy = f"must be {latency.unit}, 0 or more; correct the request or drop it"
        raise result.error(row, latency.name, value, remedy)
