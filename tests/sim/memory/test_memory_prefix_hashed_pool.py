"""Pools of blocks that are found by their hashes: logs worked out by hand."""

from __future__ import annotations

import pytest

from fragmeter.sim.types.errors import SimulationFault
from machines.hashed_pool import BlockHistory, RecordedPool


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    pool = RecordedPool(4)
    first = pool.take(3, 0)
    for block, name in zip(first, [11, 12, 13], strict=True):
        pool.publish(block, name)
    pool.release(first)
    assert pool.free_ids == (3, 2, 1, 0)
    assert (pool.num_free, pool.num_cached) == (4, 3)
    assert pool.take(2, 0) == [3, 2], "first the block that holds nothing, then the end"
    assert pool.lookup([11, 12, 13]) == [0, 1]
    assert (pool.num_cached, pool.evicted_blocks) == (2, 1)


def test_hit_blocks_leave_the_queue_and_come_back_at_its_tail():
    pool = RecordedPool(4)
    for name in (11, 12):
        (block,) = pool.take(1, 0)
        pool.publish(block, name)
        pool.release([block])
    assert pool.free_ids == (2, 3, 0, 1)
    pool.hit(pool.lookup([11]), 2, 0)
    assert pool.free_ids == (2, 3, 1)
    pool.hit(pool.lookup([11]), 1, 0)
    assert pool.reference_counts == [2, 0, 0, 0]
    pool.release([0])
    pool.release([0])
    assert pool.free_ids == (2, 3, 1, 0)
    assert (pool.queried_blocks, pool.hit_blocks) == (3, 2)


def test_of_two_blocks_of_one_name_the_first_is_found_and_the_other_remains():
    pool = RecordedPool(3)
    one, other = pool.take(2, 0)
    pool.publish(one, 7)
    pool.publish(other, 7)
    assert pool.lookup([7]) == [one]
    pool.release([one])
    pool.take(2, 0)
    assert pool.lookup([7]) == [other]


def test_a_look_up_ends_at_the_first_name_that_is_missing():
    pool = RecordedPool(3)
    for block, name in zip(pool.take(3, 0), [11, 13, 14], strict=True):
        pool.publish(block, name)
    assert pool.lookup([11, 12, 13]) == [0]
    assert pool.lookup([12, 13]) == []
    assert pool.lookup([13, 14]) == [1, 2]


def test_what_vllm_would_report_of_a_block_hit_six_times():
    history = BlockHistory()
    pool = RecordedPool(1, history)
    pool.publish(pool.take(1, 10)[0], 5)
    pool.release([0])
    for second in (11, 12, 14, 18, 26, 42):
        pool.hit([0], 1, second)
        pool.release([0])
    assert not any(map(len, history.observed_ticks().values())), "a block that is still cached is not logged"
    pool.take(1, 100)
    assert {name: ticks.tolist() for name, ticks in history.observed_ticks().items()} == {
        "vllm:kv_block_lifetime_seconds": [90],
        "vllm:kv_block_idle_before_evict_seconds": [58],
        "vllm:kv_block_reuse_gap_seconds": [4, 8, 16],
    }
    assert history.observed_ticks(lambda seconds: seconds * 7)["vllm:kv_block_lifetime_seconds"].tolist() == [630]


def test_a_pool_never_lends_what_it_has_not():
    pool = RecordedPool(2)
    with pytest.raises(SimulationFault, match="3 blocks are taken and 2 are free"):
        pool.take(3, 0)
    with pytest.raises(SimulationFault, match="block 0 is hit and has no hash"):
        pool.hit([0], 1, 0)
    with pytest.raises(SimulationFault, match="block 1 is published while it is free"):
        pool.publish(1, 9)
    with pytest.raises(SimulationFault, match="block 0 is released while it is free"):
        pool.release([0])


def test_blocks_without_a_hash_go_to_the_head_if_they_are_taken_first():
    pool = RecordedPool(5, unnamed_first=True)
    table = pool.take(4, 0)
    for block, name in zip(table, [11, 12]):
        pool.publish(block, name)
    pool.release(table)
    assert pool.free_ids == (3, 2, 4, 1, 0)
