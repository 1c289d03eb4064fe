"""A pool of blocks that are found by their hash: vLLM's block pool, block by block.

A block is in tables (its reference count says in how many) or in the free queue, with or without a name:

    tables        [0 2 5]  [0 2 6]             blocks 0 and 2 are shared
    free queue    head 3 7 9 1 4 tail          those with a hash can still be hit

Blocks that are hit leave the queue, wherever they are; others are taken from its head, which drops their hashes
(evictions). Two requests that compute the same prefix side by side publish two blocks of one name; neither table is
changed, and look-ups find the one published first.

Source: vLLM 0.33, vllm/v1/core/block_pool.py and kv_cache_utils.py (FreeKVCacheBlockQueue).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from ...types.errors import SimulationFault


class HashedBlockPool:
    """Fixed-size blocks with real ids, of which those that lie idle may be hit by their hash.

    A block's reference count is the number of table entries that name it (invariant 2). Every
    operation takes constant time a block.

    Args:
        num_blocks: Usable blocks; vLLM's null block is not among them.

    Attributes:
        reference_counts: By block.
        hashes: By block, None where it has none.
        is_named: By block, 1 where it has one: what is read by the million.
        num_cached: Free blocks that have a hash: reclaimable, contents kept.
        num_entries: Table entries that name a block.
        evicted_blocks: Hashes dropped.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks
        self.hashes: list[int | None] = [None] * num_blocks
        self.is_named = bytearray(num_blocks)
        self.num_cached = self.num_entries = 0
        self.evicted_blocks = 0
        # No plain dict: finding its first key passes over all that were removed before.
        self._free = OrderedDict.fromkeys(range(num_blocks))
        # By name the block that was published first, and those of the same name, if any, in the order of theirs.
        self._published: dict[int, int] = {}
        self._copies: dict[int, dict[int, None]] = {}

    def shuffle(self, random: np.random.Generator) -> None:
        """Queue those that are free now in a random order."""
        self._free = OrderedDict.fromkeys(random.permutation(list(self._free)).tolist())

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

    def take_cached(self, blocks: Sequence[int]) -> None:
        """One more table names each of ``blocks``, which it found.

        Raises:
            SimulationFault: A block has no hash: what ``lookup`` found has been evicted since.
        """
        references, hashes, free = self.reference_counts, self.hashes, self._free
        for block in blocks:
            if hashes[block] is None:
                raise SimulationFault(f"block {block} is hit and has no hash")
            if not references[block]:
                del free[block]
                self.num_cached -= 1
            references[block] += 1
        self.num_entries += len(blocks)

    def take_many(self, count: int) -> list[int]:
        """``count`` blocks from the head of the free queue, referenced once, without their hashes.

        Raises:
            SimulationFault: Fewer are free; the policy must have seen to that.
        """
        if count > len(self._free):
            raise SimulationFault(f"{count} blocks are taken and {len(self._free)} are free")
        pop, hashes, references = self._free.popitem, self.hashes, self.reference_counts
        blocks = [pop(last=False)[0] for _ in range(count)]
        for block in blocks:
            name = hashes[block]
            if name is not None:
                self._evict(block, name)
            references[block] = 1
        self.num_entries += count
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
            SimulationFault: No table names the block, or it has a hash already.
        """
        if not self.reference_counts[block] or self.hashes[block] is not None:
            raise SimulationFault(f"block {block} is published while it is free, or for a second time")
        self.hashes[block], self.is_named[block] = name, 1
        if self._published.setdefault(name, block) != block:
            self._copies.setdefault(name, {})[block] = None

    def release(self, table: Sequence[int]) -> None:
        """Entries of one table are gone; blocks that no other names join the free queue: those without a hash its head,
        the last one of the table first, the others its tail, in the same order.

        Raises:
            SimulationFault: A block is free already.
        """
        references, free, hashes = self.reference_counts, self._free, self.hashes
        for block in reversed(table):
            count = references[block] - 1
            if count < 0:
                raise SimulationFault(f"block {block} is released while it is free")
            references[block] = count
            if not count:
                free[block] = None
                self.num_cached += hashes[block] is not None
        for block in table:
            if not references[block] and hashes[block] is None:
                free.move_to_end(block, last=False)
        self.num_entries -= len(table)
