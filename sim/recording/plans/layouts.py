"""Addresses of tokens in a memory: through block tables, or in a contiguous piece."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...memory import Memory
from ...memory.accounting.moves import Moves
from ...memory.interface.memory import Placement
from ...memory.prefix.block_tables import BlockTables
from ...types.errors import SettingError
from ...types.sequence import Sequence
from ...types.state import State
from .form import CONTIGUOUS, PAGED

#: Slots of the address space of pieces that are only counted.
_UNBOUNDED = 1 << 40


class Layout(Protocol):
    """The addresses of tokens in a memory, as a recorder reads them.

    Attributes:
        name: "paged" or "contiguous".
        unit_slots: Slots per unit of a move: those of a block, or one.
        num_slots: Slots of the pool, and of pieces beyond it.
        moves: Moves since the last reset, between ``open`` and ``close``.
    """

    name: str
    unit_slots: int
    num_slots: int
    moves: Moves

    def settle(self, state: State, steps: int) -> None:
        """Let the tables reach to the end of so many steps of what is about to run; 0 of a step that only prefills."""

    def table(self, sequence: Sequence) -> list[int]:
        """The block table of a sequence; empty in a contiguous layout."""

    def start(self, sequence: Sequence) -> int:
        """The slot of its first token; 0 in a paged layout."""

    def slots(self, sequence: Sequence, first: int, stop: int) -> np.ndarray:
        """Slots of its tokens from ``first`` to before ``stop``, int64."""

    def pinned_slots(self) -> np.ndarray:
        """Slots of a prefix that is there from the start, int64."""

    def open(self) -> None:
        """Start to record moves."""

    def close(self) -> None:
        """Stop recording moves."""


class PagedLayout:
    """Blocks by the ids that the tables of a memory name."""

    name = PAGED

    def __init__(self, memory: Memory, tables: BlockTables) -> None:
        self._memory, self._tables, self.unit_slots = memory, tables, memory.block_size
        self.moves = Moves()
        self.num_slots = memory.num_blocks * self.unit_slots

    def shuffle(self, random: np.random.Generator) -> None:
        """Allocate blocks in a random order."""
        self._tables.pool.shuffle(random)
        self._tables.host_pool.shuffle(random)

    def settle(self, state: State, steps: int) -> None:
        """See ``Layout``."""
        self._memory.settle(state, steps)

    def table(self, sequence: Sequence) -> list[int]:
        """See ``Layout``."""
        return self._tables.tables[sequence]

    def start(self, sequence: Sequence) -> int:
        """See ``Layout``."""
        return 0

    def slots(self, sequence: Sequence, first: int, stop: int) -> np.ndarray:
        """See ``Layout``."""
        size = self.unit_slots
        block, offset = np.divmod(np.arange(first, stop), size)
        table = np.array(self.table(sequence)[first // size : -(-stop // size)], dtype=np.int64)
        return table[block - first // size] * size + offset

    def pinned_slots(self) -> np.ndarray:
        """See ``Layout``."""
        blocks = np.array(self._tables.prefix, dtype=np.int64)
        return (blocks[:, None] * self.unit_slots + np.arange(self.unit_slots)).ravel()

    def open(self) -> None:
        """See ``Layout``."""
        self._tables.moves = self.moves

    def close(self) -> None:
        """See ``Layout``."""
        self._tables.moves = None


class ContiguousLayout:
    """Pieces by their first slots; those that are only counted get addresses."""

    name = CONTIGUOUS
    unit_slots = 1

    def __init__(self, memory: Memory, placement: Placement) -> None:
        self._placement = placement
        self.moves = Moves()
        if not placement.has_addresses:
            placement.give_addresses(_UNBOUNDED)
        self.num_slots = memory.capacity_slots

    def settle(self, state: State, steps: int) -> None:
        """See ``Layout``; pieces do not grow."""

    def table(self, sequence: Sequence) -> list[int]:
        """See ``Layout``."""
        return []

    def start(self, sequence: Sequence) -> int:
        """See ``Layout``."""
        grant = sequence.grant
        start = self._placement.first_slot(grant)
        self.num_slots = max(self.num_slots, start + grant.slots)
        return start

    def slots(self, sequence: Sequence, first: int, stop: int) -> np.ndarray:
        """See ``Layout``."""
        return self.start(sequence) + np.arange(first, stop)

    def pinned_slots(self) -> np.ndarray:
        """See ``Layout``."""
        return np.zeros(0, dtype=np.int64)

    def open(self) -> None:
        """See ``Layout``."""
        self._placement.moves = self.moves

    def close(self) -> None:
        """See ``Layout``."""
        self._placement.moves = None


def layout_of(memory: Memory, policy: str) -> Layout:
    """The layout of a memory.

    Raises:
        SettingError: A plan cannot represent this memory.
    """
    if memory.groups.sliding:
        remedy = "a plan has one table a sequence, and KV groups have several; give --disable-hybrid-kv-cache-manager"
        raise SettingError("record_plan", policy, remedy)
    if memory.speculation is not None:
        remedy = "verifies drafts, of which a recording knows nothing; leave out speculative_config"
        raise SettingError("policy", policy, remedy)
    if memory.placement is not None:
        return ContiguousLayout(memory, memory.placement)
    if memory.tables is None:
        remedy = "its memory has no single table of blocks a sequence, which a recording needs; leave out the recording"
        raise SettingError("policy", policy, remedy)
    return PagedLayout(memory, memory.tables)
