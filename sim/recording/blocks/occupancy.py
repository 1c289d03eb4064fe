"""The holder of each block of a pool in one step, and the ledger buckets of its slots.

Every sequence on the device has positions i = 0, 1, 2, ... that follow its block table, or the addresses of its
contiguous piece. With c tokens computed, F tokens in the end and R tokens reserved, position i is

    |<- live ->|<- reserved ->|<- over_estimate ->|<- padding: finished_hold ->|<- residue ->|
    0          c              F                   R                            R + padding    end of its memory

A slot that no sequence holds is live in a pinned prefix, cached if its contents are kept, stranded in a free piece
too small for the head of the queue, and free otherwise. A slot that several sequences hold is in the earliest of their
buckets.

No array has an element for each slot, or for each block of the pool: ``Tables`` has one for each block up to the
highest block in use, ``Pieces`` one for each piece. The buckets of a block follow from the four *limits* of its
holder, c, F, R and R + padding, each of which divides the block in two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from ...memory import BUCKETS, Memory
from ...types.sequence import Sequence, leads
from ...types.state import State

CODES = {bucket: code for code, bucket in enumerate(BUCKETS)}
#: In ``Rows.sequence``: no sequence holds the block.
NO_SEQUENCE = -1
#: Buckets that the limits bound, in their order; past the last one lies what the memory calls its residue.
BOUNDED = tuple(CODES[bucket] for bucket in ("live", "reserved", "over_estimate", "finished_hold"))


class Rows(NamedTuple):
    """Selected blocks in one step, one element per block; see ``BlockMap``."""

    bucket: np.ndarray
    sequence: np.ndarray
    live_slots: np.ndarray
    references: np.ndarray


class Occupancy(Protocol):
    """A pool in one step.

    Attributes:
        census: int64 [9], slots of the pool by bucket.
    """

    census: np.ndarray

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, and of pieces beyond it."""

    def rows(self, shown: np.ndarray) -> Rows:
        """The blocks of these ids, int64, ascending."""

    def free_lengths(self) -> np.ndarray:
        """Lengths of the maximal runs of free blocks, int64."""


class Holder(NamedTuple):
    """A sequence on the device: c, and whether it has finished before its batch."""

    sequence: Sequence
    computed: int
    ended: bool


def holders(memory: Memory, state: State, decode_step: int) -> list[Holder]:
    """All sequences on the device, by index, after ``decode_step`` decode steps."""
    return sorted(_on_device(memory, state, decode_step), key=lambda holder: holder.sequence.index)


def _on_device(memory: Memory, state: State, decode_step: int) -> Iterator[Holder]:
    reserves = memory.reserves
    for sequence in state.running:
        computed = sequence.start_tokens + decode_step - 1 - sequence.start_step
        yield Holder(sequence, computed, reserves and sequence.finish_step < decode_step)
        if reserves and sequence.group is not None and leads(sequence) and not sequence.group.forked:
            yield from (Holder(sibling, 0, False) for sibling in sequence.group.siblings)
    for sequence in (*state.prefilling, *state.stalled):
        yield Holder(sequence, sequence.computed_tokens, False)


def limits_of(memory: Memory, held: list[Holder]) -> list[tuple[int, int, int, int]]:
    """c, F, R and R + padding of each holder: the upper ends of its buckets."""
    found = _reserved if memory.reserves else _grown
    return [found(holder) for holder in held]


def _grown(holder: Holder) -> tuple[int, int, int, int]:
    """Limits of a sequence with blocks allocated on demand."""
    return holder.computed, holder.sequence.target_tokens, 0, 0


def _reserved(holder: Holder) -> tuple[int, int, int, int]:
    """Limits of a reservation; a sequence that finished before its batch has no live slots."""
    grant = holder.sequence.grant
    if holder.ended:
        return 0, 0, 0, grant.tokens
    final = min(holder.sequence.target_tokens, grant.slots)
    requested = max(grant.tokens - grant.padding, final)
    return holder.computed, final, requested, requested + grant.padding


def gaps_between(starts: np.ndarray, stops: np.ndarray, total: int) -> np.ndarray:
    """Lengths of the gaps that spans [start, stop), sorted by start, leave in ``total``."""
    gaps = np.empty(len(starts) + 1, dtype=np.int64)
    gaps[:-1], gaps[-1] = starts, total
    gaps[1:] -= np.maximum.accumulate(stops)
    return gaps[gaps > 0]
