"""Step times under speculative decoding: the target's step, which verifies drafts, and the passes of the drafter after it."""

from __future__ import annotations

from collections.abc import Sequence

from .base import StepCost, among, coefficient, effective_context, outside_ticks, saved_ticks


class SpeculativeCost:
    """Adds the time of drafting to the step times of another cost. See ``StepCost``.

    After a step, vLLM's drafter (``SpecDecodeBaseProposer.propose``) makes one pass over all tokens of the step. Then
    it makes ``drafts - 1`` passes of one token for each sequence that sampled. A step that only continues prompts has
    the first pass alone. The host prepares a step and its drafts together, so no host time is added.

    Args:
        inner: Cost model of the target model.
        drafter: Cost model of the drafter; None if drafts take no GPU time (n-grams).
        drafts: Draft tokens per sequence.
    """

    def __init__(self, inner: StepCost, drafter: StepCost | None, drafts: int) -> None:
        self.inner, self.drafter, self.drafts, self.name = inner, drafter, drafts, inner.name
        self.step_ticks, self.decode_line = inner.step_ticks, inner.decode_line
        self.swap_out_ticks, self.swap_in_ticks = inner.swap_out_ticks, inner.swap_in_ticks
        self.copy_ticks, self.outside_ticks = inner.copy_ticks, outside_ticks(inner)
        self.effective_context, self.saved_ticks = effective_context(inner), saved_ticks(inner)

    def among(self, tokens: Sequence[int]) -> SpeculativeCost:
        """See ``base.among``; the drafter's passes stay those of an engine whose peers draft as much."""
        return SpeculativeCost(among(self.inner, tokens), self.drafter, self.drafts)

    def draft_ticks(self, rows: tuple[int, int, int, int], sampled: tuple[int, int]) -> int:
        """See ``base.draft_ticks``."""
        if self.drafter is None:
            return 0
        sequences, context = sampled
        first = self.drafter.step_ticks(*rows)
        if not sequences:
            return first
        return first + sum(
            self.drafter.step_ticks(sequences, context + place * sequences, 0, 0) for place in range(1, self.drafts)
        )

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; the drafter's coefficients are apart."""
        drafts = coefficient(self.drafts, "1", "setting speculative_config")
        found = {**self.inner.describe(), "drafts": drafts}
        return found if self.drafter is None else found | {"drafter": self.drafter.describe()}
