"""Memory of groups against tables written token by token, in which each block is looked up for what else names it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory import SharingMemory
from fragmeter.sim.types.sequence import Group, Sequence, leads, present
from fragmeter.sim.workload.groups import GroupState

from .draws import EITHER, combined
from .paged import spans
from .served import Script, Served, chosen
from .tables import SharedTables

#: What a step has come to: victims leave first, then others come back, then siblings fork, then others are admitted.
OPEN, CAME_BACK, FORKED = range(3)


class SharingMachine(Served, RuleBasedStateMachine):
    """Groups of samples or beams, with a pinned prefix or without: admitted, preempted and swapped as a whole.

    ``tokens`` are those with a slot before the coming step, in which all take theirs together.
    """

    @initialize(pool=combined(range(4, 20, 3), range(1, 5), (0, 4, 12), range(3), EITHER))
    def build(self, pool):
        num_blocks, size, host_blocks, prefix, self.pauses = pool
        self.serve(SharingMemory(num_blocks, size, host_blocks, ids=True, prefix_blocks=prefix))
        self.state = GroupState(self.pauses, size, prefix * size)
        self.model, self.host = SharedTables(num_blocks, prefix), SharedTables(host_blocks)
        self.stage: int | None = None
        # Groups with a leader that prefills in the coming step, or has; beams that find their parents, in order.
        self.prefilled: list[Group] = []
        self.forking: list[Group] = []
        # The last step for which each found its parents.
        self.beams: dict[Group, int] = {}

    def open(self) -> None:
        """A step begins: beams find their parents, and as many give way as have to."""
        if self.stage is not None:
            return
        self.stage, decode_step = OPEN, self.state.decode_step
        transaction = self.memory.transaction(decode_step)
        for group in self.beams:
            self.branch(group, decode_step)
        assert transaction.free == len(self.model.free)
        assert transaction.need == self.taken_by(self.model, self.tokens)
        while self.taken() > len(self.model.free):
            self.preempt([self.leaders()[-1]], [])

    def branch(self, group: Group, decode_step: int) -> None:
        """Once for every token, whichever other groups have found their parents."""
        pairs = group.ancestry.last if self.beams[group] < decode_step else ()
        self.beams[group] = decode_step
        for dead, parent in pairs:
            self.model.drop(group.members[dead])
            self.model.tables[group.members[dead]] = list(self.model.tables[group.members[parent]])

    def leaders(self) -> list[Sequence]:
        return sorted(filter(leads, self.tokens), key=lambda sequence: sequence.index)

    def taken_by(self, kept: SharedTables, sequences: Iterable[Sequence]) -> int:
        """Blocks that the next token of each of these takes: new ones, and copies by all but the last to write."""
        return sum(count - (block is not None) for block, count in self.written(kept, sequences).items())

    def written(self, kept: SharedTables, sequences: Iterable[Sequence]) -> Counter[int | None]:
        """How many write to each block; None is one to come."""
        full = {s: not self.known(s) % self.memory.block_size for s in sequences}
        return Counter(None if full[s] else kept.tables[s][-1] for s in full)

    def known(self, sequence: Sequence) -> int:
        """Its tokens before its next step."""
        return self.tokens.get(sequence, sequence.start_tokens - 1)

    def taken(self) -> int:
        """Blocks that the coming step takes, if groups that can fork do."""
        siblings = sum(len(group.siblings) for group in self.forking)
        return self.taken_by(self.model, self.tokens) + siblings

    def has_room(self, blocks: int) -> bool:
        return blocks + self.taken() <= len(self.model.free)

    @rule(request=combined(range(1, 9), range(1, 13), range(1, 5), EITHER, EITHER))
    def admit(self, request):
        """A new group, or one that was preempted; where others pause for it, in a step of its own."""
        prompt, output, num_seqs, searches, again = request
        self.open()
        if self.pauses and self.stage != OPEN:
            return
        again = again and bool(self.state.waiting)
        leader = self.state.waiting[0] if again else self.new_group(prompt, output, num_seqs, searches)
        members = present(leader)
        blocks = sum(self.blocks(s.start_tokens) - self.shared_by(s) for s in members)
        assert self.memory.needed_blocks(members) == blocks
        if blocks > len(self.model.free) or not (self.pauses or self.has_room(blocks)):
            return
        if not self.pauses:
            self.fork()
        for sequence in members:
            if again:
                self.state.waiting.popleft()
            self.prefill(sequence)
        if self.pauses:
            self.advance(0)

    def new_group(self, prompt: int, output: int, num_seqs: int, searches: bool) -> Sequence:
        prompt += len(self.model.pins[0]) * self.memory.block_size
        members = tuple(self.arrive(prompt, output) for _ in range(num_seqs))
        if num_seqs > 1:
            Group(members, Script(prompt + 100 * output + 10_000 * self.arrived) if searches else None)
        return members[0]

    def shared_by(self, sequence: Sequence) -> int:
        """Blocks that a table begins with: the prefix, or the full blocks of the leader's prompt."""
        return len(self.model.pins[0]) if leads(sequence) else sequence.prompt_tokens // self.memory.block_size

    def prefill(self, sequence: Sequence) -> None:
        """One after the other, the leader first."""
        begins_with = self.model.pins[0] if leads(sequence) else self.model.tables[sequence.group.leader]
        self.model.tables[sequence] = begins_with[: self.shared_by(sequence)]
        self.start(sequence, self.pauses)
        self.model.hold(sequence, self.blocks(self.tokens[sequence]))
        group = sequence.group
        if group is not None and not group.forked and sequence.output_tokens > 1:
            self.prefilled.append(group)
        self.search(group, self.state.decode_step - self.pauses)

    def search(self, group: Group | None, decode_step: int) -> None:
        if group is not None and group.forked and group.ancestry:
            self.beams[group] = decode_step

    def start(self, sequence: Sequence, pauses: bool, padded_tokens: int = 0) -> None:
        """Its last token takes its slot in the coming step, unless running sequences pause."""
        decode_step = self.state.decode_step - pauses
        self.memory.admit(sequence, decode_step, padded_tokens, pauses)
        self.state.start(sequence, decode_step, padded_tokens)
        self.tokens[sequence] = sequence.start_tokens - 1 + pauses

    def fork(self) -> None:
        """Siblings of leaders that were prefilled name all that those have."""
        self.stage = FORKED
        for group in self.forking:
            for sibling in group.siblings:
                self.state.fork(sibling, self.state.decode_step)
                self.memory.admit(sibling, self.state.decode_step)
                self.model.tables[sibling] = list(self.model.tables[group.leader])
                self.tokens[sibling] = self.tokens[group.leader]
            self.search(group, self.state.decode_step)
        self.forking = []

    @precondition(lambda self: self.tokens and self.stage in (None, OPEN))
    @rule(choice=combined(range(64), range(4)))
    def evict(self, choice):
        """One or two groups give way; to the host where it has room."""
        self.open()
        pick, swap = choice
        preempted, out, room = [], [], len(self.host.free)
        for place, leader in enumerate(chosen(self.leaders(), pick) if self.tokens else ()):
            blocks = len({block for s in present(leader) for block in self.model.tables[s]} - {*self.model.pins[0]})
            assert self.memory.held_blocks(leader, self.state.decode_step) == blocks
            goes = swap >> place & 1 and blocks <= room
            room -= blocks if goes else 0
            (out if goes else preempted).append(leader)
        self.preempt(preempted, out)

    def preempt(self, preempted: list[Sequence], out: list[Sequence]) -> None:
        """A sequence put at the front of the queue comes last."""
        back = tuple(s for leader in preempted for s in present(leader)[:: -1 if self.pauses else 1])
        swapped = tuple(s for leader in out for s in present(leader))
        self.memory.evict(back, swapped, self.state.decode_step)
        for leader in out:
            moved: dict[int, int] = {}
            for member in present(leader):
                self.model.move(member, self.host, moved)
        for sequence in back:
            self.model.drop(sequence)
        gone = {sequence.group for sequence in (*back, *swapped)}
        for sequence in (*back, *swapped):
            del self.tokens[sequence]
        self.forking = [group for group in self.forking if group not in gone]
        self.forget_beams()
        self.state.preempt(back, swapped)
        assert self.memory.swapped_blocks(swapped) == self.on_host(swapped)

    def on_host(self, sequences: Iterable[Sequence]) -> int:
        return len({block for sequence in sequences for block in self.host.tables[sequence]})

    @precondition(lambda self: self.state.swapped and self.stage in (None, OPEN, CAME_BACK))
    @rule()
    def come_back(self):
        """The first of the swapped groups, with slots for the next token of each; siblings may begin at once."""
        self.open()
        leader = self.state.swapped[0]
        members, group = present(leader), leader.group
        waits = group is not None and not group.forked
        blocks = self.on_host(members)
        assert self.memory.needed_blocks(members, 1) == blocks
        if not self.has_room(blocks + self.taken_by(self.host, members) + (len(group.siblings) if waits else 0)):
            return
        self.stage = CAME_BACK
        moved: dict[int, int] = {}
        for sequence in members:
            self.state.swapped.popleft()
            self.memory.swap_in(sequence, self.state.decode_step)
            self.state.start(sequence, self.state.decode_step)
            self.tokens[sequence] = sequence.start_tokens - 1
            self.host.move(sequence, self.model, moved)
        self.search(group, self.state.decode_step)
        if waits:
            self.forking.append(group)

    @precondition(lambda self: self.tokens)
    @rule(steps=spans)
    def leap(self, steps):
        """As far as blocks reach, up to a finish; one by one where there are beams, or siblings begin."""
        while steps and self.tokens:
            self.open()
            if self.tokens:
                self.fork()
                reach = self.reach(steps)
                self.advance(reach)
                steps -= reach

    def reach(self, limit: int) -> int:
        if self.prefilled:
            return 1
        limit, free = min(limit, self.steps_to_finish()), len(self.model.free)
        fits = max(steps for steps in range(limit + 1) if self.need(steps) <= free)
        steps = min(limit, self.memory.steps_with(self.state, self.memory.free, limit))
        assert steps == (1 if self.beams else fits)
        return steps

    def need(self, steps: int) -> int:
        """Blocks that running sequences take in so many steps."""
        later = sum(self.blocks(tokens + steps) - self.blocks(tokens + 1) for tokens in self.tokens.values())
        return self.taken() + later if steps else 0

    def advance(self, steps: int) -> None:
        """Steps pass, and finished sequences leave."""
        if steps:
            copies = self.taken_by(self.model, self.tokens) - self.written(self.model, self.tokens)[None]
            assert self.memory.copied_slots(True) == copies * self.memory.block_size
            self.write()
            self.memory.tables.grow_until(self.state.decode_step + 1)
            self.look()
        assert self.memory.advance(self.state, steps) == self.meter()
        for _ in range(steps - 1):
            self.write()
        self.state.decode_step += steps
        self.stage = None
        self.forking, self.prefilled = self.forking + self.prefilled, []
        finished = self.finished()
        assert self.state.take_finished() == finished
        self.memory.release(finished, self.state.decode_step)
        for sequence in finished:
            del self.tokens[sequence]
            self.model.drop(sequence)
        self.forget_beams()

    def forget_beams(self) -> None:
        self.beams = {group: decode_step for group, decode_step in self.beams.items() if group.leader in self.tokens}

    def write(self) -> None:
        """A token each, in order of arrival. Invariant 3: no other table names the block that it goes to."""
        for sequence in sorted(self.tokens, key=lambda sequence: sequence.index):
            self.model.write(sequence, self.tokens[sequence] // self.memory.block_size)
            self.tokens[sequence] += 1

    def meter(self) -> tuple[int, ...]:
        """Slots live, held, in tails (less those of each residency alone) and saved, each looked up where it lies."""
        size, tables, names = self.memory.block_size, self.model.tables, self.model.names()
        live = {(block, slot) for block in self.model.pins[0] for slot in range(size)}
        ends = ((s.target_tokens, table) for s, table in tables.items())
        tails = [(table[i // size], i % size) for end, table in ends for i in range(end, len(table) * size)]
        for sequence, tokens in self.tokens.items():
            live |= {(tables[sequence][i // size], i % size) for i in range(tokens)}
        return len(live), len(names) * size, len(set(tails)) - len(tails), (names.total() - len(names)) * size

    def look(self) -> None:
        """The tables, as a look finds them now."""
        kept = self.memory.tables
        self.model.check(kept.pool, kept.tables)
        self.host.check(kept.host_pool, kept.host_tables)

    @invariant()
    def holds(self):
        self.memory.tables.grow_until(self.state.decode_step)
        self.look()
        assert self.tokens.keys() == self.model.tables.keys()
        assert all(len(table) == self.blocks(self.tokens[s]) for s, table in self.model.tables.items())
        assert self.memory.free == len(self.model.free)
        assert self.memory.host_free == len(self.host.free)
