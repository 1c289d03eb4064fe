"""Pools of blocks with reference counts against lists that are searched from end to end."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory import BlockPool
from fragmeter.sim.memory.prefix import BlockHistory, HashChain, HashedBlockPool
from fragmeter.sim.types.errors import SimulationFault

from .draws import combined, picks


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
            self.pool.share(block)
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
            deepcopy(self.pool).share(block)
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


class HashedPoolMachine(RuleBasedStateMachine):
    """Requests come, fill their blocks one by one and go; the model keeps lists and the whole log of every block."""

    @initialize(num_blocks=st.integers(1, 12))
    def fill(self, num_blocks):
        self.history = BlockHistory()
        self.pool = HashedBlockPool(num_blocks, self.history)
        self.chain = HashChain()
        self.queue = list(range(num_blocks))
        self.names: dict[int, tuple[int, ...]] = {}  # block -> contents up to and with it, first published first
        self.log: dict[int, list[tuple[str, int]]] = {}
        self.tables: list[tuple[list[int], list[int], int]] = []  # blocks, contents, how many are published
        self.ended: list[tuple[list[tuple[str, int]], int]] = []
        self.now = self.queried = self.hit = self.evicted = 0

    def found(self, contents):
        """By search: the block first published under each beginning of ``contents``, until there is none."""
        blocks = []
        for end in range(1, len(contents) + 1):
            same = [block for block, name in self.names.items() if name == tuple(contents[:end])]
            if not same:
                break
            blocks.append(same[0])
        return blocks

    @rule(request=combined(range(1, 7), range(64), range(4)))
    def come(self, request):
        """With contents of two kinds, so that they often begin alike."""
        length, bits, later = request
        contents = [bits >> place & 1 for place in range(length)]
        self.now += later
        hits = self.found(contents[:-1])
        names = self.chain.extend(contents)
        assert self.pool.lookup(names[:-1]) == hits
        rest, left = len(contents) - len(hits), [block for block in self.queue if block not in hits]
        if rest > len(left):
            trial = deepcopy(self.pool)
            trial.take_cached(hits, len(contents) - 1, self.now)
            with pytest.raises(SimulationFault, match=f"{rest} blocks are taken and {len(left)} are free"):
                trial.take(rest, self.now)
            return
        self.pool.take_cached(hits, len(contents) - 1, self.now)
        new = self.pool.take(rest, self.now)
        assert new == left[:rest]
        self.queue = left[rest:]
        self.queried, self.hit = self.queried + len(contents) - 1, self.hit + len(hits)
        for block in hits:
            self.log[block].append(("hit", self.now))
        for block in new:
            self.evicted += self.names.pop(block, None) is not None
            if block in self.log:
                self.ended.append((self.log[block], self.now))
            self.log[block] = [("taken", self.now)]
        self.tables.append(([*hits, *new], contents, len(hits)))

    @precondition(lambda self: self.tables)
    @rule(pick=picks)
    def publish_one(self, pick):
        place = pick % len(self.tables)
        blocks, contents, published = self.tables[place]
        if published == len(blocks):
            with pytest.raises(SimulationFault, match="second time"):
                self.pool.publish(blocks[-1], 0)
            return
        block, name = blocks[published], tuple(contents[: published + 1])
        self.pool.publish(block, self.chain.extend(name)[-1])
        self.names[block] = name
        self.tables[place] = (blocks, contents, published + 1)

    @precondition(lambda self: self.tables)
    @rule(pick=picks)
    def go(self, pick):
        blocks, _, _ = self.tables.pop(pick % len(self.tables))
        self.pool.release(blocks)
        for block in blocks[::-1]:
            if not any(block in other for other, _, _ in self.tables):
                self.queue.append(block)

    @invariant()
    def all_is_equal(self):
        """Invariant 2, and every figure by its definition."""
        for block, count in enumerate(self.pool.reference_counts):
            assert count == sum(table.count(block) for table, _, _ in self.tables)
        assert self.pool.free_ids == tuple(self.queue)
        assert self.pool.num_free == len(self.queue)
        assert self.pool.num_entries == sum(len(table) for table, _, _ in self.tables)
        assert self.pool.num_shared == sum(max(0, count - 1) for count in self.pool.reference_counts)
        assert self.pool.num_cached == sum(block in self.names for block in self.queue)
        assert {block for block, name in enumerate(self.pool.hashes) if name is not None} == set(self.names)
        figures = (self.pool.queried_blocks, self.pool.hit_blocks, self.pool.evicted_blocks)
        assert figures == (self.queried, self.hit, self.evicted)

    @invariant()
    def histories_are_what_the_logs_say(self):
        touches = [[when for what, when in log if what == "hit"][-4:] for log, _ in self.ended]
        assert [column.tolist() for column in self.history.observed_ticks().values()] == [
            [end - log[0][1] for log, end in self.ended],
            [end - log[-1][1] for log, end in self.ended],
            [later - earlier for times in touches for earlier, later in pairwise(times)],
        ]
