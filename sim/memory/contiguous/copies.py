"""Contiguous memory for groups of sequences: each sequence has its own piece, with its own copy of the prompt.

Paged memory would share these tokens. The admission of the leader allocates the pieces of the whole group. In the next
step the siblings copy the prompt; a beam that is replaced copies all tokens of the beam that it continues. Memory that
counts slots copies these tokens. Memory with chunks copies the whole chunk, as the artifact of SOSP'23 does: its Orca
pairs all blocks of both tables, empty ones included (``BuddyBlockSpaceManager.fork``).
"""

from __future__ import annotations

from collections.abc import Iterable

from ...types.errors import SimulationFault
from ...types.sequence import FORKED, Grant, Group, Sequence
from .arena import Arena
from .contiguous import ContiguousMemory, ContiguousTransaction


class CopyingMemory(ContiguousMemory):
    """``ContiguousMemory`` for groups."""

    def __init__(self, num_blocks: int, block_size: int, arena: Arena | None = None) -> None:
        super().__init__(num_blocks, block_size, arena)
        self._copied_slots = 0
        self._beams: dict[Group, None] = {}
        self._branched_step = -1

    def _slots_to_copy(self, grant: Grant, tokens: int) -> int:
        """Slots that a copy of a piece writes, given the number that hold tokens."""
        return tokens if self.arena is None else grant.slots

    def copied_slots(self, decodes: bool) -> int:
        """Slots that the copies of the coming step write."""
        slots, self._copied_slots = self._copied_slots, 0
        return slots

    def transaction(self, decode_step: int) -> ContiguousTransaction:
        """See ``ContiguousMemory``; first determines which beams die and which they continue from."""
        if self._beams and decode_step != self._branched_step:
            self._branched_step = decode_step
            for group in self._beams:
                if group.ancestry is None:
                    raise SimulationFault("beams have no ancestry")
                replaced = group.ancestry.replaced(len(group.members))
                held = group.leader.held_tokens(decode_step)
                slots = self._slots_to_copy(group.leader.grant, held)
                self._copied_slots += len(replaced) * slots
                for dead, parent in replaced:
                    self.record_copy(group.members[parent].grant, group.members[dead].grant, slots)
        return super().transaction(decode_step)

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``ContiguousMemory``; a leader also allocates the pieces of its siblings, empty until they fork."""
        group = sequence.group
        if group is not None and sequence.kind == FORKED:
            slots = self._slots_to_copy(sequence.grant, sequence.prompt_tokens)
            self._copied_slots += slots
            self.record_copy(group.leader.grant, sequence.grant, slots)
            self._grow(sequence, decode_step)
            if group.ancestry:
                self._beams[group] = None
                self.searches = True
            return
        super().admit(sequence, decode_step, padded_tokens, past)
        for sibling in () if group is None else group.siblings:
            super().admit(sibling, decode_step, padded_tokens, past)
            self.growing -= 1
            self._lag -= sibling.start_tokens - decode_step

    def _grow(self, sibling: Sequence, decode_step: int) -> None:
        self.growing += 1
        self._lag += sibling.start_tokens - decode_step

    def release(self, finished: Iterable[Sequence], decode_step: int) -> None:
        """See ``ContiguousMemory``; siblings with nothing to generate release their pieces with the leader."""
        for sequence in finished:
            group = sequence.group
            if group is not None and sequence is group.leader:
                self._beams.pop(group, None)
                self.searches = bool(self._beams)
                if not group.forked:
                    self._give_back_empty(group.siblings, sequence.start_step)
            super().release((sequence,), decode_step)

    def _give_back_empty(self, siblings: tuple[Sequence, ...], decode_step: int) -> None:
        for sibling in siblings:
            sibling.start_step = decode_step
            self._grow(sibling, decode_step)
        super().release(siblings, decode_step)
