"""DeepSpeed-FastGen's Dynamic SplitFuse: decodes, then prompts split so that they fill the step's budget exactly.

Blocks are taken as tokens are computed. A sequence that finds none is skipped and keeps what it has; only when none
can compute anything does the last running lose its blocks, in a schedule that does nothing else.
"""

from __future__ import annotations

from .iteration import IterationSystem, known
from .model import Sequence


class FastGen(IterationSystem):
    """At most one prompt is split at a time: none starts before it is done."""

    def decide(self) -> None:
        budget = self._decode(self.limits.max_num_batched_tokens)
        budget = self._continue_prefill(budget)
        self._start(budget)
        if not self.computes:
            self.preempt(self.running[-1])

    def _decode(self, budget: int) -> int:
        for sequence in self.running:
            if sequence in self.decoding and self.room(sequence):
                self.compute(sequence, 1)
                budget -= 1
        return budget

    def room(self, sequence: Sequence) -> int:
        """Tokens that it can compute in its own blocks and all those free."""
        blocks = len(self.tables[sequence]) + len(self.free)
        return blocks * self.pool.block_size - self.computed[sequence]

    def _continue_prefill(self, budget: int) -> int:
        """The prompt that was split goes on, as far as blocks are free."""
        for sequence in self.running:
            chunk = min(known(sequence) - self.computed[sequence], budget, self.room(sequence))
            if chunk and sequence not in self.decoding:
                self.compute(sequence, chunk)
                budget -= chunk
        return budget

    def _start(self, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            tokens = known(self.waiting[0])
            if self.blocks_for(tokens) > len(self.free):
                break
            chunk = min(tokens, budget)
            self.admit(chunk)
            budget -= chunk
