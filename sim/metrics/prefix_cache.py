"""Metrics of a prefix cache: queried and hit tokens, evictions, lifetimes of blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import numpy as np

from ..memory.accounting.cache_log import CacheLog
from ..memory.prefix.residency import Observed
from ..runs.moments import ticks_of
from ..runs.run import Run
from ..types.columns import slices
from ..types.once import once
from ..types.optional import not_none
from ..types.sums import dot, total
from ..types.ticks import PER_MS, PER_SECOND

#: Upper bounds of vLLM's histograms of KV-cache residency, in ms (vllm/v1/metrics/loggers.py).
RESIDENCY_BUCKETS_MS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000),
    *(60_000, 120_000, 300_000, 600_000, 1_200_000, 1_800_000),
)
_BOUNDS_TICKS = np.array(RESIDENCY_BUCKETS_MS) * PER_MS
#: Of a float64.
_MANTISSA_BITS, _EXPONENT_OF_ONE = 52, 1023
#: Values that are kept in memory from one reading to the next; there are 16 bytes of each.
_MOST_KEPT = 1 << 22
#: Ranges of ``_width`` of an int64.
_WIDTHS = (63 << 8) + 2


def prefix_cache(run: Run) -> dict[str, Any] | None:
    """``hits_and_evictions`` and, for vLLM's blocks, its three histograms; None without a prefix cache."""
    found, log = hits_and_evictions(run), run.replica.cache_log
    if found is None or log is None:
        return None
    residency = log.residency
    if residency is None:
        return found
    return found | _histograms(lambda: residency.observations(partial(ticks_of, run.log)), run.log.compiled)


@once
def hits_and_evictions(run: Run) -> dict[str, Any] | None:
    """Look-ups of the settings' window, and evictions of the whole run; None without a prefix cache.

    As in vLLM a look-up counts when it leads to an admission, with all known tokens of the request; look-ups of
    preempted requests are counted separately. Each of several samples looks up its prompt.
    """
    log = run.replica.cache_log
    if log is None:
        return None
    known, hits, first = _look_ups(log)
    measured = is_measured(run)
    first = first[measured[first]]
    queried_tokens, hit_tokens = total(known[first]), total(hits[first])
    return {
        "queried_tokens": queried_tokens,
        "hit_tokens": hit_tokens,
        "hit_rate": hit_tokens / queried_tokens if queried_tokens else 0.0,
        "preempted_queried_tokens": total(known[measured]) - queried_tokens,
        "preempted_hit_tokens": total(hits[measured]) - hit_tokens,
        "evicted_blocks": run.replica.memory.evicted_blocks,
    }


@once
def is_measured(run: Run) -> np.ndarray:
    """Of each look-up whether its step starts in the settings' window, bool."""
    log = not_none(run.replica.cache_log)
    if run.settings.window is None:
        return np.ones(len(log.look_up_columns()["index"]), dtype=bool)
    ticks = ticks_of(run.log, log.look_up_moments())
    return (ticks >= run.window.start_ticks) & (ticks < run.window.end_ticks)


def cached_tokens(run: Run, log: CacheLog) -> np.ndarray:
    """Cached prompt tokens of each request at its first admission, int64 [n]; fewer than its prompt has.

    For several samples it is the number of the sample that finishes last (ties: the last sample), as in vLLM V1: each
    sample is a separate request with its own look-up, and the answer has the ``num_cached_tokens`` of the sample that
    completes it (vllm/v1/engine/output_processor.py, ``RequestState``; parallel_sampling.py). The hit rate of
    ``prefix_cache`` is over the look-ups of all samples, as in vLLM's log.
    """
    columns = log.look_up_columns()
    first = first_look_ups(columns["index"])
    found = np.zeros(len(run.log.output_tokens), dtype=np.int64)
    for part in slices(len(first)):
        found[columns["index"][first[part]]] = columns["hit_tokens"][first[part]]
    return found[last_to_end(run)] if run.workload.shares else found


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


def _histograms(
    observations: Callable[[], Iterable[Mapping[str, Observed]]], compiled: ModuleType | None = None
) -> dict[str, dict[str, Any]]:
    """Counts up to each bound, as Prometheus has them, with mean and median in seconds, by name.

    Args:
        observations: Returns parts of what was observed: int64 ticks, and the number of blocks with each. The parts are read
            twice: the second reading finds the medians among the values near them, so that no list of all values is needed.
            Where they are many, the function is called again. Names with the same tuple in a part have the same ones in all.
        compiled: The compiled core, which then counts; or None.
    """
    found: defaultdict[str, _Histogram] = defaultdict(partial(_Histogram, compiled))
    same: dict[str, str] = {}
    kept: list[Mapping[str, Observed]] = []
    values = 0
    for part in observations():
        same = {name: next(first for first in part if part[first] is observed) for name, observed in part.items()}
        for name in dict.fromkeys(same.values()):
            found[name].count(*part[name])
            values += len(part[name][0])
        if values <= _MOST_KEPT:
            kept.append(part)
        else:
            kept.clear()
    for part in kept if values <= _MOST_KEPT else observations():
        for name, histogram in found.items():
            histogram.look_for_median(*part[name])
    return {name: found[first].as_dict() for name, first in same.items()}


class _Histogram:
    """A histogram of values that are read in parts, twice: ``count`` of all parts, then ``look_for_median`` of all."""

    def __init__(self, compiled: ModuleType | None) -> None:
        self._compiled, self._sum = compiled, 0
        self._counts = np.zeros(len(RESIDENCY_BUCKETS_MS) + 1, dtype=np.int64)
        self._by_width = np.zeros(_WIDTHS, dtype=np.int64)
        #: The values in the widths of the two blocks in the middle, and the number of blocks with each.
        self._near: Counter[int] = Counter()

    def count(self, ticks: np.ndarray, blocks: np.ndarray) -> None:
        """Read a part."""
        if self._compiled is not None:
            columns = map(np.ascontiguousarray, (ticks, blocks))
            high, low = self._compiled.count(*columns, _BOUNDS_TICKS, self._counts, self._by_width)
            self._sum += (high << 64) + low
            return
        self._sum += dot(ticks, blocks)
        np.add.at(self._counts, np.searchsorted(_BOUNDS_TICKS, ticks), blocks)
        np.add.at(self._by_width, _width(ticks), blocks)

    def look_for_median(self, ticks: np.ndarray, blocks: np.ndarray) -> None:
        """Read a part again, when all have been counted."""
        first, last = self._middle_widths
        width = _width(ticks)
        near = (width >= first) & (width <= last)
        for value, number in zip(ticks[near].tolist(), blocks[near].tolist(), strict=True):
            self._near[value] += number

    @cached_property
    def _ranks(self) -> np.ndarray:
        """Of an even number of blocks the two in the middle."""
        count = int(self._counts.sum())
        return np.array([(count - 1) // 2, count // 2])

    @cached_property
    def _middle_widths(self) -> np.ndarray:
        """The widths with the blocks in the middle."""
        return np.searchsorted(np.cumsum(self._by_width), self._ranks, side="right")

    def as_dict(self) -> dict[str, Any]:
        """The counts up to each bound, and mean and median in seconds."""
        upto = np.cumsum(self._counts).tolist()
        count = upto[-1]
        bounds = [f"{bound / 1_000:g}" for bound in RESIDENCY_BUCKETS_MS]
        return {
            "count": count,
            "mean": self._sum / PER_SECOND / count if count else None,
            "median": self._median() / PER_SECOND if count else None,
            "buckets": dict(zip([*bounds, "+Inf"], upto, strict=True)),
        }

    def _median(self) -> float:
        values = np.array(sorted(self._near))
        before = int(self._by_width[: self._middle_widths[0]].sum())
        upto = before + np.cumsum([self._near[value] for value in values.tolist()])
        return float(np.median(values[np.searchsorted(upto, self._ranks, side="right")]))


def _width(ticks: np.ndarray) -> np.ndarray:
    """Number of the narrow range that each value lies in, ascending: 256 ranges from each power of two to the next."""
    bits = ticks.astype(np.float64).view(np.int64) >> (_MANTISSA_BITS - 8)
    return np.maximum(0, bits - (_EXPONENT_OF_ONE << 8) + 1)
