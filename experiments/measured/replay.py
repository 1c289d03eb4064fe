"""Replay of a real server's benchmark on the simulated replica: simulated and measured metrics side by side.

The replay serves the answered requests of the benchmark, with their lengths and the client's send times. With
``--max-concurrency`` the client is a closed loop, in the replay too: a finished request releases the next one. If the
client sent all requests as fast as the limit allowed, only the limit delays them. Under a finite rate no request is
sent before its original send time. Throughput counts from the first request sent to the last answer, on both sides.

Of a summary the replay serves requests with its statistics, and the statistics that it has are compared.

Time outside of the engine (HTTP, tokenizer, network) is an offset: a request reaches the engine this long after its
client sends it. In an open loop the offset shifts all requests alike and changes only latencies; in a closed loop it
lengthens each round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from ...sim import Settings, Workload, simulate
from ...sim.config.unread import only_read
from ...sim.cost import ScaledCost
from ...sim.engine.replica import build
from ...sim.metrics.gaps import Gaps
from ...sim.metrics.registry import COMPARED, LATENCIES, STATISTICS, key
from ...sim.metrics.requests import RequestTimes, request_times
from ...sim.runs.run import Run
from ...sim.types import ticks
from ...sim.types.optional import not_none
from ...sim.workload.users import Users
from ...traces import Measured, MeasuredSummary, Pacing, Trace, paced, workload
from ...traces.clients.load import ClientLoad
from ..runs.pool_use import PoolUse, pool_use
from .server_metrics import ServerMetrics

RATES = ("request_throughput", "output_throughput", "total_token_throughput")
#: Least share of tokens that arrive in chunks of their own for gaps between chunks to count as inter-token latencies.
_CHUNKS_ARE_TOKENS = 0.98
Metrics = dict[str, float]


@dataclass(frozen=True, eq=False)
class Benchmark(ABC):
    """The requests and results of a real server's benchmark.

    Attributes:
        trace: The answered requests, or requests with the statistics of its summary.
        measured: How the client sent them, and what it measured.
        metrics: Metrics of the server; None if none were scraped.
    """

    trace: Trace
    measured: ClientLoad
    metrics: ServerMetrics | None = None

    @property
    def unlimited(self) -> bool:
        """Whether the client sent a request whenever another one was answered."""
        return self.measured.max_concurrency is not None and self.measured.request_rate == inf

    @property
    def drawn(self) -> bool:
        """Whether the send times of single requests are unknown."""
        return self.trace.arrival_ticks is None and self.measured.request_rate != inf

    @cached_property
    def arrivals(self) -> Trace:
        """The trace with arrivals: the send times, or drawn ones if the file is of an older release without send times."""
        seen = self.measured
        if self.unlimited:
            return replace(self.trace, arrival_ticks=np.zeros(len(self.trace), dtype=np.int64))
        if self.trace.arrival_ticks is not None:
            return self.trace
        burstiness = seen.burstiness if seen.request_rate not in (None, inf) else None
        return paced(self.trace, Pacing(request_rate=seen.request_rate, burstiness=burstiness))

    def workload(self, offset_ticks: int) -> Workload:
        """The requests as they reach an engine behind an offset."""
        seen, users = self.measured, None
        if seen.max_concurrency is not None:
            users = Users(seen.max_concurrency, np.full(len(self.trace), offset_ticks))
        return workload(self.arrivals, users=users)

    @property
    @abstractmethod
    def duration_s(self) -> float:
        """Time in which the requests were sent and answered, in seconds; NaN if it is unknown."""

    @property
    @abstractmethod
    def sent_rate(self) -> float | None:
        """Requests/s that the client sent; None if it sent all at once, or a request whenever another one was answered."""

    @abstractmethod
    def values(self) -> Metrics:
        """The metrics, by vLLM's names."""

    @abstractmethod
    def tpot_ratio(self, replayed: Replayed) -> float | None:
        """Measured over simulated TPOT, as a median; None if no output has a second token."""

    @abstractmethod
    def late_s(self, replayed: Replayed) -> float:
        """Measured minus simulated TTFT of requests that waited for few others."""

    @abstractmethod
    def median_late_s(self, replayed: Replayed, soon: np.ndarray) -> float | None:
        """Median of measured minus simulated TTFT; None if it is unknown.

        Args:
            soon: Which served requests hardly waited in the simulation, bool [served].
        """


@dataclass(frozen=True, eq=False)
class BenchmarkOfRequests(Benchmark):
    """A benchmark with measurements of each request."""

    measured: Measured

    @cached_property
    def tpot_s(self) -> np.ndarray:
        """Time per output token after the first, float64 [n]; NaN for a single token."""
        return _tpot(self.measured.e2el_s - self.measured.ttft_s, self.trace.output_tokens)

    @property
    def gaps_are_of_tokens(self) -> bool:
        """Whether each token arrived by itself, so that the client's gaps are inter-token latencies."""
        gaps_s = self.measured.gaps_s
        return gaps_s is not None and len(gaps_s) >= _CHUNKS_ARE_TOKENS * (self.trace.output_tokens - 1).sum()

    @cached_property
    def duration_s(self) -> float:
        """Time from the first request sent to the last answer; the duration in the file if it has no times."""
        if self.trace.arrival_ticks is None:
            return self.measured.duration_s or float("nan")
        return float((self.trace.arrival_ticks / ticks.PER_SECOND + self.measured.e2el_s).max())

    @property
    def sent_rate(self) -> float | None:
        """As of the base class."""
        if self.unlimited:
            return None
        if self.trace.arrival_ticks is None:
            return None if self.measured.request_rate == inf else self.measured.request_rate
        span = int(self.trace.arrival_ticks.max() - self.trace.arrival_ticks.min())
        return (len(self.trace) - 1) * ticks.PER_SECOND / span if span else None

    def under_way(self) -> np.ndarray:
        """Number of running requests when each request was sent, int64 [n]."""
        sent = self.trace if self.trace.arrival_ticks is not None else self.arrivals
        starts = not_none(sent.arrival_ticks) / ticks.PER_SECOND
        # A client sends at the time of an answer, to the precision of the decimals of seconds.
        ends = np.sort(starts + self.measured.e2el_s) - 1e-6
        return np.arange(len(starts)) - np.searchsorted(ends, starts, side="right")

    def values(self) -> Metrics:
        """The metrics, by vLLM's names."""
        seen, lengths = self.measured, (self.trace.prompt_tokens, self.trace.output_tokens)
        tpot = self.tpot_s[~np.isnan(self.tpot_s)]
        itl = seen.gaps_s if self.gaps_are_of_tokens else None
        latencies = {"ttft": seen.ttft_s, "tpot": tpot, "itl": itl, "e2el": seen.e2el_s}
        found = _rates(self.duration_s, *lengths)
        for name, values in latencies.items():
            if values is None:
                continue
            found |= {key(which, name): _statistic(values * 1e3, rank) for which, rank in COMPARED.items()}
        return found

    def tpot_ratio(self, replayed: Replayed) -> float | None:
        """Median over requests of measured over simulated TPOT; None if no output has a second token."""
        measured = self.tpot_s[replayed.times.index]
        both = (measured > 0) & (replayed.tpot_s > 0)
        return float(np.median(measured[both] / replayed.tpot_s[both])) if both.any() else None

    def late_s(self, replayed: Replayed) -> float:
        """Mean of the middle half, over the quarter of requests that found the fewest requests running."""
        served = replayed.times.index
        others = self.under_way()[served]
        alone = others <= np.quantile(others, 0.25)
        late_s = np.sort((self.measured.ttft_s[served] - replayed.ttft_s)[alone])
        quarter = len(late_s) // 4
        return float(late_s[quarter : len(late_s) - quarter].mean())

    def median_late_s(self, replayed: Replayed, soon: np.ndarray) -> float | None:
        """The median over the requests that hardly waited."""
        late_s = self.measured.ttft_s[replayed.times.index] - replayed.ttft_s
        return float(np.median(late_s[soon])) if soon.any() else None


@dataclass(frozen=True, eq=False)
class SummarisedBenchmark(Benchmark):
    """A benchmark of which only statistics are known."""

    measured: MeasuredSummary

    @property
    def duration_s(self) -> float:
        """The duration in the file, or that of its throughputs; NaN without any."""
        outputs = int(self.trace.output_tokens.sum())
        counts = dict(
            zip(RATES, (len(self.trace), outputs, outputs + int(self.trace.prompt_tokens.sum())), strict=True)
        )
        rates = self.measured.throughputs
        of_rates = (counts[name] / rates[name] for name in RATES if rates.get(name))
        return self.measured.duration_s or next(of_rates, float("nan"))

    @property
    def sent_rate(self) -> float | None:
        """As of the base class."""
        return None if self.measured.request_rate == inf else self.measured.request_rate

    def values(self) -> Metrics:
        """The metrics that the file has, by vLLM's names."""
        found = dict(self.measured.throughputs)
        for name, of in self.measured.latencies.items():
            seconds = {
                which: of.mean if rank is None else of.percentiles.get(rank) for which, rank in STATISTICS.items()
            }
            found |= {key(which, name): value * 1e3 for which, value in seconds.items() if value is not None}
        return found

    def tpot_ratio(self, replayed: Replayed) -> float | None:
        """Of the medians, else of the means; of the ITL if there is no TPOT."""
        for name in ("median_tpot_ms", "mean_tpot_ms", "mean_itl_ms"):
            both = self._both(name, replayed)
            if both is not None and min(both) > 0:
                return both[0] / both[1]
        return None

    def late_s(self, replayed: Replayed) -> float:
        """Of the medians of all requests, else of their means: which of them waited is unknown."""
        for name in ("median_ttft_ms", "mean_ttft_ms"):
            both = self._both(name, replayed)
            if both is not None:
                return (both[0] - both[1]) / 1e3
        return 0.0

    def median_late_s(self, replayed: Replayed, soon: np.ndarray) -> float | None:
        """Of the medians, if the request in the middle hardly waited."""
        return self.late_s(replayed) if soon.mean() > 0.5 else None

    def _both(self, name: str, replayed: Replayed) -> tuple[float, float] | None:
        """A metric, measured and simulated; None if the file does not have it."""
        measured = self.values().get(name)
        return None if measured is None else (measured, replayed.values()[name])


def benchmark_of(
    trace: Trace, seen: Measured | MeasuredSummary, metrics: ServerMetrics | None = None
) -> BenchmarkOfRequests | SummarisedBenchmark:
    """The benchmark of a result file.

    Args:
        trace, seen: Its requests and measurements.
    """
    if isinstance(seen, MeasuredSummary):
        return SummarisedBenchmark(trace, seen, metrics)
    return BenchmarkOfRequests(trace, seen, metrics)


class Client:
    """The client's view of simulated requests, from their ``times`` and an ``offset_ticks``."""

    times: RequestTimes
    offset_ticks: int

    @property
    def _offset_s(self) -> float:
        return self.offset_ticks / ticks.PER_SECOND

    @cached_property
    def ttft_s(self) -> np.ndarray:
        """Time to first token, float64 [served]."""
        return self.times.ttft_ms / 1e3 + self._offset_s

    @cached_property
    def e2el_s(self) -> np.ndarray:
        """End-to-end latency, float64 [served]."""
        return self.times.e2el_ms / 1e3 + self._offset_s

    @cached_property
    def tpot_s(self) -> np.ndarray:
        """Time per output token after the first, float64 [served]; NaN for a single token."""
        return _tpot(self.e2el_s - self.ttft_s, self.times.output_tokens)


@dataclass(frozen=True, eq=False)
class Served(Client):
    """Client-side latencies of the benchmark's requests in a simulated run.

    Attributes:
        times: Times of the served requests; ``index`` are rows of the benchmark's trace.
        offset_ticks: Time that each request takes to reach the engine.
    """

    times: RequestTimes
    offset_ticks: int = 0


@dataclass(frozen=True, eq=False)
class Replayed(Client):
    """The benchmark's requests, simulated.

    Attributes:
        run: The simulation.
        offset_ticks: Time that each request takes to reach the engine.
    """

    run: Run
    offset_ticks: int = 0

    # Computed on first use; the base class leaves open whether it is stored.
    @cached_property
    def times(self) -> RequestTimes:  # type: ignore[override]
        """Times of the served requests; ``index`` are rows of the benchmark's trace."""
        return request_times(self.run)

    @cached_property
    def pool(self) -> PoolUse:
        """KV usage of the pool."""
        return pool_use(self.run)

    @cached_property
    def _gaps(self) -> Gaps:
        return Gaps.of(self.run.log)

    def _gap_ms(self, percentile: int | None) -> float:
        """A statistic of the inter-token latencies."""
        return self._gaps.mean_ms() if percentile is None else self._gaps.percentile_ms(percentile)

    def values(self, statistics: Mapping[str, int | None] = COMPARED) -> Metrics:
        """The metrics, by vLLM's names.

        Args:
            statistics: Those of each latency, as ``COMPARED``.
        """
        served = self.times.index
        lengths = self.run.workload.prompt_tokens[served], self.run.workload.output_tokens[served]
        found = _rates(self.run.log.end_ticks / ticks.PER_SECOND + self._offset_s, *lengths)
        tpot = self.tpot_s[~np.isnan(self.tpot_s)]
        for name, values in (("ttft", self.ttft_s), ("tpot", tpot), ("e2el", self.e2el_s)):
            found |= {key(which, name): _statistic(values * 1e3, rank) for which, rank in statistics.items()}
        return found | {f"{which}_itl_ms": self._gap_ms(rank) for which, rank in statistics.items()}


def replay(benchmark: Benchmark, settings: Settings, scale: float = 1.0, offset_ticks: int = 0) -> Replayed:
    """Simulate a benchmark's requests.

    Args:
        scale: Factor on the step time of the settings' cost.
        offset_ticks: Time that a request takes to reach the engine.

    Raises:
        UserError: An invalid setting, or a request longer than the model.
    """
    cost = None if scale == 1 else ScaledCost(build(settings).cost, scale)
    work = benchmark.workload(offset_ticks)
    return Replayed(simulate(only_read(settings, work), work, cost), offset_ticks)


def compared(benchmark: Benchmark, replayed: Replayed) -> list[dict[str, Any]]:
    """One row per metric: the simulated value, the measured value, and the relative error."""
    measured, simulated = benchmark.values(), replayed.values(STATISTICS)
    rows = [_row(name, simulated[name], measured[name]) for name in measured]
    return rows + _server_rows(benchmark.metrics, replayed) if benchmark.metrics else rows


def _server_rows(metrics: ServerMetrics, replayed: Replayed) -> list[dict[str, Any]]:
    """The rows of the server's own metrics, if they were scraped."""
    run, pool = replayed.run, replayed.pool
    hits = run.replica.cache_log and pool.hit_rate
    inside_ms = 0.0
    if len(replayed.times.index):
        inside_ms = float(replayed.times.ttft_ms.mean()) - run.replica.outside_ticks / ticks.PER_MS
    pairs = {
        "num_gpu_blocks": (run.replica.num_blocks, metrics.num_gpu_blocks),
        "mean_kv_cache_usage": (pool.mean_usage, metrics.kv_usage and metrics.kv_usage[0]),
        "max_kv_cache_usage": (pool.max_usage, metrics.kv_usage and metrics.kv_usage[1]),
        "mean_num_requests_running": (pool.mean_running, metrics.running),
        "mean_num_requests_waiting": (pool.mean_waiting, metrics.waiting),
        "num_preemptions": (int(replayed.times.recomputed.sum() + replayed.times.swapped.sum()), metrics.preemptions),
        "prefix_cache_hit_rate": (hits or 0.0, metrics.hit_rate),
        "server_mean_ttft_ms": (inside_ms, metrics.ttft_s and metrics.ttft_s * 1e3),
        "server_mean_itl_ms": (replayed.values()["mean_itl_ms"], metrics.itl_s and metrics.itl_s * 1e3),
    }
    return [_row(name, mine, theirs) for name, (mine, theirs) in pairs.items() if theirs is not None]


def _row(name: str, simulated: float, measured: float) -> dict[str, Any]:
    error = (simulated - measured) / measured if measured else None
    if simulated == measured:
        error = 0.0
    return {"metric": name, "simulated": simulated, "measured": measured, "error": error}


def total_error(rows: Sequence[dict[str, Any]]) -> float:
    """The error of a replay as one number: the mean over throughput and each latency of their mean absolute relative errors.

    Each relative error counts as at most 1.
    """
    parts = [RATES, *([key(which, name) for which in STATISTICS] for name in LATENCIES)]
    errors = {row["metric"]: min(1.0, abs(1.0 if row["error"] is None else row["error"])) for row in rows}
    found = [[errors[name] for name in names if name in errors] for names in parts]
    return float(np.mean([np.mean(part) for part in found if part]))


def scatter(benchmark: BenchmarkOfRequests, replayed: Client) -> dict[str, list[float | int | None]]:
    """One row for each request served on both sides, in the order of send times."""
    served = replayed.times.index
    sides: dict[str, Client | Measured] = {"simulated": replayed, "measured": benchmark.measured}
    columns: dict[str, np.ndarray] = {
        "row": not_none(benchmark.trace.rows.lines)[served],
        "prompt_tokens": benchmark.trace.prompt_tokens[served],
        "output_tokens": benchmark.trace.output_tokens[served],
    }
    for side, source in sides.items():
        rows = slice(None) if source is replayed else served
        tpot = replayed.tpot_s if source is replayed else benchmark.tpot_s[served]
        for name, values in (("ttft", source.ttft_s[rows]), ("tpot", tpot), ("e2el", source.e2el_s[rows])):
            columns[f"{side}_{name}_ms"] = values * 1e3
    # JSON has no NaN: the TPOT of an output of one token is null.
    return {name: [None if value != value else value for value in values.tolist()] for name, values in columns.items()}


def _tpot(decode_s: np.ndarray, output_tokens: np.ndarray) -> np.ndarray:
    return np.where(output_tokens > 1, decode_s / np.maximum(output_tokens - 1, 1), np.nan)


def _rates(duration_s: float, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> Metrics:
    outputs, prompts = int(output_tokens.sum()), int(prompt_tokens.sum())
    counts = (len(output_tokens), outputs, prompts + outputs)
    return {name: count / duration_s if duration_s else 0.0 for name, count in zip(RATES, counts, strict=True)}


def _statistic(values: np.ndarray, percentile: int | None) -> float:
    if not len(values):
        return 0.0
    return float(values.mean() if percentile is None else np.percentile(values, percentile))
