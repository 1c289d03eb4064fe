"""Memory of dialogue trees against the tables of running sequences and of finished ones that are kept."""

from __future__ import annotations

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory import DialogueMemory
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.types.state import State
from fragmeter.sim.workload.dialogue import NO_PARENT

from .draws import EITHER, combined, picks
from .paged import spans
from .served import chosen
from .tables import SharedTables
from .trees import ROWS, Tree


class DialogueMachine(Tree, RuleBasedStateMachine):
    """Admissions of up to three in a step, forks of running and finished requests, roll-backs, preemption."""

    @initialize(pool=combined(range(4, 20, 3), range(1, 5), EITHER), rows=ROWS)
    def build(self, pool, rows):
        num_blocks, size, self.pauses = pool
        self.serve(DialogueMemory(num_blocks, size, self.plant(rows)))
        self.memory.expect(np.array(self.children))
        self.state = State(self.pauses)
        self.model = SharedTables(num_blocks)
        #: Tables of finished requests with children, the one used longest ago first.
        self.kept: dict[int, list[int]] = {}
        self.model.pins = self.kept.values()
        self.opened = self.decodes = self.joined = False
        # Kept tables that this step's admissions count on: blocks, and the request that takes it over.
        self.counted: dict[int, int] = {}
        self.takers: dict[int, Sequence] = {}
        # Blocks that those admissions name or copy.
        self.claimed: set[int] = set()
        self.evicted = self.copied = 0

    def named_by_running(self) -> set[int]:
        return {block for table in self.model.tables.values() for block in table}

    def cached(self) -> int:
        """Blocks that only kept tables name."""
        return len({block for table in self.kept.values() for block in table} - self.named_by_running())

    def room(self) -> int:
        """Blocks that are free, or would be if nothing were kept."""
        return len(self.model.free) + self.cached()

    def taken(self) -> int:
        """Blocks that the coming step takes."""
        return sum(tokens % self.memory.block_size == 0 for tokens in self.tokens.values())

    def open(self) -> None:
        """A step begins."""
        if not self.opened:
            self.opened = True
            self.counted, self.takers, self.claimed = {}, {}, set()
            transaction = self.memory.transaction(self.state.decode_step)
            assert (transaction.free, transaction.need) == (self.room(), self.taken())

    def reserve_decodes(self) -> None:
        """The step decodes: kept tables are given up for its blocks, and as many give way as have to."""
        self.open()
        if self.decodes:
            return
        self.decodes = True
        self.memory.reserve_decodes(self.taken())
        self.make_free(min(self.taken(), self.room()))
        while self.taken() > self.room():
            self.preempt([max(self.tokens, key=lambda sequence: sequence.index)])

    def make_free(self, blocks: int) -> None:
        """Give up what was used longest ago; of what is counted on only the rest, and last."""
        before = len(self.model.free)
        for row in sorted(self.kept, key=self.counted.__contains__):
            if len(self.model.free) < blocks:
                self.cut(row, self.counted.get(row, 0))
        self.evicted += len(self.model.free) - before

    def cut(self, row: int, blocks: int) -> None:
        """A kept table is left with so many blocks."""
        table = self.kept.pop(row) if not blocks else self.kept[row]
        rest = table[blocks:]
        del table[blocks:]
        names = self.model.names()
        self.model.free += [block for block in rest if not names[block]]

    @precondition(lambda self: not self.joined)
    @rule(choice=combined(EITHER, range(1, 4)))
    def admit(self, choice):
        """New or preempted requests; where others pause for them, in a step of its own."""
        again, most = choice
        if self.pauses and self.decodes:
            return
        (self.open if self.pauses else self.reserve_decodes)()
        left, admitted = self.room() - (0 if self.pauses else self.taken()), []
        for sequence in self.heads(again)[:most]:
            self.memory.look_up(sequence, self.state.decode_step)
            assert sequence.computed_tokens == self.found(sequence)
            blocks = self.needed(sequence)
            assert self.memory.needed_blocks((sequence,)) == blocks
            left -= blocks
            if left < 0:
                break
            self.memory.promise(sequence)
            self.promise(sequence)
            admitted.append(sequence)
        for sequence in admitted:
            self.take_head(again)
            self.prefill(sequence)
        self.joined = bool(admitted)
        if self.pauses and admitted:
            self.advance(0)

    def found(self, sequence: Sequence) -> int:
        """Tokens of its parent, if all of them are there and no sequence takes them away."""
        parent, tokens = self.parents[sequence.index], self.parent_tokens[sequence.index]
        if self.blocks(sequence.start_tokens) >= self.memory.num_blocks:
            return 0
        if parent in self.kept:
            there = parent not in self.takers and len(self.kept[parent]) * self.memory.block_size >= tokens
        else:
            there = self.tokens.get(self.running(parent), 0) >= tokens
        return tokens if there else 0

    def takes(self, sequence: Sequence) -> bool:
        """Whether it takes over its parent's table, which no other request counts on."""
        parent = self.parents[sequence.index]
        alone = self.takers.get(parent) is sequence or parent not in self.counted
        return parent in self.kept and self.rolls_back[sequence.index] and alone

    def promise(self, sequence: Sequence) -> None:
        parent = self.parents[sequence.index]
        if sequence.computed_tokens and parent in self.kept:
            if self.takes(sequence):
                self.takers[parent] = sequence
            blocks = self.blocks(sequence.computed_tokens)
            self.counted[parent] = max(blocks, self.counted.get(parent, 0))
            self.kept[parent] = self.kept.pop(parent)
            self.claimed |= {*self.kept[parent][:blocks]}

    def begins_with(self, sequence: Sequence) -> tuple[list[int], bool]:
        """Blocks that it names, and whether it copies one more: it writes to none that others name."""
        tokens, parent = sequence.computed_tokens, self.parents[sequence.index]
        if not tokens:
            return [], False
        table = self.kept[parent] if parent in self.kept else self.model.tables[self.running(parent)]
        full, rest = divmod(tokens, self.memory.block_size)
        if rest and self.takes(sequence) and self.model.names()[table[full]] == 1:
            return table[: full + 1], False
        return table[:full], bool(rest)

    def needed(self, sequence: Sequence) -> int:
        """Blocks taken, cached ones that are named again, and one that is copied, which has to stay until it is."""
        named, copies = self.begins_with(sequence)
        again = set(named) - self.named_by_running() - self.claimed
        return self.blocks(sequence.start_tokens) - len(named) + len(again) + copies

    def prefill(self, sequence: Sequence) -> None:
        named, copies = self.begins_with(sequence)
        takes = sequence.computed_tokens and self.takes(sequence)
        tokens = sequence.start_tokens - 1 + self.pauses
        self.model.tables[sequence] = list(named)
        if takes:
            self.cut(self.parents[sequence.index], 0)
        self.copied += copies
        # What is free by then holds its tokens, and those of the step if there is one for all.
        in_step = 0 if self.pauses else self.taken() + (tokens % self.memory.block_size == 0)
        self.make_free(self.blocks(tokens) - len(named) + in_step)
        self.memory.admit(sequence, self.state.decode_step - self.pauses, 0, self.pauses)
        self.state.start(sequence, self.state.decode_step - self.pauses)
        self.tokens[sequence] = tokens
        self.model.hold(sequence, self.blocks(tokens))

    @precondition(lambda self: self.tokens and not self.joined)
    @rule(pick=picks)
    def evict(self, pick):
        """One or two give way and keep nothing."""
        self.reserve_decodes()
        if self.tokens:
            self.preempt(chosen([*self.tokens], pick))

    def preempt(self, victims: list[Sequence]) -> None:
        named = self.named_by_running()
        for sequence in victims[:1]:
            others = {block for s, table in self.model.tables.items() if s is not sequence for block in table}
            assert self.memory.held_blocks(sequence, self.state.decode_step) == len(named - others)
        self.memory.evict(tuple(victims), (), self.state.decode_step)
        self.state.preempt(tuple(victims), ())
        for sequence in victims:
            self.model.drop(sequence)
            del self.tokens[sequence]
        self.make_free(self.taken())

    @precondition(lambda self: self.tokens)
    @rule(steps=spans)
    def leap(self, steps):
        """As far as blocks reach, stopping where a sequence finishes."""
        while steps and self.tokens:
            self.reserve_decodes()
            if self.tokens:
                limit, free = min(steps, self.steps_to_finish()), self.memory.free
                fits = max(n for n in range(limit + 1) if self.need(n) <= len(self.model.free))
                assert min(limit, self.memory.steps_with(self.state, free, limit)) == fits
                self.advance(fits)
                steps -= fits

    def need(self, steps: int) -> int:
        """Blocks that running sequences take in so many steps."""
        return sum(self.blocks(tokens + steps) - self.blocks(tokens) for tokens in self.tokens.values())

    def advance(self, steps: int) -> None:
        """Steps pass, and finished sequences leave."""
        assert self.memory.copied_slots(bool(steps)) == self.copied * self.memory.block_size
        self.copied = 0
        if steps:
            self.write()
            self.memory.tables.grow_until(self.state.decode_step + 1)
            self.model.check(self.memory.tables.pool, self.memory.tables.tables)
        assert self.memory.advance(self.state, steps) == self.meter()
        assert self.logged_cached() == self.cached() * self.memory.block_size
        for _ in range(steps - 1):
            self.write()
        self.state.decode_step += steps
        self.opened = self.decodes = self.joined = False
        finished = self.finished()
        assert self.state.take_finished() == finished
        self.memory.release(finished, self.state.decode_step)
        self.leave(finished)
        if finished:
            assert self.logged_cached() == self.cached() * self.memory.block_size

    def write(self) -> None:
        """A token each, in order of arrival. Invariant 3: no other table names the block that it goes to."""
        for sequence in sorted(self.tokens, key=lambda sequence: sequence.index):
            self.model.write(sequence, self.tokens[sequence] // self.memory.block_size)
            self.tokens[sequence] += 1

    def leave(self, finished: list[Sequence]) -> None:
        """A request with children keeps its table for them, and the last child takes the table with it."""
        for sequence in finished:
            if self.children[sequence.index]:
                self.kept[sequence.index] = list(self.model.tables[sequence])
        for sequence in finished:
            self.model.drop(sequence)
            del self.tokens[sequence]
        for parent in (self.parents[sequence.index] for sequence in finished):
            if parent != NO_PARENT:
                self.children[parent] -= 1
                if not self.children[parent] and parent in self.kept:
                    self.cut(parent, 0)

    def meter(self) -> tuple[int, ...]:
        """Slots live, held and saved, looked up where they lie. Invariant 1: what is not held is cached or free."""
        size, tables = self.memory.block_size, self.model.tables
        live = {(tables[s][i // size], i % size) for s, tokens in self.tokens.items() for i in range(tokens)}
        held, entries = len(self.named_by_running()), sum(map(len, tables.values()))
        assert held + self.room() == self.memory.num_blocks
        return len(live), held * size, 0, (entries - held) * size

    @invariant()
    def holds(self):
        self.memory.tables.grow_until(self.state.decode_step)
        self.model.check(self.memory.tables.pool, self.memory.tables.tables)
        assert [*self.memory.kept.items()] == [*self.kept.items()]
        assert (self.memory.cached_blocks, self.memory.free) == (self.cached(), self.room())
        assert self.memory.evicted_blocks == self.evicted
