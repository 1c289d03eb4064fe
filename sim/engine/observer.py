"""The interface of what watches a run: observers see what the engine decides and does, and change none of it.

    run_started     before the first event: the engine that is about to serve
    plan_decided    the policy changes the running sequences; nothing of it has taken place yet
    step_started    the plan has taken place, and a step, or a leap of several, is about to take its time
    idle_started    nothing runs until the next request arrives

Between two of these calls the simulated clock is where the first one left it, or at the end of that step or idle span.

An observer may ask two things of the engine: ``every_step``, and ``Engine.stop``. It may make a memory keep up its block
tables (``grow_until``, ``settle``), which changes no count. All else it only reads. So a run has the same results
with and without observers, unless one stops it; with ``every_step`` its rows are single steps instead of leaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..memory.accounting.ledger import Leap
from ..types.sequence import StepPlan

if TYPE_CHECKING:
    from .engine import Engine


class Observer:
    """Watches one run; each method does nothing until it is overridden.

    Attributes:
        every_step: While True, every step is an event of its own, as with ``leap=False``. Read before each step.
    """

    every_step: bool = False

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        """The run is about to start, at tick 0.

        Args:
            engine: To read ``state``, ``memory``, ``policy``, ``cost`` and ``ledger`` of, now and later, and to ``stop``.
            refused: bool [n], requests that the pool can never hold; they are not served.

        Raises:
            SettingError: This run cannot be observed; it is not started.
        """

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        """The policy decided something else than to carry on; queues and blocks are as they were before.

        Args:
            now: Ticks.
        """

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """A step, or a leap of several that hold the same decision, starts; blocks of new sequences are taken.

        Args:
            now, ticks: When, and how long until the engine decides again; 0 where the plan only changed queues.
            leap: The ledger's row for it, columns as in ``LEAP``. Its ``steps`` is 0 where no sequence decodes.
            plan: What was decided for its first step; ``CARRY_ON`` where that is nothing new.
        """

    def idle_started(self, now: int, ticks: int) -> None:
        """Nothing runs and nothing waits for so many ticks."""
