"""The interface of a cost model, as the engine calls it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class StepCost(Protocol):
    """Durations in ticks. Coefficients are rounded to ticks once, on construction; the rest is exact.

    Attributes:
        name: Name in ``run.json`` and on the command line.
    """

    name: str

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """Duration of one iteration without swaps.

        Args:
            decodes: Sequences that decode one token each.
            decode_context: Sum of the context lengths of these sequences, new tokens included.
            prefill_tokens: Prompt tokens computed in this step, padding included.
            prefill_pairs: Causal (query, key) pairs of these prompts: p * (p + 1) / 2 for a whole prompt of p tokens.
        """

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """``(base_ticks, ticks_per_context_token, until_context)`` of a step that only decodes.

        For every context from ``context`` to before ``until_context`` (None: without end),
        ``step_ticks(decodes, context, 0, 0) == base_ticks + ticks_per_context_token * context``.
        """

    def swap_out_ticks(self, blocks: int) -> int:
        """Time to copy ``blocks`` blocks to the host."""

    def swap_in_ticks(self, blocks: int) -> int:
        """Time to copy ``blocks`` blocks back from the host."""

    def copy_ticks(self, slots: int) -> int:
        """Time to copy the keys and values of ``slots`` tokens within the device's memory."""

    def describe(self) -> dict[str, object]:
        """Every coefficient as ``{"value", "unit", "source"}``, for ``run.json``."""


def coefficient(value: float, unit: str, source: str) -> dict[str, object]:
    """One entry of ``describe``."""
    return {"value": value, "unit": unit, "source": source}
