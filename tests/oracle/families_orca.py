"""The Orca policies over requests of several sequences: a piece of memory for each, with its own copy of the prompt.

All pieces are taken at admission, and all sequences count. The siblings begin in the step after the prompt's, with
copies of it; a beam that dies copies all that its survivor has: its tokens, or with chunks the chunk, empty slots
included.
"""

from __future__ import annotations

from collections.abc import Callable

from .buddy import BuddyArena
from .families import FORKED, Draws, Family, FamilyRequest, FamilySystem
from .model import Limits, Pool


class GroupedOrca(FamilySystem):
    """As its own paper has it: prompt and allowed output are counted in slots."""

    def __init__(self, pool: Pool, limits: Limits, ancestry: Callable[[int], Draws] | None = None) -> None:
        super().__init__()
        self.pool, self.limits, self.ancestry = pool, limits, ancestry
        self.free_slots = pool.slots
        self.draws: dict[Family, Draws] = {}
        self.owed_slots = 0

    def piece_slots(self, request: FamilyRequest) -> int:
        """What each sequence reserves: no output is declared here, so as much as the model allows."""
        return self.limits.max_model_len

    def refuses(self, request: FamilyRequest) -> bool:
        return request.n * self.piece_slots(request) > self.pool.slots

    def slots_to_copy(self, tokens: int) -> int:
        """What a copy of a piece with so many tokens writes."""
        return tokens

    def take(self, family: Family) -> bool:
        """All pieces of a family, or none; whether there was room."""
        slots = family.n * self.piece_slots(family.request)
        if slots > self.free_slots:
            return False
        self.free_slots -= slots
        return True

    def give_back(self, family: Family) -> None:
        self.free_slots += family.n * self.piece_slots(family.request)

    def held_slots(self) -> int:
        return self.pool.slots - self.free_slots

    def decide(self) -> None:
        """Running sequences go on; then the queue, up to the first that does not fit."""
        self.decided.copied_slots, self.owed_slots = self.owed_slots, 0
        for family in self.running:
            self.decode(family)
        tokens = len(self.decided.decoded)
        while self.waiting:
            family = self.waiting[0]
            tokens += family.request.prompt_tokens
            if self.running and tokens > self.limits.max_num_batched_tokens:
                break
            if self.running and self.num_seqs() + family.n > self.limits.max_num_seqs:
                break
            if not self.take(family):
                break
            self.prefill(self.waiting.pop(0))

    def prefill(self, family: Family) -> None:
        prompt = family.request.prompt_tokens
        family.leader.computed_tokens = prompt
        family.forked = family.n == 1
        self.running.append(family)
        self.decided.prefilled.append((family.leader, 0, prompt))
        self.decided.began.append((family.leader, 0, family.kind))
        self.decided.families.append(family)

    def decode(self, family: Family) -> None:
        if not family.forked:
            family.forked = True
            for sibling in family.members[1:]:
                sibling.computed_tokens = family.leader.computed_tokens
                self.decided.copied_slots += self.slots_to_copy(sibling.computed_tokens)
                self.decided.began.append((sibling, family.generated, FORKED))
        for member in family.members:
            member.computed_tokens += 1
        self.decided.decoded += family.members
        self.decided.families.append(family)

    def step_over(self, family: Family) -> None:
        """Of those that die, each copies what a survivor has before the next step."""
        if self.ancestry is None or family.n == 1 or not family.forked:
            return
        if family not in self.draws:
            self.draws[family] = self.ancestry(family.index)
        for _, survivor in next(self.draws[family]):
            self.owed_slots += self.slots_to_copy(family.members[survivor].computed_tokens)

    def release(self, family: Family) -> None:
        self.give_back(family)

    def census(self) -> tuple[int, int, int, int, int]:
        live = sum(member.computed_tokens for family in self.running for member in family.present)
        return live, self.held_slots(), 0, 0, 0


class GroupedOrcaMax(GroupedOrca):
    """Pieces are buddy chunks of a power of two of blocks."""

    def __init__(self, pool: Pool, limits: Limits, ancestry: Callable[[int], Draws] | None = None) -> None:
        super().__init__(pool, limits, ancestry)
        self.arena = BuddyArena(pool.num_blocks)
        self.chunks: dict[Family, list[int]] = {}
        self.chunk_blocks = 1 << (-(-limits.max_model_len // pool.block_size) - 1).bit_length()

    def refuses(self, request: FamilyRequest) -> bool:
        return request.n * self.chunk_blocks > self.pool.num_blocks

    def slots_to_copy(self, tokens: int) -> int:
        return self.chunk_blocks * self.pool.block_size

    def take(self, family: Family) -> bool:
        room = sum(blocks // self.chunk_blocks for _, blocks in self.arena.chunks())
        if family.n > room:
            return False
        self.chunks[family] = [self.arena.allocate(self.chunk_blocks) for _ in family.members]
        return True

    def give_back(self, family: Family) -> None:
        for start in self.chunks.pop(family):
            self.arena.release(start, self.chunk_blocks)

    def held_slots(self) -> int:
        return sum(map(len, self.chunks.values())) * self.chunk_blocks * self.pool.block_size
