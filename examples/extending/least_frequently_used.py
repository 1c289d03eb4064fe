"""An order of eviction of its own: the free block that was hit least often is taken first, as in a cache of frequencies.

fragmeter simulate --policy least_frequently_used:FrequentV1 --trace conversations.jsonl
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ranked_order import RankedOrder

from fragmeter.sim.policy.vllm_v1 import VllmV1


class LeastFrequentlyUsed(RankedOrder):
    """Blocks without a hash come first, then those with the fewest hits of their contents."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._hits: Counter[int] = Counter()

    def rank(self, block: int) -> int:
        return self._hits[block]

    def popleft_n(self, count: int) -> list[int]:
        blocks = super().popleft_n(count)
        for block in blocks:
            del self._hits[block]
        return blocks

    def note_hits(self, blocks: Sequence[int]) -> None:
        self._hits.update(blocks)


class FrequentV1(VllmV1):
    name, eviction_order = "vllm-v1-lfu", LeastFrequentlyUsed
