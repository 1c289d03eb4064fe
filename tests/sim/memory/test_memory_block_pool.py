"""The block pool on logs worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim.memory import BlockPool
from fragmeter.sim.memory.prefix import UNSHARED, BlockResidency, LeastRecentlyUsed
from fragmeter.sim.types.errors import SimulationFault
from observed import observed_ticks


def test_the_last_block_freed_is_the_first_one_taken():
    pool = BlockPool(4)
    assert pool.get_new_blocks(3) == [0, 1, 2]
    pool.free_blocks([0, 2])
    assert [pool.get_new_blocks(1)[0], pool.get_new_blocks(1)[0], pool.get_new_blocks(1)[0]] == [2, 0, 3]
    with pytest.raises(SimulationFault, match="1 blocks are taken and 0 are free"):
        pool.get_new_blocks(1)[0]


def test_the_block_free_for_longest_is_the_first_one_taken_from_a_queue():
    pool = BlockPool(5, LeastRecentlyUsed)
    assert pool.get_new_blocks(3) == [0, 1, 2]
    pool.free_blocks([0, 2])
    pool.free_blocks([1])
    assert pool.free_ids == (3, 4, 2, 0, 1)
    assert (pool.get_new_blocks(3), pool.get_new_blocks(2), pool.num_free) == ([3, 4, 2], [0, 1], 0)
    with pytest.raises(SimulationFault, match="1 blocks are taken and 0 are free"):
        pool.get_new_blocks(1)[0]


def test_a_pool_costs_what_is_taken_of_it():
    pool = BlockPool(10**15)
    pool.free_blocks(pool.get_new_blocks(3)[1:])
    assert (pool.num_free, pool.get_new_blocks(4)) == (10**15 - 1, [2, 1, 3, 4])


def test_what_is_free_is_not_released():
    pool = BlockPool(4)
    taken = pool.get_new_blocks(2)
    with pytest.raises(SimulationFault, match="block 3 is free"):
        pool.free_blocks([0, 3])
    pool = BlockPool(4)
    with pytest.raises(SimulationFault, match="a block is released twice by one table"):
        pool.free_blocks([*pool.get_new_blocks(2), *taken])


def test_a_block_that_is_named_twice_is_freed_twice_before_it_is_free():
    pool = BlockPool(1)
    block = pool.get_new_blocks(1)[0]
    pool.touch([block])
    pool.free_blocks([block])
    assert pool.num_free == 0
    pool.free_blocks([block])
    assert pool.free_ids == (0,)
    with pytest.raises(SimulationFault, match="block 0"):
        pool.free_blocks([block])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    pool = BlockPool(4)
    first = pool.get_new_blocks(3)
    for block, name in zip(first, [11, 12, 13], strict=True):
        pool.cache_full_blocks([block], [name])
    pool.free_blocks(first)
    assert pool.free_ids == (3, 2, 1, 0)
    assert (pool.num_free, pool.num_cached) == (4, 3)
    assert pool.get_new_blocks(2) == [3, 2], "first the block that holds nothing, then the end"
    assert pool.get_cached_blocks([11, 12, 13]) == [0, 1]
    assert (pool.num_cached, pool.evicted_blocks) == (2, 1)


def test_hit_blocks_leave_the_queue_and_come_back_at_its_tail():
    pool = BlockPool(4)
    for name in (11, 12):
        (block,) = pool.get_new_blocks(1)
        pool.cache_full_blocks([block], [name])
        pool.free_blocks([block])
    assert pool.free_ids == (2, 3, 0, 1)
    pool.touch(pool.get_cached_blocks([11]), 0)
    assert pool.free_ids == (2, 3, 1)
    pool.touch(pool.get_cached_blocks([11]), 0)
    assert pool.reference_counts == [2, 0, 0, 0]
    pool.free_blocks([0])
    pool.free_blocks([0])
    assert pool.free_ids == (2, 3, 1, 0)


def test_of_two_blocks_of_one_name_the_first_is_found_and_the_other_remains():
    pool = BlockPool(3)
    one, other = pool.get_new_blocks(2)
    pool.cache_full_blocks([one], [7])
    pool.cache_full_blocks([other], [7])
    assert pool.get_cached_blocks([7]) == [one]
    pool.free_blocks([one])
    pool.get_new_blocks(2)
    assert pool.get_cached_blocks([7]) == [other]


def test_a_look_up_ends_at_the_first_name_that_is_missing():
    pool = BlockPool(3)
    for block, name in zip(pool.get_new_blocks(3), [11, 13, 14], strict=True):
        pool.cache_full_blocks([block], [name])
    assert pool.get_cached_blocks([11, 12, 13]) == [0]
    assert pool.get_cached_blocks([12, 13]) == []
    assert pool.get_cached_blocks([13, 14]) == [1, 2]


def test_what_vllm_would_report_of_a_block_hit_six_times():
    residency = BlockResidency()
    pool = BlockPool(1, residency=residency)
    pool.cache_full_blocks([pool.get_new_blocks(1, [10] * 1)[0]], [5])
    pool.free_blocks([0])
    for second in (11, 12, 14, 18, 26, 42):
        pool.touch([0], second)
        pool.free_blocks([0])
    assert not any(len(ticks) for ticks, _ in observed_ticks(residency).values()), (
        "a block that is still cached is not logged"
    )
    pool.get_new_blocks(1, [100] * 1)
    assert {name: np.repeat(*each).tolist() for name, each in observed_ticks(residency).items()} == {
        "vllm:kv_block_lifetime_seconds": [90],
        "vllm:kv_block_idle_before_evict_seconds": [58],
        "vllm:kv_block_reuse_gap_seconds": [4, 8, 16],
    }
    assert observed_ticks(residency, lambda seconds: seconds * 7)["vllm:kv_block_lifetime_seconds"][0].tolist() == [630]


def test_a_pool_never_lends_what_it_has_not():
    pool = BlockPool(2)
    with pytest.raises(SimulationFault, match="3 blocks are taken and 2 are free"):
        pool.get_new_blocks(3)
    with pytest.raises(SimulationFault, match="block 0 is free"):
        pool.touch([0], 0)
    with pytest.raises(SimulationFault, match="block 0 is free"):
        pool.free_blocks([0])
    pool.free_blocks(pool.get_new_blocks(2))
    with pytest.raises(SimulationFault, match="block 1 is cached while it is free"):
        pool.cache_full_blocks([1], [9])
    with pytest.raises(SimulationFault, match="block 1 is shared while it is free and has no hash"):
        pool.touch([1])
    with pytest.raises(SimulationFault, match="block 1 is released while it is free"):
        pool.free_blocks([1])


def test_blocks_without_a_hash_go_to_the_head_if_they_are_taken_first():
    pool = BlockPool(5)
    table = pool.get_new_blocks(4)
    for block, name in zip(table, [11, 12]):
        pool.cache_full_blocks([block], [name])
    pool.free_blocks(table)
    assert pool.free_ids == (3, 2, 4, 1, 0)


def test_a_block_that_no_look_up_asks_for_is_cached_and_evicted_without_a_place_in_the_map():
    pool = BlockPool(2)
    table = pool.get_new_blocks(2)
    pool.cache_full_blocks(table, [UNSHARED, UNSHARED])
    pool.free_blocks(table)
    assert (pool.num_cached, pool.get_cached_blocks([UNSHARED])) == (2, [])
    assert pool.get_new_blocks(1) == [1] and pool.evicted_blocks == 1
    pool.free_blocks([1])
    pool.touch([0])
    pool.cache_full_blocks([0], [5])
    assert pool.get_cached_blocks([5]) == [0], "its hash may be asked for later"


def test_hit_blocks_leave_the_queue_in_runs_and_one_by_one():
    pool = BlockPool(6, LeastRecentlyUsed)
    table = pool.get_new_blocks(6)
    pool.cache_full_blocks(table, [*range(1, 7)])
    pool.free_blocks(table)
    assert pool.free_ids == (5, 4, 3, 2, 1, 0)
    for hit, left in (([2, 3], (5, 4, 1, 0)), ([0, 5], (4, 1)), ([1, 4], ())):
        pool.touch(hit)
        assert pool.free_ids == left and pool.num_free == len(left)
    pool.free_blocks([1])
    assert pool.free_ids == (1,)
