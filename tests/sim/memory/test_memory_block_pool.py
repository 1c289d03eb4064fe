"""The block pool on logs worked out by hand."""

from __future__ import annotations

import pytest

from fragmeter.sim.memory import BlockPool
from fragmeter.sim.memory.paged.block_pool import BlockQueue
from fragmeter.sim.types.errors import SimulationFault


def test_the_last_block_freed_is_the_first_one_taken():
    pool = BlockPool(4)
    assert pool.take_many(3) == [0, 1, 2]
    pool.release([0, 2])
    assert [pool.take(), pool.take(), pool.take()] == [2, 0, 3]
    with pytest.raises(SimulationFault, match="1 blocks are taken and 0 are free"):
        pool.take()


def test_the_block_free_for_longest_is_the_first_one_taken_from_a_queue():
    pool = BlockQueue(5)
    assert pool.take_many(3) == [0, 1, 2]
    pool.release([0, 2])
    pool.release([1])
    assert pool.free_ids == (1, 0, 2, 4, 3)
    assert (pool.take_many(3), pool.take_many(2), pool.num_free) == ([3, 4, 2], [0, 1], 0)
    with pytest.raises(SimulationFault, match="1 blocks are taken and 0 are free"):
        pool.take()


def test_a_pool_costs_what_is_taken_of_it():
    pool = BlockPool(10**15)
    pool.release(pool.take_many(3)[1:])
    assert (pool.num_free, pool.take_many(4)) == (10**15 - 1, [2, 1, 3, 4])


def test_what_is_free_is_not_released():
    pool = BlockPool(4)
    taken = pool.take_many(2)
    with pytest.raises(SimulationFault, match="block 3 is released while it is free"):
        pool.release([0, 3])
    pool = BlockPool(4)
    with pytest.raises(SimulationFault, match="a block is released twice by one table"):
        pool.release([*pool.take_many(2), *taken])


def test_a_block_that_is_named_twice_is_freed_twice_before_it_is_free():
    pool = BlockPool(1)
    block = pool.take()
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.free_ids == (0,)
    with pytest.raises(SimulationFault, match="block 0"):
        pool.release([block])
