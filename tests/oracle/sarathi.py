"""Sarathi-Serve: a budget of tokens a step, for decodes first, then prefills that go on, then new prompts.

A prompt takes all its blocks when it is admitted and fills them in chunks, so that decodes never stall for it.
"""

from __future__ import annotations

from .iteration import IterationSystem, known


class Sarathi(IterationSystem):
    """Decodes keep a block free as in vllm-sosp23; a victim is the last running, in its prefill or not."""

    def decide(self) -> None:
        budget = self._decode(self.limits.max_num_batched_tokens)
        budget = self._continue_prefill(budget)
        if not self.work.preempted:
            self._admit(budget)

    def _decode(self, budget: int) -> int:
        # Victims leave at the end of the list, which the loop has yet to reach.
        for sequence in self.running:
            if sequence in self.decoding:
                if not self.make_room(sequence, 1):
                    break
                self.compute(sequence, 1)
                budget -= 1
        return budget

    def _continue_prefill(self, budget: int) -> int:
        """The next chunk of every prompt in its prefill; all its blocks are there."""
        for sequence in self.running:
            chunk = min(known(sequence) - self.computed[sequence], budget)
            if chunk and sequence not in self.decoding:
                self.compute(sequence, chunk)
                budget -= chunk
        return budget

    def _admit(self, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            tokens = known(self.waiting[0])
            if len(self.free) - self.blocks_for(tokens) < self.watermark_blocks():
                break
            chunk = min(tokens, budget)
            self.grow(self.admit(chunk), tokens)
            budget -= chunk
