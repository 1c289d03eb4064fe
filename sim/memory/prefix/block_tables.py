"""Block tables: physical ids behind the counts of paged memory, and which blocks several tables share.

    prompt       [b0][b1][b2 ..]            a leader, with a half-full last block
    fork         [b0][b1][b2 ..]   twice    in the next step its siblings begin with all of its blocks
    first write  [b0][b1][b3 ..]            of the tables that name b2 all but the last copy it before they write

The pool counts the entries of each block. A sequence that left may leave its blocks under a number, such as that of its slot, for
a sequence that comes: ``kept``.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Set as AbstractSet
from operator import attrgetter

from ...types.sequence import FORKED, Sequence, leads, present
from ..accounting.moves import Moves
from .block_pool import BlockPool


class BlockTables:
    """A block table for every sequence on the device or the host.

    Tables grow when sequences come, go or are looked at: a look in ``decode_step`` first calls
    ``grow_until(decode_step + 1)``, which changes nothing but the tables.

    Args:
        pool: The pool of a prefix cache, which blocks are taken from; None makes one.
        prefix_blocks: Blocks of ``prefix``.
        in_turn: Whether the slot of the step that admits a sequence comes in its turn, with all the others'; else with its prompt.

    Attributes:
        moves: Where blocks with contents that change place are noted; None without a recording.
        pool, host_pool: Blocks of the device, and of the swap space.
        tables, host_tables: Block ids of each sequence on the device, and of each that is swapped out, by position. A list only grows,
            at its end: a table in which blocks become others is a new list.
        prefix: Blocks of a pinned prefix, with which the table of every leader begins.
        kept: Blocks that no sequence holds, and that are not free, by number.
    """

    moves: Moves | None = None

    def __init__(
        self,
        num_blocks: int,
        host_blocks: int,
        block_size: int,
        pool: BlockPool | None = None,
        prefix_blocks: int = 0,
        in_turn: bool = False,
    ) -> None:
        self.pool = BlockPool(num_blocks) if pool is None else pool
        self.host_pool = BlockPool(host_blocks)
        self.prefix = self.pool.get_new_blocks(prefix_blocks)
        self.tables: dict[Sequence, list[int]] = {}
        self.host_tables: dict[Sequence, list[int]] = {}
        self.kept: dict[int, list[int]] = {}
        self._in_turn = in_turn
        # Sequences with a last block that may be shared in the step that comes next.
        self._copiers: dict[Sequence, None] = {}
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

    def detach(self, sequence: Sequence) -> tuple[list[int | None], ...]:
        """Remove the table of a sequence that grows no more, the blocks of which stay taken until they are given back."""
        return ([*self.tables.pop(sequence)],)

    def give_back_all(self, tables: tuple[list[int | None], ...]) -> None:
        """Give back the blocks of tables that were detached."""
        self.pool.free_blocks([block for table in tables for block in table if block is not None])

    def append(self, sequence: Sequence) -> None:
        """A block for the token that a sequence computes in the coming step."""
        self.tables[sequence] += self.pool.get_new_blocks(1)

    def grown(self, decode_step: int, idle: AbstractSet[Sequence]) -> None:
        """The tables have grown through ``decode_step``, one by one, but for those of ``idle`` sequences."""
        self._grown_until = decode_step + 1

    def admit(self, sequence: Sequence, decode_step: int, past: bool, phase: int) -> None:
        """A table that grows from ``decode_step`` on; one that comes from the host gets new device ids."""
        self.grow_until(decode_step + (past or not self._in_turn))
        if sequence in self.host_tables:
            self._swap_in(present(sequence))
        elif sequence not in self.tables:
            self.tables[sequence] = self._name(self._common(sequence))
        self.hold(sequence, sequence.start_tokens - (self._in_turn and not past))
        if sequence.group is not None and sequence.group.forked:
            self._copiers |= dict.fromkeys(present(sequence.group.leader))
        self.join(sequence, phase)

    def _common(self, sequence: Sequence) -> list[int]:
        """Blocks that a new table begins with: the prefix, all that the leader has, or its full ones of the prompt."""
        group = sequence.group
        if group is None or leads(sequence):
            return self.prefix
        table = self.tables[group.leader]
        return table if sequence.kind == FORKED else table[: sequence.prompt_tokens // self._block_size]

    def _name(self, blocks: list[int]) -> list[int]:
        """A new table of these blocks."""
        if blocks:
            self.pool.touch(blocks)
        return list(blocks)

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
        if self._copiers and decode_step > self._grown_until:
            self._copy_and_grow(self._grown_until)
            self._grown_until += 1
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

    def _copy_and_grow(self, step: int) -> None:
        """One step, in the order of the sequences: a block for a full table, a copy for a shared last block."""
        full = dict.fromkeys(self._members[step % self._block_size])
        for sequence in sorted(full | self._copiers, key=attrgetter("order")):
            table = self.tables[sequence]
            if sequence in full:
                table.append(self.pool.get_new_blocks(1)[0])
            elif self.pool.is_shared(table[-1]):
                copy = self.pool.get_new_blocks(1)[0]
                if self.moves is not None:
                    self.moves.copies.append((table[-1], copy, self._block_size))
                self.pool.free_blocks(table[-1:])
                self.tables[sequence] = [*table[:-1], copy]
        self._copiers.clear()

    def park(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows no more."""
        self._members[phase].remove(sequence)

    def leave(self, sequence: Sequence, phase: int) -> None:
        """The sequence grows no more; unless it was swapped out, its blocks are given back."""
        self.park(sequence, phase)
        self._copiers.pop(sequence, None)
        self.drop(sequence)

    def copy(self, block: int | None, sequence: Sequence, place: int) -> None:
        """The block at ``place`` of its table begins as a copy, if there is one."""
        if block is not None and self.moves is not None:
            self.moves.copies.append((block, self.tables[sequence][place], self._block_size))

    def replace(self, dead: Sequence, parent: Sequence) -> int:
        """A beam becomes a copy of another; the number of blocks that no table names any more."""
        old, new, free = self.tables[dead], self.tables[parent], self.pool.num_free
        common = _num_common(old, new)
        self.pool.free_blocks(old[common:])
        self.pool.touch(new[common:])
        self.tables[dead] = list(new)
        self._copiers |= {dead: None, parent: None}
        return self.pool.num_free - free

    # --- Blocks that sequences leave for others ---

    def keep(self, sequence: Sequence, number: int) -> None:
        """The blocks of a sequence that leaves stay."""
        self.kept[number] = self.tables.pop(sequence)

    def begin(self, sequence: Sequence, number: int, blocks: int) -> None:
        """A table begins with the first of the blocks that were kept; the others are free."""
        kept = self.kept.pop(number, [])
        self.tables[sequence] = kept[:blocks]
        self.pool.free_blocks(kept[blocks:])

    def forget(self, number: int) -> None:
        """Blocks are kept no more."""
        self.pool.free_blocks(self.kept.pop(number))

    # --- The host ---

    def swap_out(self, sequence: Sequence) -> None:
        """Move the tables of a leader and its group to the host pool; what is shared moves once."""
        if not leads(sequence):
            return
        moved: dict[int, int] = {}
        for member in present(sequence):
            table = self.tables.pop(member)
            self.host_tables[member] = _rename(table[len(self.prefix) :], moved, self.host_pool)
            self.pool.free_blocks(table)
        if self.moves is not None:
            self.moves.swap_outs += moved.items()

    def _swap_in(self, members: tuple[Sequence, ...]) -> None:
        moved: dict[int, int] = {}
        for member in members:
            table = self.host_tables.pop(member)
            self.tables[member] = self._name(self.prefix) + _rename(table, moved, self.pool)
            self.host_pool.free_blocks(table)
        if self.moves is not None:
            self.moves.swap_ins += moved.items()


def _num_common(left: list[int], right: list[int]) -> int:
    """Entries with which both tables begin."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))


def _rename(table: list[int], moved: dict[int, int], pool: BlockPool) -> list[int]:
    """A table in another pool; ``moved`` says where blocks that other tables name went, and learns where these go."""
    renamed = []
    for block in table:
        if block in moved:
            pool.touch((moved[block],))
        else:
            moved[block] = pool.get_new_blocks(1)[0]
        renamed.append(moved[block])
    return renamed
