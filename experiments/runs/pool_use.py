"""KV usage of a simulated pool as vLLM's gauges report it: averaged over the time in which requests run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...sim.memory.accounting.buckets import NOT_HELD
from ...sim.metrics.prefix_cache import hits_and_evictions
from ...sim.runs.growth import growth_moments
from ...sim.runs.run import Run
from ...sim.types.sums import dot, total


@dataclass(frozen=True)
class PoolUse:
    """Means over busy time.

    Attributes:
        mean_usage, max_usage: Share of the pool in use, ``vllm:kv_cache_usage_perc``; cached blocks without
            references count as free.
        mean_running, mean_waiting: Requests, ``vllm:num_requests_running`` and ``_waiting``.
        hit_rate: Hit rate of the prefix cache; None without a prefix cache.
    """

    mean_usage: float
    max_usage: float
    mean_running: float
    mean_waiting: float
    hit_rate: float | None


def pool_use(run: Run) -> PoolUse:
    """The gauges of a run. They are exact, but with sliding-window layers the maximum covers only the first steps of leaps."""
    rows, capacity = run.log.rows, run.log.ledger_slots
    busy = int(rows["ticks"].sum())
    over_time = run.accounts.window().slot_ticks
    used = sum(value for bucket, value in over_time.items() if bucket not in NOT_HELD)
    at_rows = np.add(*_used_slots(run))
    cache = hits_and_evictions(run)
    return PoolUse(
        mean_usage=used / (capacity * busy) if busy and capacity else 0.0,
        # A pool of one block, which is V1's null block, has no usable block.
        max_usage=int(at_rows.max(initial=0)) / capacity if capacity else 0.0,
        mean_running=_mean(rows["batch_size"], rows["ticks"]),
        mean_waiting=_mean(rows["waiting"], rows["ticks"]),
        hit_rate=None if cache is None else cache["hit_rate"],
    )


def _used_slots(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Slots in use in the first step of every row, and those allocated in its later steps, int64 [rows] each."""
    levels = run.accounts.at_rows()
    first = np.asarray(run.log.ledger_slots - sum(levels[bucket] for bucket in NOT_HELD))
    if not run.log.paged or run.log.groups.sliding:
        return first, np.zeros_like(first)
    # In its last step a leap holds the blocks that its sequences have allocated on the way.
    return first, growth_moments(run.log)[0] * run.log.block_size


class UseWhileArriving(NamedTuple):
    """Means from the first arrival to the last, over the time in which requests run: share of the pool in use, and requests."""

    mean_usage: float
    mean_running: float
    mean_waiting: float


def use_while_arriving(run: Run) -> UseWhileArriving:
    """The gauges of a run without its drain; those of the whole run where all requests arrive at once."""
    rows, arrivals = run.log.rows, run.workload.arrival_ticks
    first, last = (int(arrivals.min()), int(arrivals.max())) if len(arrivals) else (0, 0)
    start = rows["start_ticks"]
    ticks = np.maximum(np.minimum(start + rows["ticks"], last) - np.maximum(start, first), 0)
    if not ticks.any():
        whole = pool_use(run)
        return UseWhileArriving(whole.mean_usage, whole.mean_running, whole.mean_waiting)
    usage = usage_over_spans(run, (first, last))
    return UseWhileArriving(
        float(usage.used_ticks[0] / usage.busy_ticks[0]),
        _mean(rows["batch_size"], ticks),
        _mean(rows["waiting"], ticks),
    )


class UsageOverSpans(NamedTuple):
    """Use of a pool in successive spans of time, float64 [spans] each.

    Attributes:
        used_ticks: Share of the pool in use, integrated over time.
        busy_ticks: Time in which requests run.
        peak: Highest share, of the leaps that start in the span.
    """

    used_ticks: np.ndarray
    busy_ticks: np.ndarray
    peak: np.ndarray


def usage_over_spans(run: Run, edges: Sequence[int]) -> UsageOverSpans:
    """The use of a pool between successive edges, in rising ticks. Within a leap it is taken to grow evenly."""
    rows, (first, grown), capacity = run.log.rows, _used_slots(run), max(run.log.ledger_slots, 1)
    begin, ticks = rows["start_ticks"], rows["ticks"]
    at = np.stack([begin, begin + ticks], axis=1).ravel()

    def between(levels: np.ndarray) -> np.ndarray:
        before = np.concatenate([[0.0], np.cumsum(levels * ticks)])
        # The integral at the start and at the end of every row; between rows it stays.
        return np.diff(np.interp(edges, at, np.repeat(before, 2)[1:-1]))

    place = np.searchsorted(edges, begin, side="right") - 1
    inside = (place >= 0) & (place < len(edges) - 1)
    peak = np.zeros(len(edges) - 1)
    np.maximum.at(peak, place[inside], (first + grown)[inside] / capacity)
    return UsageOverSpans(between((first + grown / 2) / capacity), between(np.ones(len(begin))), peak)


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    return dot(values, weights) / total(weights) if weights.any() else 0.0
