"""Metrics of a prefix cache: queried and hit tokens, evictions, lifetimes of blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..engine.run import Run
from ..memory.accounting.cache_log import CacheLog
from ..memory.accounting.moments import ticks_of
from ..types.sums import dot, total
from ..types.ticks import PER_MS, PER_SECOND

#: Upper bounds of vLLM's histograms of KV-cache residency, in ms (vllm/v1/metrics/loggers.py).
RESIDENCY_BUCKETS_MS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000),
    *(60_000, 120_000, 300_000, 600_000, 1_200_000, 1_800_000),
)


def prefix_cache(run: Run) -> dict[str, Any] | None:
    """Look-ups, evictions and, for vLLM's blocks, its three histograms; None without a prefix cache.

    As in vLLM a look-up counts when it leads to an admission, with all known tokens of the request; look-ups of
    preempted requests are counted separately. Each of several samples looks up its prompt.
    """
    log = run.replica.cache_log
    if log is None:
        return None
    known, hits, first = _look_ups(log)
    queried_tokens, hit_tokens = total(known[first]), total(hits[first])
    observed = {} if log.history is None else log.history.observed_ticks(partial(ticks_of, run.log))
    return {
        "queried_tokens": queried_tokens,
        "hit_tokens": hit_tokens,
        "hit_rate": hit_tokens / queried_tokens if queried_tokens else 0.0,
        "preempted_queried_tokens": total(known) - queried_tokens,
        "preempted_hit_tokens": total(hits) - hit_tokens,
        "evicted_blocks": run.replica.memory.evicted_blocks,
        **{name: _histogram(*of) for name, of in observed.items()},
    }


def cached_tokens(run: Run, log: CacheLog) -> np.ndarray:
    """Cached prompt tokens of each request at its first admission, int64 [n]; fewer than its prompt has.

    For several samples it is the number of the sample that finishes last (ties: the last sample), as in vLLM V1: each
    sample is a separate request with its own look-up, and the answer has the ``num_cached_tokens`` of the sample that
    completes it (vllm/v1/engine/output_processor.py, ``RequestState``; parallel_sampling.py). The hit rate of
    ``prefix_cache`` is over the look-ups of all samples, as in vLLM's log.
    """
    index = log.look_up_columns()["index"]
    _, hits, first = _look_ups(log)
    found = np.zeros(int(run.workload.num_sequences.sum()), dtype=np.int64)
    found[index[first]] = hits[first]
    return found[last_to_end(run)]


def last_to_end(run: Run) -> np.ndarray:
    """The sequence of each request that finishes last, int64 [n]."""
    counts, residencies = run.workload.num_sequences, run.log.residencies
    finish = np.zeros(int(counts.sum()), dtype=np.int64)
    # Stays are in order of time: the last one of a sequence stands.
    finish[residencies["index"]] = run.log.release_ticks
    request = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((np.arange(len(request)), finish, request))
    return order[np.cumsum(counts) - 1]


def _look_ups(log: CacheLog) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens known and tokens hit, one a look-up, and which of them are a sequence's first."""
    columns = log.look_up_columns()
    return columns["known_tokens"], columns["hit_tokens"], first_look_ups(columns["index"])


def first_look_ups(index: np.ndarray) -> np.ndarray:
    """Rows of the first look-up of each sequence, int64, from the sequences of all look-ups."""
    return np.unique(index, return_index=True)[1]


def _histogram(ticks: np.ndarray, blocks: np.ndarray) -> dict[str, Any]:
    """Counts up to each bound, as Prometheus has them, with mean and median in seconds.

    Args:
        ticks: What was observed, int64.
        blocks: Of how many blocks each, int64.
    """
    order = np.argsort(ticks, kind="stable")
    ordered, upto = ticks[order], np.append(0, np.cumsum(blocks[order]))
    count = int(upto[-1])
    counts = upto[np.searchsorted(ordered, np.array(RESIDENCY_BUCKETS_MS) * PER_MS, side="right")]
    bounds = [f"{bound / 1_000:g}" for bound in RESIDENCY_BUCKETS_MS]
    # Of an even number of blocks the two in the middle.
    middle = ordered[np.searchsorted(upto, [(count - 1) // 2, count // 2], side="right") - 1] if count else ordered
    return {
        "count": count,
        "mean": dot(ticks, blocks) / PER_SECOND / count if count else None,
        "median": float(np.median(middle)) / PER_SECOND if count else None,
        "buckets": dict(zip([*bounds, "+Inf"], [*counts.tolist(), count], strict=True)),
    }
