"""Steps of one second, in which a story and its test count."""

from __future__ import annotations

from ...sim.types.ticks import PER_SECOND


class OneSecondStep:
    """A ``StepCost`` with steps of one second, which makes arrivals easy to place."""

    name = "one-second-step"

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``."""
        return PER_SECOND

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``."""
        return PER_SECOND, 0, None

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return 0

    def swap_in_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return 0

    def copy_ticks(self, slots: int) -> int:
        """See ``StepCost``."""
        return 0

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        return {"name": self.name, "step": {"value": PER_SECOND, "unit": "ticks", "source": "chosen"}}
