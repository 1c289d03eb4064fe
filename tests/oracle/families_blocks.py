"""Blocks that several tables may hold, each with the names of those that do; and the tables."""

from __future__ import annotations

from math import ceil

from .families import Family, Member

#: Holds the prefix that all prompts begin with.
PIN = Member(-1)


class Blocks:
    """A pool in which a block is free while no table names it.

    ``holders`` has the members with tables that name each block; ``tables`` the blocks of each member, in order.
    """

    def __init__(self, num_blocks: int, block_size: int, pinned_blocks: int = 0) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.holders: dict[int, list[Member]] = {block: [] for block in range(num_blocks)}
        self.free: list[int] = list(range(num_blocks))
        self.tables: dict[Member, list[int]] = {PIN: []}
        for _ in range(pinned_blocks):
            self.take(PIN)

    def blocks_for(self, tokens: int) -> int:
        return ceil(tokens / self.block_size)

    def take(self, member: Member) -> int:
        """A free block at the end of the table."""
        block = self.free.pop()
        self.name(member, block)
        return block

    def name(self, member: Member, block: int) -> None:
        """A block, in other tables perhaps, at the end of this one."""
        self.tables.setdefault(member, []).append(block)
        self.holders[block].append(member)

    def give_back(self, member: Member, keep_blocks: int = 0) -> None:
        """All blocks of a table, or those beyond its first so many."""
        table = self.tables.pop(member)
        for block in table[keep_blocks:]:
            self._leave(member, block)
        if keep_blocks:
            self.tables[member] = table[:keep_blocks]

    def _leave(self, member: Member, block: int) -> None:
        self.holders[block].remove(member)
        if not self.holders[block]:
            self.free.append(block)

    def share(self, member: Member, other: Member, blocks: int | None = None) -> None:
        """The table begins as the first so many blocks of another one's; all of them where nothing is said."""
        for block in self.tables[other][:blocks]:
            self.name(member, block)

    def append_slot(self, member: Member) -> int:
        """Room for one more token; returns the slots copied, a whole block if others name the one it lies in."""
        place = member.computed_tokens // self.block_size
        member.computed_tokens += 1
        table = self.tables[member]
        if place == len(table):
            self.take(member)
            return 0
        old = table[place]
        if self.holders[old] == [member]:
            return 0
        new = self.free.pop()
        self.holders[new].append(member)
        table[place] = new
        self._leave(member, old)
        return self.block_size

    def grow(self, member: Member, tokens: int) -> None:
        """Let the table reach to so many tokens."""
        while len(self.tables.setdefault(member, [])) * self.block_size < tokens:
            self.take(member)

    def of(self, family: Family) -> list[int]:
        """The blocks of a family, each once, without the pinned ones."""
        pinned = set(self.tables[PIN])
        named = dict.fromkeys(block for member in family.present for block in self.tables[member])
        return [block for block in named if block not in pinned]

    def census(self) -> tuple[int, int, int]:
        """Slots that are live, held, and spared because a table names a block that another one names already."""
        live = {(block, slot) for block in self.tables[PIN] for slot in range(self.block_size)}
        for member, table in self.tables.items():
            if len(table) * self.block_size < member.computed_tokens:
                raise AssertionError(f"{member.index} has {member.computed_tokens} tokens in {len(table)} blocks")
            for i in range(member.computed_tokens):
                live.add((table[i // self.block_size], i % self.block_size))
        held = [len(holders) for holders in self.holders.values() if holders]
        if len(held) + len(self.free) != self.num_blocks:
            raise AssertionError(f"{len(held)} blocks held and {len(self.free)} free of {self.num_blocks}")
        return len(live), len(held) * self.block_size, (sum(held) - len(held)) * self.block_size
