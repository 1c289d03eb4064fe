"""Block tables of sequences that share: which physical block each of them names, and when it gets one of its own."""

from __future__ import annotations

from operator import attrgetter

from ...types.sequence import FORKED, Sequence, leads, present
from ..prefix.block_pool import BlockPool
from .block_tables import BlockTables


class SharingTables(BlockTables):
    """Block tables of which several may name a block; shared blocks are copied before they are written.

    The table of every leader begins with ``prefix``.
    """

    rewrites = True
    #: Of the kind that counts references.
    pool: BlockPool

    def __init__(self, num_blocks: int, host_blocks: int, block_size: int, prefix_blocks: int) -> None:
        super().__init__(num_blocks, host_blocks, block_size)
        self.prefix = self.pool.get_new_blocks(prefix_blocks)
        # Sequences with a last block that may be shared in the step that comes next.
        self._copiers: dict[Sequence, None] = {}

    def admit(self, sequence: Sequence, decode_step: int, past: bool, phase: int) -> None:
        """See ``BlockTables``; the slot of ``decode_step`` itself comes in its turn, with all the others'."""
        self.grow_until(decode_step + past)
        if sequence in self.host_tables:
            self._swap_in(present(sequence))
        else:
            if sequence not in self.tables:
                self.tables[sequence] = self._name(self._common(sequence))
            self.hold(sequence, sequence.start_tokens - 1 + past)
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
        self.pool.touch(blocks)
        return list(blocks)

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

    def grow_until(self, decode_step: int) -> None:
        """See ``BlockTables``."""
        if self._copiers and decode_step > self._grown_until:
            self._copy_and_grow(self._grown_until)
            self._grown_until += 1
        super().grow_until(decode_step)

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
                table[-1] = copy
        self._copiers.clear()

    def leave(self, sequence: Sequence, phase: int) -> None:
        """See ``BlockTables``."""
        super().leave(sequence, phase)
        self._copiers.pop(sequence, None)

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
