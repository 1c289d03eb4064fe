"""``BlockPool`` with hashes and both orders of its queue against lists that are searched from end to end, with a log of every block.

Source of the metrics: vLLM V1, vllm/v1/core/kv_cache_metrics.py.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import pairwise

import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory.prefix import BlockPool, BlockResidency, FreeKVCacheBlockQueue, LeastRecentlyUsed
from fragmeter.sim.types.errors import SimulationFault
from observed import observed_ticks

from .draws import EITHER, combined, picks


def named(contents):
    """A number for each beginning of some contents of 0 and 1."""
    return [int("1" + "".join(map(str, contents[:end])), 2) for end in range(1, len(contents) + 1)]


class HashedPoolMachine(RuleBasedStateMachine):
    """Requests come, fill their blocks one by one and go; the model keeps lists and the whole log of every block."""

    @initialize(setup=combined(range(1, 13), EITHER))
    def fill(self, setup):
        num_blocks, self.unnamed_first = setup
        order = FreeKVCacheBlockQueue if self.unnamed_first else LeastRecentlyUsed
        self.pool = BlockPool(num_blocks, order, BlockResidency())
        self.queue = list(range(num_blocks))
        self.names: dict[int, tuple[int, ...]] = {}  # block -> contents up to and with it, first published first
        self.log: dict[int, list[tuple[str, int]]] = {}
        self.tables: list[tuple[list[int], list[int], int]] = []  # blocks, contents, how many are published
        self.ended: list[tuple[list[tuple[str, int]], int]] = []
        self.now = self.evicted = 0

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
        names = named(contents)
        assert self.pool.get_cached_blocks(names[:-1]) == hits
        rest, left = len(contents) - len(hits), [block for block in self.queue if block not in hits]
        if rest > len(left):
            trial = deepcopy(self.pool)
            trial.touch(hits, self.now)
            with pytest.raises(SimulationFault, match=f"{rest} blocks are taken and {len(left)} are free"):
                trial.get_new_blocks(rest, [self.now] * rest)
            return
        self.pool.touch(hits, self.now)
        new = self.pool.get_new_blocks(rest, [self.now] * rest)
        assert new == left[:rest]
        self.queue = left[rest:]
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
                self.pool.cache_full_blocks(blocks[-1:], [1])
            return
        block, name = blocks[published], tuple(contents[: published + 1])
        self.pool.cache_full_blocks([block], named(name)[-1:])
        self.names[block] = name
        self.tables[place] = (blocks, contents, published + 1)

    @precondition(lambda self: self.tables)
    @rule(pick=picks)
    def go(self, pick):
        blocks, _, _ = self.tables.pop(pick % len(self.tables))
        self.pool.free_blocks(blocks)
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
        assert {block for block, name in enumerate(self.pool.block_hash) if name is not None} == set(self.names)
        assert self.pool.hashed_ids().tolist() == sorted(self.names)
        assert self.pool.evicted_blocks == self.evicted

    @invariant()
    def histories_are_what_the_logs_say(self):
        touches = [[when for what, when in log if what == "hit"][-4:] for log, _ in self.ended]
        residency = self.pool.residency
        observed = observed_ticks(residency).values()
        assert [Counter(dict(zip_counts(*each))) for each in observed] == [
            Counter(end - log[0][1] for log, end in self.ended),
            Counter(end - log[-1][1] for log, end in self.ended),
            Counter(later - earlier for times in touches for earlier, later in pairwise(times)),
        ]
        assert residency.evictions.columns()["blocks"].sum() == self.evicted


def zip_counts(values, blocks):
    """How many blocks have each value."""
    found = Counter()
    for value, count in zip(values.tolist(), blocks.tolist(), strict=True):
        found[value] += count
    return found.items()
