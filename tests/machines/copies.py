"""Contiguous memories of groups against a census of every slot of every piece."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fragmeter.sim.memory import ContiguousMemory
from fragmeter.sim.types.sequence import Grant, Group, Sequence
from fragmeter.sim.workload.groups import GroupState
from oracle.slots import classify_slot

from .arenas import ARENAS
from .draws import EITHER, combined
from .reservations import Counted, InChunks
from .served import Script


class InSteps(Counted):
    """Admissions of one step ask one transaction."""

    def __init__(self, *memory: Any) -> None:
        super().__init__(*memory)
        self.opened = self.refused = False
        # Slots that are copied in the coming step.
        self.copied = 0

    def open(self) -> None:
        """A step begins."""
        if not self.opened:
            self.opened, self.refused, self.blocked = True, False, 0
            self.transaction = self.memory.transaction(self.state.decode_step)
            assert self.transaction.free_slots == self.free_slots

    def refuse(self, tokens: int) -> None:
        """No sequence behind it is admitted in this step."""
        self.refused = True
        self.transaction.refuse(tokens)
        self.blocked = self.blocked_by(tokens)

    def has_places(self, slots: int, pieces: int) -> bool:
        return pieces * slots <= self.free_slots

    def advance(self, steps: int) -> None:
        assert self.memory.copied_slots(True) == self.copied
        self.copied, self.opened = 0, False
        super().advance(steps)

    def leap(self, steps: int) -> None:
        """Stopping where a sequence finishes."""
        while steps and self.tokens:
            self.open()
            reach = min(steps, self.steps_to_finish(), self.longest())
            self.advance(reach)
            steps -= reach

    def longest(self) -> int:
        """Steps in which nothing is decided."""
        return 64

    def census(self) -> list[str]:
        """Siblings that have not begun hold pieces in which no slot is live."""
        return [
            classify_slot(i, self.tokens.get(s, 0), s.target_tokens, grant.tokens, grant.tokens)
            for s, grant in self.held.items()
            for i in range(grant.slots)
        ]


class PlacedInSteps(InSteps, InChunks):
    """Chunks of an arena; of each free one as many pieces are cut as it holds."""

    def has_places(self, slots: int, pieces: int) -> bool:
        size = self.memory.block_size
        return sum(blocks * size // slots for _, blocks in self.places.pieces()) >= pieces


class Groups(InSteps):
    """Groups with a leader that takes the pieces of all; its siblings copy the prompt in the step after."""

    def __init__(self, *memory: Any) -> None:
        super().__init__(*memory)
        self.state = GroupState(False, 1)
        self.prefilled: list[Group] = []
        self.beams: list[Group] = []

    def open(self) -> None:
        """A step begins: dead beams copy their parents, then siblings of those that were prefilled begin."""
        if self.opened:
            return
        super().open()
        for group in self.beams:
            self.copied += sum(self.written_by_a_copy(group.members[parent]) for _, parent in group.ancestry.last)
        for group in self.prefilled:
            for sibling in group.siblings:
                self.state.fork(sibling, self.state.decode_step)
                self.memory.admit(sibling, self.state.decode_step)
                self.tokens[sibling] = self.tokens[group.leader]
                self.copied += self.written_by_a_copy(group.leader)
        self.beams += [group for group in self.prefilled if group.ancestry]
        self.prefilled = []

    def admit_group(self, prompt: int, output: int, extra: int, num_seqs: int, searches: bool) -> None:
        """All of its pieces or none. The last token of an output needs no slot."""
        self.open()
        if self.refused:
            return
        members = tuple(self.arrive(prompt, output) for _ in range(num_seqs))
        tokens = prompt + output - 1 + extra
        room = self.has_places(self.slots_for(tokens), num_seqs)
        assert self.transaction.fits(members[0], tokens, num_seqs) == room
        if not room:
            self.refuse(tokens)
            return
        if num_seqs > 1:
            Group(members, Script(prompt + 100 * output + 10_000 * self.arrived) if searches else None)
        self.transaction.place(members[0], tokens, num_seqs)
        grants = [Grant(tokens, self.slots_for(tokens), 0, start) for _, _, start in self.transaction.places]
        for grant in grants:
            self.take(grant)
        self.start(members[0], False)
        for member, grant in zip(members, grants, strict=True):
            self.hold(member, grant)

    def written_by_a_copy(self, source: Sequence) -> int:
        """Slots: its tokens."""
        return self.tokens[source]

    def longest(self) -> int:
        return 1 if self.beams or self.just_prefilled() else super().longest()

    def just_prefilled(self) -> list[Group]:
        """Groups with siblings that begin in the next step."""
        groups = (s.group for s in self.tokens if s.group is not None and not s.group.forked)
        return [group for group in groups if group.leader.output_tokens > 1]

    def leave(self) -> None:
        """Siblings that have nothing to generate leave with their leader."""
        idle = [s.group for s in self.finished() if s.group is not None and not s.group.forked]
        super().leave()
        for group in idle:
            for sibling in group.siblings:
                self.drop(sibling)
        self.prefilled = self.just_prefilled()
        self.beams = [group for group in self.beams if group.leader in self.tokens]


class PlacedGroups(Groups, PlacedInSteps):
    """Groups in chunks of an arena, which are copied whole."""

    def written_by_a_copy(self, source: Sequence) -> int:
        return self.held[source].slots


class CopyMachine(RuleBasedStateMachine):
    """The same groups, and the same leaps, in two memories."""

    @initialize(pool=combined(range(4, 33), range(1, 5), ARENAS))
    def build(self, pool):
        *pool, arena = pool
        self.memories = [
            Groups(ContiguousMemory(*pool)),
            PlacedGroups(ContiguousMemory(*pool, ARENAS[arena](pool[0])), arena),
        ]

    @rule(request=combined(range(1, 8), range(1, 13), range(4), range(1, 5), EITHER))
    def admit(self, request):
        for served in self.memories:
            served.admit_group(*request)

    @rule(steps=st.integers(1, 8))
    def leap(self, steps):
        for served in self.memories:
            served.leap(steps)

    @invariant()
    def holds(self):
        for served in self.memories:
            served.check()
