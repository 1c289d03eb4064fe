"""Blocks with reference counts and hashes, and the queue of those that are free: vLLM's block pool.

    tables        [0 2 5]  [0 2 6]             blocks 0 and 2 are shared: their reference count is 2
    free queue    3 7 | 10 11 12 ... | 9 1 4   in the order in which they are taken; 10 and those behind it were never taken

A block is in tables, and its reference count is the number of their entries with it, or it is in the free queue. Full blocks
have a hash, which stays when they are freed, until they are taken again: a look-up finds the block by it meanwhile. Two
requests that compute the same prefix at the same time cache two blocks under one hash; look-ups find the first of them.

The pool owns reference counts, hashes, the map from hashes to blocks, and the free queue. The queue owns the order of eviction,
and nothing else knows it: settings and the compiled core name one of ``FREE_QUEUES``, and a policy may bring another queue
(docs/extending.md has one). Block tables, what a
request's hashes are, and when a block is full, belong to the callers. Names are those of vLLM, vllm/v1/core/block_pool.py and
kv_cache_utils.py (release 0.33). Deliberate differences:

    null block         none is kept: the pool has the usable blocks, and a null entry of a table is None
    hashes             integers that stand for a whole prefix (``chains``) and for a KV group, without collisions
    ``UNSHARED``       hash of a block that no look-up asks for, as no other request begins alike: it is in no map
    never taken        blocks are no objects, and those that were never taken are a counter: vLLM's first order is 0, 1, 2, ...
    ``free_blocks``    takes a table in its order and frees its last block first; vLLM's callers reverse it
    moments            times are numbers of the caller (``accounting.moments``), as a leap takes blocks of many steps at once
    partial hashes, events, resets and watchers of reuse do not exist
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import cast

import numpy as np

from ...types.errors import Overdrawn, SimulationFault
from .contents_log import ContentsLog
from .residency import BlockResidency

#: Hash of a full block that no look-up asks for. Hashes of others are not 0.
UNSHARED = 0
_NONE = -1


class FreeKVCacheBlockQueue:
    """The free blocks, in the order in which they are taken: those without a hash first, then those free for longest.

    Of the blocks of one table its last ones come first. This is the order of vLLM 0.24 and later.

    Attributes:
        num_free_blocks: Number of blocks in the queue.
        num_touched: Blocks from 0 on that were ever taken; the others are behind ``_first``, in the order of their ids.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free_blocks, self._num_blocks, self.num_touched = num_blocks, num_blocks, 0
        # Blocks in front of those never taken: a stack, as none of them has a hash that could be hit.
        self._front: list[int] = []
        # Those behind them: a doubly linked list, of which a block that is hit can leave at any place.
        self._next: list[int] = []
        self._prev: list[int] = []
        self._first = self._last = _NONE

    def popleft_n(self, count: int) -> list[int]:
        """Take the first ``count`` blocks.

        Raises:
            Overdrawn: Fewer blocks are free; the policy must prevent this.
        """
        if count > self.num_free_blocks:
            raise Overdrawn(f"{count} blocks are taken and {self.num_free_blocks} are free")
        if count <= 0:
            return []
        self.num_free_blocks -= count
        blocks: list[int] = []
        if front := self._front:
            blocks = front[: -count - 1 : -1]
            del front[-count:]
            count -= len(blocks)
        if fresh := min(count, self._num_blocks - self.num_touched):
            blocks += range(self.num_touched, self.num_touched + fresh)
            self.num_touched += fresh
            self._next += [_NONE] * fresh
            self._prev += [_NONE] * fresh
            count -= fresh
        if count:
            after, block, append = self._next, self._first, blocks.append
            for _ in range(count):
                append(block)
                block = after[block]
            self._first = block
            if block == _NONE:
                self._last = _NONE
        return blocks

    def remove_n(self, blocks: Sequence[int]) -> None:
        """Take blocks with a hash out of the queue. Runs of neighbours are unlinked at once, if they come in the queue's order."""
        after, before, place, end = self._next, self._prev, 0, len(blocks)
        self.num_free_blocks -= end
        while place < end:
            first = last = blocks[place]
            place += 1
            while place < end and last != self._last and after[last] == blocks[place]:
                last = blocks[place]
                place += 1
            right = _NONE if last == self._last else after[last]
            if first == self._first:
                self._first = right
            else:
                after[before[first]] = right
            if right == _NONE:
                self._last = _NONE if self._first == _NONE else before[first]
            else:
                before[right] = before[first]

    def append_n(self, blocks: Sequence[int]) -> None:
        """Put blocks at the end, the first of them first."""
        if not blocks:
            return
        self.num_free_blocks += len(blocks)
        after, before, last = self._next, self._prev, self._last
        if last == _NONE:
            last = self._first = blocks[0]
            blocks = blocks[1:]
        for block in blocks:
            before[block] = last
            after[last] = block
            last = block
        self._last = last
        after[last] = _NONE

    def prepend_n(self, blocks: Sequence[int]) -> None:
        """Put blocks without a hash in front, the first of them first."""
        self.num_free_blocks += len(blocks)
        self._front += reversed(blocks)

    def free_n(self, blocks: Sequence[int], unhashed: Sequence[int]) -> None:
        """Blocks are in no table any more.

        Args:
            blocks: The last ones of a table come first.
            unhashed: Those of them without a hash.
        """
        if unhashed:
            self.prepend_n(unhashed)
            if len(unhashed) == len(blocks):
                return
            blocks = [*filterfalse(set(unhashed).__contains__, blocks)]
        self.append_n(blocks)

    def note_hits(self, blocks: Sequence[int]) -> None:
        """A request hits blocks, which are in other tables or leave the queue; nothing depends on that in this order."""

    def shuffle(self, random: np.random.Generator) -> None:
        """Bring the free blocks into a random order."""
        blocks = self.get_all_free_blocks()
        random.shuffle(blocks)
        more = self._num_blocks - self.num_touched
        self._next += [_NONE] * more
        self._prev += [_NONE] * more
        self.num_touched, self.num_free_blocks, self._front = self._num_blocks, 0, []
        self._first = self._last = _NONE
        self.append_n(blocks)

    def get_all_free_blocks(self) -> list[int]:
        """The free blocks in the order in which they will be taken."""
        blocks = [*reversed(self._front), *range(self.num_touched, self._num_blocks)]
        block = self._first
        while block != _NONE:
            blocks.append(block)
            block = self._next[block]
        return blocks


class LeastRecentlyUsed(FreeKVCacheBlockQueue):
    """As ``FreeKVCacheBlockQueue``, but blocks with and without a hash go to the end: vLLM before 0.24."""

    def free_n(self, blocks: Sequence[int], unhashed: Sequence[int]) -> None:
        self.append_n(blocks)


#: The orders of vLLM's releases, by the names under which ``spec.releases`` chooses one. ``_core_pool.c`` has the same ones.
FREE_QUEUES: dict[str, type[FreeKVCacheBlockQueue]] = {
    "unhashed-first": FreeKVCacheBlockQueue,
    "least-recently-used": LeastRecentlyUsed,
}


class BlockPool:
    """Fixed-size blocks with ids, as vLLM's ``BlockPool``. Every operation takes constant time per block.

    Args:
        num_blocks: Usable blocks.
        order: Class of the free queue.
        residency: Log of block lifetimes, or None.
        contents: Log of cached contents, or None.

    Attributes:
        free_block_queue: The free blocks.
        ref_cnt: Reference count of each block that was ever allocated.
        block_hash: Hash of each of these blocks, ``UNSHARED``, or None.
        num_cached: Free blocks with a hash: their contents are kept until they are reclaimed.
        num_entries: Entries of all block tables.
        evicted_blocks: Blocks that lost their hash on allocation.
        taken: Set to which allocated and hit blocks are added; None if nobody reads it.
    """

    def __init__(
        self,
        num_blocks: int,
        order: type[FreeKVCacheBlockQueue] = FreeKVCacheBlockQueue,
        residency: BlockResidency | None = None,
        contents: ContentsLog | None = None,
    ) -> None:
        self.contents = contents
        self.num_blocks, self.free_block_queue, self.residency = num_blocks, order(num_blocks), residency
        self.ref_cnt: list[int] = []
        self.block_hash: list[int | None] = []
        # As ``block_hash``, to be read as a whole.
        self._is_hashed = bytearray()
        self.num_cached = self.num_entries = self.evicted_blocks = 0
        self.taken: set[int] | None = None
        self._cached_block_hash_to_block: dict[int, int] = {}
        # Further blocks with a hash, in the order in which they were cached.
        self._copies: dict[int, dict[int, None]] = {}

    def shuffle(self, random: np.random.Generator) -> None:
        """Queue the free blocks in a random order."""
        self.free_block_queue.shuffle(random)
        self._note_touched()

    def _note_touched(self) -> None:
        more = self.free_block_queue.num_touched - len(self.ref_cnt)
        self.ref_cnt += [0] * more
        self.block_hash += [None] * more
        self._is_hashed += bytes(more)
        if self.residency is not None:
            self.residency.on_blocks_added(more)

    @property
    def order(self) -> str | None:
        """Name of the free queue in ``FREE_QUEUES``, or None for one that a policy brings."""
        return next((name for name, queue in FREE_QUEUES.items() if type(self.free_block_queue) is queue), None)

    @property
    def num_free(self) -> int:
        """Blocks in no table, with and without a hash."""
        return self.free_block_queue.num_free_blocks

    @property
    def free_ids(self) -> tuple[int, ...]:
        """Ids of the free blocks, in the order in which they will be taken."""
        return tuple(self.free_block_queue.get_all_free_blocks())

    @property
    def num_shared(self) -> int:
        """References of all blocks beyond the first of each block."""
        return self.num_entries - self.num_blocks + self.num_free

    @property
    def reference_counts(self) -> list[int]:
        """``ref_cnt`` of every block."""
        return [*self.ref_cnt, *[0] * (self.num_blocks - len(self.ref_cnt))]

    def hashed_ids(self) -> np.ndarray:
        """Ids of the blocks with a hash, ascending, int64."""
        return np.flatnonzero(np.frombuffer(bytes(self._is_hashed), np.uint8))

    def is_shared(self, block: int) -> bool:
        """Whether ``block`` has more than one reference, so that a sequence that writes into it must copy it first."""
        return self.ref_cnt[block] > 1

    def is_cached(self, block_hash: int) -> bool:
        """Whether some block has the hash."""
        return block_hash in self._cached_block_hash_to_block

    def get_cached_blocks(self, hashes: Sequence[int]) -> list[int]:
        """Blocks of the longest prefix of ``hashes`` that are cached. Changes nothing."""
        get, start, span = self._cached_block_hash_to_block.get, 0, 16
        found: list[int] = []
        while start < len(hashes):
            blocks = [*map(get, hashes[start : start + span])]
            if None in blocks:
                return [*found, *cast("list[int]", blocks[: blocks.index(None)])]
            found += cast("list[int]", blocks)
            start, span = start + span, 2 * span
        return found

    def get_new_blocks(self, count: int, moments: Sequence[int] | None = None) -> list[int]:
        """Allocate ``count`` blocks from the head of the free queue, with reference count 1 and without hashes.

        Args:
            moments: Time at which each is allocated, ascending; None without ``residency``.

        Raises:
            Overdrawn: Fewer blocks are free, which the policy must prevent.
        """
        known = len(self.ref_cnt)
        blocks = self.free_block_queue.popleft_n(count)
        if self.free_block_queue.num_touched > known:
            self._note_touched()
        references = self.ref_cnt
        for block in blocks:
            references[block] = 1
        if self.num_cached:
            self._maybe_evict_cached_blocks(blocks, moments)
        if self.residency is not None and moments is not None:
            self.residency.on_blocks_allocated(blocks, moments)
        if self.contents is not None:
            self.contents.on_taken(self.num_free)
        self.num_entries += len(blocks)
        if self.taken is not None:
            self.taken.update(blocks)
        return blocks

    def _maybe_evict_cached_blocks(self, blocks: Sequence[int], moments: Sequence[int] | None) -> None:
        hashes, is_hashed, cached = self.block_hash, self._is_hashed, self._cached_block_hash_to_block
        names: Sequence[int | None] = [*map(hashes.__getitem__, blocks)]
        if moments is None:
            moments = blocks
        if None in names:
            some = [each for each in zip(blocks, names, moments, strict=True) if each[1] is not None]
            if not some:
                return
            blocks, names, moments = zip(*some, strict=True)
        if self.contents is not None:
            self.contents.on_stays_ended(blocks, cast("Sequence[int]", names), moments, False)
        for block in blocks:
            hashes[block], is_hashed[block] = None, 0
        if any(names):
            for block, name in zip(blocks, names, strict=True):
                if name and (not self._copies or not self._drop_copy(name, block)):
                    del cached[name]
        self.num_cached -= len(blocks)
        self.evicted_blocks += len(blocks)
        if self.residency is not None:
            self.residency.on_blocks_evicted(moments)

    def _drop_copy(self, name: int, block: int) -> bool:
        """Remove one of several blocks with the same hash, if there are several. After the first one look-ups find the next."""
        copies = self._copies.get(name)
        if copies is None:
            return False
        if self._cached_block_hash_to_block[name] == block:
            block = self._cached_block_hash_to_block[name] = next(iter(copies))
        del copies[block]
        if not copies:
            del self._copies[name]
        return True

    def touch(self, blocks: Sequence[int], moment: int = 0) -> None:
        """Increment the reference count of each of ``blocks``, as vLLM's ``touch``; free ones leave the queue.

        Raises:
            SimulationFault: A block is free and has no hash: it was evicted after the look-up, or was never cached.
        """
        references = self.ref_cnt
        counts = self._references(blocks)
        queued = blocks
        if any(counts):
            queued = [block for block, count in zip(blocks, counts, strict=True) if not count]
        if queued:
            hashes = [*map(self.block_hash.__getitem__, queued)]
            if None in hashes:
                raise SimulationFault(f"block {queued[hashes.index(None)]} is shared while it is free and has no hash")
            # The last blocks of a table come first in the queue.
            self.free_block_queue.remove_n(queued[::-1])
            self.num_cached -= len(queued)
            if self.contents is not None:
                self.contents.on_stays_ended(queued, cast("Sequence[int]", hashes), [moment] * len(queued), True)
        for block, count in zip(blocks, counts, strict=True):
            references[block] = count + 1
        self.free_block_queue.note_hits(blocks)
        self.num_entries += len(blocks)
        if self.residency is not None:
            self.residency.on_blocks_accessed(blocks, moment)
        if self.taken is not None:
            self.taken.update(blocks)

    def cache_full_blocks(self, blocks: Iterable[int], names: Sequence[int]) -> None:
        """Give full blocks of a table their hashes, so that look-ups find them, except for hashes that are
        ``UNSHARED``.

        Raises:
            SimulationFault: A block is in no table, or has a hash already.
        """
        references, hashes, cached = self.ref_cnt, self.block_hash, self._cached_block_hash_to_block
        for block, name in zip(blocks, names, strict=False):
            if not references[block] or hashes[block]:
                raise SimulationFault(f"block {block} is cached while it is free, or for a second time")
            hashes[block], self._is_hashed[block] = name, 1
            if name and cached.setdefault(name, block) != block:
                self._copies.setdefault(name, {})[block] = None
        if self.contents is not None and names:
            self.contents.on_named(names, self.num_free)

    def free_blocks(self, table: Sequence[int], moment: int = 0) -> None:
        """Decrement the reference counts of the blocks of ``table``. Blocks at 0 join the free queue, the last block
        first.

        Args:
            moment: Time of the release, for ``contents``.

        Raises:
            SimulationFault: A block is free already.
        """
        freed = self._drop_references(table[::-1])
        if len(set(freed)) < len(freed):
            raise SimulationFault("a block is released twice by one table")
        hashes = [*map(self.block_hash.__getitem__, freed)]
        unhashed: list[int] = []
        if hashes.count(None) == len(hashes):
            unhashed = [*freed]
        elif None in hashes:
            unhashed = [block for block, name in zip(freed, hashes, strict=True) if name is None]
        self.num_entries -= len(table)
        self.num_cached += len(freed) - len(unhashed)
        self.free_block_queue.free_n(freed, unhashed)
        if self.contents is not None:
            self.contents.on_freed({*freed} - {*unhashed} if unhashed else freed, moment)
            self.contents.on_released([self.block_hash[block] or UNSHARED for block in table], self.num_free)

    def seal_contents(self) -> None:
        """Complete the log of cached contents at the end of the run."""
        if self.contents is not None:
            ids = [block for block in self.hashed_ids().tolist() if not self.ref_cnt[block]]
            self.contents.seal({block: self.block_hash[block] or UNSHARED for block in ids})

    def _drop_references(self, blocks: Sequence[int]) -> Sequence[int]:
        """One reference less to each block. Returns those that have none any more."""
        references, counts = self.ref_cnt, self._references(blocks)
        if 0 in counts:
            raise SimulationFault(f"block {blocks[counts.index(0)]} is released while it is free")
        if counts.count(1) == len(counts):
            for block in blocks:
                references[block] = 0
            return blocks
        for block, count in zip(blocks, counts, strict=True):
            references[block] = count - 1
        return [block for block, count in zip(blocks, counts, strict=True) if count == 1]

    def _references(self, blocks: Sequence[int]) -> list[int]:
        """References of different blocks."""
        try:
            return [*map(self.ref_cnt.__getitem__, blocks)]
        except IndexError:
            known = len(self.ref_cnt)
            raise SimulationFault(f"block {next(block for block in blocks if block >= known)} is free") from None
