"""The interface of observers: they are notified of the engine's decisions and steps, and change neither.

    run_started     before the first event
    plan_decided    the policy returned a plan that changes the running sequences; it is not carried out yet
    requests_finished  with asynchronous scheduling: the plan is carried out, and requests that finished in the step
                    before, which it did not know, are about to release their blocks
    step_started    the plan is carried out; a step, or a leap of several steps, begins
    idle_started    nothing runs until the next request arrives

Each call comes at the simulated time of the call before it, or at the end of the step or idle span that it announced.

An observer controls the engine in two ways: ``every_step`` and ``Observed.stop``. It may make a memory update its block
tables (``grow_until``, ``settle``), which changes no count. Apart from these it only reads. A run therefore has the
same results with and without observers, unless one stops it; with ``every_step`` each of its rows is a step instead of
a leap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from ..cost.base import StepCost
from ..memory import Memory
from ..memory.accounting.ledger import Leap, Ledger
from ..policy.base import PairedPolicy
from ..types.sequence import Sequence, StepPlan
from ..types.state import State


class Observed(Protocol):
    """An engine as its observers see it: all but ``stop`` is only read."""

    state: State
    memory: Memory
    policy: PairedPolicy
    cost: StepCost
    ledger: Ledger

    def stop(self) -> None:
        """End the run after the step or leap in progress."""


class MapLimits(NamedTuple):
    """Bounds of a block map by the compiled core (recording/blocks/recording.py): its first stride, columns, blocks that all looks read, and
    blocks that a sequence counts as; the codes of its buckets, and how many there are; and lengths of free runs."""

    stride_ticks: int
    most_columns: int
    most_read: int
    of_sequence: int
    live: int
    reserved: int
    block_tail: int
    cached: int
    free: int
    num_buckets: int
    num_sizes: int


class BlockViews(Protocol):
    """A replica in the compiled core, which records a block map."""

    memory: Memory
    policy: PairedPolicy
    cost: StepCost

    def record(self, shown: np.ndarray, limits: MapLimits) -> Callable[[], tuple[int, memoryview, memoryview]]:
        """Record a block map from now on.

        Args:
            shown: Blocks to show, int64, ascending.

        Returns:
            To be called when the run has ended: it returns the stride of the grid in ticks, the look of each of its times, int32, and
            the looks, of ``look_type`` (recording/blocks/recording.py).
        """


class Observer:
    """Base class of observers of one run; every method does nothing unless overridden.

    Attributes:
        every_step: If True, every step is a separate event, as with ``leap=False``. Read before each step.
        maps_blocks: If True, the compiled core may serve the run: then ``core_started`` is called in place of ``run_started``, and
            nothing after it.
    """

    every_step: bool = False
    maps_blocks: bool = False

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        """Called before the run starts, at tick 0.

        Args:
            engine: To read now and later, and to stop.
            refused: bool [n], requests that the pool can never hold; they are not served.

        Raises:
            SettingError: The observer does not support this run; the run does not start.
        """

    def core_started(self, views: BlockViews, refused: np.ndarray) -> None:
        """As ``run_started``, where ``maps_blocks`` and the compiled core serves the run."""

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        """Called with a plan that changes the running sequences, before queues and blocks change.

        Args:
            now: Ticks.
        """

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """Called at the start of a step or leap, after the blocks of admitted sequences were allocated.

        Args:
            now, ticks: Start, and ticks until the next decision; 0 if the plan only changed queues.
            leap: The ledger's row, with the columns of ``LEAP``. Its ``steps`` is 0 if no sequence decodes.
            plan: The plan of its first step; ``CARRY_ON`` if the decision is unchanged.
        """

    def requests_finished(self, now: int, finished: Iterable[Sequence], in_vain: Iterable[Sequence]) -> None:
        """Called when sequences have generated their last token and still hold their blocks. Asynchronous scheduling alone: the step that
        starts ``now`` was planned before it was known that they would finish.

        Args:
            finished: They generated their last token in the step that ended ``now``; sequences that the plan of the next step preempted
                are among them.
            in_vain: Those of them that the step that starts ``now`` computes once more, for a token that is thrown away.
        """

    def idle_started(self, now: int, ticks: int) -> None:
        """Called when no sequence runs or waits for the next ``ticks``."""
