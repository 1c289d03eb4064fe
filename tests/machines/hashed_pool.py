"""``HashedBlockPool`` against lists that are searched from end to end, with a log of every block.

``RecordedPool`` adds vLLM's block metrics and the older rule of the free queue to it, block by block. ``SegmentPool`` is
compared with it.

Source of the metrics: vLLM V1, vllm/v1/core/kv_cache_metrics.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fragmeter.sim.memory.prefix import HashedBlockPool
from fragmeter.sim.types.errors import SimulationFault

from .draws import EITHER, combined, picks

KEPT_TOUCHES = 4
_LIFE = 3


class BlockHistory:
    """What was observed of blocks that were taken anew, in the order in which they were.

    Times are numbers of the caller, which says in the end which ticks they are.
    """

    def __init__(self) -> None:
        # (born, last touch or birth, taken anew) a block, and (touch, next touch) a gap, one after the other.
        self._lives, self._gaps = array("q"), array("q")
        self._born_at: dict[int, int] = {}
        self._touches: dict[int, tuple[int, ...]] = {}

    def taken(self, blocks: Iterable[int], now: int) -> None:
        """``blocks`` are born; their lives before are logged."""
        born_at, touched, tell = self._born_at, self._touches, self._lives.extend
        for block in blocks:
            before = born_at.get(block)
            if before is not None:
                touches = touched.pop(block, (before,))
                tell((before, touches[-1], now))
                for gap in zip(touches, touches[1:], strict=False):
                    self._gaps.extend(gap)
            born_at[block] = now

    def touched(self, blocks: Iterable[int], now: int) -> None:
        """A request hits ``blocks``."""
        touches = self._touches
        for block in blocks:
            touches[block] = (*touches[block][1 - KEPT_TOUCHES :], now) if block in touches else (now,)

    def observed_ticks(self, ticks_of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> dict[str, np.ndarray]:
        """The observations, int64 each, by vLLM's names of the metrics.

        Args:
            ticks_of: Turns the caller's times (int64) into ticks.
        """
        lives = ticks_of(np.array(self._lives, dtype=np.int64)).reshape(-1, _LIFE)
        gaps = ticks_of(np.array(self._gaps, dtype=np.int64)).reshape(-1, 2)
        born_at, touched_at, taken_at = lives.T
        return {
            "vllm:kv_block_lifetime_seconds": taken_at - born_at,
            "vllm:kv_block_idle_before_evict_seconds": taken_at - touched_at,
            "vllm:kv_block_reuse_gap_seconds": gaps[:, 1] - gaps[:, 0],
        }


class RecordedPool(HashedBlockPool):
    """A ``HashedBlockPool`` with counters of look-ups, and a log of its blocks.

    Args:
        num_blocks: Usable blocks.
        history: Records how long blocks are kept, or None. It takes the times that the calls below are given.
        unnamed_first: See ``HashedBlockPool``.

    Attributes:
        queried_blocks: Blocks that requests looked up, each request once, when it takes the blocks that it found.
        hit_blocks: Number of these blocks that were found.
    """

    def __init__(self, num_blocks: int, history: BlockHistory | None = None, unnamed_first: bool = True) -> None:
        super().__init__(num_blocks, unnamed_first)
        self.history = history
        self.queried_blocks = self.hit_blocks = 0

    def hit(self, blocks: Sequence[int], queried_blocks: int, now: int) -> None:
        """``take_cached``, of ``queried_blocks`` that were looked up."""
        self.take_cached(blocks)
        if self.history is not None:
            self.history.touched(blocks, now)
        self.queried_blocks += queried_blocks
        self.hit_blocks += len(blocks)

    def take(self, count: int, now: int) -> list[int]:
        """``take_many`` at a time."""
        blocks = self.take_many(count)
        if self.history is not None:
            self.history.taken(blocks, now)
        return blocks


def named(contents):
    """A number for each beginning of some contents of 0 and 1."""
    return [int("1" + "".join(map(str, contents[:end])), 2) for end in range(1, len(contents) + 1)]


class HashedPoolMachine(RuleBasedStateMachine):
    """Requests come, fill their blocks one by one and go; the model keeps lists and the whole log of every block."""

    @initialize(setup=combined(range(1, 13), EITHER))
    def fill(self, setup):
        num_blocks, self.unnamed_first = setup
        self.history = BlockHistory()
        self.pool = RecordedPool(num_blocks, self.history, self.unnamed_first)
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
        names = named(contents)
        assert self.pool.lookup(names[:-1]) == hits
        rest, left = len(contents) - len(hits), [block for block in self.queue if block not in hits]
        if rest > len(left):
            trial = deepcopy(self.pool)
            trial.hit(hits, len(contents) - 1, self.now)
            with pytest.raises(SimulationFault, match=f"{rest} blocks are taken and {len(left)} are free"):
                trial.take(rest, self.now)
            return
        self.pool.hit(hits, len(contents) - 1, self.now)
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
        self.pool.publish(block, named(name)[-1])
        self.names[block] = name
        self.tables[place] = (blocks, contents, published + 1)

    @precondition(lambda self: self.tables)
    @rule(pick=picks)
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
