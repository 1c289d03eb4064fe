"""Serves a workload and records its block tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np

from ...cost.base import StepCost
from ...engine.engine import Engine
from ...engine.grouping import pinned_tokens
from ...engine.observer import Observer
from ...engine.run import Run, simulate
from ...engine.settings import Settings
from ...memory.accounting.ledger import Leap
from ...types.errors import SettingError
from ...types.sequence import StepPlan
from ...types.state import State
from ...workload.groups import Group, Lineage
from ...workload.workload import Workload
from .layouts import PagedLayout, layout_of
from .names import TokenNames
from .recorded import SCHEMA_VERSION, Plan
from .recorder import Recorder

#: Sets the stream of shuffled ids apart from others that are spawned from the same seed.
_STREAM = 16


def record(
    settings: Settings,
    workload: Workload,
    first_step: int = 0,
    num_steps: int | None = None,
    shuffle_ids: bool = False,
    step_cost: StepCost | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Run, Plan]:
    """Serve a workload as ``simulate`` does, and record a window of steps.

    The run is the one that ``simulate`` gives, bit by bit. Up to the end of the window it goes step by step, with
    block ids: some ten thousand steps a second at most, and less where many sequences run.

    Args:
        first_step, num_steps: The window, in steps from the start of the run, of which those count that only move
            blocks; None is all that follow.
        shuffle_ids: Hand out block ids in a random order, as a pool that has long been in use does.
        step_cost, progress: See ``simulate``.

    Raises:
        SettingError: The policy's memory cannot be recorded, or ids of pieces are to be shuffled.
        UserError, SimulationFault: As ``simulate``.
    """
    recording = PlanRecording(settings, workload, first_step, num_steps, shuffle_ids)
    run = simulate(replace(settings, ids=True), workload, step_cost, progress, (recording,))
    return replace(run, settings=settings), recording.plan(run)


class PlanRecording(Observer):
    """Watches a run, which must have block ids, and records a window of its steps.

    Args:
        settings, workload: Of the run.
        first_step, num_steps, shuffle_ids: See ``record``.

    Raises:
        SettingError: There is no such window.
    """

    every_step = True

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        first_step: int = 0,
        num_steps: int | None = None,
        shuffle_ids: bool = False,
    ) -> None:
        for field, value, least in (("first_step", first_step, 0), ("num_steps", num_steps, 1)):
            if value is not None and value < least:
                raise SettingError(field, value, f"must be {least} or more")
        self._settings, self._workload = settings, workload
        self._steps, self._shuffle_ids = (first_step, num_steps), shuffle_ids

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        """See ``Observer``: from now on the memory tells what it moves."""
        layout = self._layout = layout_of(engine.memory, engine.policy.name)
        if self._shuffle_ids:
            if not isinstance(layout, PagedLayout):
                raise SettingError("shuffle_ids", True, f"{engine.policy.name} hands out no block ids; leave it out")
            seeds = np.random.SeedSequence(self._settings.seed, spawn_key=(_STREAM,))
            layout.shuffle(np.random.default_rng(seeds))
        layout.open()
        names = TokenNames(self._workload.sequences, pinned_tokens(self._settings.policy_options))
        self._state, self._recorder = engine.state, Recorder(layout, names, *self._steps)

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        """See ``Observer``: groups that fork are watched for beams that die."""
        for sequence in plan.admitted:
            group = sequence.group
            ancestry = None if group is None else group.ancestry
            if group is not None and ancestry is not None and not isinstance(ancestry, _WatchedAncestry):
                group.ancestry = _WatchedAncestry(ancestry, group, self._state, self._recorder)

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """See ``Observer``: the step is recorded, and when the window is over the run may leap.

        Tokens that are computed in vain (asynchronous scheduling) are not recorded, nor steps of nothing else.
        """
        in_vain_only = not (leap[1] or plan.prefill_tokens or plan.preempted or plan.swapped_out)
        if self.every_step and not in_vain_only:
            self._recorder.step(now, ticks, self._state, plan)
            self.every_step = not self._recorder.is_over

    def plan(self, run: Run) -> Plan:
        """What was recorded of a run that is over."""
        return self._recorder.plan(self._meta(run))

    def _meta(self, run: Run) -> dict[str, Any]:
        """What the plan says of itself."""
        layout, settings = self._layout, self._settings
        return {
            "schema_version": SCHEMA_VERSION,
            "fragmeter": version("fragmeter"),
            "policy": settings.policy,
            "model": settings.model,
            "layout": layout.name,
            "block_size": run.replica.block_size,
            "num_blocks": run.replica.memory.num_blocks,
            "host_blocks": run.replica.host_blocks,
            "num_slots": layout.num_slots,
            "first_step": self._steps[0],
            "shuffle_ids": self._shuffle_ids,
            "seed": settings.seed,
            "trace_sha256": self._workload.sha256(),
        }


class _WatchedAncestry:
    """Tells a recorder of the beams that die, which is known of the draws alone."""

    def __init__(self, ancestry: Lineage, group: Group, state: State, recorder: Recorder) -> None:
        self._ancestry, self._group, self._state, self._recorder = ancestry, group, state, recorder

    def replaced(self, beams: int) -> list[tuple[int, int]]:
        """See ``Lineage``."""
        replaced = self._ancestry.replaced(beams)
        self._recorder.branch(self._group, replaced, self._group.leader.held_tokens(self._state.decode_step))
        return replaced
