"""The state of a pool with block tables in one step."""

from __future__ import annotations

from array import array

import numpy as np

from ...memory import Memory
from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ..plans.layouts import Layout
from .occupancy import BOUNDED, CODES, NO_SEQUENCE, Holder, Rows, gaps_between, limits_of

_NOTHING = np.zeros(0, dtype=np.int64)
_FREE, _CACHED = CODES["free"], CODES["cached"]


class TableReader:
    """Looks at a memory with block tables, moment by moment.

    Blocks of a table are kept as an array from one moment to the next: of one that only grows the new ones are read.
    """

    def __init__(self, memory: Memory, layout: Layout) -> None:
        if memory.tables is None:
            raise SimulationFault("a memory without block tables is to be read through them")
        self.memory, self.layout = memory, layout
        # A pinned prefix is as a table that is live throughout.
        self.pinned = layout.pinned_slots()[:: memory.block_size] // memory.block_size
        self._known: dict[Sequence, tuple[list[int], array[int]]] = {}

    def look(self, held: list[Holder]) -> Tables:
        """The pool, with these sequences on the device, in order of their index."""
        known, self._known = self._known, {}
        tables = []
        for holder in held:
            table = self.layout.table(holder.sequence)
            before = known.get(holder.sequence)
            # Preempted and admitted again, or rewritten, it has another one.
            blocks = before[1] if before is not None and before[0] is table else array("q")
            blocks.extend(table[len(blocks) :])
            self._known[holder.sequence] = table, blocks
            tables.append(np.array(blocks, dtype=np.int64))
        memory, pinned = self.memory, self.pinned
        # No sequence is named only where all others are: the pinned prefix comes last.
        return Tables(
            memory.block_size,
            memory.num_blocks,
            [*limits_of(memory, held), (len(pinned) * memory.block_size,) * 4],
            [*(holder.sequence.index for holder in held), NO_SEQUENCE],
            [*tables, pinned],
            memory.cached_block_ids(),
        )


class Tables:
    """See ``Occupancy``.

    Args:
        size, num_blocks: Of the pool.
        limits: Of each table, see ``limits_of``.
        sequences: Index of the sequence of each table, ascending, or ``NO_SEQUENCE`` for the last one.
        tables: Ids of the blocks of each, int64, from 0; at least one.
        cached: Ids of blocks with cached contents, int64.

    Attributes:
        in_use: Blocks that are named or cached.
    """

    def __init__(
        self,
        size: int,
        num_blocks: int,
        limits: list[tuple[int, int, int, int]],
        sequences: list[int],
        tables: list[np.ndarray],
        cached: np.ndarray,
    ) -> None:
        self._size, self.num_blocks = size, num_blocks
        self._limits = np.maximum.accumulate(np.array(limits, dtype=np.int64).T)
        self._sequence = np.array(sequences, dtype=np.int32)
        self._blocks = np.concatenate(tables)
        lengths = np.array([len(table) for table in tables])
        self._first = lengths.cumsum() - lengths
        span = 1 + max(int(self._blocks.max(initial=-1)), int(cached.max(initial=-1)))
        self._references = np.bincount(self._blocks, minlength=span)
        self._is_busy = self._references > 0
        self._merge_shared()
        in_use = in_tables = int(np.count_nonzero(self._is_busy))
        if len(cached):
            self._is_busy[cached] = True
            in_use = int(np.count_nonzero(self._is_busy))
        self.in_use = in_use
        self.census = np.zeros(len(CODES), dtype=np.int64)
        before = np.minimum(self._limits, lengths * size).sum(axis=1) - self._saved
        self._put_counts(self.census, before, in_tables * size)
        self.census[_CACHED] = (in_use - in_tables) * size
        self.census[_FREE] = (self.num_blocks - in_use) * size

    def _put_counts(self, counts: np.ndarray, before: np.ndarray, slots: int) -> None:
        """Slots of each bucket of those that are held, by the code of the bucket, of so many slots."""
        counts[BOUNDED[0]] = before[0]
        for place in range(1, len(BOUNDED)):
            counts[BOUNDED[place]] = before[place] - before[place - 1]
        counts[CODES["block_tail"]] = slots - before[-1]

    def _holder_of(self, entry: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each place in all tables together the holder, and the slots of its block before each of its limits."""
        holder = self._first.searchsorted(entry, side="right") - 1
        before = self._limits[:, holder]
        before -= (entry - self._first[holder]) * self._size
        np.maximum(before, 0, out=before)
        np.minimum(before, self._size, out=before)
        return holder, before

    def _merge_shared(self) -> None:
        """Of each block that several name the slots before the farthest of their limits; and how many that spares
        beside what there would be if each had a block of its own."""
        self._shared, self._merged, self._saved = _NOTHING, np.zeros((4, 0), dtype=np.int64), np.zeros(4, np.int64)
        if self._references.max(initial=0) < 2:
            return
        entry = np.flatnonzero(self._references[self._blocks] > 1)
        entry = entry[np.argsort(self._blocks[entry], kind="stable")]
        block = self._blocks[entry]
        begins = np.flatnonzero(np.diff(block, prepend=-1))
        _, before = self._holder_of(entry)
        self._shared, self._merged = block[begins], np.maximum.reduceat(before, begins, axis=1)
        self._saved = before.sum(axis=1) - self._merged.sum(axis=1)

    def rows(self, shown: np.ndarray) -> Rows:
        """See ``Occupancy``."""
        rows = len(shown)
        bucket, sequence = np.full(rows, _FREE, dtype=np.uint8), np.full(rows, NO_SEQUENCE, dtype=np.int32)
        live, references = np.zeros(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)
        within = shown[: shown.searchsorted(len(self._is_busy))]
        references[: len(within)] = self._references[within]
        bucket[: len(within)][self._is_busy[within]] = _CACHED
        named = np.flatnonzero(references)
        # The last one written stands: the first table that names a block.
        first = np.zeros(len(self._is_busy), dtype=np.int64)
        first[self._blocks[::-1]] = np.arange(len(self._blocks) - 1, -1, -1)
        holder, before = self._holder_of(first[shown[named]])
        self._put_merged(shown[named], before)
        sequence[named], live[named] = self._sequence[holder], before[0]
        # Of several buckets that have most slots the first.
        counts = np.zeros((_CACHED, len(named)), dtype=np.int64)
        self._put_counts(counts, before, self._size)
        bucket[named] = counts.argmax(axis=0)
        return Rows(bucket, sequence, live, references)

    def _put_merged(self, blocks: np.ndarray, before: np.ndarray) -> None:
        if len(self._shared):
            place = self._shared.searchsorted(blocks).clip(max=len(self._shared) - 1)
            is_shared = self._shared[place] == blocks
            before[:, is_shared] = self._merged[:, place[is_shared]]

    def free_lengths(self) -> np.ndarray:
        """See ``Occupancy``."""
        busy = np.zeros(len(self._is_busy) + 2, dtype=bool)
        busy[1:-1] = self._is_busy
        edges = np.flatnonzero(busy[1:] != busy[:-1])
        return gaps_between(edges[::2], edges[1::2], self.num_blocks)
