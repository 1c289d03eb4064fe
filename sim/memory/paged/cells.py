"""One cache of cells that all slots of a server share, as llama.cpp's unified KV cache.

A cell holds one token of any sequence, wherever it lies. A sequence that finishes leaves its cells in its slot:

    slot 0, decodes    slot 1, idle    slot 2, given to a request that has not begun
    u u u u            k k k           s s                                              . . . .
    used               kept            stale                                            unused

    kept     freed when a request is given a slot, and where a batch lacks cells: slot by slot, the lowest number first
    stale    kept before the slot was given to a request; freed with the first chunk of its prompt, not before

Kept and stale cells are *cached*: no table names them. ``free`` counts them in. They change with decisions and finishes alone:
the policy's horizon ends before a step for which too few cells are unused.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Meter
from .block_tables import BlockTables
from .paged import PagedMemory
from .transaction import PagedTransaction


class CellTransaction(PagedTransaction):
    """Slots and cells that a step takes, each at once. See ``Transaction``."""

    __slots__ = ()
    memory: CellMemory

    def give_slot(self, slot: int) -> None:
        """A request is given an idle slot: what other idle slots keep is freed, what this one keeps is stale."""
        memory = self.memory
        if slot in memory.kept:
            memory.stale[slot] = memory.kept.pop(slot)
        for other in list(memory.kept):
            memory.forget(other, memory.kept, self.decode_step)

    def begin(self, sequence: Sequence, slot: int) -> None:
        """The first chunk of the prompt of the request in ``slot``."""
        if slot in self.memory.stale:
            self.memory.forget(slot, self.memory.stale, self.decode_step)
        self.memory.slots[sequence] = slot

    def find(self, tokens: int) -> int:
        """Make cells unused for all decodes and for ``tokens`` of prompts. Returns how many cells are lacking."""
        memory, wanted = self.memory, self.need + tokens
        while memory.kept and memory.unused < wanted:
            memory.forget(min(memory.kept), memory.kept, self.decode_step)
        return max(0, wanted - memory.unused)


class CellMemory(PagedMemory):
    """Cells of one token each, and what idle slots keep of them.

    Args:
        cells: Size of the cache.
        ids: Whether to keep a table of cells for each sequence.

    Attributes:
        kept: Cells that each idle slot keeps of its last request, by the number of the slot.
        stale: The same of slots that are given to requests that have not begun.
        slots: The slot of each sequence that has begun.
    """

    def __init__(self, cells: int, ids: bool = False) -> None:
        super().__init__(cells, 1)
        self.kept: dict[int, int] = {}
        self.stale: dict[int, int] = {}
        self.slots: dict[Sequence, int] = {}
        self.cached_level: CacheLog = CacheLog(1)
        self.tables: CellTables | None = CellTables(cells) if ids else None
        self._transaction: CellTransaction = CellTransaction(self)

    def transaction(self, decode_step: int) -> CellTransaction:
        """See ``PagedMemory``."""
        super().transaction(decode_step)
        return self._transaction

    @property
    def cached_blocks(self) -> int:
        """See ``PagedMemory``: cells that slots keep."""
        return sum(self.kept.values()) + sum(self.stale.values())

    @property
    def unused(self) -> int:
        """Cells that neither a sequence holds nor a slot keeps."""
        return self.free - self.cached_blocks

    def forget(self, slot: int, among: dict[int, int], decode_step: int) -> None:
        """Free what a slot keeps, before ``decode_step``."""
        del among[slot]
        if self.tables:
            self.tables.grow_until(decode_step)
            self.tables.forget(slot)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``PagedMemory``; the slots of the sequences keep the cells."""
        leaving = list(leaving)
        if self.tables:
            self.tables.grow_until(decode_step)
        for sequence in leaving:
            slot = self.slots.pop(sequence)
            self.kept[slot] = sequence.held_tokens(decode_step)
            if self.tables:
                self.tables.keep(sequence, slot)
        super().release(leaving, decode_step)
        self.cached_level.end_row(self.cached_blocks)

    def advance(self, state: State, steps: int) -> Meter:
        """See ``PagedMemory``."""
        self.cached_level.enter_row(self.cached_blocks)
        return super().advance(state, steps)

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``."""
        if self.tables is None:
            return super().cached_block_ids()
        return np.fromiter(chain(*self.tables.kept.values()), dtype=np.int64)


class CellTables(BlockTables):
    """Tables of cells, and the cells that slots keep.

    Attributes:
        kept: Ids of the cells, by the number of the slot.
    """

    def __init__(self, cells: int) -> None:
        super().__init__(cells, 0, 1)
        self.kept: dict[int, list[int]] = {}

    def keep(self, sequence: Sequence, slot: int) -> None:
        """The cells of a sequence that leaves stay with its slot."""
        self.kept[slot] = self.tables.pop(sequence)

    def forget(self, slot: int) -> None:
        """The cells that a slot keeps are free."""
        self.pool.release(self.kept.pop(slot))
