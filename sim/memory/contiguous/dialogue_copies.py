"""Contiguous memory for dialogue trees: a request continues from any token of an earlier request by copying it.

A finished request keeps its piece while other requests name it as their parent. If memory runs out, the least recently
used parent is evicted first. A fork copies the parent's tokens into a piece of its own. A rollback reuses
the parent's piece if that is long enough, and copies otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

from ...types.sequence import Grant, Sequence
from ...types.state import State
from ...workload.dialogue import NO_PARENT, Dialogue
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Meter
from ..accounting.parents import Parents
from .arena import Arena
from .contiguous import ContiguousMemory, ContiguousTransaction


class DialogueTransaction(ContiguousTransaction):
    """Tentative reservations that may evict or take over kept pieces; one piece per sequence."""

    __slots__ = ("_given_up",)
    memory: DialogueContiguousMemory
    #: Parents that ``fits`` found would be given up; None where even that makes no room.
    _given_up: list[int] | None

    def fits(self, sequence: Sequence, tokens: int, pieces: int) -> bool:
        """See ``ContiguousTransaction``; also chooses the pieces to evict, if any.

        If its own parent is evicted, the sequence finds nothing.
        """
        self._given_up = []
        if self._piece(sequence, tokens) is not None:
            return True
        memory = self.memory
        self._given_up = self._victims(tokens, memory.unpromised(spared=memory.found_in(sequence)))
        if self._given_up is None and sequence.computed_tokens:
            self._given_up = self._victims(tokens, memory.unpromised())
            if self._given_up is not None:
                sequence.computed_tokens = 0
        return self._given_up is not None

    def _victims(self, tokens: int, candidates: list[int]) -> list[int] | None:
        """The first candidates that make room for ``tokens`` together; None if all of them do not.

        Tries and undoes the evictions, since no piece is evicted in vain.
        """
        memory, free_slots = self.memory, self.free_slots
        if free_slots + sum(memory.kept[parent].slots for parent in candidates) < memory.slots_of(tokens):
            return None
        with memory.tried():
            for count, parent in enumerate(candidates):
                if self.has_room(tokens):
                    break
                self.free_slots += memory.kept[parent].slots
                memory.give_place(memory.kept[parent])
            else:
                count = len(candidates)
            enough = self.has_room(tokens)
        self.free_slots = free_slots
        return candidates[:count] if enough else None

    def place(self, sequence: Sequence, tokens: int, pieces: int) -> None:
        """See ``ContiguousTransaction``; a request that rolls back its parent takes over its piece."""
        for parent in self._given_up or ():
            self.free_slots += self.memory.evict_kept(parent)
        grant = self._piece(sequence, tokens)
        self.memory.promise(sequence)
        if grant is None:
            self.reserve(tokens)
        else:
            self.places.append((tokens, grant.slots, grant.start))
            self.memory.hand_over(sequence)

    def _piece(self, sequence: Sequence, tokens: int) -> Grant | None:
        """The parent's piece, if the sequence rolls it back and it is long enough for ``tokens``."""
        grant = self.memory.piece_to_take(sequence)
        return grant if grant is not None and self.memory.slots_of(tokens) <= grant.slots else None


class DialogueContiguousMemory(Parents[Grant], ContiguousMemory):
    """``ContiguousMemory`` for trees of requests; ``kept`` are the pieces of finished parents."""

    def __init__(self, num_blocks: int, block_size: int, dialogue: Dialogue, arena: Arena | None = None) -> None:
        super().__init__(num_blocks, block_size, arena)
        self.know(dialogue)
        # Kept pieces that admissions of this step count on.
        self._promised: set[int] = set()
        self._in_place: set[int] = set()
        self._kept_slots = self._evicted_slots = 0
        self.cache_log: CacheLog = CacheLog(1)
        self.cached_level = self.cache_log

    @property
    def evicted_blocks(self) -> int:
        """Blocks of evicted pieces."""
        return self._evicted_slots // self.block_size

    def transaction(self, decode_step: int) -> DialogueTransaction:
        self._promised.clear()
        self._joining = False
        self._transaction = DialogueTransaction(self)
        self._transaction.free_slots -= self._kept_slots
        return self._transaction

    def look_up(self, sequence: Sequence, decode_step: int) -> None:
        """Set the tokens that a waiting sequence need not compute: those of its parent, if available."""
        parent, tokens = self._parent[sequence.index], self._parent_tokens[sequence.index]
        there = parent in self.kept or self._has_computed(parent, tokens, decode_step)
        sequence.computed_tokens = tokens if there else 0

    def promise(self, sequence: Sequence) -> None:
        """Keep the pieces that an admitted sequence copies from until the step begins."""
        self._joining = True
        parent = self._parent[sequence.index]
        if sequence.computed_tokens and parent in self.kept:
            self.kept.move_to_end(parent)
            self._promised.add(parent)

    def piece_to_take(self, sequence: Sequence) -> Grant | None:
        """The parent's kept piece, if the sequence rolls its parent back and no other admission needs the piece; else
        None."""
        parent = self._parent[sequence.index]
        alone = self._rolls_back[sequence.index] and parent not in self._promised
        return self.kept.get(parent) if alone else None

    def hand_over(self, sequence: Sequence) -> None:
        """Give the parent's piece to the sequence, which then copies nothing."""
        parent = self._parent[sequence.index]
        self._promised.discard(parent)
        self._kept_slots -= self.kept.pop(parent).slots
        self._in_place.add(sequence.index)

    def found_in(self, sequence: Sequence) -> int:
        """The parent that a sequence found tokens in, or ``NO_PARENT``."""
        return self._parent[sequence.index] if sequence.computed_tokens else NO_PARENT

    def unpromised(self, spared: int = NO_PARENT) -> list[int]:
        """Parents with pieces that no admission of this step needs, least recently used first."""
        return [parent for parent in self.kept if parent not in self._promised and parent != spared]

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Context in which placements and evictions are undone at the end."""
        before = deepcopy((self.arena, self.addresses))
        yield
        self.arena, self.addresses = before
        self._largest_run = None

    def evict_kept(self, parent: int) -> int:
        """Evict a kept piece; returns its slots."""
        slots = self._release_kept(parent)
        self._evicted_slots += slots
        return slots

    def _release_kept(self, parent: int) -> int:
        grant = self.kept.pop(parent)
        self._promised.discard(parent)
        self._kept_slots -= grant.slots
        self.give_place(grant)
        return grant.slots

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``ContiguousMemory``; copies the parent's tokens, unless the sequence took over its piece."""
        super().admit(sequence, decode_step, padded_tokens, past)
        self._running[sequence.index] = sequence
        self.cache_log.look_up(sequence.index, sequence.start_tokens, sequence.computed_tokens)
        if sequence.index not in self._in_place:
            self._copied_slots += sequence.computed_tokens
            if sequence.computed_tokens:
                self.record_copy(self._piece_of_parent(sequence), sequence.grant, sequence.computed_tokens)

    def _piece_of_parent(self, sequence: Sequence) -> Grant:
        parent = self._parent[sequence.index]
        return self.kept[parent] if parent in self.kept else self._running[parent].grant

    def kept_pieces(self) -> list[Grant]:
        """See ``Placement``."""
        return list(self.kept.values())

    def release(self, finished: Iterable[Sequence], decode_step: int) -> None:
        """See ``ContiguousMemory``; a request with children keeps its piece for them."""
        for sequence in finished:
            del self._running[sequence.index]
            grant = sequence.grant
            self._end(sequence)
            self.used_slots -= grant.slots
            if self._children[sequence.index]:
                self.kept[sequence.index] = grant
                self._kept_slots += grant.slots
            else:
                self.give_place(grant)
            self._forget_child(self._parent[sequence.index])
        self.cache_log.end_row(self._kept_slots)

    def largest_free_slots(self) -> int:
        return super().largest_free_slots() - (0 if self.arena else self._kept_slots)

    def advance(self, state: State, steps: int) -> Meter:
        """See ``ContiguousMemory``; kept pieces are noted separately."""
        self.cache_log.enter_row(self._kept_slots)
        return super().advance(state, steps)
