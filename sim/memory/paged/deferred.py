"""Pages that stay mapped after their request: vAttention's deferred reclamation.

A sequence lives in a *region* of virtual memory, contiguous. Pages are mapped to its front as it
grows. (A page here is a page group, a block of the ledger.) A sequence that leaves keeps its pages mapped:

    region of         S1 ended       S3 runs (took over another's)     S2 runs
    pages             m m m          u u u | m                         u u          . .
                      deferred       used    spare                     used         unmapped

    comes     the deferred region that holds it most tightly, else the largest, is taken over: what is
              mapped is used, the rest stays mapped as *spare*; what lacks is mapped
    grows     into its own spare page, else a page is mapped
    mapping   takes an unmapped page; where there is none the oldest deferred region gives up its last
              one, and where there is no such region, the spare pages of the sequence that came first

Deferred and spare pages are *cached*: no table names them, and they can be had. ``free`` counts them
in, so decisions are those of plain paged memory. In a leap ``cached`` may change in the first step
only: the policy's horizon ends at the next step in which a sequence grows into a spare page, or in
which one grows while nothing is left unmapped. Once all pages were mapped that is each step in which
a sequence grows, so that a leap is some ``block_size / batch_size`` steps long, and there are about as many
leaps as page groups are filled.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Meter
from ..prefix.block_tables import BlockTables
from .paged import PagedMemory


class Regions:
    """The pages that are mapped and in no table: a page is its id, or 0 where no ids are kept.

    Attributes:
        deferred: Pages of each region without a running sequence, by address; the region left first comes first.
        spare: Pages past those that a running sequence uses, where there are any; in order of admission.
        cached: Pages in both.
    """

    __slots__ = ("cached", "deferred", "spare")

    def __init__(self) -> None:
        self.deferred: list[list[int]] = []
        self.spare: dict[Sequence, list[int]] = {}
        self.cached = 0

    def enter(self, sequence: Sequence, pages: int) -> list[int]:
        """Give a sequence a region, and return those of the ``pages`` it asks for that are mapped already."""
        if not self.deferred:
            return []
        sizes = [len(region) for region in self.deferred]
        enough = [size for size in sizes if size >= pages]
        region = self.deferred.pop(sizes.index(min(enough) if enough else max(sizes)))
        used, spare = region[:pages], region[pages:]
        if spare:
            self.spare[sequence] = spare
        self.cached -= len(used)
        return used

    def grow(self, sequence: Sequence) -> int:
        """The first spare page of a sequence that has one, which it uses now."""
        spare = self.spare[sequence]
        page = spare.pop(0)
        if not spare:
            del self.spare[sequence]
        self.cached -= 1
        return page

    def leave(self, sequence: Sequence, used: list[int]) -> None:
        """Defer the region of a sequence that leaves."""
        self.deferred.append(used + self.spare.pop(sequence, []))
        self.cached += len(used)

    def unmap(self, count: int) -> list[int]:
        """Pages that are mapped no more, so many of the cached ones: the oldest region's first, its last page first."""
        if count > self.cached:
            raise SimulationFault(f"{count} pages are to be unmapped and {self.cached} are cached")
        pages: list[int] = []
        while len(pages) < count:
            region = self.deferred[0] if self.deferred else next(iter(self.spare.values()))
            some = region[: -(count - len(pages)) - 1 : -1]
            del region[-len(some) :]
            pages += some
            if not region:
                self._forget_first()
        self.cached -= len(pages)
        return pages

    def _forget_first(self) -> None:
        if self.deferred:
            del self.deferred[0]
        else:
            del self.spare[next(iter(self.spare))]


class DeferredMemory(PagedMemory):
    """As ``PagedMemory`` without a host, with pages that stay mapped until a sequence needs them.

    Args:
        num_blocks: Page groups of the device pool.
        block_size: Tokens a page group.
        ids: Whether to keep tables of page groups.
    """

    def __init__(self, num_blocks: int, block_size: int, ids: bool) -> None:
        super().__init__(num_blocks, block_size)
        self.regions = Regions()
        #: Slots that are mapped and in no table.
        self.cached_level: CacheLog = CacheLog(block_size)
        self.tables: RegionTables | None = RegionTables(num_blocks, block_size) if ids else None

    @property
    def cached_blocks(self) -> int:
        """See ``PagedMemory``: pages that are mapped and in no table."""
        return self.regions.cached

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``PagedMemory``; the pages of a region that was left are used first."""
        pages = -(-(sequence.start_tokens - 1 + past) // self.block_size)
        unmapped = self.free - self.regions.cached
        used = self.regions.enter(sequence, pages)
        self.regions.unmap(pages - len(used) - unmapped)
        super().admit(sequence, decode_step, padded_tokens, past)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``PagedMemory``; what was mapped stays mapped."""
        for sequence in leaving:
            self.regions.leave(sequence, [0] * -(-sequence.held_tokens(decode_step) // self.block_size))
        super().release(leaving, decode_step)
        self.cached_level.end_row(self.regions.cached)

    def steps_settled(self, decode_step: int, limit: int) -> int:
        """See ``PagedMemory``.

        Perhaps fewer than the truth, where pages that are spare by then will have been unmapped.
        """
        regions, size = self.regions, self.block_size
        own = 0
        for sequence, spare in regions.spare.items():
            ahead = -sequence.held_tokens(decode_step) % size
            if not ahead:
                own += 1
                # Into another of its pages as soon as this one is full.
                ahead = size if len(spare) > 1 else limit
            limit = min(limit, ahead)
        unmapped = max(0, self.free - regions.cached - (self.phases.total(decode_step, 1) - own))
        if limit > 1 and self.phases.total(decode_step + 1, limit - 1) > unmapped:
            return 1 + self.phases.steps_within(decode_step + 1, unmapped)
        return limit

    def advance(self, state: State, steps: int) -> Meter:
        if steps and self.regions.cached:
            self._map_first(state.decode_step)
        self.cached_level.enter_row(self.regions.cached)
        return super().advance(state, steps)

    def cached_block_ids(self) -> np.ndarray:
        if self.tables is None:
            return super().cached_block_ids()
        regions = self.tables.regions
        return np.fromiter(chain(*regions.deferred, *regions.spare.values()), dtype=np.int64)

    def _map_first(self, decode_step: int) -> None:
        """Pages for the growth of ``decode_step``: spare ones, unmapped ones, and those of others."""
        regions, size = self.regions, self.block_size
        unmapped = self.free - regions.cached
        own = [sequence for sequence in regions.spare if not sequence.held_tokens(decode_step) % size]
        for sequence in own:
            regions.grow(sequence)
        regions.unmap(self.phases.total(decode_step, 1) - len(own) - unmapped)


class RegionTables(BlockTables):
    """Tables with pages that stay mapped when a sequence leaves.

    They follow the rule step by step, whenever they are looked at, without the counts of ``DeferredMemory``. A page has a
    reference as long as it is mapped.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, 0, block_size)
        self.regions = Regions()

    def hold(self, sequence: Sequence, tokens: int) -> None:
        """Give a new sequence a region, with pages for ``tokens``."""
        pages = -(-tokens // self._block_size)
        used = self.regions.enter(sequence, pages)
        self.tables[sequence] = used + self._map(pages - len(used))

    def grow_until(self, decode_step: int) -> None:
        """See ``BlockTables``; into spare pages where a sequence has them."""
        for step in range(self._grown_until, decode_step):
            members = self._members[step % self._block_size]
            others = [sequence for sequence in members if not self._grow_into_spare(sequence)]
            for sequence, page in zip(others, self._map(len(others)), strict=True):
                self.tables[sequence].append(page)
        self._grown_until = max(decode_step, self._grown_until)

    def _grow_into_spare(self, sequence: Sequence) -> bool:
        """Whether the sequence had a spare page, which it uses now."""
        if sequence not in self.regions.spare:
            return False
        page = self.regions.grow(sequence)
        self.tables[sequence].append(page)
        return True

    def leave(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows no more, and its region is deferred."""
        self._members[phase].remove(sequence)
        self.regions.leave(sequence, self.tables.pop(sequence))

    def _map(self, count: int) -> list[int]:
        """So many pages, unmapped where they were if they must be."""
        self.pool.free_blocks(self.regions.unmap(count - self.pool.num_free))
        return self.pool.get_new_blocks(count)
