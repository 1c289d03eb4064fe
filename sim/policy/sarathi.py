"""Sarathi-Serve: prompts in chunks that fill the token budget left by decodes."""

from __future__ import annotations

from ..memory.paged.paged import PagedMemory
from ..types.state import State
from .base import Source
from .options import WatermarkOptions
from .server import Pool
from .token_budget import TokenBudget


class Sarathi(TokenBudget):
    """Sarathi-Serve (OSDI'24): the token budget of a step is the chunk size, and decodes come first.

    As vLLM V1 with four differences: a prompt takes all its blocks at admission; an admission leaves the watermark free
    (waived when nothing runs); every decode requires a free block, needed or not; and there is no null block.
    """

    name = "sarathi"
    source = Source("OSDI'24", "paper")
    system = "Sarathi-Serve, OSDI'24"
    options_type = WatermarkOptions
    default_max_num_seqs = 128
    default_max_num_batched_tokens = 512
    null_blocks = 0
    caches_prefixes = False

    def memory(self, pool: Pool) -> PagedMemory:
        return PagedMemory(pool.num_blocks, pool.block_size, ids=pool.ids, whole_prompts=True)

    def _suffices(self, free: int, need: int, last_need: int) -> bool:
        return free > need - last_need

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Steps until a running sequence could find no free block."""
        return max(1, memory.steps_with(state, memory.free - 1, limit))
