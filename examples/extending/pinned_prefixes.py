"""An order of eviction that keeps system prompts: blocks of the first tokens of prompts are taken last.

fragmeter simulate --policy pinned_prefixes:PinnedV1 --trace conversations.jsonl

vLLM has no such option. A pinned block is evicted once all other free blocks are taken, so that no request waits for it.
"""

from __future__ import annotations

from ranked_order import RankedOrder

from fragmeter.sim.memory import Memory
from fragmeter.sim.memory.paged.cached import CachedMemory
from fragmeter.sim.memory.prefix import BlockPool
from fragmeter.sim.memory.prefix.chains import PLACE_BITS
from fragmeter.sim.policy.server import Pool
from fragmeter.sim.policy.vllm_v1 import VllmV1

PINNED_TOKENS = 512


class PinnedPrefixes(RankedOrder):
    """Blocks without a hash come first, then those behind the pinned tokens of a prompt, then the pinned ones.

    Attributes:
        pool, pinned_blocks: The pool of the queue, and the blocks of a prompt that are pinned.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.pool, self.pinned_blocks = BlockPool(0), 0

    def rank(self, block: int) -> int:
        return int(self.pool.block_hash[block] % (1 << PLACE_BITS) < self.pinned_blocks)


class PinnedV1(VllmV1):
    name, eviction_order = "vllm-v1-pinned", PinnedPrefixes

    def memory(self, pool: Pool) -> Memory:
        """That of vLLM; its queue sees the contents of the blocks."""
        memory = super().memory(pool)
        if isinstance(memory, CachedMemory):
            queue = memory.pool.free_block_queue
            queue.pool, queue.pinned_blocks = memory.pool, PINNED_TOKENS // memory.block_size
        return memory
