"""What observers see, and what they may ask: the run is the one without observers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import evictions_of, residencies_of, settings_of, steps_of, times_of, workload_of
from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.memory.accounting.ledger import LEAP
from fragmeter.sim.types.sequence import CARRY_ON
from strategies import Case, crowded_cases, small_cases


class Log(Observer):
    """Writes all down."""

    def __init__(self, every_step: bool = False, stop_at: int | None = None) -> None:
        self.every_step, self._stop_at = every_step, stop_at
        self.lines: list[tuple] = []

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        self.engine = engine
        self.lines.append(("run", int(refused.sum())))

    def plan_decided(self, now, plan):
        self.lines.append(("plan", now, [one.index for one in plan.admitted]))

    def step_started(self, now, ticks, leap, plan):
        self.lines.append(("step", now, ticks, leap, plan is CARRY_ON))
        if len(self.spans()) == self._stop_at:
            self.engine.stop()

    def idle_started(self, now, ticks):
        self.lines.append(("idle", now, ticks))

    def spans(self) -> list[tuple]:
        return [line for line in self.lines if line[0] in ("step", "idle")]


def two_apart() -> Workload:
    """A request of two tokens at once, one of three a second later, and one that no pool of four blocks holds."""
    return Workload("two", np.array([0, 10**12, 10**12]), np.array([3, 3, 90]), np.array([2, 3, 2]))


TINY = settings(model="toy-opt", block_size=4, num_gpu_blocks_override=4, max_model_len=128, watermark=0)


def test_a_story_of_two_requests():
    log = Log()
    run = simulate(TINY, two_apart(), observers=[log])
    events = [(line[0], line[1]) if line[0] != "plan" else line for line in log.lines]
    first = run.log.rows["start_ticks"].tolist()
    second = 10**12
    assert events[:3] == [("run", 1), ("plan", 0, [0]), ("step", 0)]
    assert ("plan", second, [1]) in events and ("step", second) in events
    idle = next(line for line in log.lines if line[0] == "idle")
    assert sum(idle[1:]) == second and first[0] == 0 and second in first


@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v1", "orca-max", "static", "sglang"])
@hypothesis_settings(max_examples=6)
@given(case=st.one_of(crowded_cases(), small_cases()), every_step=st.booleans())
def test_observers_see_all_time_and_change_nothing(policy, case: Case, every_step: bool):
    chosen = settings_of(policy, case.pool, case.limits)
    work, log = workload_of(case.requests, case.limits.max_model_len), Log(every_step)
    run, plain = simulate(chosen, work, case.cost, observers=[log]), simulate(chosen, work, case.cost)
    for what in (times_of, steps_of, residencies_of, evictions_of):
        assert what(run) == what(plain)
    now = 0
    for span in log.spans():
        assert span[1] == now
        now += span[2]
    assert now == run.log.end_ticks
    leaps = [line[3] for line in log.lines if line[0] == "step"]
    rows = run.log.rows
    assert leaps == [*zip(*(rows[name].tolist() for name in LEAP))]
    assert not every_step or max(rows["steps"], default=0) <= 1
    plans = [line[1] for line in log.lines if line[0] == "plan"]
    assert {line[1] for line in log.lines if line[0] == "step" and not line[4]} <= set(plans)


def test_a_run_that_is_stopped_ends_with_the_step_under_way():
    whole, stopped = Log(every_step=True), Log(every_step=True, stop_at=2)
    simulate(TINY, two_apart(), observers=[whole])
    reported: list[int] = []
    run = simulate(TINY, two_apart(), progress=reported.append, observers=[stopped])
    assert stopped.lines == whole.lines[: len(stopped.lines)] and len(stopped.spans()) == 2 < len(whole.spans())
    assert run.log.end_ticks == sum(span[2] for span in stopped.spans())
    assert run.log.num_steps == 2 and max(reported) < 2


def test_every_step_is_asked_before_each():
    """An observer that has seen enough lets the run leap from then on."""

    class First(Log):
        def step_started(self, now, ticks, leap, plan):
            super().step_started(now, ticks, leap, plan)
            self.every_step = len(self.spans()) < 2

    log = First(every_step=True)
    long = Workload("long", np.array([0]), np.array([3]), np.array([12]))
    simulate(TINY, long, observers=[log])
    steps = [line[3][1] for line in log.lines if line[0] == "step"]
    assert steps[:2] == [1, 1] and max(steps[2:]) > 1 and sum(steps) == 12
