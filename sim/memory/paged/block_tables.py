"""Block tables: physical ids behind the counts of paged memory."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import Protocol

import numpy as np

from ...types.sequence import Sequence
from ..accounting.moves import Moves
from ..prefix.block_pool import BlockPool


class IdPool(Protocol):
    """Blocks that tables take and give back by their ids."""

    def get_new_blocks(self, count: int) -> list[int]:
        """Ids of ``count`` free blocks, which are free no more."""

    def free_blocks(self, table: list[int]) -> None:
        """Give back blocks of a table."""

    def shuffle(self, random: np.random.Generator) -> None:
        """Hand out the blocks that are free now in a random order."""


class BlockTables:
    """Physical ids behind the counts: a block table for every sequence on the device or the host.

    Tables grow when sequences come, go or are looked at: a look in ``decode_step`` first calls
    ``grow_until(decode_step + 1)``, which changes nothing but the tables.

    Args:
        pool: The pool of a prefix cache, which blocks are taken from; None makes one.

    Attributes:
        moves: Where blocks with contents that change place are noted; None without a recording.
        rewrites: Whether blocks that a table names may become others; else tables only grow, at their ends.
        prefix: Blocks of a pinned prefix; see ``Tables``.
    """

    moves: Moves | None = None
    rewrites = False

    def __init__(self, num_blocks: int, host_blocks: int, block_size: int, pool: IdPool | None = None) -> None:
        self.prefix: list[int] = []
        self.pool: IdPool = BlockPool(num_blocks) if pool is None else pool
        self.host_pool = BlockPool(host_blocks)
        self.tables: dict[Sequence, list[int]] = {}
        self.host_tables: dict[Sequence, list[int]] = {}
        self._block_size = block_size
        # Running sequences by phase, in arrival order: which take a block in a step, in which order.
        self._members: list[list[Sequence]] = [[] for _ in range(block_size)]
        self._grown_until = 0

    def hold(self, sequence: Sequence, tokens: int) -> None:
        """Extend a table to ``tokens``."""
        table = self.tables.setdefault(sequence, [])
        table += self.pool.get_new_blocks(-(-tokens // self._block_size) - len(table))

    def drop(self, sequence: Sequence) -> None:
        """Give back the blocks of a table; nothing where that was done before."""
        self.pool.free_blocks(self.tables.pop(sequence, []))

    def append(self, sequence: Sequence) -> None:
        """A block for the token that a sequence computes in the coming step."""
        self.tables[sequence] += self.pool.get_new_blocks(1)

    @property
    def grown_until(self) -> int:
        """Decode step up to which tables have grown."""
        return self._grown_until

    def grown(self, decode_step: int) -> None:
        """The tables have grown through ``decode_step``, one by one."""
        self._grown_until = decode_step + 1

    def admit(self, sequence: Sequence, decode_step: int, past: bool, phase: int) -> None:
        """A table that grows from ``decode_step`` on; one that comes from the host gets new device ids."""
        self.grow_until(decode_step + 1)
        swapped = self.host_tables.pop(sequence, [])
        self.host_pool.free_blocks(swapped)
        self.hold(sequence, sequence.start_tokens)
        if self.moves is not None:
            # The token of the coming step may open a block of its own.
            self.moves.swap_ins += zip(swapped, self.tables[sequence], strict=False)
        self.join(sequence, phase)

    def join(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows from now on, in its turn by arrival."""
        members = self._members[phase]
        if members and members[-1].order > sequence.order:
            insort(members, sequence, key=attrgetter("order"))
        else:
            members.append(sequence)

    def grow_until(self, decode_step: int) -> None:
        """Append a block to every table that is full before each of the steps before ``decode_step`` that it
        was not yet done for, in the order of (step, sequence)."""
        if decode_step <= self._grown_until:
            return
        members, tables, size = self._members, self.tables, self._block_size
        if size == 1:
            self._grow_all(members[0], decode_step - self._grown_until)
            self._grown_until = decode_step
            return
        full = [tables[sequence] for step in range(self._grown_until, decode_step) for sequence in members[step % size]]
        for table, block in zip(full, self.pool.get_new_blocks(len(full)), strict=True):
            table.append(block)
        self._grown_until = decode_step

    def _grow_all(self, growing: list[Sequence], steps: int) -> None:
        """In each of so many steps a block for each in turn: where a block holds a token."""
        blocks = self.pool.get_new_blocks(len(growing) * steps)
        for place, sequence in enumerate(growing):
            self.tables[sequence] += blocks[place :: len(growing)]

    def park(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows no more."""
        self._members[phase].remove(sequence)

    def leave(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows no more; unless it was swapped out, its blocks are given back."""
        self.park(sequence, phase)
        if sequence in self.tables:
            self.pool.free_blocks(self.tables.pop(sequence))

    def swap_out(self, sequence: Sequence) -> None:
        """Move the table to the host pool."""
        table = self.tables.pop(sequence)
        self.host_tables[sequence] = swapped = self.host_pool.get_new_blocks(len(table))
        self.pool.free_blocks(table)
        if self.moves is not None:
            self.moves.swap_outs += zip(table, swapped, strict=True)
