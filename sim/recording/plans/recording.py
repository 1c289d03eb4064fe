"""Serves a workload and records what its block tables do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import simpy

from ...cost.base import StepCost
from ...engine.engine import Engine
from ...engine.executor import Begun, FirstStep
from ...engine.grouping import pinned_tokens
from ...engine.run import Run, simulate
from ...engine.settings import Settings
from ...memory import Memory
from ...memory.accounting.ledger import Leap
from ...policy import Policy
from ...types.errors import SettingError
from ...types.sequence import CARRY_ON
from ...types.sequence import Plan as Decision
from ...types.state import State
from ...workload.groups import Group, Lineage
from ...workload.source import Source
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
    window = _Window(settings, workload, first_step, num_steps, shuffle_ids)
    run = simulate(replace(settings, ids=True), workload, step_cost, progress, window.engine)
    return replace(run, settings=settings), window.recorder.plan(window.meta(run))


class _Window:
    """What is to be recorded, from the settings to the plan."""

    def __init__(
        self, settings: Settings, workload: Workload, first_step: int, num_steps: int | None, shuffle_ids: bool
    ) -> None:
        for field, value, least in (("first_step", first_step, 0), ("num_steps", num_steps, 1)):
            if value is not None and value < least:
                raise SettingError(field, value, f"must be {least} or more")
        self._settings, self._workload = settings, workload
        self._steps, self._shuffle_ids = (first_step, num_steps), shuffle_ids

    def engine(self, env: simpy.Environment, source: Source, policy: Policy, memory: Memory, *others: Any) -> Engine:
        """The engine that serves the workload, and is watched."""
        layout = self._layout = layout_of(memory, policy.name)
        if self._shuffle_ids:
            if not isinstance(layout, PagedLayout):
                raise SettingError("shuffle_ids", True, f"{policy.name} hands out no block ids; leave it out")
            seeds = np.random.SeedSequence(self._settings.seed, spawn_key=(_STREAM,))
            layout.shuffle(np.random.default_rng(seeds))
        names = TokenNames(self._workload.sequences, pinned_tokens(self._settings.policy_options))
        self.recorder = Recorder(layout, names, *self._steps)
        return _WatchedEngine(self.recorder, env, source, policy, memory, *others)

    def meta(self, run: Run) -> dict[str, Any]:
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


class _WatchedEngine(Engine):
    """An engine that shows a recorder every step before it runs, and leaps when that has seen enough."""

    def __init__(self, recorder: Recorder, *served: Any) -> None:
        super().__init__(*served)
        self._leaps, self.leap = self.leap, False
        self._recorder = recorder
        self._decision = CARRY_ON

    def _carry_out(self, plan: Decision, now: int) -> FirstStep:
        for sequence in plan.admitted:
            self._watch(sequence.group)
        self._decision = plan
        return super()._carry_out(plan, now)

    def _watch(self, group: Group | None) -> None:
        ancestry = None if group is None else group.ancestry
        if group is not None and ancestry is not None and not isinstance(ancestry, _WatchedAncestry):
            group.ancestry = _WatchedAncestry(ancestry, group, self.state, self._recorder)

    def _leap_over(self, now: int, first_step: FirstStep) -> tuple[int, int, Leap]:
        steps, ticks, leap = super()._leap_over(now, first_step)
        self._tell(now, ticks, CARRY_ON if first_step is None else self._decision)
        return steps, ticks, leap

    def _stand_still(self, now: int, first_step: Begun, plan: Decision) -> tuple[int, Leap]:
        ticks, leap = super()._stand_still(now, first_step, plan)
        self._tell(now, ticks, plan)
        return ticks, leap

    def _tell(self, now: int, ticks: int, decision: Decision) -> None:
        if not self._recorder.is_over:
            self._recorder.step(now, ticks, self.state, decision)
            self.leap = self._leaps and self._recorder.is_over


class _WatchedAncestry:
    """Tells a recorder of the beams that die, which is known of the draws alone."""

    def __init__(self, ancestry: Lineage, group: Group, state: State, recorder: Recorder) -> None:
        self._ancestry, self._group, self._state, self._recorder = ancestry, group, state, recorder

    def replaced(self, beams: int) -> list[tuple[int, int]]:
        """See ``Lineage``."""
        replaced = self._ancestry.replaced(beams)
        self._recorder.branch(self._group, replaced, self._group.leader.held_tokens(self._state.clock))
        return replaced
