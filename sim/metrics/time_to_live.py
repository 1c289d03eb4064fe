"""What a time to live of the cached blocks would free, and which hits it would lose, on the schedule of the run.

    released                 hit, or evicted
    |---- cached ----|------ freed ------|          a stay that is longer than the time to live
    |---- cached ----|

A stay that a hit ends after more than the time to live is a lost hit: its request computes the block, for which it takes a free one, so
that tables and numbers of free blocks stay those of the run. Of a chain the end is never released after its beginning, so what is left
of a hit is still a prefix. The loss is an upper bound: another block may have the same contents, and what is freed may hold others.

Contents that no other request shares are not logged one by one. They leave the free queue in the order in which they came.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..runs.moments import ticks_of
from ..types.sums import dot, total
from ..types.ticks import PER_SECOND
from .cache_worth import CacheWorth

#: Share of the blocks asked for that the time to live may lose, as its reciprocal: one point of hit rate.
_LOSS = 100


class TimeToLive(NamedTuple):
    """One time to live.

    Attributes:
        ticks: How long contents are kept after their last table.
        freed_slot_ticks: Cached slots that are free in its place, over time.
        lost_blocks: Hits that it loses, at most.
    """

    ticks: int
    freed_slot_ticks: int
    lost_blocks: int


def shortest(worth: CacheWorth, asked_blocks: int) -> TimeToLive:
    """The shortest time to live, in whole seconds, that loses at most one point of the hit rate of a run.

    Args:
        asked_blocks: Blocks that the look-ups of the run ask for.
    """
    since, until, hits = _stays(worth)
    lasted, hit = until - since, np.flatnonzero(hits)
    longest = hit[np.argsort(-lasted[hit], kind="stable")]
    lost = np.cumsum(hits[longest])
    # The first stay whose hit may not be lost is kept to its end.
    first = int(np.searchsorted(lost, asked_blocks // _LOSS, side="right"))
    seconds = 0 if first == len(lost) else -(-int(lasted[longest[first]]) // PER_SECOND)
    return _cut(worth, seconds * PER_SECOND, since, until, hits)


def time_to_live(worth: CacheWorth, ticks: int) -> TimeToLive:
    """What a time to live of so many ticks would have freed and lost."""
    return _cut(worth, ticks, *_stays(worth))


def _cut(worth: CacheWorth, ticks: int, since: np.ndarray, until: np.ndarray, hits: np.ndarray) -> TimeToLive:
    """As ``time_to_live``, from ``_stays``."""
    run, names, window = worth.run, worth.names, worth.run.window

    def freed(blocks: np.ndarray, since: np.ndarray, until: np.ndarray) -> int:
        first = np.maximum(since + ticks, window.start_ticks)
        return dot(blocks, np.maximum(np.minimum(until, window.end_ticks) - first, 0))

    size, kept = run.replica.block_size, ticks_of(run.log, names.kept["since"])
    slots = size * freed(names.stays["blocks"], since, until)
    slots += size * freed(names.kept["blocks"], kept, np.full_like(kept, run.log.end_ticks))
    return TimeToLive(ticks, slots + freed(*_unlogged(worth)), total(hits[until - since > ticks]))


def _stays(worth: CacheWorth) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First and last tick of each logged stay that has ended, and its blocks if a hit in the settings' window ended it; int64."""
    (since, until), window = worth.stay_ticks, worth.run.window
    measured = (until >= window.start_ticks) & (until < window.end_ticks)
    return since, until, np.where(measured, worth.hits, 0)


def _unlogged(worth: CacheWorth) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots of contents that are not logged, and when they were cached, first and last tick; int64."""
    log, names, nothing = worth.run.log, worth.names, np.zeros(0, dtype=np.int64)
    if worth.all_shared:
        return nothing, nothing, nothing
    size, changes = worth.run.replica.block_size, log.cache_changes
    came = np.concatenate([names.stays["since"], names.kept["since"]])
    slots = size * np.concatenate([names.stays["blocks"], names.kept["blocks"]])
    more, fewer = np.maximum(changes["slots"], 0), np.maximum(-changes["slots"], 0)
    arrived = _over_time(ticks_of(log, changes["moment"]), more, ticks_of(log, came), slots)
    stays = size * names.stays["blocks"]
    left = _over_time(ticks_of(log, changes["moment"]), fewer, ticks_of(log, names.stays["until"]), stays)
    ends = np.union1d(arrived[1], left[1])
    first, last = (times[np.searchsorted(sums, ends)] for times, sums in (arrived, left))
    return np.diff(ends, prepend=0), first, last


def _over_time(
    ticks: np.ndarray, slots: np.ndarray, logged_ticks: np.ndarray, logged: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Times at which slots came (or went) that are not logged, ascending, and how many until each."""
    times, at = np.unique(np.concatenate([ticks, logged_ticks]), return_inverse=True)
    counts = np.zeros(len(times), dtype=np.int64)
    np.add.at(counts, at, np.concatenate([slots, -logged]))
    some = np.flatnonzero(counts)
    return times[some], np.cumsum(counts[some])
