"""KV usage of a simulated pool as vLLM's gauges report it: averaged over the time in which requests run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...sim.engine.run import Run
from ...sim.memory.accounting.growth import growth_moments
from ...sim.metrics.prefix_cache import prefix_cache

#: Buckets of slots that a new request can use; all others are in use.
_FREE = ("free", "cached", "stranded")


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
    rows, capacity = run.log.rows, run.log.capacity_slots
    busy = int(rows["ticks"].sum())
    over_time = run.accounts.window().slot_ticks
    used = sum(value for bucket, value in over_time.items() if bucket not in _FREE)
    levels = run.accounts.at_rows()
    at_rows = np.asarray(capacity - sum(levels[bucket] for bucket in _FREE))
    if run.log.paged and not run.log.groups.sliding:
        # In its last step a leap holds the blocks that its sequences have allocated on the way.
        at_rows = at_rows + growth_moments(run.log)[0] * run.log.block_size
    cache = prefix_cache(run)
    return PoolUse(
        mean_usage=used / (capacity * busy) if busy and capacity else 0.0,
        # A pool of one block, which is V1's null block, has no usable block.
        max_usage=int(at_rows.max(initial=0)) / capacity if capacity else 0.0,
        mean_running=_mean(rows["batch_size"], rows["ticks"]),
        mean_waiting=_mean(rows["waiting"], rows["ticks"]),
        hit_rate=None if cache is None else cache["hit_rate"],
    )


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    return float(values @ weights.astype(np.float64) / weights.sum()) if weights.any() else 0.0
