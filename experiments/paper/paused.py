"""A step cost with something of the host's in front of every step."""

from __future__ import annotations

from ...sim.cost import StepCost
from ...sim.cost.base import coefficient


class PausedCost:
    """A ``StepCost`` in which every step first waits for the host; the rest is the given cost.

    Args:
        pause_ticks: Before every step.
        source: Where the pause is known from.
    """

    def __init__(self, cost: StepCost, pause_ticks: int, source: str) -> None:
        self._cost, self._pause_ticks, self._source = cost, pause_ticks, source
        self.name = f"{cost.name}, paused"
        self.swap_out_ticks, self.swap_in_ticks = cost.swap_out_ticks, cost.swap_in_ticks
        self.copy_ticks = cost.copy_ticks

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``."""
        return self._pause_ticks + self._cost.step_ticks(decodes, decode_context, prefill_tokens, prefill_pairs)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``."""
        base, slope, until = self._cost.decode_line(decodes, context)
        return self._pause_ticks + base, slope, until

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        return self._cost.describe() | {"pause": coefficient(self._pause_ticks, "ticks", self._source)}
