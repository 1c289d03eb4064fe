"""TensorRT-LLM's two ways to admit, and the step that they share with LightLLM.

A step holds the decodes of all running and whole prompts of admitted sequences. GUARANTEED_NO_EVICT admits those that
can run to completion beside all others; MAX_UTILIZATION admits those that fit now, and pauses the last running when
blocks end.
"""

from __future__ import annotations

from .iteration import IterationSystem, known
from .model import Sequence, allowed_output_tokens


class WholePrompts(IterationSystem):
    """Decodes and whole prompts in one step, within ``max_num_batched_tokens``."""

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is memory to admit it."""
        raise NotImplementedError

    def admit_in_order(self) -> None:
        """First come first served; a prompt longer than the step's tokens goes when nothing else runs."""
        step_tokens = len(self.running)
        while self.waiting and len(self.running) < self.max_num_seqs:
            tokens = known(self.waiting[0])
            step_tokens += tokens
            if self.running and step_tokens > self.limits.max_num_batched_tokens:
                break
            if not self.fits(self.waiting[0]):
                break
            self.admit(tokens)


class NoEvict(WholePrompts):
    """GUARANTEED_NO_EVICT: no sequence is ever preempted."""

    def largest_tokens(self, sequence: Sequence) -> int:
        """Prompt and allowed output, the last token's slot counted."""
        allowed = sequence.request.prompt_tokens + allowed_output_tokens(sequence.request, self.limits)
        return min(allowed, self.limits.max_model_len)

    def decide(self) -> None:
        for sequence in self.running:
            self.compute(sequence, 1)
        self.admit_in_order()

    def fits(self, sequence: Sequence) -> bool:
        to_come = sum(self.blocks_missing(runs, self.largest_tokens(runs)) for runs in self.running)
        return to_come + self.blocks_for(self.largest_tokens(sequence)) <= len(self.free)


class MaxUtilization(WholePrompts):
    """MAX_UTILIZATION: blocks of the next step only."""

    def decide(self) -> None:
        # Victims leave at the end of the list, which the loop has yet to reach.
        for sequence in self.running:
            if not self.make_room(sequence, self.blocks_missing(sequence, known(sequence))):
                break
            self.compute(sequence, 1)
        if not self.work.preempted:
            self.admit_in_order()

    def fits(self, sequence: Sequence) -> bool:
        return self.blocks_for(known(sequence)) <= len(self.free)
