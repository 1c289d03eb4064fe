"""Step times of a recorded run by a later calibration: the same steps, without another simulation.

The steps of a run depend on their times where requests arrive over time. A calibration that goes on while the recorded
steps are replayed must not change them, so its times are computed for the steps as they were recorded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...sim import Settings, Workload
from ...sim.cost.base import StepCost, effective_context, saved_ticks
from ...sim.engine.observer import Observer
from ...sim.engine.run import simulate
from ...sim.memory.accounting.ledger import Leap
from ...sim.recording.plans import Plan, PlanRecording
from ...sim.types.sequence import StepPlan

#: A method of a step cost and its arguments; after those of ``step_ticks``, with the whole context, the slots of it that
#: are read again.
Question = tuple[str, tuple[int, ...]]


class PricedPlan(NamedTuple):
    """A plan, and what a step cost was asked for each of its steps: the step, and its swaps and copies."""

    plan: Plan
    questions: list[tuple[Question, ...]]

    def ticks(self, cost: StepCost) -> np.ndarray:
        """int64 [steps], durations of the recorded steps by another step cost."""
        effective, saved = effective_context(cost), saved_ticks(cost)

        def answer(name: str, sizes: tuple[int, ...]) -> int:
            if name == "step_ticks":
                decodes, context, tokens, pairs, repeated = sizes
                read = context if effective is None else effective(context, repeated)
                less = saved(decodes, context, repeated) if saved is not None and decodes and tokens else 0
                return cost.step_ticks(decodes, read, tokens, pairs) - less
            return int(getattr(cost, name)(*sizes))

        sums = (sum(answer(*question) for question in asked) for asked in self.questions)
        return np.fromiter(sums, np.int64, len(self.questions))


def priced(settings: Settings, workload: Workload, shuffle_ids: bool, cost: StepCost) -> PricedPlan:
    """Record a run as ``sim.recording.plans.record`` does, and what its steps asked the cost for."""
    asked, recording = _AskedCost(cost), PlanRecording(settings, workload, shuffle_ids=shuffle_ids)
    run = simulate(replace(settings, ids=True), workload, asked, None, (recording, asked))
    plan = recording.plan(run)
    return PricedPlan(plan, [asked.by_start[start] for start in plan.start_ticks.tolist()])


class _AskedCost(Observer):
    """A step cost that passes questions on to another one, and keeps those of each step.

    Attributes:
        name: See ``StepCost``.
        by_start: The questions of each step, by the tick of its start.
    """

    def __init__(self, inner: StepCost) -> None:
        self._inner, self.name = inner, inner.name
        self.by_start: dict[int, tuple[Question, ...]] = {}
        self._asked: list[Question] = []
        self._lines: list[Question] = []
        self._effective = effective_context(inner)
        # Of the step that is asked for next: slots that are read again, and by how much its context is shortened for them.
        self._repeated = self._free = 0

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """See ``Observer``. A decision that is unchanged has no question but that of its line."""
        if ticks:
            self.by_start[now] = tuple(self._asked or self._lines[:1])
        self._asked, self._lines = [], []

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``."""
        self._asked.append(self._step(decodes, decode_context, prefill_tokens, prefill_pairs))
        return self._inner.step_ticks(decodes, decode_context, prefill_tokens, prefill_pairs)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``."""
        self._lines.append(self._step(decodes, context))
        return self._inner.decode_line(decodes, context)

    def effective_context(self, context: int, repeated: int) -> int:
        """See ``base.effective_context``; always there, as the cost that is asked later may know repeated reads."""
        read = context if self._effective is None else self._effective(context, repeated)
        self._repeated, self._free = repeated, context - read
        return read

    def _step(self, decodes: int, context: int, tokens: int = 0, pairs: int = 0) -> Question:
        repeated, free, self._repeated, self._free = self._repeated, self._free, 0, 0
        return "step_ticks", (decodes, context + free, tokens, pairs, repeated)

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return self._answer("swap_out_ticks", blocks)

    def swap_in_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return self._answer("swap_in_ticks", blocks)

    def copy_ticks(self, slots: int) -> int:
        """See ``StepCost``."""
        return self._answer("copy_ticks", slots)

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        return self._inner.describe()

    def _answer(self, name: str, *sizes: int) -> int:
        self._asked.append((name, sizes))
        return int(getattr(self._inner, name)(*sizes))
