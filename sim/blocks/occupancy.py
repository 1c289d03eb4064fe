"""Which sequence holds each slot of a pool, and in which bucket of the ledger it is, in one step.

Every sequence on the device has places i = 0, 1, 2, ... which lie through its block table, or one after the
other from the start of its piece. With c tokens computed, F in the end and R asked for, place i is

    |<- live ->|<- reserved ->|<- over_estimate ->|<- padding: finished_hold ->|<- residue ->|
    0          c              F                   R                            R + padding    end of what it holds

Slots that no sequence holds are live where a prefix is pinned, cached where they keep their contents, stranded in
free pieces too small for the queue's head, else free. A slot that several hold is in the earliest bucket of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..groups import leads
from ..memory import BUCKETS, BuddyMemory, ContiguousMemory
from ..plan.form import PAGED
from ..plan.layouts import Layout
from ..sequence import Sequence
from ..state import State

CODES = {bucket: code for code, bucket in enumerate(BUCKETS)}
_LIVE, _RESERVED, _OVER_ESTIMATE = CODES["live"], CODES["reserved"], CODES["over_estimate"]
_HELD = CODES["finished_hold"]
_COMPUTED, _FINAL, _ASKED, _PADDING = range(3, 7)
_NOTHING = np.zeros(0, dtype=np.int64)


class _Holding(NamedTuple):
    """What a sequence holds: which blocks, its slots in them by place, and c, F, R and the padding."""

    sequence: int
    blocks: np.ndarray
    slots: np.ndarray
    computed: int
    final: int
    asked: int
    padding: int


class Occupancy(NamedTuple):
    """One step.

    Attributes:
        bucket: uint8 [slots], a place in ``BUCKETS``.
        block, sequence: int64 [held]: every block that a sequence holds slots of, and which; in order of the sequences.
        pinned_blocks: int64 [pinned], those of a prefix that is there from the start.
    """

    bucket: np.ndarray
    block: np.ndarray
    sequence: np.ndarray
    pinned_blocks: np.ndarray


def look(memory: Any, layout: Layout, state: State, decodes: bool) -> Occupancy:
    """The slots in the step that is about to run, which ``decodes`` or not."""
    if state.running or state.prefilling:
        layout.settle(state, decodes and bool(state.width))
    held = sorted(_holdings(memory, layout, state, state.clock + decodes), key=itemgetter(0))
    sequence = np.repeat(_column(held, 0), [len(holding.blocks) for holding in held])
    pinned = layout.pinned_slots()
    bucket = _buckets(memory, layout, held, pinned)
    return Occupancy(bucket, _joined(held, 1), sequence, np.unique(pinned // memory.block_size))


def _column(held: list[_Holding], field: int) -> np.ndarray:
    return np.array([holding[field] for holding in held], dtype=np.int64)


def _joined(held: list[_Holding], field: int) -> np.ndarray:
    return np.concatenate([_NOTHING, *(holding[field] for holding in held)])


def _classes(held: list[_Holding], slots: int, residue: int) -> np.ndarray:
    """The bucket of every slot that somebody holds, as that one has it."""
    lengths = np.array([len(holding.slots) for holding in held], dtype=np.int64)
    place = np.arange(slots) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    found = np.full(slots, residue, dtype=np.uint8)
    bound = _column(held, _ASKED) + _column(held, _PADDING)
    # What is written last matches first.
    for code, limit in (
        (_HELD, bound),
        (_OVER_ESTIMATE, _column(held, _ASKED)),
        (_RESERVED, _column(held, _FINAL)),
        (_LIVE, _column(held, _COMPUTED)),
    ):
        found[place < np.repeat(limit, lengths)] = code
    return found


def _buckets(memory: Any, layout: Layout, held: list[_Holding], pinned: np.ndarray) -> np.ndarray:
    """The bucket of every slot; what is written last matches first."""
    slot, cached = _joined(held, 2), _cached_slots(memory, layout)
    found = _classes(held, len(slot), CODES[memory.residue])
    num_slots = 1 + max(layout.num_slots - 1, int(slot.max(initial=-1)), int(cached.max(initial=-1)))
    bucket = np.full(num_slots, CODES["free"], dtype=np.uint8)
    if isinstance(memory, BuddyMemory):
        for start, blocks in memory.stranded_pieces():
            bucket[start * memory.block_size : (start + blocks) * memory.block_size] = CODES["stranded"]
    bucket[cached] = CODES["cached"]
    for code in range(_HELD, -1, -1):
        bucket[slot[found == code]] = code
    bucket[pinned] = _LIVE
    return bucket


def _holdings(memory: Any, layout: Layout, state: State, clock: int) -> Iterator[_Holding]:
    """What everybody on the device holds; ``clock`` steps will then have decoded."""
    reserves = isinstance(memory, ContiguousMemory)
    hold = partial(_reservation if reserves else _growth, memory, layout)
    for sequence in state.running:
        ended = reserves and sequence.finish_clock < clock
        yield hold(sequence, sequence.start_tokens + clock - 1 - sequence.start_clock, ended)
        if reserves and sequence.group is not None and leads(sequence) and not sequence.group.forked:
            yield from (hold(sibling, 0) for sibling in sequence.group.siblings)
    for sequence in (*state.prefilling, *state.stalled):
        yield hold(sequence, sequence.computed_tokens)


def _growth(memory: Any, layout: Layout, sequence: Sequence, computed: int, ended: bool = False) -> _Holding:
    """Blocks that were handed out on demand."""
    table = np.array(layout.table(sequence), dtype=np.int64)
    slots = _slots_in(table, layout.unit_slots)
    return _Holding(sequence.index, table, slots, computed, sequence.target_tokens, 0, 0)


def _reservation(memory: Any, layout: Layout, sequence: Sequence, computed: int, ended: bool = False) -> _Holding:
    """A piece, or blocks, for all that was asked for; of one that ``ended`` before its batch nothing is of use."""
    grant, blocks = sequence.grant, np.array(layout.table(sequence), dtype=np.int64)
    if layout.name == PAGED:
        slots = _slots_in(blocks, layout.unit_slots)
    else:
        start = layout.start(sequence)
        slots = np.arange(start, start + grant.slots)
        blocks = np.arange(start // memory.block_size, -(-(start + grant.slots) // memory.block_size))
    if ended:
        return _Holding(sequence.index, blocks, slots, 0, 0, 0, grant.tokens)
    final = min(sequence.target_tokens, grant.slots)
    asked = max(grant.tokens - grant.padding, final)
    return _Holding(sequence.index, blocks, slots, computed, final, asked, grant.padding)


def _cached_slots(memory: Any, layout: Layout) -> np.ndarray:
    """Slots whose contents, or whose mapping, are kept; some of them may be in tables too."""
    kept = [slot for grant in _kept_grants(memory) for slot in range(*_span(memory, grant))]
    blocks = np.array(_cached_blocks(memory), dtype=np.int64)
    return np.concatenate([np.array(kept, dtype=np.int64), _slots_in(blocks, layout.unit_slots)])


def _kept_grants(memory: Any) -> list[Any]:
    """Pieces of parents that are done."""
    return [] if getattr(memory, "tables", None) is not None else [*getattr(memory, "kept", {}).values()]


def _span(memory: Any, grant: Any) -> tuple[int, int]:
    start = memory.first_slot(grant)
    return start, start + grant.slots


def _cached_blocks(memory: Any) -> list[int]:
    """Blocks that a prefix cache, a radix tree, tables of parents or regions keep."""
    tables = getattr(memory, "tables", None)
    if tables is None:
        return []
    regions, tree = getattr(tables, "regions", None), getattr(memory, "tree", None)
    kept = [*getattr(memory, "kept", {}).values()]
    kept += [] if regions is None else [*regions.deferred, *regions.spare.values()]
    kept += [] if tree is None else tree.slots.values()
    names = getattr(tables.pool, "hashes", ())
    return [block for table in kept for block in table] + [b for b, name in enumerate(names) if name is not None]


def _slots_in(blocks: np.ndarray, size: int) -> np.ndarray:
    """Addresses of the slots of blocks, one block after the other."""
    return (blocks[:, None] * size + np.arange(size)).ravel()
