"""How long cached blocks live, lie idle and wait for reuse: vLLM's three histograms, in simulated time.

A block is born when it is taken, touched when a request hits it, and told of when its hash is dropped:

    take        hit    hit            hit                 evicted
     |-----------|------|--------------|---------------------|
                  <gap-> <----gap-----> <--idle before evict->
     <------------------------lifetime----------------------->

As in vLLM, birth is no touch (the way to the first hit is no gap), a release is none either, only
the gaps between the last four touches are told, and blocks that are still cached are not. Unlike
vLLM, which samples one block in a hundred by default, every block is recorded.

Source: vLLM, vllm/v1/core/kv_cache_metrics.py (``--kv-cache-metrics``).
"""

from __future__ import annotations

from collections import deque

from ...ticks import PER_SECOND

KEPT_TOUCHES = 4


class BlockHistory:
    """Observations of evicted blocks, in the order in which they were evicted.

    Attributes:
        lifetime_ticks: From birth to eviction, one a block.
        idle_before_evict_ticks: From the last touch, or birth, to eviction, one a block.
        reuse_gap_ticks: Between consecutive touches, up to three a block.
    """

    def __init__(self) -> None:
        self.lifetime_ticks: list[int] = []
        self.idle_before_evict_ticks: list[int] = []
        self.reuse_gap_ticks: list[int] = []
        self._born_at: dict[int, int] = {}
        self._touched_at: dict[int, deque[int]] = {}

    def born(self, block: int, now_ticks: int) -> None:
        """``block`` is taken; what it was before is forgotten."""
        self._born_at[block] = now_ticks
        self._touched_at[block] = deque(maxlen=KEPT_TOUCHES)

    def touched(self, block: int, now_ticks: int) -> None:
        """A request hits ``block``."""
        self._touched_at[block].append(now_ticks)

    def evicted(self, block: int, now_ticks: int) -> None:
        """The hash of ``block`` is dropped: its observations are made."""
        born_at, touches = self._born_at.pop(block), list(self._touched_at.pop(block))
        self.lifetime_ticks.append(now_ticks - born_at)
        self.idle_before_evict_ticks.append(now_ticks - (touches[-1] if touches else born_at))
        self.reuse_gap_ticks.extend(later - earlier for earlier, later in zip(touches, touches[1:], strict=False))

    def in_seconds(self) -> dict[str, list[float]]:
        """The observations by vLLM's names of the metrics."""
        return {
            "vllm:kv_block_lifetime_seconds": _seconds(self.lifetime_ticks),
            "vllm:kv_block_idle_before_evict_seconds": _seconds(self.idle_before_evict_ticks),
            "vllm:kv_block_reuse_gap_seconds": _seconds(self.reuse_gap_ticks),
        }


def _seconds(observed_ticks: list[int]) -> list[float]:
    return [ticks / PER_SECOND for ticks in observed_ticks]
