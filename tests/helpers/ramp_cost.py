"""A step cost with a closed form."""

from __future__ import annotations

from dataclasses import dataclass

from strategies import LineCost


@dataclass(frozen=True)
class RampCost(LineCost):
    """``base_ticks`` a step and ``context_ticks`` a token that a decode attends to; a prompt is free."""

    base_ticks: int = 1

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return self.base_ticks + self.context_ticks * decode_context

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return self.base_ticks, self.context_ticks, None
