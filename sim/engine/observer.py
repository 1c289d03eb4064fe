"""The interface of observers: they are notified of the engine's decisions and steps, and change neither.

    run_started     before the first event
    plan_decided    the policy returned a plan that changes the running sequences; it is not carried out yet
    step_started    the plan is carried out; a step, or a leap of several steps, begins
    idle_started    nothing runs until the next request arrives

Each call comes at the simulated time of the call before it, or at the end of the step or idle span that it announced.

An observer controls the engine in two ways: ``every_step`` and ``Engine.stop``. It may make a memory update its block
tables (``grow_until``, ``settle``), which changes no count. Apart from these it only reads. A run therefore has the
same results with and without observers, unless one stops it; with ``every_step`` each of its rows is a step instead of
a leap.
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
