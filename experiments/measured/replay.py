"""A benchmark of a real server, replayed on the simulated replica: simulated beside measured.

The requests are those that were answered: their lengths, and the times at which the client sent them. Behind a
``--max-concurrency`` the client is a closed loop, and so it is here: a request is sent when an answer is there; where
all were sent as fast as that let them, nothing else holds them back, and under a finite rate none is sent before it
was. Throughput counts on both sides from the first request sent to the last answer.

What passes outside of the engine (HTTP, tokenizer, network) is an offset: a request reaches the engine so much later
than its client sends it. In an open loop that moves all requests alike, so only latencies change; in a closed loop
each round takes so much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from ...sim import Settings, Workload, simulate
from ...sim.cost import ScaledCost
from ...sim.engine.replica import build
from ...sim.engine.run import Run
from ...sim.engine.unread import only_read
from ...sim.metrics.gaps import Gaps
from ...sim.metrics.requests import RequestTimes, request_times
from ...sim.types import ticks
from ...sim.types.optional import not_none
from ...sim.workload.users import Users
from ...traces import Measured, Pacing, Trace, paced, workload
from ..runs.pool_use import PoolUse, pool_use
from .server_metrics import ServerMetrics

#: Statistics of a latency, by vLLM's names, and the percentile of each; None is the mean.
STATISTICS = {"mean": None, "median": 50, "p99": 99}
LATENCIES = ("ttft", "tpot", "itl", "e2el")
RATES = ("request_throughput", "output_throughput", "total_token_throughput")
#: Share of the tokens that must come in chunks of their own for gaps between chunks to be those between tokens.
_CHUNKS_ARE_TOKENS = 0.98
Metrics = dict[str, float]


@dataclass(frozen=True, eq=False)
class Benchmark:
    """What a real server was asked and what came of it.

    Attributes:
        trace: The requests that were answered.
        measured: What the client saw of them.
        metrics: Metrics of the server; None where none were scraped.
    """

    trace: Trace
    measured: Measured
    metrics: ServerMetrics | None = None

    @property
    def unlimited(self) -> bool:
        """Whether the client sent a request whenever another was answered."""
        return self.measured.max_concurrency is not None and self.measured.request_rate == inf

    @property
    def drawn(self) -> bool:
        """Whether the send times of single requests are unknown."""
        return self.trace.arrival_ticks is None and self.measured.request_rate != inf

    @cached_property
    def arrivals(self) -> Trace:
        """The trace with arrivals: as sent, or as drawn where the file, of an older release, does not say."""
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

    @cached_property
    def tpot_s(self) -> np.ndarray:
        """Time per output token after the first, float64 [n]; NaN where there is one token only."""
        return _tpot(self.measured.e2el_s - self.measured.ttft_s, self.trace.output_tokens)

    @property
    def gaps_are_of_tokens(self) -> bool:
        """Whether each token came by itself, so that the client's gaps are inter-token latencies."""
        gaps_s = self.measured.gaps_s
        return gaps_s is not None and len(gaps_s) >= _CHUNKS_ARE_TOKENS * (self.trace.output_tokens - 1).sum()

    @cached_property
    def duration_s(self) -> float:
        """From the first request sent to the last answer; what the file says where it has no times."""
        if self.trace.arrival_ticks is None:
            return self.measured.duration_s or float("nan")
        return float((self.trace.arrival_ticks / ticks.PER_SECOND + self.measured.e2el_s).max())

    def under_way(self) -> np.ndarray:
        """Requests that each one found under way when it was sent, int64 [n]."""
        sent = self.trace if self.trace.arrival_ticks is not None else self.arrivals
        starts = not_none(sent.arrival_ticks) / ticks.PER_SECOND
        # A client sends in the instant in which it has an answer, give or take the decimals of seconds.
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
            found |= {f"{which}_{name}_ms": _statistic(values * 1e3, rank) for which, rank in STATISTICS.items()}
        return found


class Client:
    """What the client sees of requests that were simulated, from their ``times`` and an ``offset_ticks``."""

    times: RequestTimes
    offset_ticks: int

    @property
    def _offset_s(self) -> float:
        return self.offset_ticks / ticks.PER_SECOND

    @cached_property
    def ttft_s(self) -> np.ndarray:
        """Float64 [served], as the client sees it."""
        return self.times.ttft_ms / 1e3 + self._offset_s

    @cached_property
    def e2el_s(self) -> np.ndarray:
        """Float64 [served], as the client sees it."""
        return self.times.e2el_ms / 1e3 + self._offset_s

    @cached_property
    def tpot_s(self) -> np.ndarray:
        """Float64 [served], NaN where there is one token only."""
        return _tpot(self.e2el_s - self.ttft_s, self.times.output_tokens)


@dataclass(frozen=True, eq=False)
class Served(Client):
    """The benchmark's requests, from the tables of a run.

    Attributes:
        times: Of those that were served; ``index`` are rows of the benchmark's trace.
        offset_ticks: What each takes to reach the engine.
    """

    times: RequestTimes
    offset_ticks: int = 0


@dataclass(frozen=True, eq=False)
class Replayed(Client):
    """The benchmark's requests, simulated.

    Attributes:
        run: What became of them.
        offset_ticks: What each takes to reach the engine.
    """

    run: Run
    offset_ticks: int = 0

    # Computed when it is first read; the base class does not say whether it is given.
    @cached_property
    def times(self) -> RequestTimes:  # type: ignore[override]
        """Of those that were served; ``index`` are rows of the benchmark's trace."""
        return request_times(self.run)

    @cached_property
    def pool(self) -> PoolUse:
        """How full the pool was."""
        return pool_use(self.run)

    @cached_property
    def _gaps(self) -> Gaps:
        return Gaps.of(self.run.log)

    def _gap_ms(self, percentile: int | None) -> float:
        """A statistic of the inter-token latencies."""
        return self._gaps.mean_ms() if percentile is None else self._gaps.percentile_ms(percentile)

    def values(self) -> Metrics:
        """The metrics, by vLLM's names."""
        served = self.times.index
        lengths = self.run.workload.prompt_tokens[served], self.run.workload.output_tokens[served]
        found = _rates(self.run.log.end_ticks / ticks.PER_SECOND + self._offset_s, *lengths)
        tpot = self.tpot_s[~np.isnan(self.tpot_s)]
        for name, values in (("ttft", self.ttft_s), ("tpot", tpot), ("e2el", self.e2el_s)):
            found |= {f"{which}_{name}_ms": _statistic(values * 1e3, rank) for which, rank in STATISTICS.items()}
        return found | {f"{which}_itl_ms": self._gap_ms(rank) for which, rank in STATISTICS.items()}


def replay(benchmark: Benchmark, settings: Settings, scale: float = 1.0, offset_ticks: int = 0) -> Replayed:
    """Simulate a benchmark's requests.

    Args:
        scale: Factor on the steps of the settings' cost.
        offset_ticks: What a request takes to reach the engine.

    Raises:
        UserError: A setting cannot be, or a request is longer than the model.
    """
    cost = None if scale == 1 else ScaledCost(build(settings).cost, scale)
    work = benchmark.workload(offset_ticks)
    return Replayed(simulate(only_read(settings, work), work, cost), offset_ticks)


def compared(benchmark: Benchmark, replayed: Replayed) -> list[dict[str, Any]]:
    """A row a metric: what was simulated, what was measured, and the relative error."""
    measured, simulated = benchmark.values(), replayed.values()
    rows = [_row(name, simulated[name], measured[name]) for name in measured]
    return rows + _server_rows(benchmark.metrics, replayed) if benchmark.metrics else rows


def _server_rows(metrics: ServerMetrics, replayed: Replayed) -> list[dict[str, Any]]:
    """What the server says of itself, where it says it."""
    run, pool = replayed.run, replayed.pool
    hits = run.replica.cache_log and pool.hit_rate
    inside_ms = float(replayed.times.ttft_ms.mean()) if len(replayed.times.index) else 0.0
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
    """One number for how far off a replay is: of throughput and of each latency the mean of the absolute relative
    errors, of which none counts for more than 1; then the mean of these."""
    parts = [RATES, *([f"{which}_{name}_ms" for which in STATISTICS] for name in LATENCIES)]
    errors = {row["metric"]: min(1.0, abs(1.0 if row["error"] is None else row["error"])) for row in rows}
    found = [[errors[name] for name in names if name in errors] for names in parts]
    return float(np.mean([np.mean(part) for part in found if part]))


def scatter(benchmark: Benchmark, replayed: Client) -> dict[str, list[float | int | None]]:
    """Columns of a row for each request that was served on both sides, in the order in which they were sent."""
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
    # JSON has no NaN: the TPOT of an answer of one token is null.
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
