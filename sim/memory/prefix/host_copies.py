"""Copies between GPU and host, beside the steps: one after the other each way, and the records that metrics read."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Values
from heapq import heappop, heappush
from typing import Protocol

from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ...workload.source import NEVER
from ..accounting.ledger import Table
from .tiers import Link

#: Columns of an admission's look-up on the host, in tokens; parallel to those of the GPU's prefix cache.
HOST_LOOK_UP = ("index", "queried_tokens", "hit_tokens")
#: Columns of a copy between GPU and host.
TRANSFER = ("index", "asked_ticks", "start_ticks", "end_ticks", "blocks", "is_store")
#: Columns of a change of the host's blocks.
HOST_LEVEL = ("ticks", "used_blocks")
#: Columns of a step that waits for copies.
FLUSH = ("start_ticks", "ticks")
#: Columns of the tokens that a look-up found in a tier behind the host: row of the look-up, place of the tier.
BEHIND = ("look_up", "tier", "hit_tokens")


class HostCounts(Protocol):
    """Blocks of the host: all, those in use, those evicted so far, and stores that found no room."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def used_blocks(self) -> int: ...
    @property
    def evicted_blocks(self) -> int: ...
    @property
    def refused_stores(self) -> int: ...


class HostCopies:
    """Copies between GPU and host.

    Args:
        cache: Blocks of the host.
        behind: Tiers behind the host, in the order in which they are asked.
        chunk_blocks: Blocks of the GPU in one of the host.

    Attributes:
        look_ups, transfers, levels, flushes, behind_hits: Records, by the columns above.
        loaded: Waiting sequences that load or have loaded, with their tokens, those that the GPU had included.
        seen_ticks: When what the coming decision knows was known.
    """

    def __init__(self, cache: HostCounts, behind: Values[Link] = (), chunk_blocks: int = 1) -> None:
        self.cache, self.behind, self.chunk_blocks, self.seen_ticks = cache, behind, chunk_blocks, 0
        self.look_ups, self.transfers = Table(HOST_LOOK_UP), Table(TRANSFER)
        self.levels, self.flushes, self.behind_hits = Table(HOST_LEVEL), Table(FLUSH), Table(BEHIND)
        self.loaded: dict[Sequence, int] = {}
        # Of loads and of stores: ticks of a copy, and when the link has done all that was submitted.
        self._ticks: tuple[Callable[[int], int], Callable[[int], int]] = _not_connected, _not_connected
        self._free_from = [0, 0]
        self._clock: Callable[[], int] = _not_connected
        # By its end, what is to be done when a copy has ended.
        self._running: list[tuple[int, int, Callable[[], None]]] = []
        self._submitted = self._level = 0

    def connect(self, clock: Callable[[], int], load: Callable[[int], int], store: Callable[[int], int]) -> None:
        """Set the clock of the run, and the time that a load or a store of some blocks takes, in ticks."""
        self._clock, self._ticks = clock, (load, store)

    @property
    def labels(self) -> list[str]:
        """Names of the tiers behind the host, as vLLM's metrics have them."""
        return [f"{place}:{link.spec.type}" for place, link in enumerate(self.behind, 1)]

    @property
    def next_ticks(self) -> int:
        """When the next copy ends or a decision can be another one, or ``NEVER``."""
        return self._running[0][0] if self._running else NEVER

    @property
    def has_finished(self) -> bool:
        """Whether finished sequences have something for the next decision."""
        return False

    def is_settled(self) -> bool:
        """Whether steps without admissions, finishes and preemptions begin no copy, and wait for none."""
        return not self._running

    @property
    def loaded_tokens(self) -> int:
        """Tokens that waiting sequences have blocks for."""
        return sum(self.loaded.values())

    def complete(self, until: int) -> None:
        """Note the copies that have ended by ``until``."""
        self.seen_ticks = until
        while self._running and self._running[0][0] <= until:
            heappop(self._running)[2]()

    def _copy(
        self, index: int, asked_ticks: int, blocks: int, ticks: int, is_store: bool, done: Callable[[], None]
    ) -> int:
        """Put a copy of so many blocks at the end of the queue of its direction. Returns its end; then ``done`` is called.

        Args:
            index: Whose it is; -1 of several.
            ticks: How long it takes.
        """
        start = max(asked_ticks, self._free_from[is_store])
        end = self._free_from[is_store] = start + ticks
        self._until(end, done)
        self.transfers.append((index, asked_ticks, start, end, blocks, is_store))
        return end

    def _until(self, end_ticks: int, done: Callable[[], None]) -> None:
        """Call ``done`` when the engine knows that it is ``end_ticks``."""
        heappush(self._running, (end_ticks, self._submitted, done))
        self._submitted += 1

    def note_wait(self, now: int, ticks: int) -> None:
        """A step waits for copies."""
        if ticks:
            self.flushes.append((now, ticks))

    def _note_level(self, now: int) -> None:
        """Record the blocks of the host that are in use, if they are others."""
        if self.cache.used_blocks != self._level:
            self._level = self.cache.used_blocks
            self.levels.append((now, self._level))


def _not_connected(*_: int) -> int:
    raise SimulationFault("an engine must connect the host tier before copies begin")
