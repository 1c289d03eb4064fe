"""LightLLM: slots token by token, and an estimate of the peak to which running sequences will grow.

All running sequences grow by a slot a step. When the one with the i-th most tokens left ends, i of them remain, each
grown by what that one had left: the peak is the largest of these i sums.
"""

from __future__ import annotations

from .iteration import known
from .model import Limits, Pool, Sequence, allowed_output_tokens
from .trtllm import WholePrompts


class LightLlm(WholePrompts):
    """Admission by the estimated peak; where outputs exceed the declared length, the last running is paused."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__(pool, limits)
        if pool.block_size != 1:
            raise ValueError(f"block_size = {pool.block_size}: LightLLM's blocks hold one token")

    def largest_tokens(self, sequence: Sequence) -> int:
        """The peak of the sequence alone, as estimated and as it will be."""
        declared = sequence.request.prompt_tokens + allowed_output_tokens(sequence.request, self.limits) - 1
        return max(declared, super().largest_tokens(sequence))

    def decide(self) -> None:
        while len(self.free) < len(self.running):
            self.preempt(self.running[-1])
        for sequence in self.running:
            self.compute(sequence, 1)
        if not self.work.preempted:
            self.admit_in_order()

    def tokens_left(self, sequence: Sequence) -> int:
        """Tokens of its allowed output to generate after this step."""
        return max(0, allowed_output_tokens(sequence.request, self.limits) - sequence.generated - 1)

    def fits(self, sequence: Sequence) -> bool:
        growing = [(self.tokens_left(runs), self.computed_now(runs)) for runs in self.running]
        growing.append((self.tokens_left(sequence), known(sequence)))
        growing.sort(reverse=True)
        held, peak = 0, 0
        for number, (left, tokens) in enumerate(growing, start=1):
            held += tokens
            peak = max(peak, left * number + held)
        return peak <= self.pool.slots
