"""Pools of blocks with reference counts against lists that are searched from end to end."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory import BlockPool
from fragmeter.sim.types.errors import SimulationFault

from .draws import picks


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
    def get_new_blocks(self, count):
        if count > len(self.stack):
            with pytest.raises(SimulationFault):
                deepcopy(self.pool).get_new_blocks(count)
            return
        one_by_one = deepcopy(self.pool)
        expected = [self.stack.pop() for _ in range(count)]
        assert [block for _ in range(count) for block in one_by_one.get_new_blocks(1)] == expected
        assert self.pool.get_new_blocks(count) == expected
        self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(pick=picks)
    def fork(self, pick):
        """A child names its parent's blocks."""
        table = self.tables[pick % len(self.tables)]
        for block in table:
            self.pool.touch([block])
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(pick=picks)
    def release(self, pick):
        table = self.tables.pop(pick % len(self.tables))
        self.pool.free_blocks(table)
        self.stack += [block for block in table if not self.named(block)]

    @precondition(lambda self: self.stack)
    @rule(pick=picks)
    def misuse(self, pick):
        """No sequence shares a free block, none frees one twice."""
        block = self.stack[pick % len(self.stack)]
        with pytest.raises(SimulationFault, match=f"block {block}"):
            deepcopy(self.pool).touch([block])
        with pytest.raises(SimulationFault, match=f"block {block}"):
            deepcopy(self.pool).free_blocks([block])

    @invariant()
    def a_count_is_the_number_of_table_entries(self):
        """Invariant 2: a block's reference count is the number of table entries that name it; free ones have none."""
        counts = [self.named(block) for block in range(self.pool.num_blocks)]
        assert self.pool.reference_counts == counts
        assert [self.pool.is_shared(block) for block in range(len(self.pool.ref_cnt))] == [
            n > 1 for n in counts[: len(self.pool.ref_cnt)]
        ]
        assert [*reversed(self.pool.free_ids)] == self.stack
        assert self.pool.num_free == len(self.stack)
