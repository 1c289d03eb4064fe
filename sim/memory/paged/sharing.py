"""Paged memory with shared blocks: groups that fork from one prompt, and a prefix that all have.

Every sequence is first counted as if nothing were shared (``PagedMemory``), then what it does not
hold of its own is given back:

    leader of a group, or lone sequence       the blocks of the pinned prefix
    a sibling                                 the full blocks of its prompt
    a group, besides                          ``saved_blocks``: a half-full last block after a fork,
                                              and whatever beams have in common

A shared block that is not full is copied before it is written: of the k tables that name it k - 1 take
a copy in their next step (``pending_copies``), and the last one writes in place.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...types.errors import SimulationFault
from ...types.optional import not_none
from ...types.sequence import FORKED, Group, Sequence, leads, present
from ...types.state import State
from ..accounting.ledger import METER, Meter
from ..prefix.block_tables import BlockTables
from .paged import PagedMemory
from .transaction import PagedTransaction


class SharingMemory(PagedMemory):
    """As ``PagedMemory``, with blocks shared within a group of sequences (copy on write) and a pinned common prefix.

    Args:
        prefix_blocks: Blocks of a prefix that every prompt begins with, pinned from the start.
    """

    meter: tuple[str, ...] = (*METER[:2], "prefill_tail", "saved")

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int, ids: bool, prefix_blocks: int) -> None:
        super().__init__(num_blocks, block_size, host_blocks)
        if ids:
            self.tables = BlockTables(num_blocks, host_blocks, block_size, prefix_blocks=prefix_blocks, in_turn=True)
        self.free -= prefix_blocks
        self.prefix_blocks, self.pinned_slots = prefix_blocks, prefix_blocks * block_size
        # Table entries of those on the device less the blocks that they name, the prefix left out.
        self._saved_blocks = 0
        self._due: dict[Group, None] = {}
        # The last step for which each found its parents.
        self._beams: dict[Group, int] = {}

    def shared_blocks(self, sequence: Sequence) -> int:
        """Blocks at the start of a sequence's table that are counted elsewhere: the pinned prefix, or a sibling's
        prompt."""
        return self.prefix_blocks if leads(sequence) else sequence.prompt_tokens // self.block_size

    def held_blocks(self, sequence: Sequence, decode_step: int) -> int:
        """See ``PagedMemory``; blocks of the group of a leader, each counted once."""
        members, size = present(sequence), self.block_size
        own = sum(-(-member.held_tokens(decode_step) // size) - self.shared_blocks(member) for member in members)
        return own - self._spared(sequence)

    def needed_blocks(self, members: Iterable[Sequence], tokens: int = 0) -> int:
        """New blocks of sequences that are admitted or return, for all their known tokens but the last ``tokens``."""
        size, own = self.block_size, 0
        for member in members:
            own += -(-(member.start_tokens - tokens) // size) - self.shared_blocks(member)
            own -= self._spared(member) if leads(member) else 0
        return own

    @staticmethod
    def _spared(leader: Sequence) -> int:
        return 0 if leader.group is None else leader.group.saved_blocks

    def copied_slots(self, decodes: bool) -> int:
        """Slots of the blocks that the coming step copies before it writes to them, if it decodes."""
        return self.pending_copies * self.block_size if decodes else 0

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        """See ``Memory``; blocks that are copied before the step writes are read once, and the pinned prefix is named by every
        leader."""
        blocks = self._saved_blocks - self.pending_copies - self.prefix_blocks
        # Of a prefill in chunks nothing is saved yet.
        for sequence in admitted:
            blocks -= self.shared_blocks(sequence) + (self._spared(sequence) if leads(sequence) else 0)
        return blocks * self.block_size

    def transaction(self, decode_step: int) -> PagedTransaction:
        """See ``PagedMemory``; before anything is decided, the beams find their parents."""
        beams = [group for group, branched_step in self._beams.items() if branched_step < decode_step]
        if beams:
            self._branch(beams, decode_step)
        transaction = super().transaction(decode_step)
        transaction.need += self.pending_copies
        return transaction

    def _branch(self, groups: Iterable[Group], decode_step: int) -> None:
        """Beams that died become copies of others of their group, and name all of their blocks."""
        if self.tables is None:
            raise SimulationFault("beams have no block tables")
        self.tables.grow_until(decode_step)
        for group in groups:
            self._beams[group] = decode_step
            replaced = not_none(group.ancestry).replaced(len(group.members))
            if not replaced:
                continue
            freed = sum(self.tables.replace(group.members[dead], group.members[parent]) for dead, parent in replaced)
            self._share(group, freed)
            if group.leader.held_tokens(decode_step) % self.block_size:
                self._owe(group, len(replaced))

    def _share(self, group: Group, blocks: int) -> None:
        """So many table entries of a group name blocks that others of them name too."""
        group.saved_blocks += blocks
        self._saved_blocks += blocks
        self.free += blocks

    def _owe(self, group: Group, copies: int) -> None:
        group.pending_copies += copies
        self.pending_copies += copies
        if copies:
            self._due[group] = None

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``PagedMemory``; also a sibling that forks."""
        super().admit(sequence, decode_step, padded_tokens, past)
        shared, group = self.shared_blocks(sequence), sequence.group
        self.free += shared
        self._saved_blocks += shared
        if group is None:
            return
        if sequence.kind == FORKED and sequence.prompt_tokens % self.block_size:
            self._share(group, 1)
            self._owe(group, 1)
        if group.forked and group.ancestry:
            self._beams[group] = decode_step
            self.searches = True

    def swap_in(self, sequence: Sequence, decode_step: int) -> None:
        """See ``PagedMemory``; a group shares what it shared before."""
        self.host_free -= self.shared_blocks(sequence)
        super().swap_in(sequence, decode_step)
        group = sequence.group
        if group is not None and sequence is group.leader:
            spared, due = group.saved_blocks, group.pending_copies
            self.host_free -= spared
            self.free += spared
            self._saved_blocks += spared
            group.pending_copies = 0
            self._owe(group, due)

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``PagedMemory``; a recomputed sequence shares only the full blocks of the prompt."""
        super().evict(preempted, swapped_out, decode_step)
        for sequence in swapped_out:
            self.host_free += self.shared_blocks(sequence) + (self._spared(sequence) if leads(sequence) else 0)
        for sequence in preempted:
            if sequence.group is not None:
                sequence.group.saved_blocks = sequence.group.pending_copies = 0

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``PagedMemory``; a group leaves as a whole."""
        leaving = tuple(leaving)
        super().release(leaving, decode_step)
        for sequence in leaving:
            shared = self.shared_blocks(sequence)
            if sequence.group is not None and sequence is sequence.group.leader:
                shared += sequence.group.saved_blocks
                self._forget(sequence.group)
            self.free -= shared
            self._saved_blocks -= shared

    def _forget(self, group: Group) -> None:
        self._beams.pop(group, None)
        self.searches = bool(self._beams)
        if group in self._due:
            del self._due[group]
            self.pending_copies -= group.pending_copies

    def steps_with(self, state: State, blocks: int, limit: int) -> int:
        """See ``PagedMemory``; beams decide anew in every step."""
        return 1 if self._beams else super().steps_with(state, blocks - self.pending_copies, limit)

    def advance(self, state: State, steps: int) -> Meter:
        """See ``PagedMemory``; in the first step sequences that owe a copy make it."""
        live, held, _ = super().advance(state, steps)
        size, due = self.block_size, self.pending_copies
        saved = self._saved_blocks * size
        live += self.pinned_slots - saved
        if not steps:
            slots, tail = self._owed(state.decode_step)
            return live + slots, held, -tail, saved
        for group in self._due:
            group.saved_blocks -= group.pending_copies
            group.pending_copies = 0
        self._due.clear()
        self.pending_copies = 0
        self._saved_blocks -= due
        self.free -= due
        if self.free < 0:
            raise self.overdrawn()
        return live + due * size, held + due * size, 0, saved - due * size

    def _owed(self, decode_step: int) -> tuple[int, int]:
        """Of the copies that are due while all stand still: slots that are empty in them, and their block_tail.

        What several tables name is there once: its tokens, and the tail that each residency counts.
        """
        size, slots, tail = self.block_size, 0, 0
        for group in self._due:
            tokens, target = group.leader.held_tokens(decode_step), group.leader.target_tokens
            slots += group.pending_copies * (-tokens % size)
            if tokens > (target - 1) // size * size:
                tail += group.pending_copies * (-target % size)
        return slots, tail
