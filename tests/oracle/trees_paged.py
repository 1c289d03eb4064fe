"""vllm-sosp23 and vllm-v0 over dialogue trees: tables of finished parents are kept for their children.

A block is *free* while no running table names it, kept or not. Admissions are decided by counts, and take what they
were promised when all are decided: so what one of them counts on is still there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .families import Family, FamilyRequest, Member
from .families_blocks import Blocks
from .families_paged import GroupedSosp23, GroupedV0
from .model import Limits, Pool


class KeepingBlocks(Blocks):
    """``kept`` has the tables of finished requests, the one used longest ago first; ``wanted`` says on how many
    blocks of them the admissions of this step count."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.kept: dict[Family, list[int]] = {}
        self.wanted: dict[Family, int] = {}

    def cached(self) -> set[int]:
        """Blocks in kept tables alone."""
        return {block for table in self.kept.values() for block in table if not self.holders[block]}

    def take(self, member: Member) -> int:
        """A block that is in no table; where there is none, kept tables are given up."""
        while len(self.cached()) == len(self.free):
            self.give_up_oldest()
        cached = self.cached()
        block = next(block for block in self.free if block not in cached)
        self.name(member, block)
        return block

    def name(self, member: Member, block: int) -> None:
        if block in self.free:
            self.free.remove(block)
        super().name(member, block)

    def give_up_oldest(self) -> None:
        """The table used longest ago, but for the blocks at its start that admissions count on."""
        for family, table in self.kept.items():
            counted_on = table[: self.wanted.get(family, 0)]
            if len(counted_on) < len(table):
                self.kept[family] = counted_on
                if not counted_on:
                    del self.kept[family]
                return
        raise AssertionError("no kept table can be given up")


@dataclass(frozen=True)
class Start:
    """What an admission finds: ``tokens`` of the parent in blocks that it names, the half-full one it copies, and
    whether it takes the parent's place."""

    tokens: int = 0
    named: tuple[int, ...] = ()
    copied: int | None = None
    in_place: bool = False


class TreeSosp23(GroupedSosp23):
    """Victims are computed again; ``starts`` is what the admissions of this step find."""

    def __init__(self, pool: Pool, limits: Limits, requests: list[FamilyRequest]) -> None:
        super().__init__(Pool(pool.num_blocks, pool.block_size), limits)
        self.blocks: KeepingBlocks = KeepingBlocks(pool.num_blocks, pool.block_size)
        self.families: dict[int | None, Family] = {}
        self.undone = {index for index, request in enumerate(requests) if not self.refuses(request)}
        self.children = {parent: [c for c, a in enumerate(requests) if a.parent == parent] for parent in self.undone}
        self.starts: dict[Family, Start] = {}
        self.promised_blocks = 0

    @property
    def free_blocks(self) -> int:
        return len(self.blocks.free) - self.promised_blocks

    def decide(self) -> None:
        self.starts, self.promised_blocks = {}, 0
        super().decide()
        for family, start in self.starts.items():
            self.begin(family, start)
        self.blocks.wanted = {}

    def claimed(self) -> set[int]:
        """Blocks that the admissions of this step name or copy."""
        named = {block for start in self.starts.values() for block in start.named}
        return named | {start.copied for start in self.starts.values() if start.copied is not None}

    def preempt(self, family: Family) -> None:
        super().preempt(family)
        family.leader.computed_tokens = 0

    def start_of(self, family: Family) -> Start:
        """What is there of the parent's tokens."""
        request, size = family.request, self.pool.block_size
        parent = self.families.get(request.parent)
        table = self.table_of(parent, request.parent_tokens)
        if table is None or self.blocks.blocks_for(family.known_tokens) >= self.pool.num_blocks:
            return Start()
        tokens = request.parent_tokens
        named, half_full = tuple(table[: tokens // size]), table[tokens // size] if tokens % size else None
        alone = parent in self.blocks.kept and not any(
            other is not family and other.request.parent == request.parent and start.tokens
            for other, start in self.starts.items()
        )
        in_place = request.rolls_back and alone
        if in_place and half_full is not None and not self.is_named(half_full, parent):
            named, half_full = (*named, half_full), None
        return Start(tokens, named, half_full, in_place)

    def table_of(self, parent: Family | None, tokens: int) -> list[int] | None:
        """The parent's table, if it has so many tokens."""
        if parent is None:
            return None
        blocks = self.blocks.blocks_for(tokens)
        if parent in self.running and self.stored_tokens(parent) >= tokens:
            return self.blocks.tables[parent.leader]
        taken = any(s.in_place and f.request.parent == parent.index for f, s in self.starts.items())
        if parent in self.blocks.kept and len(self.blocks.kept[parent]) >= blocks and not taken:
            return self.blocks.kept[parent]
        return None

    def is_held(self, block: int, parent: int) -> bool:
        """Whether another request, running or kept, names a block of the parent's table."""
        others = [table for family, table in self.blocks.kept.items() if family.index != parent]
        return bool(self.blocks.holders[block]) or any(block in table for table in others)

    def is_named(self, block: int, parent: Family) -> bool:
        """Whether another request, running, kept or admitted, names a block of the parent's table."""
        return self.is_held(block, parent.index) or block in self.claimed()

    def stored_tokens(self, family: Family) -> int:
        """Tokens stored before this step."""
        return family.leader.computed_tokens - (family in self.decided.families)

    def there(self, family: Family) -> list[int]:
        return [self.start_of(family).tokens]

    def admission_blocks(self, family: Family) -> int:
        """All its blocks but for those that are in use anyway; and one for a copy that needs its source kept."""
        start = self.start_of(family)
        claimed = self.claimed()
        in_use = [block for block in start.named if self.blocks.holders[block] or block in claimed]
        return self.blocks.blocks_for(family.known_tokens) - len(in_use) + (start.copied is not None)

    def prefill(self, family: Family) -> None:
        self.families[family.index] = family
        start, blocks = self.start_of(family), self.admission_blocks(family)
        self.promised_blocks += blocks
        self.starts[family] = start
        parent = self.families.get(family.request.parent)
        if start.tokens and parent in self.blocks.kept:
            # Used just now.
            self.blocks.kept[parent] = self.blocks.kept.pop(parent)
            blocks = self.blocks.blocks_for(start.tokens)
            self.blocks.wanted[parent] = max(blocks, self.blocks.wanted.get(parent, 0))
        family.forked = True
        self.running.append(family)
        self.decided.prefilled.append((family.leader, start.tokens, family.known_tokens))
        self.decided.began.append((family.leader, family.generated, family.kind))
        self.decided.families.append(family)

    def begin(self, family: Family, start: Start) -> None:
        """An admission is carried out, after those before it in the step."""
        member = family.leader
        if start.in_place and start.copied is not None and not self.is_held(start.copied, family.request.parent):
            start = replace(start, named=(*start.named, start.copied), copied=None)
        for block in start.named:
            self.blocks.name(member, block)
        if start.in_place:
            del self.blocks.kept[self.families[family.request.parent]]
        self.blocks.grow(member, family.known_tokens)
        member.computed_tokens = family.known_tokens
        if start.copied is not None:
            self.decided.copied_slots += self.pool.block_size

    def release(self, family: Family) -> None:
        """Kept while a request goes on from it; what it went on from, no longer than that."""
        self.undone.discard(family.index)
        if self.is_wanted(family):
            self.blocks.kept[family] = list(self.blocks.tables[family.leader])
        self.blocks.give_back(family.leader)
        parent = self.families.get(family.request.parent)
        if parent is not None and parent in self.blocks.kept and not self.is_wanted(parent):
            del self.blocks.kept[parent]

    def is_wanted(self, family: Family) -> bool:
        """Whether an unfinished request goes on from it."""
        return any(child in self.undone for child in self.children[family.index])

    def census(self) -> tuple[int, int, int, int, int]:
        return *self.blocks.census(), len(self.blocks.cached()) * self.pool.block_size, 0


class TreeV0(TreeSosp23, GroupedV0):
    """Steps that prefill, or decode."""
