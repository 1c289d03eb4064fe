"""Paged memories against tables that grow by one token and one sequence at a time."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory import DeferredMemory, PagedMemory
from fragmeter.sim.types.sequence import Sequence

from .draws import EITHER, combined, picks
from .served import Served, chosen
from .tables import MappedTables, Tables, walk

BLOCKS, SIZES, PROMPTS, OUTPUTS = range(3, 17), range(1, 5), range(1, 8), range(1, 16)
spans = st.integers(1, 8)


class PagedMachine(Served, RuleBasedStateMachine):
    """Admissions, leaps of any length, preemption, and swapping out and in."""

    @initialize(pool=combined(BLOCKS, SIZES, range(9)))
    def build(self, pool):
        num_blocks, block_size, host_blocks = pool
        self.serve(PagedMemory(num_blocks, block_size, host_blocks, ids=True))
        self.model, self.host = Tables(num_blocks), Tables(host_blocks)

    def may_pause(self, wanted: bool) -> bool:
        """Whether running sequences pause for an admission: in a step in which nothing has begun."""
        return wanted and not self.begun

    def begin(self) -> None:
        """Sequences with full blocks take another, in order of arrival."""
        if not self.begun:
            super().begin()
            full = [s for s, tokens in self.tokens.items() if (tokens - 1) % self.memory.block_size == 0]
            self.model.grow(sorted(full, key=lambda sequence: sequence.index))

    def need(self, steps: int) -> int:
        """Blocks that the running sequences take in the steps from the coming one on."""
        before = [tokens - self.begun for tokens in self.tokens.values()]
        return sum(self.blocks(tokens + steps) - self.blocks(tokens) for tokens in before)

    def has_room(self, blocks: int, pauses: bool = False) -> bool:
        """Whether so many blocks are left by the slots of the coming step."""
        return blocks <= self.memory.free - (0 if pauses else self.taken_now())

    def taken_now(self) -> int:
        """Blocks that the coming step takes, or has taken if it has begun."""
        return self.need(1)

    @rule(request=combined(PROMPTS, OUTPUTS, EITHER, EITHER))
    def admit(self, request):
        """A new request, or one that was preempted."""
        prompt, output, again, pauses = request
        pauses = self.may_pause(pauses)
        again = again and bool(self.state.waiting)
        sequence = self.state.waiting[0] if again else self.arrive(prompt, output)
        if not self.has_room(self.blocks(sequence.start_tokens), pauses):
            return
        if again:
            self.state.waiting.popleft()
        self.start(sequence, pauses)
        self.model.hold(sequence, self.blocks(sequence.start_tokens))
        if pauses:
            self.advance(0)

    @precondition(lambda self: self.tokens and not self.begun)
    @rule(choice=combined(range(64), range(4)))
    def evict(self, choice):
        """One or two give way; to the host where it has room."""
        pick, swap = choice
        victims = chosen(list(self.tokens), pick)
        out: list[Sequence] = []
        for place, sequence in enumerate(victims):
            blocks = len(self.model.tables[sequence])
            if swap >> place & 1 and blocks <= len(self.host.free):
                self.host.hold(sequence, blocks)
                self.model.drop(sequence)
                out.append(sequence)
        self.preempt([sequence for sequence in victims if sequence not in out], out)

    def preempt(self, preempted: list[Sequence], out: list[Sequence]) -> None:
        self.memory.evict(tuple(preempted), tuple(out), self.state.decode_step)
        self.state.preempt(tuple(preempted), tuple(out))
        # Those that do not run give their blocks back first.
        for sequence in sorted(preempted, key=lambda sequence: sequence in self.tokens):
            self.model.drop(sequence)
        for sequence in (*preempted, *out):
            self.tokens.pop(sequence, None)

    @precondition(lambda self: self.state.swapped)
    @rule()
    def come_back(self):
        """The head of the swapped, with a slot for its next token."""
        sequence = self.state.swapped[0]
        if not self.has_room(self.blocks(sequence.start_tokens)):
            return
        self.state.swapped.popleft()
        self.begin()
        self.memory.swap_in(sequence, self.state.decode_step)
        self.state.start(sequence, self.state.decode_step)
        self.host.drop(sequence)
        self.tokens[sequence] = sequence.start_tokens
        self.model.hold(sequence, self.blocks(sequence.start_tokens))

    @precondition(lambda self: self.tokens or self.begun)
    @rule(steps=spans)
    def leap(self, steps):
        """As far as blocks reach, stopping where a sequence finishes."""
        if not self.tokens:
            self.advance(0)
            return
        reach = self.reach(steps)
        while steps and reach:
            self.advance(reach)
            steps -= reach
            reach = self.reach(steps) if self.tokens else 0

    def reach(self, limit: int) -> int:
        """Steps, at most ``limit``, up to a finish or until blocks lack."""
        limit = min(limit, self.steps_to_finish())
        decode_step, free = self.state.decode_step, self.memory.free
        assert self.memory.phases.total(decode_step, limit) == self.need(limit)
        fits = max(steps for steps in range(limit + 1) if self.need(steps) <= free)
        assert min(limit, self.memory.steps_with(self.state, free, limit)) == fits
        return fits

    def advance(self, steps: int) -> None:
        """Steps pass, and finished sequences leave."""
        if steps:
            self.begin()
        self.look()
        assert self.memory.advance(self.state, steps) == self.meter()
        self.step_on(steps)
        finished = self.finished()
        assert self.state.take_finished() == finished
        self.memory.release(finished, self.state.decode_step)
        for sequence in finished:
            del self.tokens[sequence]
            self.model.drop(sequence)

    def meter(self) -> tuple[int, ...]:
        """Slots live and slots held, as the model has them."""
        held = sum(len(table) for table in self.model.tables.values())
        # Invariant 1: what is not held is free.
        assert held + len(self.model.free) == self.memory.num_blocks
        return sum(self.tokens.values()), held * self.memory.block_size, 0

    def look(self) -> None:
        """The tables, as a look finds them now."""
        kept = self.memory.tables
        kept.grow_until(self.state.decode_step + self.begun)
        self.walk()
        assert kept.tables == self.model.tables and [*reversed(kept.pool.free_ids)] == self.model.free
        assert kept.host_tables == self.host.tables and [*reversed(kept.host_pool.free_ids)] == self.host.free

    def walk(self) -> None:
        kept = self.memory.tables
        walk(kept.pool, kept.tables)
        walk(kept.host_pool, kept.host_tables)

    @invariant()
    def holds(self):
        self.look()
        assert {s: len(self.model.tables[s]) for s in self.tokens} == {
            s: self.blocks(tokens) for s, tokens in self.tokens.items()
        }
        # ``free`` does not include the slots of the coming step.
        assert self.memory.free == len(self.model.free) + (self.taken_now() if self.begun else 0)
        assert self.memory.host_free == len(self.host.free)


class ChunkedMachine(PagedMachine):
    """As above, with prefills in chunks and decodes that stand still; no sequence is swapped out."""

    @initialize(pool=combined(BLOCKS, SIZES, EITHER))
    def build(self, pool):
        num_blocks, block_size, whole = pool
        self.serve(PagedMemory(num_blocks, block_size, ids=True, whole_prompts=whole))
        self.model, self.host, self.whole = Tables(num_blocks), Tables(0), whole
        # Tokens computed of those that hold blocks and do not run.
        self.standing: dict[Sequence, int] = {}

    def may_pause(self, wanted: bool) -> bool:
        """No sequence has to pause, as prefills come in chunks."""
        return False

    def has_room_for(self, sequence: Sequence, tokens: int) -> bool:
        """Whether a table can come to hold so many tokens."""
        return self.has_room(self.blocks(tokens) - len(self.model.tables.get(sequence, ())))

    @rule(chunk=combined(range(4, 17), OUTPUTS, range(1, 6), range(4)))
    def prefill(self, chunk):
        """A chunk, of a new request or of one that goes on, which leaves at least one token to compute."""
        prompt, output, tokens, pick = chunk
        going_on = list(self.state.prefilling)
        is_new = pick >= len(going_on)
        sequence = self.arrive(prompt, output) if is_new else going_on[pick]
        computed = self.standing.get(sequence, 0) + tokens
        held = sequence.start_tokens if self.whole else computed
        if computed >= sequence.start_tokens or not self.has_room_for(sequence, held):
            return
        self.begin()
        if is_new:
            self.state.waiting.appendleft(sequence)
        self.state.prefill(sequence, tokens)
        self.memory.prefill(sequence, self.state.decode_step)
        self.standing[sequence] = computed
        self.model.hold(sequence, self.blocks(held))

    @precondition(lambda self: self.standing)
    @rule(pick=picks)
    def continue_prefill(self, pick):
        """The last chunk of a prefill, or the next token of one that stood still."""
        sequence = list(self.standing)[pick % len(self.standing)]
        if not self.has_room_for(sequence, sequence.start_tokens):
            return
        self.state.prefilling.pop(sequence, None)
        self.state.stalled.pop(sequence, None)
        self.start(sequence, pauses=False)
        del self.standing[sequence]
        self.model.hold(sequence, self.blocks(sequence.start_tokens))

    @precondition(lambda self: self.tokens and not self.begun)
    @rule(pick=picks)
    def stall(self, pick):
        sequence = list(self.tokens)[pick % len(self.tokens)]
        self.memory.stall(sequence, self.state.decode_step)
        self.state.stall(sequence)
        self.standing[sequence] = self.tokens.pop(sequence)

    @precondition(lambda self: (self.tokens or self.standing) and not self.begun)
    @rule(pick=picks)
    def evict(self, pick):
        """One or two give way, whether they run or stand."""
        victims = chosen([*self.tokens, *self.standing], pick)
        self.preempt(victims, [])
        for sequence in victims:
            self.standing.pop(sequence, None)

    def meter(self) -> tuple[int, ...]:
        """With block_tail of those that do not run: slots past the end of their sequences."""
        live, held, _ = super().meter()
        ends = {s: len(self.model.tables[s]) * self.memory.block_size for s in self.standing}
        tail = sum(slot >= s.target_tokens for s, end in ends.items() for slot in range(end))
        return live + sum(self.standing.values()), held, tail


class DeferredMachine(PagedMachine):
    """Prefills in steps of their own, and pages that stay mapped; no sequence is swapped out."""

    @initialize(pool=combined(BLOCKS, SIZES))
    def build(self, pool):
        num_blocks, block_size = pool
        self.serve(DeferredMemory(num_blocks, block_size, ids=True))
        self.model, self.host = MappedTables(num_blocks), Tables(0)

    def may_pause(self, wanted: bool) -> bool:
        return True

    def reach(self, limit: int) -> int:
        """Also up to the step in which mapped pages change hands."""
        fits = super().reach(limit)
        return self.memory.steps_settled(self.state.decode_step, fits) if fits else 0

    def step_on(self, steps: int) -> None:
        """What is cached changes in the first step of a leap at the most."""
        cached = len(self.model.cached)
        super().step_on(steps)
        assert len(self.model.cached) == cached

    def meter(self) -> tuple[int, ...]:
        """Invariant 1: what is not held is free or cached; the meter and the log of changes agree on it."""
        held, cached, size = sum(map(len, self.model.tables.values())), len(self.model.cached), self.memory.block_size
        assert held + cached + len(self.model.free) == self.memory.num_blocks
        assert self.logged_cached() == cached * size
        return sum(self.tokens.values()), held * size, 0

    def logged_cached(self) -> int:
        """Cached slots by the changes that were logged so far."""
        return int(self.memory.cached_level.changes.columns()["slots"].sum())

    def walk(self) -> None:
        """Every page is in a table, deferred, spare or unmapped; no two of these."""
        kept = self.memory.tables
        walk(kept.pool, kept.tables, self.model.cached)
        assert (kept.regions.deferred, kept.regions.spare) == (self.model.deferred, self.model.spare)

    @invariant()
    def holds(self):
        """What is counted leap by leap is what the tables do step by step."""
        self.look()
        counted, model = self.memory.regions, self.model
        assert self.memory.free == len(model.free) + len(model.cached)
        assert counted.cached == self.memory.tables.regions.cached == len(model.cached)
        assert self.logged_cached() == counted.cached * self.memory.block_size
        assert [len(region) for region in counted.deferred] == [len(region) for region in model.deferred]
        assert {s: len(pages) for s, pages in counted.spare.items()} == {s: len(p) for s, p in model.spare.items()}
