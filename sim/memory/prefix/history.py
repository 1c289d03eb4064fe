"""How long blocks are kept: what vLLM's KV-cache residency metrics observe.

A block is born when it is taken, touched when a request hits it, and logged when it is taken anew:

    take        hit    hit            hit                 taken anew
     |-----------|------|--------------|---------------------|
                  <gap-> <----gap-----> <--idle before evict->
     <------------------------lifetime----------------------->

As in vLLM, birth is no touch (the way to the first hit is no gap), a release is none either, only
the gaps between the last four touches are logged, blocks that are never taken anew are not, and whether
a block still has a hash makes no difference. Unlike vLLM, which samples one block in a hundred by
default, every block is recorded.

Source: vLLM, vllm/v1/core/kv_cache_metrics.py (``--kv-cache-metrics``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np

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
