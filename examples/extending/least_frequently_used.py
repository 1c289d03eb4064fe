"""An order of eviction of its own: the free block that was hit least often is taken first, as in a cache of frequencies.

fragmeter simulate --policy least_frequently_used:FrequentV1 --trace conversations.jsonl
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from fragmeter.sim.memory.prefix import FreeKVCacheBlockQueue
from fragmeter.sim.policy.vllm_v1 import VllmV1


class LeastFrequentlyUsed(FreeKVCacheBlockQueue):
    """Blocks without a hash come first, then those with the fewest hits; of several the one that is free for longest."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._hits: Counter[int] = Counter()
        self._turn = count()
        # Free blocks with a hash: a heap by hits and turn, and the entry of each; entries of blocks that left stay in the heap.
        self._heap: list[tuple[int, int, int]] = []
        self._entries: dict[int, tuple[int, int, int]] = {}

    def popleft_n(self, count: int) -> list[int]:
        """Take blocks without a hash as before, and then those with the fewest hits."""
        blocks = super().popleft_n(min(count, self.num_free_blocks - len(self._entries)))
        if count - len(blocks) > len(self._entries):
            return super().popleft_n(count)
        while len(blocks) < count:
            entry = heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                self.remove_n(entry[2:])
                del self._hits[entry[2]]
                blocks.append(entry[2])
        return blocks

    def free_n(self, blocks: Sequence[int], unhashed: Sequence[int]) -> None:
        self.prepend_n(unhashed)
        for block in blocks:
            if block not in unhashed:
                self._entries[block] = entry = (self._hits[block], next(self._turn), block)
                heappush(self._heap, entry)
                self.num_free_blocks += 1

    def remove_n(self, blocks: Sequence[int]) -> None:
        self.num_free_blocks -= len(blocks)
        for block in blocks:
            del self._entries[block]

    def note_hits(self, blocks: Sequence[int]) -> None:
        self._hits.update(blocks)


class FrequentV1(VllmV1):
    name, eviction_order = "vllm-v1-lfu", LeastFrequentlyUsed
