"""What a pool of blocks did with the contents that it keeps: enough to say afterwards what each cached block was worth.

    table        a request's blocks        released, kept           hit, or evicted
    block        |------ held ------|------------ stay ------------|
    stays                           since                        until

A stay is the time of a block in the free queue with its hash. The events are the same run from the side of its hashes: look-ups,
blocks that get one, tables that are given back, and how many blocks are free after each. ``metrics.cache_worth`` divides the stays,
and ``metrics.cache_bounds`` replays the events in another order of eviction.

Blocks that no look-up asks for (``UNSHARED``) are in neither; what they take is what the ledger has beyond the stays.
``_core_pool.c`` writes the same records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Table
from .chains import Paths

#: Columns of stays: moments; whether a hit ended it or an eviction; look-ups before its end; and its blocks, with hashes that follow
#: one another from ``name`` on.
STAY = ("since", "until", "hit", "look_ups", "name", "blocks")
#: Columns of events: its kind; the first of the hashes, which follow one another, or the number of the look-up; how many blocks they
#: are, or were hit; and the fewest free blocks from then to the next event.
EVENT = ("kind", "name", "blocks", "free")
#: Kinds of events: a look-up that led to an admission; blocks in a table that get a hash; blocks with a hash in a table that is given
#: back; and none of them.
LOOKED_UP, NAMED, RELEASED, TAKEN = range(4)


class ContentsLog:
    """Stays and events of the blocks with hashes of one pool.

    Attributes:
        stays, events: Tables with the columns ``STAY`` and ``EVENT``; ``seal`` completes them.
        kept: Stays that have not ended, of a run that goes on no more: ``until`` is -1. With blocks that are ``UNSHARED``, name 0.
    """

    def __init__(self) -> None:
        self.stays, self.events, self.kept = Table(STAY), Table(EVENT), Table(STAY)
        self._look_ups = 0
        self._since: dict[int, int] = {}
        # The last event, which changes until the next.
        self._last: list[int] | None = None

    def on_freed(self, blocks: Iterable[int], moment: int) -> None:
        """Blocks with a hash, ``UNSHARED`` or not, are in no table any more."""
        self._since.update(dict.fromkeys(blocks, moment))

    def on_stays_ended(self, blocks: Sequence[int], names: Sequence[int], moments: Sequence[int], hit: bool) -> None:
        """Free blocks are hit, or lose their hashes."""
        ended = np.array([[*map(self._since.pop, blocks)], moments, names], dtype=np.int64)
        ended = ended[:, np.flatnonzero(ended[2])]
        # Blocks of a table are hit from its first on, and evicted from its last on.
        same = np.diff(ended) == np.array([[0], [0], [1 if hit else -1]])
        starts = np.flatnonzero(np.append(True, ~same.all(axis=0))[: ended.shape[1]])
        for start, end in pairwise([*starts.tolist(), ended.shape[1]]):
            since, until, name = ended[:, start if hit else end - 1].tolist()
            self.stays.append((since, until, hit, self._look_ups, name, end - start))

    def on_looked_up(self, asks: bool, found: int, free: int) -> None:
        """A sequence enters after it has looked up its blocks; ``asks``: if they have hashes."""
        if asks:
            self._note(LOOKED_UP, [(self._look_ups, found)], free)
        self._look_ups += 1

    def on_named(self, names: Iterable[int], free: int) -> None:
        """Blocks in tables get hashes."""
        self._note(NAMED, _runs(names), free)

    def on_released(self, names: Iterable[int], free: int) -> None:
        """A table has been given back."""
        self._note(RELEASED, _runs(names), free)

    def on_taken(self, free: int) -> None:
        """Blocks have been taken."""
        if self._last is None:
            self._last = [TAKEN, 0, 0, free]
        else:
            self._last[-1] = min(self._last[-1], free)

    def _note(self, kind: int, runs: Iterable[tuple[int, int]], free: int) -> None:
        for name, blocks in runs:
            if self._last is not None:
                self.events.append((*self._last,))
            self._last = [kind, name, blocks, free]

    def seal(self, kept: dict[int, int]) -> None:
        """Complete the tables, when the run has ended.

        Args:
            kept: Hashes of the free blocks that have one.
        """
        if self._last is not None:
            self.events.append((*self._last,))
            self._last = None
        for block, name in kept.items():
            if block in self._since:
                self.kept.append((self._since.pop(block), -1, False, self._look_ups, name, 1))


class ContentsKept(Protocol):
    """Optional part of a memory: what its cached blocks had, and what look-ups asked for, when the run has ended.

    Attributes:
        block_size: Tokens of a block.
        unshared: For each request, whether no other request has a common prefix with it.
        cache_log: The look-ups.
    """

    block_size: int
    unshared: Sequence[bool]
    cache_log: CacheLog

    def sealed_contents(self) -> ContentsLog:
        """Stays and events, complete."""

    def log_no_contents(self) -> None:
        """Keep no log, before the first step: the memory has no ``contents_kept`` then."""

    def paths_of(self, requests: np.ndarray) -> Paths:
        """Paths of requests, ascending, and perhaps of others."""


def _runs(names: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Ascending hashes of a table as runs of consecutive ones: first, and how many. ``UNSHARED`` ones are left out."""
    some = [*filter(None, names)]
    if not some or some[-1] - some[0] + 1 == len(some):
        return [(some[0], len(some))] if some else []
    starts = [0, *(np.flatnonzero(np.diff(some) != 1) + 1).tolist(), len(some)]
    return [(some[start], end - start) for start, end in pairwise(starts)]
