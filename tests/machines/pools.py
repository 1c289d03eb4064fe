"""Pools of blocks with reference counts against lists that are searched from end to end."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory import BlockPool
from fragmeter.sim.memory.accounting.moments import after_step, at_row, in_step
from fragmeter.sim.memory.prefix import Chains, SegmentPool, lookup_blocks
from fragmeter.sim.types.errors import SimulationFault

from .draws import EITHER, combined, picks
from .hashed_pool import BlockHistory, RecordedPool


class PoolMachine(RuleBasedStateMachine):
    """Tables that name blocks, some of them shared; a block is free when no table names it."""

    @initialize(num_blocks=st.integers(0, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.stack = list(reversed(range(num_blocks)))
        self.tables: list[list[int]] = []

    def named(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @rule(count=st.integers(0, 6))
    def take_many(self, count):
        if count > len(self.stack):
            with pytest.raises(SimulationFault):
                deepcopy(self.pool).take_many(count)
            return
        one_by_one = deepcopy(self.pool)
        expected = [self.stack.pop() for _ in range(count)]
        assert [one_by_one.take() for _ in range(count)] == expected
        assert self.pool.take_many(count) == expected
        self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(pick=picks)
    def fork(self, pick):
        """A child names its parent's blocks."""
        table = self.tables[pick % len(self.tables)]
        for block in table:
            self.pool.share([block])
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(pick=picks)
    def release(self, pick):
        table = self.tables.pop(pick % len(self.tables))
        self.pool.release(table)
        self.stack += [block for block in table if not self.named(block)]

    @precondition(lambda self: self.stack)
    @rule(pick=picks)
    def misuse(self, pick):
        """No sequence shares a free block, none frees one twice."""
        block = self.stack[pick % len(self.stack)]
        with pytest.raises(SimulationFault, match=f"block {block}"):
            deepcopy(self.pool).share([block])
        with pytest.raises(SimulationFault, match=f"block {block}"):
            deepcopy(self.pool).release([block])

    @invariant()
    def a_count_is_the_number_of_table_entries(self):
        """Invariant 2: a block's reference count is the number of table entries that name it; free ones have none."""
        counts = [self.named(block) for block in range(self.pool.num_blocks)]
        assert self.pool.reference_counts == counts
        assert [self.pool.is_shared(block) for block in range(self.pool.num_blocks)] == [n > 1 for n in counts]
        assert list(self.pool.free_ids) == self.stack
        assert self.pool.num_free == len(self.stack)


class Strings:
    """What requests are made of, as ``workload.content.Tokens``: one string of runs each, to the end of its output."""

    def __init__(self) -> None:
        self.strings: list[list[tuple[int, int, int]]] = []
        self._unshared: list[bool] = []

    def add(self, prompt: list[tuple[int, int, int]]) -> int:
        """A request with such a prompt, and an output of its own."""
        own = 100 + len(self.strings)
        self.strings.append([*prompt, (own, 0, 40)])
        self._unshared.append(not prompt)
        return len(self.strings) - 1

    def runs(self, request: int) -> list[tuple[int, int, int]]:
        return self.strings[request][:-1]

    def output_runs(self, request: int) -> list[tuple[int, int, int]]:
        return self.strings[request][-1:]

    @property
    def unshared(self) -> list[bool]:
        return self._unshared

    def tokens(self, request: int) -> tuple[tuple[int, int], ...]:
        """One by one."""
        return tuple(
            (stream, place) for stream, start, length in self.strings[request] for place in range(start, start + length)
        )


class Served:
    """One sequence on the device, in both pools."""

    def __init__(self, request: int, table, ids: list[int], blocks: list[int], tokens: int, known: int) -> None:
        self.request, self.table, self.ids, self.blocks = request, table, ids, blocks
        #: Tokens computed, those that a prefill has to compute, and blocks published of ``blocks``.
        self.tokens, self.known, self.published = tokens, known, 0
        self.decodes = False


class SegmentPoolMachine(RuleBasedStateMachine):
    """Requests prefill in chunks, decode step by step, are preempted and end, in segments and block by block.

    The pool of segments hears of what decoding sequences take and fill when a look-up, a release or an extension makes it
    settle; the pool of blocks takes and publishes each in its step.
    """

    @initialize(setup=combined(range(1, 15), (1, 2, 3), EITHER, EITHER))
    def start(self, setup):
        num_blocks, self.size, self.unnamed_first, self.has_ids = setup
        self.strings = Strings()
        chains = Chains(self.strings, self.size)
        self.pool = SegmentPool(num_blocks, self.size, chains, in_step, self.unnamed_first, self.has_ids)
        self.pool.history.growing = self.growing
        self.history = BlockHistory()
        self.blocks = RecordedPool(num_blocks, self.history, self.unnamed_first)
        self.numbers: dict[tuple, int] = {}
        self.served: list[Served] = []
        self.returning: list[tuple[int, int]] = []
        self.step = self.row = 0
        #: Cached blocks by moment, as they were when it was over.
        self.levels: Counter[int] = Counter()
        self.cached = 0

    # --- What both are asked ---

    def name(self, request: int, place: int) -> int:
        prefix = self.strings.tokens(request)[: (place + 1) * self.size]
        return self.numbers.setdefault(prefix, len(self.numbers))

    def settle(self, moment: int) -> None:
        self.levels[moment] += self.blocks.num_cached - self.cached
        self.cached = self.blocks.num_cached

    def growing(self):
        return [(one.table.taken, len(one.blocks), one.lag) for one in self.served if one.decodes]

    def fill(self, one: Served, tokens: int) -> None:
        one.tokens = tokens
        for place in range(one.published, tokens // self.size):
            self.blocks.publish(one.blocks[place], self.name(one.request, place))
        one.published = tokens // self.size

    def take(self, one: Served, count: int, moment: int) -> None:
        taken = self.blocks.take(count, moment)
        one.blocks += taken
        if self.has_ids:
            one.ids += self.pool.queue.take_many(count)
            assert one.ids == one.blocks
        self.settle(moment)

    def prefill(self, one: Served, tokens: int) -> None:
        """Compute up to so many tokens."""
        moment = at_row(self.row)
        missing = -(-tokens // self.size) - len(one.blocks)
        if missing:
            self.take(one, missing, moment)
            self.pool.take(one.table, missing, self.step, moment)
        self.pool.publish(one.table, tokens // self.size, self.step)
        self.fill(one, tokens)
        if tokens == one.known:
            one.decodes = True
            one.lag = tokens - self.step
            if one.table.path is not None:
                self.pool.decode(one.table, one.lag)

    # --- Operations ---

    @rule(request=combined(range(4), range(1, 6), range(3), range(1, 5), range(1, 20)))
    def come(self, request):
        """With one or two pieces of two kinds, cut anywhere, or a prompt of its own; perhaps in chunks."""
        kind, first, second, length, budget = request
        prompt = [[], [(1, 0, first)], [(2, 0, first)], [(1, 0, first), (second, 0, length)]][kind]
        if self.returning and kind == 3 and second == 2:
            index, known = self.returning.pop()
        else:
            index = self.strings.add(prompt)
            known = sum(run[2] for run in prompt) or length
        self.look_up(index, known, budget)

    def look_up(self, index: int, known: int, budget: int) -> None:
        most = lookup_blocks(known, self.size)
        path = self.pool.path(index)
        self.pool.queue.reach(self.blocks.num_free)
        found = [] if path is None else self.pool.look_up(path, most, self.step)
        hits = self.blocks.lookup(self.name(index, place) for place in range(most))
        assert (found[-1][2] if found else 0) == len(hits)
        if (
            -(-known // self.size) - sum(self.blocks.reference_counts[block] > 0 for block in hits)
            > self.blocks.num_free
        ):
            self.returning.append((index, known))
            return
        moment, ids = at_row(self.row), [] if self.has_ids else None
        self.blocks.hit(hits, most, moment)
        self.settle(moment)
        table = self.pool.enter(path, found, moment, ids)
        assert not self.has_ids or ids == hits
        one = Served(index, table, ids, list(hits), len(hits) * self.size, known)
        one.published = len(hits)
        self.served.append(one)
        self.prefill(one, min(known, one.tokens + budget))

    @precondition(lambda self: any(not one.decodes for one in self.served))
    @rule(pick=picks, budget=st.integers(1, 9))
    def continue_prefill(self, pick, budget):
        waiting = [one for one in self.served if not one.decodes]
        one = waiting[pick % len(waiting)]
        tokens = min(one.known, one.tokens + budget)
        if -(-tokens // self.size) - len(one.blocks) <= self.blocks.num_free:
            self.pool.queue.reach(self.blocks.num_free)
            self.row += 1
            self.prefill(one, tokens)

    @rule(steps=st.integers(1, 5))
    def decode(self, steps):
        """In each step the running sequences take a block where theirs are full, as long as there is one for each."""
        self.row += 1
        for _ in range(steps):
            step = self.step + 1
            full = [one for one in self.served if one.decodes and not one.tokens % self.size]
            if len(full) > self.blocks.num_free or any(one.tokens > 20 for one in self.served):
                return
            self.step = step
            for one in full:
                self.take(one, 1, in_step(step))
            for one in self.served:
                if one.decodes:
                    self.fill(one, one.tokens + 1)

    @precondition(lambda self: self.served)
    @rule(pick=picks, preempted=st.booleans())
    def go(self, pick, preempted):
        one = self.served.pop(pick % len(self.served))
        self.pool.queue.reach(self.blocks.num_free)
        moment = after_step(self.step + 1)
        self.blocks.release(one.blocks)
        self.settle(moment)
        returns = one.request if preempted else None
        lag = one.lag if one.decodes else None
        self.pool.release(one.table, len(one.blocks), one.tokens // self.size, moment, lag, returns)
        if preempted:
            self.returning.append((one.request, one.tokens + one.decodes if one.decodes else one.known))

    # --- What has to be equal ---

    @invariant()
    def counts_are_equal(self):
        assert self.pool.num_shared == self.blocks.num_shared

    @invariant()
    def the_queue_is_the_same(self):
        if self.has_ids:
            self.pool.queue.reach(self.blocks.num_free)
            assert self.pool.queue.free_ids == self.blocks.free_ids

    @rule()
    def read_the_history(self):
        """In the middle of it, and once more at the end."""
        assert self.pool.history.evicted_blocks == self.blocks.evicted_blocks
        changes = self.pool.history.changes()
        found: Counter[int] = Counter()
        for moment, blocks in zip(changes["moment"].tolist(), changes["blocks"].tolist(), strict=True):
            found[moment] += blocks
        assert {moment: blocks for moment, blocks in found.items() if blocks} == {
            moment: blocks for moment, blocks in self.levels.items() if blocks
        }
        observed = self.pool.history.observed_ticks()
        for name, ticks in self.history.observed_ticks().items():
            found: Counter[int] = Counter()
            for value, blocks in zip(*(column.tolist() for column in observed[name]), strict=True):
                found[value] += blocks
            assert found == Counter(ticks.tolist())

    def teardown(self):
        if hasattr(self, "pool"):
            self.read_the_history()
