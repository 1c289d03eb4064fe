"""vLLM's prefix cache against lists that are searched from end to end, and against logs worked by hand."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import pytest
from fragmeter.sim.errors import SimulationFault
from fragmeter.sim.memory.prefix import BlockHistory, HashChain, HashedBlockPool, lookup_blocks
from fragmeter.sim.ticks import PER_SECOND
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

# Contents that often begin alike.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class PoolAgainstLists(RuleBasedStateMachine):
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
        self.evicted: list[tuple[list[tuple[str, int]], int]] = []
        self.now = self.queried = self.hit = 0

    def found(self, contents):
        """By search: the block first published under each beginning of ``contents``, until there is none."""
        blocks = []
        for end in range(1, len(contents) + 1):
            same = [block for block, name in self.names.items() if name == tuple(contents[:end])]
            if not same:
                break
            blocks.append(same[0])
        return blocks

    @rule(contents=prompts, later=st.integers(0, 3))
    def come(self, contents, later):
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
            if self.names.pop(block, None):
                self.evicted.append((self.log[block], self.now))
            self.log[block] = [("taken", self.now)]
        self.tables.append(([*hits, *new], contents, len(hits)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish_one(self, data):
        place = data.draw(st.integers(0, len(self.tables) - 1))
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
    @rule(data=st.data())
    def go(self, data):
        blocks, _, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
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
        assert self.pool.num_cached == sum(block in self.names for block in self.queue)
        assert {block for block, name in enumerate(self.pool.hashes) if name is not None} == set(self.names)
        figures = (self.pool.queried_blocks, self.pool.hit_blocks, self.pool.evicted_blocks)
        assert figures == (self.queried, self.hit, len(self.evicted))

    @invariant()
    def histories_are_what_the_logs_say(self):
        touches = [[when for what, when in log if what == "hit"][-4:] for log, _ in self.evicted]
        assert self.history.lifetime_ticks == [end - log[0][1] for log, end in self.evicted]
        assert self.history.idle_before_evict_ticks == [end - log[-1][1] for log, end in self.evicted]
        gaps = [later - earlier for times in touches for earlier, later in pairwise(times)]
        assert self.history.reuse_gap_ticks == gaps


PoolAgainstLists.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestPoolAgainstLists = PoolAgainstLists.TestCase


@pytest.mark.parametrize(
    ("prompt_tokens", "block_size", "blocks"),
    [(1, 16, 0), (15, 16, 0), (16, 16, 0), (17, 16, 1), (32, 16, 1), (33, 16, 2), (5, 1, 4), (1, 1, 0)],
)
def test_a_hit_covers_full_blocks_and_never_the_last_token(prompt_tokens, block_size, blocks):
    assert lookup_blocks(prompt_tokens, block_size) == blocks


def test_a_number_of_the_chain_is_a_whole_prefix():
    chain = HashChain()
    assert chain.extend("abc") == [1, 2, 3]
    assert chain.extend("abd") == [1, 2, 4]
    assert chain.extend("bab") == [5, 6, 7], "the same contents behind others are other blocks"
    assert chain.extend("cd", prefix=2) == [3, 8]
    assert chain.extend("") == []
    assert chain.parents == [0, 0, 1, 2, 2, 0, 5, 6, 3]


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
    pool.publish(pool.take(1, 10 * PER_SECOND)[0], 5)
    pool.release([0])
    for second in (11, 12, 14, 18, 26, 42):
        pool.take_cached([0], 1, second * PER_SECOND)
        pool.release([0])
    assert history.lifetime_ticks == [], "nothing is told of a block that is still cached"
    pool.take(1, 100 * PER_SECOND)
    assert history.in_seconds() == {
        "vllm:kv_block_lifetime_seconds": [90.0],
        "vllm:kv_block_idle_before_evict_seconds": [58.0],
        "vllm:kv_block_reuse_gap_seconds": [4.0, 8.0, 16.0],
    }


def test_a_pool_never_lends_what_it_has_not():
    pool = HashedBlockPool(2)
    with pytest.raises(SimulationFault, match="3 blocks are taken and 2 are free"):
        pool.take(3, 0)
    with pytest.raises(SimulationFault, match="block 0 is hit and has no hash"):
        pool.take_cached([0], 1, 0)
    with pytest.raises(SimulationFault, match="block 1 is published while it is free"):
        pool.publish(1, 9)
    with pytest.raises(SimulationFault, match="block 0 is released while it is free"):
        pool.release([0])
