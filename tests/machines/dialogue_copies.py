"""Contiguous memories of dialogue trees against a census of every slot of every piece, of finished requests too."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fragmeter.sim.memory import DialogueContiguousMemory
from fragmeter.sim.types.sequence import Grant, Sequence
from fragmeter.sim.workload.dialogue import NO_PARENT
from oracle.slots import FREE

from .arenas import ARENAS
from .copies import InSteps, PlacedInSteps
from .draws import combined
from .trees import ROWS, Tree


class Kept(Tree, InSteps):
    """A tree of requests that copy what they begin with; a finished one keeps its piece for its children."""

    def __init__(self, num_blocks: int, block_size: int, rows: list[tuple], *arena: Any) -> None:
        self.kept: dict[int, Grant] = {}
        self.counted: set[int] = set()
        super().__init__(DialogueContiguousMemory(num_blocks, block_size, self.plant(rows), *arena[:1]), *arena[1:])
        self.memory.expect(np.array(self.children))

    def open(self) -> None:
        if not self.opened:
            self.counted = set()
        super().open()

    def admit_head(self, extra: int) -> None:
        """The next request, if there is room for it or can be made."""
        self.open()
        if self.refused or not self.to_come:
            return
        sequence = self.to_come[0]
        parent, tokens = self.parents[sequence.index], sequence.target_tokens - 1 + extra
        self.memory.look_up(sequence, self.state.decode_step)
        assert sequence.computed_tokens == self.found(sequence)
        own = self.kept.get(parent) if self.rolls_back[sequence.index] and parent not in self.counted else None
        fits_own = own is not None and self.slots_for(tokens) <= own.slots
        victims = [] if fits_own else self.victims(sequence, self.slots_for(tokens))
        assert self.transaction.fits(sequence, tokens, 1) == (victims is not None)
        if victims is None:
            self.refuse(tokens)
            return
        for row in victims:
            self.give_up(row)
        assert sequence.computed_tokens == self.found(sequence)
        self.transaction.place(sequence, tokens, 1)
        self.take_head(again=False)
        if fits_own:
            grant = self.kept.pop(parent)._replace(tokens=tokens)
        else:
            self.count_on(sequence, parent)
            grant = Grant(tokens, self.slots_for(tokens), 0, self.transaction.places[-1][2])
            self.take(grant)
            self.copied += sequence.computed_tokens
        self.start(sequence, False)
        self.hold(sequence, grant)

    def found(self, sequence: Sequence) -> int:
        """Tokens of its parent, if that is kept or has got so far."""
        parent, tokens = self.parents[sequence.index], self.parent_tokens[sequence.index]
        computed = self.tokens.get(self.running(parent), 0) - self.begun
        return tokens if parent in self.kept or 0 < tokens <= computed else 0

    def count_on(self, sequence: Sequence, parent: int) -> None:
        if sequence.computed_tokens and parent in self.kept:
            self.counted.add(parent)
            self.kept[parent] = self.kept.pop(parent)

    def victims(self, sequence: Sequence, slots: int) -> list[int] | None:
        """Pieces to give up, used longest ago first; its own parent's only where the others are not enough."""
        idle = [row for row in self.kept if row not in self.counted]
        own = self.parents[sequence.index] if sequence.computed_tokens else NO_PARENT
        for rows in ([row for row in idle if row != own], idle):
            for count in range(len(rows) + 1):
                if self.would_have_place(slots, [self.kept[row] for row in rows[:count]]):
                    return rows[:count]
        return None

    def would_have_place(self, slots: int, given_up: list[Grant]) -> bool:
        return slots <= self.free_slots + sum(grant.slots for grant in given_up)

    def give_up(self, row: int) -> None:
        self.give_back(self.kept.pop(row))

    def give_back(self, grant: Grant) -> None:
        self.free_slots += grant.slots

    def drop(self, sequence: Sequence) -> None:
        """A request with children keeps its piece for them; the last child takes the parent's with it."""
        row, parent = sequence.index, self.parents[sequence.index]
        grant = self.held.pop(sequence)
        if self.children[row]:
            self.kept[row] = grant
        else:
            self.give_back(grant)
        if parent != NO_PARENT:
            self.children[parent] -= 1
            if not self.children[parent] and parent in self.kept:
                self.give_up(parent)

    def kept_slots(self) -> int:
        return sum(grant.slots for grant in self.kept.values())

    def check_meter(self, meter: tuple[int, ...]) -> None:
        super().check_meter(meter)
        assert self.logged_cached() == self.kept_slots()

    def free_census(self) -> list[str]:
        """The ledger takes cached slots from those that are free."""
        return [*super().free_census(), *[FREE] * self.kept_slots()]

    def check(self) -> None:
        assert [*self.memory.kept.items()] == [*self.kept.items()]
        assert self.memory.used_slots == self.slots - self.free_slots - self.kept_slots()
        assert self.memory.growing == len(self.tokens)


class PlacedKept(Kept, PlacedInSteps):
    """A tree in chunks of an arena."""

    def would_have_place(self, slots: int, given_up: list[Grant]) -> bool:
        places, size = deepcopy(self.places), self.memory.block_size
        for grant in given_up:
            places.give(grant.start, grant.slots // size)
        return any(blocks * size >= slots for _, blocks in places.pieces())

    def give_back(self, grant: Grant) -> None:
        super().give_back(grant)
        self.places.give(grant.start, grant.slots // self.memory.block_size)

    def check(self) -> None:
        super().check()
        assert self.memory.arena.free_runs() == self.places.runs()


class DialogueCopyMachine(RuleBasedStateMachine):
    """The same tree, and the same leaps, in two memories."""

    @initialize(pool=combined(range(4, 25), range(1, 5), ARENAS), rows=ROWS)
    def build(self, pool, rows):
        *pool, arena = pool
        self.memories = [
            Kept(*pool, rows),
            PlacedKept(*pool, rows, ARENAS[arena](pool[0]), arena),
        ]

    @rule(extra=st.integers(0, 6))
    def admit(self, extra):
        for served in self.memories:
            served.admit_head(extra)

    @rule(steps=st.integers(1, 8))
    def leap(self, steps):
        for served in self.memories:
            served.leap(steps)

    @invariant()
    def holds(self):
        for served in self.memories:
            served.check()
