"""The block pool against a dictionary of counts and a stack of ids."""

from __future__ import annotations

from copy import deepcopy

import pytest
from fragmeter.sim.errors import SimulationFault
from fragmeter.sim.memory import BlockPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


class PoolAgainstTables(RuleBasedStateMachine):
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

    @rule()
    def take(self):
        if not self.stack:
            with pytest.raises(SimulationFault):
                self.pool.take()
            return
        block = self.pool.take()
        assert block == self.stack.pop()
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        """A child names its parent's blocks."""
        table = data.draw(st.sampled_from(self.tables))
        for block in table:
            self.pool.share(block)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        self.stack += [block for block in table if not self.named(block)]

    @precondition(lambda self: self.stack)
    @rule(data=st.data())
    def misuse(self, data):
        """Nobody shares a free block, nobody frees one twice."""
        block = data.draw(st.sampled_from(self.stack))
        with pytest.raises(SimulationFault, match=f"block {block}"):
            deepcopy(self.pool).share(block)
        with pytest.raises(SimulationFault, match=f"block {block}"):
            deepcopy(self.pool).release([block])

    @invariant()
    def a_count_is_the_number_of_table_entries(self):
        """Invariant 2: a block's reference count is the number of table entries that name it; free ones have none."""
        assert self.pool.reference_counts == [self.named(block) for block in range(self.pool.num_blocks)]
        assert list(self.pool.free_ids) == self.stack
        assert self.pool.num_free == len(self.stack)


PoolAgainstTables.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestPoolAgainstTables = PoolAgainstTables.TestCase


def test_the_last_block_freed_is_the_first_one_taken():
    pool = BlockPool(4)
    assert pool.take_many(3) == [0, 1, 2]
    pool.release([0, 2])
    assert [pool.take(), pool.take(), pool.take()] == [2, 0, 3]
    with pytest.raises(SimulationFault, match="1 blocks are taken and 0 are free"):
        pool.take()


def test_a_block_that_is_named_twice_is_freed_twice_before_it_is_free():
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.free_ids == (0,)
    with pytest.raises(SimulationFault, match="block 0"):
        pool.release([block])
