"""One cache of cells that all slots of a server share, as llama.cpp's unified KV cache.

A cell holds one token of any sequence, wherever it lies. A sequence that finishes leaves its cells in its slot:

    slot 0, decodes    slot 1, idle    slot 2, given to a request that has not begun
    u u u u            k k k           s s                                              . . . .
    used               kept            stale                                            unused

    kept     freed where a batch lacks cells: slot by slot, the lowest number first; without prefix caching also when a request
             is given a slot
    stale    kept before the slot was given to a request; with the first chunk of its prompt, not before, the sequence takes over
             those of the tokens with which its prompt begins, and the others are freed

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
from ..prefix.block_tables import BlockTables
from .paged import PagedMemory
from .transaction import PagedTransaction


class CellTransaction(PagedTransaction):
    """Slots and cells that a step takes, each at once. See ``Transaction``."""

    __slots__ = ()
    memory: CellMemory

    def give_slot(self, slot: int) -> None:
        """A request is given an idle slot, and what the slot keeps is stale; without prefix caching what others keep is freed."""
        memory = self.memory
        if slot in memory.kept:
            memory.stale[slot] = memory.kept.pop(slot)
        if memory.cache_log is None:
            for other in list(memory.kept):
                memory.forget(other, self.decode_step)

    def begin(self, sequence: Sequence, slot: int, found: int) -> None:
        """The first chunk of the prompt of the request in ``slot``.

        Args:
            found: The first tokens that the slot keeps and the sequence need not compute.
        """
        memory = self.memory
        memory.stale.pop(slot, None)
        memory.slots[sequence] = slot
        if memory.tables:
            memory.tables.grow_until(self.decode_step)
            memory.tables.begin(sequence, slot, found)
        if memory.cache_log:
            sequence.computed_tokens = found
            memory.begin(sequence, found)
            memory.cache_log.look_up(sequence.index, sequence.start_tokens, found)

    def kept_tokens(self, slot: int) -> int:
        """Tokens that a slot keeps of its last request."""
        memory = self.memory
        return memory.kept.get(slot, 0) or memory.stale.get(slot, 0)

    def find(self, tokens: int) -> int:
        """Make cells unused for all decodes and for ``tokens`` of prompts. Returns how many cells are lacking."""
        memory, wanted = self.memory, self.need + tokens
        while memory.kept and memory.unused < wanted:
            memory.evicted += memory.forget(min(memory.kept), self.decode_step)
        return max(0, wanted - memory.unused)


class CellMemory(PagedMemory):
    """Cells of one token each, and what idle slots keep of them.

    Args:
        cells: Size of the cache.
        ids: Whether to keep a table of cells for each sequence.
        caches: Whether prompts find tokens in their slots.

    Attributes:
        kept: Cells that each idle slot keeps of its last request, by the number of the slot.
        stale: The same of slots that are given to requests that have not begun.
        slots: The slot of each sequence that has begun.
        evicted: Kept cells that were freed because a batch lacked cells.
    """

    def __init__(self, cells: int, ids: bool, caches: bool) -> None:
        super().__init__(cells, 1)
        self.evicted = 0
        self.kept: dict[int, int] = {}
        self.stale: dict[int, int] = {}
        self.slots: dict[Sequence, int] = {}
        self.cached_level: CacheLog = CacheLog(1)
        self.cache_log = self.cached_level if caches else None
        self.tables: BlockTables | None = BlockTables(cells, 0, 1) if ids else None
        self._transaction: CellTransaction = CellTransaction(self)

    def transaction(self, decode_step: int) -> CellTransaction:
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

    @property
    def evicted_blocks(self) -> int:
        return self.evicted

    def forget(self, slot: int, decode_step: int) -> int:
        """Free what an idle slot keeps, before ``decode_step``. Returns how many cells these are."""
        if self.tables:
            self.tables.grow_until(decode_step)
            self.tables.forget(slot)
        return self.kept.pop(slot)

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
        self.cached_level.enter_row(self.cached_blocks)
        return super().advance(state, steps)

    def cached_block_ids(self) -> np.ndarray:
        if self.tables is None:
            return super().cached_block_ids()
        return np.fromiter(chain(*self.tables.kept.values()), dtype=np.int64)
