"""The state of a pool of contiguous pieces in one step.

Pieces of sequences, stranded free pieces and pieces kept for parents do not overlap. The number of slots of a bucket
below an address is therefore the sum over the pieces that end below it, from a running sum, plus a part of the piece
at the address. The slots within a block are the number below its end less the number below its start.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...memory import Memory
from ...types.errors import SimulationFault
from ..plans.layouts import Layout
from .occupancy import BOUNDED, CODES, NO_SEQUENCE, Holder, Rows, gaps_between, limits_of

_FREE = CODES["free"]


class PiecesSeen(NamedTuple):
    """What a look at a pool of pieces reads; it takes little room, and ``Pieces`` works it out where it is kept.

    Attributes:
        block_size, num_slots: Of the pool.
        spans: int64 [spans, 2], first slot and slots of the pieces of sequences, of those kept, of stranded ones.
        limits: int64 [sequences, 4], see ``limits_of``.
        sequences: int32 [sequences + 1], their indices, and ``NO_SEQUENCE``.
        cached: How many pieces are kept.
    """

    block_size: int
    num_slots: int
    spans: np.ndarray
    limits: np.ndarray
    sequences: np.ndarray
    cached: int


def look_at_pieces(memory: Memory, layout: Layout, held: list[Holder]) -> PiecesSeen:
    """The pool, with these sequences on the device, in order of their index."""
    placement, size = memory.placement, memory.block_size
    if placement is None:
        raise SimulationFault("a memory of blocks is to be read as one of pieces")
    own = [(layout.start(holder.sequence), holder.sequence.grant.slots) for holder in held]
    cached = [(placement.first_slot(grant), grant.slots) for grant in placement.kept_pieces()]
    stranded = [(first * size, blocks * size) for first, blocks in placement.stranded_pieces()]
    spans = [*own, *cached, *stranded]
    return PiecesSeen(
        size,
        layout.num_slots,
        np.array(spans, dtype=np.int64).reshape(-1, 2),
        np.array(limits_of(memory, held), dtype=np.int64).reshape(-1, len(BOUNDED)),
        np.array([*(holder.sequence.index for holder in held), NO_SEQUENCE], dtype=np.int32),
        len(cached),
    )


class Pieces:
    """See ``Occupancy``."""

    def __init__(self, seen: PiecesSeen) -> None:
        self._size, num_slots, spans, holder_limits, sequences, num_cached = seen
        own, num_kept = len(holder_limits), len(holder_limits) + num_cached
        start, slots = spans.T
        #: Of the pool, and of pieces beyond it.
        self.num_slots = max(num_slots, int((start + slots).max(initial=0)))
        self._codes = np.array([*BOUNDED, CODES["round_up"], CODES["cached"], CODES["stranded"]])
        # Within each span where its buckets end, which lie in this order; most are empty.
        ends = np.repeat(slots[None], len(self._codes), axis=0)
        ends[: len(BOUNDED), :own] = np.minimum(np.maximum.accumulate(holder_limits.T), slots[:own])
        ends[:5, own:] = 0
        ends[5, num_kept:] = 0
        order = np.argsort(start)
        self._from, self._ends = start[order], ends[:, order]
        below = np.diff(self._ends, axis=0, prepend=0).cumsum(axis=1)
        self._below = np.concatenate([np.zeros((len(self._codes), 1), dtype=np.int64), below], axis=1)
        self.census = np.zeros(len(CODES), dtype=np.int64)
        self.census[self._codes] = self._below[:, -1]
        self.census[_FREE] = self.num_slots - self.census.sum()
        is_own = order < own
        self._start, self._stop = self._from[is_own], self._from[is_own] + slots[order][is_own]
        self._sequence = np.append(sequences[order[is_own]], sequences[-1])
        is_busy = order < num_kept
        self._busy = self._from[is_busy], self._from[is_busy] + slots[order][is_busy]

    @property
    def num_blocks(self) -> int:
        """See ``Occupancy``; the last one may not be whole."""
        return -(-self.num_slots // self._size)

    def _slots_below(self, address: np.ndarray) -> np.ndarray:
        """int64 [7, addresses]: slots of each bucket below each address."""
        if not len(self._from):
            return np.zeros((len(self._codes), len(address)), dtype=np.int64)
        place = np.maximum(self._from.searchsorted(address, side="right") - 1, 0)
        inside = np.maximum(address - self._from[place], 0)
        reached = np.minimum(self._ends[:, place], inside)
        reached[1:] -= reached[:-1].copy()
        return self._below[:, place] + reached

    def rows(self, shown: np.ndarray) -> Rows:
        """See ``Occupancy``."""
        starts = shown * self._size
        stops = starts + self._size
        counts = np.zeros((len(CODES), len(shown)), dtype=np.int64)
        if shown[-1] - shown[0] == len(shown) - 1:
            # Each block begins where the one before ends.
            counts[self._codes] = np.diff(self._slots_below(np.append(starts, stops[-1])), axis=1)
        else:
            counts[self._codes] = self._slots_below(stops) - self._slots_below(starts)
        # The last block may not be whole; those beyond it are free.
        slots = np.where(starts < self.num_slots, np.minimum(stops, self.num_slots), stops) - starts
        counts[_FREE] = slots - counts.sum(axis=0)
        first, end = self._stop.searchsorted(starts, side="right"), self._start.searchsorted(stops)
        # Of the sequences from one place to before another the lowest, where there are any.
        least = np.minimum.reduceat(self._sequence, np.stack([first, end], axis=1).ravel())[::2]
        sequence = np.where(end > first, least, np.int32(NO_SEQUENCE))
        live = counts[CODES["live"]].astype(np.int32)
        return Rows(counts.argmax(axis=0).astype(np.uint8), sequence, live, (end - first).astype(np.int32))

    def free_lengths(self) -> np.ndarray:
        """See ``Occupancy``."""
        starts, stops = self._busy
        return gaps_between(starts // self._size, -(-stops // self._size), self.num_slots // self._size)
