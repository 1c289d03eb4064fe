"""A queue of free blocks in the order of a rank, for orders of eviction: a subclass says the rank of a block when it is freed."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from fragmeter.sim.memory.prefix import FreeKVCacheBlockQueue


class RankedOrder(FreeKVCacheBlockQueue):
    """Blocks without a hash come first, then those of the lowest rank; of several the one that is free for longest."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._turn = count()
        # Free blocks with a hash: a heap by rank and turn, and the entry of each; entries of blocks that left stay in the heap.
        self._heap: list[tuple[int, int, int]] = []
        self._entries: dict[int, tuple[int, int, int]] = {}

    def rank(self, block: int) -> int:
        """The rank of a block with a hash that is freed; lower ones are taken first."""
        raise NotImplementedError

    def popleft_n(self, count: int) -> list[int]:
        """Take blocks without a hash as before, and then those of the lowest rank."""
        blocks = super().popleft_n(min(count, self.num_free_blocks - len(self._entries)))
        if count - len(blocks) > len(self._entries):
            return super().popleft_n(count)
        while len(blocks) < count:
            entry = heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                self.remove_n(entry[2:])
                blocks.append(entry[2])
        return blocks

    def free_n(self, blocks: Sequence[int], unhashed: Sequence[int]) -> None:
        self.prepend_n(unhashed)
        for block in blocks:
            if block not in unhashed:
                self._enter(block)
                self.num_free_blocks += 1

    def remove_n(self, blocks: Sequence[int]) -> None:
        self.num_free_blocks -= len(blocks)
        for block in blocks:
            del self._entries[block]

    def _enter(self, block: int) -> None:
        self._entries[block] = entry = (self.rank(block), next(self._turn), block)
        heappush(self._heap, entry)
