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
from typing import NamedTuple, Protocol

import numpy as np

from ...types.errors import SimulationFault
from ..accounting.ledger import Table
from .chains import PLACE_BITS, Paths

#: Columns of stays: moments; whether a hit ended it or an eviction; look-ups before its end; and its blocks, with hashes that follow
#: one another from ``name`` on.
STAY = ("since", "until", "hit", "look_ups", "name", "blocks")
#: Columns of events: its kind; the first of the hashes, which follow one another, or the number of the look-up; how many blocks they
#: are, or were hit; and the fewest free blocks from then to the next event.
EVENT = ("kind", "name", "blocks", "free")
#: Columns of hashes that blocks have from a moment on, one block more (1) or fewer (-1).
HOLDING = ("moment", "name", "more")
#: Kinds of events: a look-up that led to an admission; blocks in a table that get a hash; blocks with a hash in a table that is given
#: back; and none of them.
LOOKED_UP, NAMED, RELEASED, TAKEN = range(4)


_PENDING = -1


class Asked(NamedTuple):
    """Look-ups that led to an admission, in their order; int64 [look-ups].

    Attributes:
        requests: The request of each.
        start, stop: Places in its path.
    """

    requests: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class OneGroup(NamedTuple):
    """The blocks of one KV group that look-ups could hit.

    Attributes:
        place: The group.
        blocks: Of each look-up, from the first block on; int64 [look-ups].
    """

    place: int
    blocks: np.ndarray


class ContentsLog:
    """Stays and events of the blocks with hashes of one pool.

    Attributes:
        stays, events: Tables with the columns ``STAY`` and ``EVENT``; ``seal`` completes them.
        kept: Stays that have not ended, of a run that goes on no more: ``until`` is -1. With blocks that are ``UNSHARED``, name 0.
    """

    #: From the hash of one block of a chain to that of the next.
    _stride = 1

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
        self._add_stays([*map(self._since.pop, blocks)], moments, names, hit, self._look_ups)

    def _add_stays(
        self, since: Sequence[int], until: Sequence[int], names: Sequence[int], hit: bool, look_ups: int
    ) -> None:
        """Stays of blocks, those of consecutive hashes as one."""
        ended = np.array([since, until, names], dtype=np.int64)
        ended = ended[:, np.flatnonzero(ended[2])]
        # Blocks of a table are hit from its first on, and evicted from its last on.
        same = np.diff(ended) == np.array([[0], [0], [self._stride if hit else -self._stride]])
        starts = np.flatnonzero(np.append(True, ~same.all(axis=0))[: ended.shape[1]])
        for start, end in pairwise([*starts.tolist(), ended.shape[1]]):
            self.stays.append(
                (*ended[:2, start].tolist(), hit, look_ups, int(ended[2, start if hit else end - 1]), end - start)
            )

    def on_looked_up(self, asks: bool, found: int, free: int) -> None:
        """A sequence enters after it has looked up its blocks; ``asks``: if they have hashes."""
        if asks:
            self._note(LOOKED_UP, [(self._look_ups, found)], free)
        self._look_ups += 1

    def on_named(self, names: Sequence[int], free: int) -> None:
        """Blocks in tables get hashes."""
        self._note(NAMED, _runs(names, self._stride), free)

    def on_released(self, names: Iterable[int], free: int) -> None:
        """A table has been given back."""
        self._note(RELEASED, _runs(names, self._stride), free)

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


class SettledContentsLog(ContentsLog):
    """As ``ContentsLog``, of a cache that says later when its level changed: all since the last ``settle`` happened then.

    Args:
        num_kv_groups: KV groups; a hash modulo this is the block's. Sealed tables have those of one chain for each chain and group.

    Attributes:
        holdings: Hashes that came and went, as ``HOLDING``; None where no slower tier has the same ones.
    """

    holdings: Table | None = None

    def __init__(self, num_kv_groups: int) -> None:
        super().__init__()
        self._stride, self._is_sealed = num_kv_groups, False
        # Since the last moment: blocks that were freed; stays that ended, as the arguments of ``_add_stays``; and hashes that came (1)
        # and went (-1).
        self._freed: list[int] = []
        self._ended: list[tuple[list[int], Sequence[int], bool, int]] = []
        self._held: list[tuple[Sequence[int], int]] = []

    def log_holdings(self) -> None:
        """Log ``holdings``, too; before the first step."""
        self.holdings = Table(HOLDING)

    def on_freed(self, blocks: Iterable[int], moment: int = 0) -> None:
        blocks = [*blocks]
        self._since.update(dict.fromkeys(blocks, _PENDING))
        self._freed += blocks

    def on_stays_ended(self, blocks: Sequence[int], names: Sequence[int], moments: Sequence[int], hit: bool) -> None:
        if not blocks:
            return
        self._ended.append(([*map(self._since.pop, blocks)], names, hit, self._look_ups))
        if not hit and self.holdings is not None:
            self._held.append((names, -1))

    def on_named(self, names: Sequence[int], free: int) -> None:
        """See ``ContentsLog``."""
        if self.holdings is not None:
            self._held.append((names, 1))
        super().on_named(names, free)

    def settle(self, moment: int) -> None:
        """What has been noted since the last call happened at ``moment``."""
        for since, names, hit, look_ups in self._ended:
            times = [moment if each == _PENDING else each for each in since]
            self._add_stays(times, [moment] * len(names), names, hit, look_ups)
        for block in self._freed:
            if self._since.get(block) == _PENDING:
                self._since[block] = moment
        if self.holdings is not None:
            for names, more in self._held:
                for name in names:
                    self.holdings.append((moment, name, more))
        self._freed, self._ended, self._held = [], [], []

    def seal(self, kept: dict[int, int]) -> None:
        if self._freed or self._ended:
            raise SimulationFault("the cached level changed after it was settled for the last time")
        super().seal(kept)
        if self._stride > 1 and not self._is_sealed:
            self.stays, self.kept, self.events = map(self._in_chains, (self.stays, self.kept, self.events))
            self.holdings = self.holdings and self._in_chains(self.holdings)
        self._is_sealed = True

    def _in_chains(self, table: Table) -> Table:
        """Hashes of groups, as hashes of blocks of other chains."""
        columns, groups = table.columns(), self._stride
        number, group = np.divmod(columns["name"], groups)
        number += (number >> PLACE_BITS) * (groups - 1) + group << PLACE_BITS
        if "kind" in columns:
            # Others have numbers of look-ups.
            kind = columns["kind"]
            number = np.where((kind == NAMED) | (kind == RELEASED), number, columns["name"])
        renamed = Table(table.fields)
        renamed.extend(np.stack([*(columns | {"name": number}).values()], axis=1))
        return renamed


class ContentsKept(Protocol):
    """Optional part of a memory: what its cached blocks had, and what look-ups asked for, when the run has ended.

    Attributes:
        block_size: Slots of a block.
        unshared: For each request, whether no other request has a common prefix with it; those of such requests are not logged.
        num_kv_groups: Chains of hashes of each chain of blocks.
        has_bounds: Whether hits can be counted in the blocks of one group, all of which a hit has.
    """

    block_size: int
    unshared: Sequence[bool]
    num_kv_groups: int
    has_bounds: bool

    def asked(self) -> Asked:
        """The hashes that each look-up asks for."""

    def sealed_contents(self) -> ContentsLog:
        """Stays and events, complete."""

    def could_hit(self) -> OneGroup | None:
        """What look-ups could hit if nothing were evicted, on the schedule of the run; None where each hits as many of its blocks as are
        cached without a gap.
        """

    def paths_of(self, requests: np.ndarray) -> Paths:
        """Paths of requests, ascending, and perhaps of others."""


def _runs(names: Iterable[int], stride: int) -> Iterable[tuple[int, int]]:
    """Ascending hashes of a table as runs of consecutive ones: first, and how many. ``UNSHARED`` ones are left out."""
    some = [*filter(None, names)]
    if not some or some[-1] - some[0] == stride * (len(some) - 1):
        return [(some[0], len(some))] if some else []
    starts = [0, *(np.flatnonzero(np.diff(some) != stride) + 1).tolist(), len(some)]
    return [(some[start], end - start) for start, end in pairwise(starts)]
