"""The Orca policies over dialogue trees: pieces of finished parents are kept for their children.

A fork copies the parent's tokens into a piece of its own. A rollback stays in the parent's piece, if that is
kept, long enough, and copied by no other request in this step; otherwise it copies too.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

from .buddy import BuddyArena
from .families import Family, FamilyRequest, FamilySystem
from .model import Limits, Pool


class Place(NamedTuple):
    """How an admission finds room: the tokens that it finds, the piece that it takes over, and the pieces given up."""

    tokens: int = 0
    copies: Family | None = None
    takes_pieces_of: Family | None = None
    given_up: tuple[Family, ...] = ()


class TreeOrca(FamilySystem):
    """Pieces counted in slots, as its own paper has it.

    ``kept`` are the pieces of finished requests, the one used longest ago first; ``copied`` those copied in this step.
    """

    def __init__(self, pool: Pool, limits: Limits, requests: list[FamilyRequest]) -> None:
        super().__init__()
        self.pool, self.limits = pool, limits
        self.families: dict[int | None, Family] = {}
        self.undone = {index for index, request in enumerate(requests) if not self.refuses(request)}
        self.children = {parent: [c for c, a in enumerate(requests) if a.parent == parent] for parent in self.undone}
        self.pieces: dict[Family, int] = {}
        self.kept: dict[Family, int] = {}
        self.copied: set[Family] = set()

    def piece_slots(self, request: FamilyRequest) -> int:
        """What a request reserves: as much as the model allows."""
        return self.limits.max_model_len if request.max_tokens is None else request.prompt_tokens + request.max_tokens

    def refuses(self, request: FamilyRequest) -> bool:
        return self.piece_slots(request) > self.pool.slots

    def room_without(self, given_up: list[Family], slots: int) -> bool:
        """Whether there would be room for a piece if those were given up."""
        held = sum(self.pieces.values()) + sum(self.kept[family] for family in self.kept if family not in given_up)
        return held + slots <= self.pool.slots

    def take(self, family: Family) -> None:
        """A piece that there is room for."""
        self.pieces[family] = self.piece_slots(family.request)

    def free(self, family: Family) -> None:
        """A piece that is no longer named."""

    def give_up(self, family: Family) -> None:
        self.free(family)
        del self.kept[family]

    def decide(self) -> None:
        """Running sequences go on; then the queue, up to the first that does not fit."""
        self.copied = set()
        stored = {family: family.leader.computed_tokens for family in self.running}
        for family in self.running:
            family.leader.computed_tokens += 1
            self.decided.decoded.append(family.leader)
            self.decided.families.append(family)
        tokens = len(self.decided.decoded)
        while self.waiting:
            family = self.waiting[0]
            place = self.place_for(family, stored)
            if place is None:
                break
            tokens += family.request.prompt_tokens - place.tokens
            if self.running and tokens > self.limits.max_num_batched_tokens:
                break
            if self.running and self.num_seqs() + 1 > self.limits.max_num_seqs:
                break
            self.admit(self.waiting.pop(0), place)

    def place_for(self, family: Family, stored: dict[Family, int]) -> Place | None:
        """Where it goes, if anywhere; its parent is not given up for its own sake, unless there is no other room."""
        request, slots = family.request, self.piece_slots(family.request)
        parent = self.families.get(request.parent)
        if parent in self.kept or stored.get(parent, 0) >= request.parent_tokens > 0:
            in_reach = request.rolls_back and parent in self.kept and parent not in self.copied
            if in_reach and self.slots_of(self.kept[parent]) >= slots:
                return Place(request.parent_tokens, None, parent)
            given_up = self.given_up_for(slots, {*self.copied, parent})
            if given_up is not None:
                return Place(request.parent_tokens, parent, None, given_up)
        given_up = self.given_up_for(slots, self.copied)
        return None if given_up is None else Place(given_up=given_up)

    def given_up_for(self, slots: int, spared: set[Family]) -> tuple[Family, ...] | None:
        """Those used longest ago, until there is room; None where all would not do."""
        candidates = [family for family in self.kept if family not in spared]
        for count in range(len(candidates) + 1):
            if self.room_without(candidates[:count], slots):
                return tuple(candidates[:count])
        return None

    def admit(self, family: Family, place: Place) -> None:
        self.families[family.index] = family
        for kept in place.given_up:
            self.give_up(kept)
        if place.takes_pieces_of is not None:
            self.pieces[family] = self.kept.pop(place.takes_pieces_of)
        else:
            self.take(family)
        if place.copies is not None:
            self.decided.copied_slots += place.tokens
            self.copied.add(place.copies)
            if place.copies in self.kept:
                self.kept[place.copies] = self.kept.pop(place.copies)
        family.leader.computed_tokens = family.request.prompt_tokens
        family.forked = True
        self.running.append(family)
        self.decided.prefilled.append((family.leader, place.tokens, family.request.prompt_tokens))
        self.decided.began.append((family.leader, 0, family.kind))
        self.decided.families.append(family)

    def release(self, family: Family) -> None:
        """Kept while an unfinished request goes on from it; what it went on from, no longer than that."""
        self.undone.discard(family.index)
        self.kept[family] = self.pieces.pop(family)
        parent = self.families.get(family.request.parent)
        for done in (family, parent):
            if done in self.kept and not any(child in self.undone for child in self.children[done.index]):
                self.give_up(done)

    def slots_of(self, piece: int) -> int:
        return piece

    def census(self) -> tuple[int, int, int, int, int]:
        live = sum(family.leader.computed_tokens for family in self.running)
        held, kept = (sum(map(self.slots_of, pieces.values())) for pieces in (self.pieces, self.kept))
        return live, held, 0, kept, 0


class TreeOrcaMax(TreeOrca):
    """Pieces are buddy chunks, known by their first block."""

    def __init__(self, pool: Pool, limits: Limits, requests: list[FamilyRequest]) -> None:
        self.arena = BuddyArena(pool.num_blocks)
        self.chunk_blocks: dict[int, int] = {}
        super().__init__(pool, limits, requests)

    def estimated_tokens(self, request: FamilyRequest) -> int:
        """Prompt and output, as the policy expects them."""
        return self.limits.max_model_len

    def piece_slots(self, request: FamilyRequest) -> int:
        blocks = -(-min(self.estimated_tokens(request), self.limits.max_model_len) // self.pool.block_size)
        return (1 << (blocks - 1).bit_length()) * self.pool.block_size

    def room_without(self, given_up: list[Family], slots: int) -> bool:
        arena = deepcopy(self.arena)
        for family in given_up:
            arena.release(self.kept[family], self.chunk_blocks[self.kept[family]])
        return any(blocks * self.pool.block_size >= slots for _, blocks in arena.chunks())

    def take(self, family: Family) -> None:
        blocks = self.piece_slots(family.request) // self.pool.block_size
        self.pieces[family] = start = self.arena.allocate(blocks)
        self.chunk_blocks[start] = blocks

    def free(self, family: Family) -> None:
        self.arena.release(self.kept[family], self.chunk_blocks[self.kept[family]])

    def slots_of(self, piece: int) -> int:
        return self.chunk_blocks[piece] * self.pool.block_size


class TreeOrcaOracle(TreeOrcaMax):
    """Chunks for the true output."""

    def estimated_tokens(self, request: FamilyRequest) -> int:
        return request.prompt_tokens + request.output_tokens
