"""A pool of blocks that are found by their hashes: vLLM's block pool, with one entry per block.

A block is in tables (its reference count is their number) or in the free queue, with or without a hash:

    tables        [0 2 5]  [0 2 6]             blocks 0 and 2 are shared
    free queue    head 3 7 9 1 4 tail          blocks with a hash can still be hit

Blocks that are hit leave the queue at any place; other blocks are taken from its head, which drops their hashes
(evictions). Two requests that compute the same prefix at the same time publish two blocks with the same hash. Neither
table is changed, and look-ups find the block published first.

Source: vLLM 0.33, vllm/v1/core/block_pool.py and kv_cache_utils.py (FreeKVCacheBlockQueue).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from ...types.errors import SimulationFault


class HashedBlockPool:
    """Fixed-size blocks with ids. Free blocks with a hash can be hit.

    A block's reference count is the number of table entries with it (invariant 2). Every operation takes
    constant time per block.

    Args:
        num_blocks: Usable blocks, without vLLM's null block.
        unnamed_first: Whether blocks without a hash are freed to the head of the queue instead of its tail.

    Attributes:
        reference_counts: Reference count of each block.
        hashes: Hash of each block, or None.
        is_named: 1 for each block with a hash, else 0; an array that is fast to read as a whole.
        num_cached: Number of free blocks with a hash, which are reclaimable and keep their contents.
        num_entries: Number of table entries.
        evicted_blocks: Number of dropped hashes.
        taken: Where blocks that are taken or hit are noted; None without need.
    """

    def __init__(self, num_blocks: int, unnamed_first: bool = True) -> None:
        self.num_blocks, self.unnamed_first = num_blocks, unnamed_first
        self.reference_counts = [0] * num_blocks
        self.hashes: list[int | None] = [None] * num_blocks
        self.is_named = bytearray(num_blocks)
        self.num_cached = self.num_entries = 0
        self.evicted_blocks = 0
        self.taken: set[int] | None = None
        # Not a dict: finding its first key skips all keys that were removed before.
        self._free = OrderedDict.fromkeys(range(num_blocks))
        # By hash: the block published first, and further blocks with the same hash, in the order of publication.
        self._published: dict[int, int] = {}
        self._copies: dict[int, dict[int, None]] = {}

    def shuffle(self, random: np.random.Generator) -> None:
        """Queue the free blocks in a random order."""
        self._free = OrderedDict.fromkeys(random.permutation(list(self._free)).tolist())

    @property
    def num_free(self) -> int:
        """Number of blocks in no table, with and without a hash."""
        return len(self._free)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """Ids of the free blocks, in the order in which they will be taken."""
        return tuple(self._free)

    def lookup(self, hashes: Iterable[int]) -> list[int]:
        """The blocks of the longest cached prefix of ``hashes``. Does not change the pool."""
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
        """Add a reference of a table to each of ``blocks``, which ``lookup`` found.

        Raises:
            SimulationFault: A block has no hash: it was evicted after the look-up.
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
        if self.taken is not None:
            self.taken.update(blocks)

    def take_many(self, count: int) -> list[int]:
        """Take ``count`` blocks from the head of the free queue. They lose their hashes and have one reference.

        Raises:
            SimulationFault: Fewer blocks are free; the policy must prevent this.
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
        if self.taken is not None:
            self.taken.update(blocks)
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
        """Remove one of several blocks with the same hash. After the first one, look-ups find the next."""
        copies = self._copies[name]
        if self._published[name] == block:
            block = self._published[name] = next(iter(copies))
        del copies[block]
        if not copies:
            del self._copies[name]

    def publish(self, block: int, name: int) -> None:
        """Publish a full block with the hash ``name``: look-ups can find it from now on.

        Raises:
            SimulationFault: The block is in no table, or it already has a hash.
        """
        if not self.reference_counts[block] or self.hashes[block] is not None:
            raise SimulationFault(f"block {block} is published while it is free, or for a second time")
        self.hashes[block], self.is_named[block] = name, 1
        if self._published.setdefault(name, block) != block:
            self._copies.setdefault(name, {})[block] = None

    def release(self, table: Sequence[int]) -> None:
        """Release the entries of one table. Blocks in no other table join the free queue, the last one of the table first.

        Blocks without a hash go to the head of the queue if ``unnamed_first``, the others to its tail.

        Raises:
            SimulationFault: A block is already free.
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
        if self.unnamed_first:
            for block in table:
                if not references[block] and hashes[block] is None:
                    free.move_to_end(block, last=False)
        self.num_entries -= len(table)
