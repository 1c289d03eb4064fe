"""Memory of KV groups against tables that grow, and lose their first blocks, by one token and one sequence at a time."""

from __future__ import annotations

from collections import Counter
from math import lcm

from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory import GroupSize, PagedMemory, PageGroups
from fragmeter.sim.memory.paged.group_cache import NULL_BLOCK
from fragmeter.sim.types.sequence import Sequence

from .draws import EITHER, combined, picks
from .paged import spans
from .served import Served, chosen

COUNTS = ((0, 1), (1, 1), (1, 2), (2, 1))
#: Of the blocks of groups, in turns.
RATIOS = ((1, 1), (1, 1), (1, 2), (2, 1), (2, 3), (3, 1))
PROMPTS, OUTPUTS = range(1, 17), range(1, 16)


class GroupTables:
    """A table for each group of a sequence, the full ones first; the page freed last is the first one taken."""

    def __init__(self, num_pages: int, sizes: list[GroupSize], groups: PageGroups) -> None:
        self.free = list(reversed(range(num_pages)))
        self.tables: dict[Sequence, tuple[list[int | None], ...]] = {}
        self.sizes, self.groups = sizes, groups

    def passed(self, group: int, table: list[int | None], computed: int) -> list[int]:
        """Places of pages that the token after ``computed`` ones does not see, the last one first."""
        size, window, _ = self.sizes[group]
        first_seen = computed - window + 1 if window else 0
        places = [place for place in range(len(table)) if (place + 1) * size <= first_seen]
        return [place for place in reversed(places) if table[place] is not NULL_BLOCK]

    def exchange(self, sequence: Sequence, computed: int, tokens: int) -> tuple[int, int]:
        """Pages that the sequence gives back, and then takes, to compute up to ``tokens``."""
        tables = self.tables.get(sequence, ([],) * self.groups.number)
        back = sum(len(self.passed(group, table, computed)) for group, table in enumerate(tables))
        sizes = [size.block_size for size in self.sizes]
        return back, sum(max(0, -(-tokens // size) - len(table)) for size, table in zip(sizes, tables, strict=True))

    def reach(self, sequence: Sequence, computed: int, tokens: int) -> None:
        tables = self.tables.setdefault(sequence, tuple([] for _ in range(self.groups.number)))
        for group, table in enumerate(tables):
            passed = self.passed(group, table, computed)
            # Given back as one: the last one is the first to be taken again.
            self.free += [table[place] for place in reversed(passed)]
            for place in passed:
                table[place] = NULL_BLOCK
        for size, table in zip(self.sizes, tables, strict=True):
            while len(table) * size.block_size < tokens:
                table.append(self.free.pop())

    def drop(self, sequence: Sequence) -> None:
        for table in self.tables.pop(sequence):
            self.free += [page for page in table if page is not NULL_BLOCK]

    def held(self, sequence: Sequence) -> int:
        return sum(page is not NULL_BLOCK for table in self.tables[sequence] for page in table)


class HybridMachine(Served, RuleBasedStateMachine):
    """Admissions of prompts shorter and longer than the window, either in chunks or with pauses, leaps of any length,
    preemption; over blocks of one size or of two, with windows of two lengths."""

    @initialize(pool=combined(range(4, 25, 2), range(1, 4), COUNTS, range(1, 10), EITHER, RATIOS))
    def build(self, pool):
        num_pages, block_size, (full, sliding), window, self.may_pause, ratios = pool
        groups = PageGroups.of(full, sliding, window, num_pages)
        sizes = [GroupSize(block_size)] * full + [GroupSize(block_size, window, num_pages)] * sliding
        if len(set(ratios)) > 1:
            windows = [0] * full + [window, 2 * window + 1][:sliding]
            sizes = [
                GroupSize(block_size * ratios[place % 2], each, each and num_pages)
                for place, each in enumerate(windows)
            ]
            groups = groups._replace(sizes=tuple(sizes), window_tokens=max(windows))
        slots = lcm(*(size.block_size for size in sizes))
        self.serve(PagedMemory(num_pages, slots, ids=True, groups=groups))
        self.model = GroupTables(num_pages, sizes, groups)
        # Computed tokens of each chunked prefill.
        self.standing: dict[Sequence, int] = {}
        # Pages that the coming step takes, less those that it gives back, once it has begun.
        self.exchanged = 0

    def in_order(self) -> list[Sequence]:
        return sorted(self.tokens, key=lambda sequence: sequence.index)

    def step_fits(self) -> bool:
        """Whether every running sequence finds the pages for the coming step."""
        free = len(self.model.free)
        for sequence in self.in_order():
            back, taken = self.model.exchange(sequence, self.tokens[sequence], self.tokens[sequence] + 1)
            if free + back < taken:
                return False
            free += back - taken
        return True

    def begin(self) -> None:
        """Each running sequence gives back what its window has passed, and takes what its next token needs."""
        if not self.begun:
            before = len(self.model.free)
            super().begin()
            for sequence in self.in_order():
                self.model.reach(sequence, self.tokens[sequence] - 1, self.tokens[sequence])
            self.exchanged = before - len(self.model.free)

    def has_room_for(self, sequence: Sequence, tokens: int, pauses: bool = False) -> bool:
        """Whether the tables of a sequence can come to hold so many tokens, once running ones have theirs."""
        free = len(self.model.free)
        if not (self.begun or pauses):
            if not self.step_fits():
                return False
            exchanges = [self.model.exchange(s, held, held + 1) for s, held in self.tokens.items()]
            free += sum(back - taken for back, taken in exchanges)
        back, taken = self.model.exchange(sequence, self.standing.get(sequence, 0), tokens)
        return taken <= free + back

    @rule(request=combined(PROMPTS, OUTPUTS, EITHER, EITHER))
    def admit(self, request):
        """A new request, or one that was preempted; with a pause where the step has not begun."""
        prompt, output, again, pauses = request
        pauses, again = pauses and self.may_pause and not self.begun, again and bool(self.state.waiting)
        sequence = self.state.waiting[0] if again else self.arrive(prompt, output)
        if not self.has_room_for(sequence, sequence.start_tokens, pauses):
            return
        if again:
            self.state.waiting.popleft()
        self.end_prefill(sequence, pauses)
        if pauses:
            self.advance(0)

    def end_prefill(self, sequence: Sequence, pauses: bool = False) -> None:
        computed = self.standing.pop(sequence, 0)
        self.start(sequence, pauses)
        self.model.reach(sequence, computed, sequence.start_tokens)
        if not pauses:
            # The slot of its last token counts as a running sequence's.
            self.exchanged += sum((sequence.start_tokens - 1) % size.block_size == 0 for size in self.model.sizes)

    @precondition(lambda self: not self.may_pause)
    @rule(chunk=combined(range(4, 25), OUTPUTS, range(1, 9), range(4)))
    def prefill(self, chunk):
        """A chunk, of a new request or of one that goes on, which leaves at least one token to compute."""
        prompt, output, tokens, pick = chunk
        going_on = list(self.state.prefilling)
        is_new = pick >= len(going_on)
        sequence = self.arrive(prompt, output) if is_new else going_on[pick]
        before = self.standing.get(sequence, 0)
        if before + tokens >= sequence.start_tokens or not self.has_room_for(sequence, before + tokens):
            return
        self.begin()
        if is_new:
            self.state.waiting.appendleft(sequence)
        else:
            self.check_chunk(sequence, tokens)
        self.state.prefill(sequence, tokens)
        self.memory.prefill(sequence, self.state.decode_step)
        self.model.reach(sequence, before, before + tokens)
        self.standing[sequence] = before + tokens

    def check_chunk(self, sequence: Sequence, tokens: int) -> None:
        """What a transaction says of a chunk."""
        computed = self.standing[sequence]
        back, taken = self.model.exchange(sequence, computed, computed + tokens)
        transaction = self.memory.transaction(self.state.decode_step)
        # As policies do: running sequences take their blocks before the chunk gives any back.
        transaction.grow_tables(1)
        assert transaction.chunk_blocks(sequence, tokens) == taken - back

    @precondition(lambda self: self.standing)
    @rule(pick=picks)
    def continue_prefill(self, pick):
        """The last chunk of a prefill."""
        sequence = list(self.standing)[pick % len(self.standing)]
        if self.has_room_for(sequence, sequence.start_tokens):
            del self.state.prefilling[sequence]
            self.end_prefill(sequence)

    @precondition(lambda self: (self.tokens or self.standing) and not self.begun)
    @rule(pick=picks)
    def evict(self, pick):
        """One or two give way, whether they run or not."""
        victims = chosen([*self.tokens, *self.standing], pick)
        self.memory.evict(tuple(victims), (), self.state.decode_step)
        self.state.preempt(tuple(victims), ())
        # Those that do not run give their pages back first.
        for sequence in sorted(victims, key=lambda sequence: sequence in self.tokens):
            self.model.drop(sequence)
            self.tokens.pop(sequence, None)
            self.standing.pop(sequence, None)

    @precondition(lambda self: self.tokens or self.begun)
    @rule(steps=spans)
    def leap(self, steps):
        """As far as pages reach, stopping where a sequence finishes."""
        if not self.tokens:
            self.advance(0)
            return
        while steps and self.tokens and (self.begun or self.step_fits()):
            if not self.begun:
                self.check_transaction()
            reach = max(1, self.reach(min(steps, self.steps_to_finish())))
            self.advance(reach)
            steps -= reach

    def reach(self, limit: int) -> int:
        """Steps for which the pages suffice; before the coming one has begun all of them, as far as its cycles are alike."""
        steps = min(limit, self.memory.steps_with(self.state, self.memory.free, limit))
        if not self.begun:
            alike = min(kind.steps_alike(self.state.decode_step) for kind in self.memory.giving)
            assert steps == min(self.steps_that_fit(limit), alike)
        return steps

    def steps_that_fit(self, limit: int) -> int:
        """Steps in each of which pages that are free before it suffice for all sequences, found on a copy of the tables."""
        copy = GroupTables(0, self.model.sizes, self.model.groups)
        copy.free = [*self.model.free]
        copy.tables = {sequence: tuple(map(list, tables)) for sequence, tables in self.model.tables.items()}
        for step in range(limit):
            tokens = {sequence: self.tokens[sequence] + step for sequence in self.in_order()}
            if sum(copy.exchange(sequence, held, held + 1)[1] for sequence, held in tokens.items()) > len(copy.free):
                return step
            for sequence, held in tokens.items():
                copy.reach(sequence, held, held + 1)
        return limit

    def advance(self, steps: int) -> None:
        """Steps pass, and finished sequences leave."""
        predicted = self.predicted_steps() if steps else {}
        if steps:
            self.begin()
        self.look()
        assert self.memory.advance(self.state, steps) == self.meter()
        self.levels = [len(self.model.free)]
        self.step_on(steps)
        for pages, number in predicted.items():
            first = next((number for number, level in enumerate(self.levels, 1) if level >= pages), None)
            assert number == first or (first is None and number > steps)
        finished = self.finished()
        assert self.state.take_finished() == finished
        self.memory.release(finished, self.state.decode_step)
        for sequence in finished:
            del self.tokens[sequence]
            self.model.drop(sequence)

    def predicted_steps(self) -> dict[int, int | None]:
        """After which step so many pages are free; untold while a prompt has yet to give back what its window passed."""
        free, more = self.memory.free, () if any(kind.prompts for kind in self.memory.giving) else (0, 1, 3, 8)
        return {free + pages: self.memory.step_that_frees(self.state.decode_step, free + pages) for pages in more}

    def step_on(self, steps: int) -> None:
        """Within a leap every sequence finds pages, in any order."""
        for _ in range(steps - 1):
            self.begun = False
            taken = sum(self.model.exchange(s, tokens, tokens + 1)[1] for s, tokens in self.tokens.items())
            assert taken <= len(self.model.free)
            self.begin()
            self.levels.append(len(self.model.free))
        self.begun = False
        self.state.decode_step += steps

    def meter(self) -> tuple[int, ...]:
        """Slots that are live, and of a group that keeps every token those held and past the ends of unfinished prompts; and those that
        a sliding group has given back. Where blocks have several sizes, of each class of groups, in slots of its own."""
        tables, columns = self.model.tables, [sum(self.tokens.values()) + sum(self.standing.values())]
        classes = self.memory.groups.classes(self.memory.block_size)
        for each in classes if self.memory.groups.sizes else classes[-1:]:
            size, group = each.block_size, each.places[0]
            columns.append(size * sum(len(found[group]) for found in tables.values()))
            columns.append(sum(max(0, len(tables[s][group]) * size - s.target_tokens) for s in self.standing))
            if each.window_tokens:
                columns.append(size * sum(found[group].count(NULL_BLOCK) for found in tables.values()))
        return tuple(columns)

    def look(self) -> None:
        """The tables, as a look finds them now. Invariants 2 and 3: a page is in one entry, or free."""
        kept = self.memory.group_tables
        kept.grow_until(self.state.decode_step + self.begun)
        assert kept.tables == self.model.tables and [*reversed(kept.pool.free_ids)] == self.model.free
        named = Counter(page for tables in kept.tables.values() for table in tables for page in table)
        del named[NULL_BLOCK]
        assert kept.pool.reference_counts == [named[page] for page in range(self.memory.num_blocks)]
        assert sorted([*named.elements(), *kept.pool.free_ids]) == list(range(self.memory.num_blocks))

    @invariant()
    def holds(self):
        self.look()
        # ``free`` does not include the exchange of the coming step.
        assert self.memory.free == len(self.model.free) + (self.exchanged if self.begun else 0)
        if not self.begun:
            self.check_transaction()

    def check_transaction(self) -> None:
        """What a transaction says of the coming step, of each sequence and of all."""
        decode_step, taken_by_all, back_by_all = self.state.decode_step, 0, 0
        transaction = self.memory.transaction(decode_step)
        for sequence, tokens in self.tokens.items():
            back, taken = self.model.exchange(sequence, tokens, tokens + 1)
            assert transaction.exchange(sequence, decode_step) == (back, taken)
            taken_by_all += taken
            back_by_all += back
        for sequence in (*self.tokens, *self.standing):
            assert self.memory.held_blocks(sequence, decode_step) == self.model.held(sequence)
        assert (transaction.takes, transaction.need) == (taken_by_all, taken_by_all - back_by_all)
