"""vLLM's prefix cache block by block: what ``SegmentPool`` is held to.

A full block is named by a hash of its tokens and of all that precedes them. A block is in tables (its reference count says
in how many) or in the free queue, with or without a name:

    tables        [0 2 5]  [0 2 6]             blocks 0 and 2 are shared
    free queue    head 3 7 9 1 4 tail          those with a hash can still be hit

A request looks its names up, first to last, until one is missing; blocks that it hits leave the free
queue. For the rest it takes blocks from the head, which drops their hashes (evictions). Blocks that
no table names any more go to the tail, the end of the table first; with ``unnamed_first`` those without a hash go to the
head, the end of the table in front.

Two requests that compute the same prefix side by side publish two blocks of one name; neither table
is changed, and look-ups find the one published first.

Source: vLLM V1, vllm/v1/core/block_pool.py, kv_cache_utils.py (FreeKVCacheBlockQueue) and kv_cache_metrics.py.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np


class PoolError(Exception):
    """A block is asked for that cannot be had."""


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


class HashedBlockPool:
    """Fixed-size blocks with real ids, of which those that lie idle may be hit by their hash.

    A block's reference count is the number of table entries that name it (invariant 2). Every
    operation takes constant time a block.

    Args:
        num_blocks: Usable blocks; vLLM's null block is not among them.
        history: Records how long blocks are kept, or None. It takes the times that the calls below are given.
        unnamed_first: Whether blocks without a hash are freed to the head of the queue.

    Attributes:
        reference_counts: By block.
        hashes: By block, None where it has none.
        is_named: By block, 1 where it has one: what is read by the million.
        num_cached: Free blocks that have a hash: reclaimable, contents kept.
        num_entries: Table entries that name a block.
        queried_blocks: Blocks that requests looked up, each request once, when it takes what it found.
        hit_blocks: Those of them that were found.
        evicted_blocks: Hashes dropped.
    """

    def __init__(self, num_blocks: int, history: BlockHistory | None = None, unnamed_first: bool = False) -> None:
        self.num_blocks, self.unnamed_first = num_blocks, unnamed_first
        self.history = history
        self.reference_counts = [0] * num_blocks
        self.hashes: list[int | None] = [None] * num_blocks
        self.is_named = bytearray(num_blocks)
        self.num_cached = self.num_entries = 0
        self.queried_blocks = self.hit_blocks = self.evicted_blocks = 0
        # No plain dict: finding its first key passes over all that were removed before.
        self._free = OrderedDict.fromkeys(range(num_blocks))
        # By name the block that was published first, and those of the same name, if any, in the order of theirs.
        self._published: dict[int, int] = {}
        self._copies: dict[int, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no table names, with and without a hash."""
        return len(self._free)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """Free block ids, the next one to be taken first."""
        return tuple(self._free)

    def lookup(self, hashes: Iterable[int]) -> list[int]:
        """The blocks of the longest cached prefix of ``hashes``; changes nothing."""
        found, published = [], self._published
        for name in hashes:
            if name not in published:
                break
            found.append(published[name])
        return found

    @property
    def num_shared(self) -> int:
        """Table entries beyond the first of each block."""
        return self.num_entries - self.num_blocks + len(self._free)

    def take_cached(self, blocks: Sequence[int], queried_blocks: int, now: int) -> None:
        """One more table names each of ``blocks``, which it found among the ``queried_blocks`` that it looked up.

        Raises:
            PoolError: A block has no hash: what ``lookup`` found has been evicted since.
        """
        references, hashes, free = self.reference_counts, self.hashes, self._free
        for block in blocks:
            if hashes[block] is None:
                raise PoolError(f"block {block} is hit and has no hash")
            if not references[block]:
                del free[block]
                self.num_cached -= 1
            references[block] += 1
        if self.history is not None:
            self.history.touched(blocks, now)
        self.num_entries += len(blocks)
        self.queried_blocks += queried_blocks
        self.hit_blocks += len(blocks)

    def take(self, count: int, now: int) -> list[int]:
        """``count`` blocks from the head of the free queue, referenced once, without their hashes.

        Raises:
            PoolError: Fewer are free; the policy must have seen to that.
        """
        if count > len(self._free):
            raise PoolError(f"{count} blocks are taken and {len(self._free)} are free")
        pop, hashes, references = self._free.popitem, self.hashes, self.reference_counts
        blocks = [pop(last=False)[0] for _ in range(count)]
        for block in blocks:
            name = hashes[block]
            if name is not None:
                self._evict(block, name)
            references[block] = 1
        self.num_entries += count
        if self.history is not None:
            self.history.taken(blocks, now)
        return blocks

    def _evict(self, block: int, name: int) -> None:
        self.hashes[block], self.is_named[block] = None, 0
        if name in self._copies:
            self._drop_copy(name, block)
        else:
            del self._published[name]
        self.num_cached -= 1
        self.evicted_blocks += 1

    def _drop_copy(self, name: int, block: int) -> None:
        """One of several blocks of a name is gone; if it was the first, the next one is found in its place."""
        copies = self._copies[name]
        if self._published[name] == block:
            block = self._published[name] = next(iter(copies))
        del copies[block]
        if not copies:
            del self._copies[name]

    def publish(self, block: int, name: int) -> None:
        """``block`` is full, and may be hit by its hash ``name`` from now on.

        Raises:
            PoolError: No table names the block, or it has a hash already.
        """
        if not self.reference_counts[block] or self.hashes[block] is not None:
            raise PoolError(f"block {block} is published while it is free, or for a second time")
        self.hashes[block], self.is_named[block] = name, 1
        if self._published.setdefault(name, block) != block:
            self._copies.setdefault(name, {})[block] = None

    def release(self, table: Sequence[int]) -> None:
        """The table ``table`` is gone; blocks that no other names join the free queue, the last one first.

        Raises:
            PoolError: A block is free already.
        """
        references, free, hashes = self.reference_counts, self._free, self.hashes
        first = []
        for block in reversed(table):
            count = references[block] - 1
            if count < 0:
                raise PoolError(f"block {block} is released while it is free")
            references[block] = count
            if not count:
                free[block] = None
                self.num_cached += hashes[block] is not None
                if self.unnamed_first and hashes[block] is None:
                    first.append(block)
        for block in reversed(first):
            free.move_to_end(block, last=False)
        self.num_entries -= len(table)
