"""vLLM V1: one budget of tokens a step, and every sequence catches up from what it computed to what it knows.

Running sequences come first, in order, each taking the blocks of the tokens it computes; where these are not free the
last running goes. Only if none went are others admitted, in chunks of what is left of the budget. One block is the
null block, in no table and in no bucket.
"""

from __future__ import annotations

from dataclasses import replace

from .iteration import IterationSystem, known
from .model import Limits, Pool


class VllmV1(IterationSystem):
    """Decodes and chunks share a step; blocks for a chunk, but admission only where the whole prompt's are free."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__(replace(pool, num_blocks=pool.num_blocks - 1), limits)
        if limits.max_num_batched_tokens < self.max_num_seqs:
            budget = limits.max_num_batched_tokens
            raise ValueError(f"max_num_batched_tokens = {budget} for {self.max_num_seqs} sequences")
        # Of all blocks, the null block among them.
        self._watermark = int(limits.watermark_fraction * pool.num_blocks)

    @property
    def kept_free(self) -> int:
        """Blocks that an admission leaves, unless nothing runs."""
        return self._watermark if self.running else 0

    def decide(self) -> None:
        budget = self._catch_up(self.limits.max_num_batched_tokens)
        if not self.work.preempted:
            self._admit(budget)

    def _catch_up(self, budget: int) -> int:
        """Running sequences compute what they have not yet; what is left of the budget."""
        # Victims leave at the end of the list, which the loop has yet to reach.
        for sequence in self.running:
            tokens = min(known(sequence) - self.computed[sequence], budget)
            if not self.make_room(sequence, self.blocks_missing(sequence, self.computed[sequence] + tokens)):
                break
            self.compute(sequence, tokens)
            budget -= tokens
        return budget

    def _admit(self, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            tokens = known(self.waiting[0])
            if self.blocks_for(tokens) + self.kept_free > len(self.free):
                break
            chunk = min(tokens, budget)
            self.admit(chunk)
            budget -= chunk
