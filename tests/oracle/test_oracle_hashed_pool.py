"""The per-block pool of the oracle: on logs worked out by hand, and against lists that are searched from end to end."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from oracle.hashed_pool import BlockHistory, HashedBlockPool, PoolError


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    pool = HashedBlockPool(4)
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
    pool = HashedBlockPool(4)
    for name in (11, 12):
        (block,) = pool.take(1, 0)
        pool.publish(block, name)
        pool.release([block])
    assert pool.free_ids == (2, 3, 0, 1)
    pool.take_cached(pool.lookup([11]), 2, 0)
    assert pool.free_ids == (2, 3, 1)
    pool.take_cached(pool.lookup([11]), 1, 0)
    assert pool.reference_counts == [2, 0, 0, 0]
    pool.release([0])
    pool.release([0])
    assert pool.free_ids == (2, 3, 1, 0)
    assert (pool.queried_blocks, pool.hit_blocks) == (3, 2)


def test_of_two_blocks_of_one_name_the_first_is_found_and_the_other_remains():
    pool = HashedBlockPool(3)
    one, other = pool.take(2, 0)
    pool.publish(one, 7)
    pool.publish(other, 7)
    assert pool.lookup([7]) == [one]
    pool.release([one])
    pool.take(2, 0)
    assert pool.lookup([7]) == [other]


def test_a_look_up_ends_at_the_first_name_that_is_missing():
    pool = HashedBlockPool(3)
    for block, name in zip(pool.take(3, 0), [11, 13, 14], strict=True):
        pool.publish(block, name)
    assert pool.lookup([11, 12, 13]) == [0]
    assert pool.lookup([12, 13]) == []
    assert pool.lookup([13, 14]) == [1, 2]


def test_what_vllm_would_report_of_a_block_hit_six_times():
    history = BlockHistory()
    pool = HashedBlockPool(1, history)
    pool.publish(pool.take(1, 10)[0], 5)
    pool.release([0])
    for second in (11, 12, 14, 18, 26, 42):
        pool.take_cached([0], 1, second)
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
    pool = HashedBlockPool(2)
    with pytest.raises(PoolError, match="3 blocks are taken and 2 are free"):
        pool.take(3, 0)
    with pytest.raises(PoolError, match="block 0 is hit and has no hash"):
        pool.take_cached([0], 1, 0)
    with pytest.raises(PoolError, match="block 1 is published while it is free"):
        pool.publish(1, 9)
    with pytest.raises(PoolError, match="block 0 is released while it is free"):
        pool.release([0])


def test_blocks_without_a_hash_go_to_the_head_if_they_are_taken_first():
    pool = HashedBlockPool(5, unnamed_first=True)
    table = pool.take(4, 0)
    for block, name in zip(table, [11, 12]):
        pool.publish(block, name)
    pool.release(table)
    assert pool.free_ids == (3, 2, 4, 1, 0)


def named(contents):
    """A number for each beginning of some contents of 0 and 1."""
    return [int("1" + "".join(map(str, contents[:end])), 2) for end in range(1, len(contents) + 1)]


class HashedPoolMachine(RuleBasedStateMachine):
    """Requests come, fill their blocks one by one and go; the model keeps lists and the whole log of every block."""

    @initialize(setup=st.tuples(st.integers(1, 12), st.booleans()))
    def fill(self, setup):
        num_blocks, self.unnamed_first = setup
        self.history = BlockHistory()
        self.pool = HashedBlockPool(num_blocks, self.history, self.unnamed_first)
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

    @rule(request=st.tuples(st.integers(1, 6), st.integers(0, 63), st.integers(0, 3)))
    def come(self, request):
        """With contents of two kinds, so that they often begin alike."""
        length, bits, later = request
        contents = [bits >> place & 1 for place in range(length)]
        self.now += later
        hits = self.found(contents[:-1])
        names = named(contents)
        assert self.pool.lookup(names[:-1]) == hits
        rest, left = len(contents) - len(hits), [block for block in self.queue if block not in hits]
        if rest > len(left):
            trial = deepcopy(self.pool)
            trial.take_cached(hits, len(contents) - 1, self.now)
            with pytest.raises(PoolError, match=f"{rest} blocks are taken and {len(left)} are free"):
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
    @rule(pick=st.integers(0, 63))
    def publish_one(self, pick):
        place = pick % len(self.tables)
        blocks, contents, published = self.tables[place]
        if published == len(blocks):
            with pytest.raises(PoolError, match="second time"):
                self.pool.publish(blocks[-1], 0)
            return
        block, name = blocks[published], tuple(contents[: published + 1])
        self.pool.publish(block, named(name)[-1])
        self.names[block] = name
        self.tables[place] = (blocks, contents, published + 1)

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 63))
    def go(self, pick):
        blocks, _, _ = self.tables.pop(pick % len(self.tables))
        self.pool.release(blocks)
        freed = [block for block in blocks[::-1] if not any(block in other for other, _, _ in self.tables)]
        first = [block for block in freed if self.unnamed_first and block not in self.names]
        self.queue = first + self.queue + [block for block in freed if block not in first]

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


def test_random_operations():
    run_state_machine_as_test(HashedPoolMachine, settings=hypothesis.settings.get_profile("machines"))
