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
    """An engine as its observers see it. They only read it, except for ``stop``."""

    state: State
    memory: Memory
    policy: PairedPolicy
    cost: StepCost
    ledger: Ledger

    def stop(self) -> None:
        """End the run after the step or leap in progress."""


class MapLimits(NamedTuple):
    """Bounds of a block map that the compiled core records (``sim.recording.blocks.recording``).

    Attributes:
        stride_ticks: Time between two columns of the map at its start.
        most_columns: Columns of the map, at most.
        most_read: Block states that all looks may read, at most.
        of_sequence: Block states that each running sequence counts as, towards ``most_read``.
        live, reserved, block_tail, cached, free: Codes of the buckets.
        num_buckets: Number of bucket codes.
        num_sizes: Number of classes of the length of a free run.
    """

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
            shown: Ids of the blocks to show, int64, ascending.
            limits: Bounds of the map.

        Returns:
            A function to call after the run. It returns the stride of the map in ticks, the index of the look at each
                time (int32), and the looks (``look_type`` of ``sim.recording.blocks.recording``).
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
        """Called in place of ``run_started`` if ``maps_blocks`` is set and the compiled core serves the run."""

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        """Called with a plan that changes the running sequences, before queues and blocks change.

        Args:
            now: Ticks.
        """

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """Called at the start of a step or leap, after the blocks of admitted sequences were allocated.

        Args:
            now: Start in ticks.
            ticks: Ticks until the next decision; 0 if the plan only changed queues.
            leap: The ledger's row, with the columns of ``LEAP``. Its ``steps`` is 0 if no sequence decodes.
            plan: The plan of the first step; ``CARRY_ON`` if the decision is unchanged.
        """

    def requests_finished(self, now: int, finished: Iterable[Sequence], overrunning: Iterable[Sequence]) -> None:
        """Called when sequences have generated their last token and still hold their blocks; asynchronous scheduling
        only.

        The step that starts at ``now`` was planned before these finishes were known.

        Args:
            now: Ticks.
            finished: Sequences whose last token was generated in the step that ended at ``now``, including sequences
                that the plan of the next step preempted.
            overrunning: The subset that the step starting at ``now`` computes once more; that token is discarded.
        """

    def idle_started(self, now: int, ticks: int) -> None:
        """Called when no sequence runs or waits for the next ``ticks``."""
