"""A step cost that runs the steps: the engine serves requests on a device's own clock.

    Engine   carries a plan out: queues and block tables are those of the step
             asks its cost for the ticks of the step          step_ticks, or decode_line where the decision is unchanged
    here     the step's batch and moves, by the recorder of plans, from the engine's state
             the skeleton runs them; the stopwatch's time, in whole ticks, is the answer
    Engine   adds the ticks to its clock, delivers what has arrived by then, and decides

The next decision therefore depends on what the step took. The engine asks twice for some steps (its leaps need a line), so the
answer is kept until the step starts. Time between steps, in which the simulator decides, is not part of the clock. The simulated
state sees integer ticks only.
"""

from __future__ import annotations

import numpy as np
import torch

from ...sim import Settings, Workload
from ...sim.engine.observer import Observed, Observer
from ...sim.memory.accounting.ledger import Leap
from ...sim.recording.plans.form import PAGED
from ...sim.recording.plans.layouts import Layout, layout_of
from ...sim.recording.plans.names import TokenNames
from ...sim.recording.plans.recording import Recorder
from ...sim.types.errors import SettingError
from ...sim.types.sequence import CARRY_ON, StepPlan
from ...sim.types.state import State
from ...sim.types.ticks import PER_US
from ..devices import timing
from ..model.skeleton import Skeleton
from .validate import Size, batch_of, one_step_us, size_of


class DeviceCost(Observer):
    """A ``StepCost`` whose times are measured; pass it to ``simulate`` as the cost and as an observer.

    Args:
        skeleton: Runs the steps; its pool has room for all slots.
        settings, workload: Of the run, with ``ids``.
        warm: Sizes of steps that the skeleton has run. The first step of a size runs once untimed before, so that no compilation or
            capture counts.

    Attributes:
        name: See ``StepCost``.
        steps: Number of steps that ran.
    """

    every_step = True
    name = "device"
    _layout: Layout
    _state: State
    _recorder: Recorder
    _plan: StepPlan
    #: Ticks of the step that is about to start, once it has run.
    _ticks: int | None

    def __init__(self, skeleton: Skeleton, settings: Settings, workload: Workload, warm: set[Size]) -> None:
        self._skeleton, self._warm = skeleton, warm
        self._stopwatch = timing.stopwatch(skeleton.device)
        self._names = TokenNames(workload.sequences, settings.policy_options.pinned_tokens)
        self._plan, self._ticks, self._recorded, self.steps = CARRY_ON, None, 0, 0

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        if engine.policy.schedules_ahead:
            remedy = "decides a step while the one before it runs, which a device that runs step after step cannot show"
            raise SettingError("policy", engine.policy.name, f"{remedy}; give --no-async-scheduling")
        self._state, self._layout = engine.state, layout_of(engine.memory, engine.policy.name)
        self._layout.open()

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        self._plan = plan

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """See ``Observer``: the next question is about another step."""
        self._plan, self._ticks = CARRY_ON, None

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``: runs the step."""
        self._ticks = self._run()
        return self._ticks

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``: runs the step if it has not run; the line ends after this context."""
        if self._ticks is None:
            self._ticks = self._run()
        return self._ticks, 0, context + 1

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``; 0, because moves run, and count, in the step that they precede."""
        return 0

    swap_in_ticks = copy_ticks = swap_out_ticks

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; there are no coefficients."""
        return {}

    @torch.inference_mode()
    def _run(self) -> int:
        """Run the step that is about to start; returns its ticks."""
        if not self._recorded or self._layout.name == PAGED or self._plan.prefill_tokens:
            # A window of its own; that of a static batch begins with its prompts, of which the padding follows.
            self._recorder, self._recorded = Recorder(self._layout, self._names), 0
        self._recorder.step(0, 0, self._state, self._plan)
        step, self._recorded = self._recorded, self._recorded + 1
        window = self._recorder.plan({"layout": self._layout.name, "first_step": 0})
        pool = self._skeleton.pool
        if self._layout.num_slots > pool.num_slots:
            raise SettingError("num_slots", self._layout.num_slots, f"the skeleton has {pool.num_slots}; give it more")
        found = batch_of(window, step)
        size = size_of(found, pool.block_size)
        if size not in self._warm:
            self._skeleton.step(found)
            self._warm.add(size)
        self.steps += 1
        return max(1, round(one_step_us(self._skeleton, window, step, self._stopwatch) * PER_US))
