"""Asynchronous scheduling of vllm-v1, in stories with steps of 10 ticks; ``tests/real_vllm`` compares it with vLLM's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.memory.accounting.ledger import Leap
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.sequence import Sequence, StepPlan
from fragmeter.sim.workload.users import Users
from paths import DATA
from strategies import LineCost

#: Prompt, output and declared tokens, and arrival.
Asked = tuple[int, int, int, int]


class TenTicks(LineCost):
    """Every step takes as long."""

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return 10

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return 10, 0, None


class Steps(Observer):
    """Writes down when each step starts and which requests it computes; a token in vain has a minus."""

    every_step = True

    def __init__(self) -> None:
        self.log: list[tuple[int, list[int]]] = []
        self._overrunning: list[int] = []

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        self._state = engine.state

    def requests_finished(self, now: int, finished: Iterable[Sequence], overrunning: Iterable[Sequence]) -> None:
        self._overrunning = [-sequence.index for sequence in overrunning]

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        computed = [sequence.index for sequence in self._state.running]
        computed += [sequence.index for sequence, _ in plan.chunks]
        self.log.append((now, sorted(computed + self._overrunning)))
        self._overrunning = []


def served(requests: list[Asked], **others: Any) -> tuple[Run, list[tuple[int, list[int]]]]:
    """A run in steps of 10 ticks, and its steps; request 0 is left for the sake of the sign."""
    columns = np.array(requests).T
    work = Workload("story", columns[3], columns[0], columns[1], max_tokens=columns[2])
    chosen = {"policy": "vllm-v1", "model": str(DATA / "config.json"), "block_size": 4, "num_gpu_blocks_override": 21}
    chosen |= {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "outside_ms": 0}
    steps = Steps()
    run = simulate(settings(**chosen | others), work, TenTicks(), observers=[steps])
    return run, steps.log


#: Served before any other: requests of stories are 1, 2, ...
FIRST = (1, 1, 1, 0)


@pytest.mark.parametrize("arrival, start", [(10, 20), (11, 30), (20, 30), (21, 40)])
def test_a_request_joins_the_step_after_the_one_that_starts_once_it_has_arrived(arrival, start):
    """The step at 20 is decided at 10."""
    _, steps = served([FIRST, (4, 9, 9, 0), (4, 2, 2, arrival)])
    assert next(now for now, computed in steps if 2 in computed) == start


def test_an_idle_engine_schedules_at_once():
    _, steps = served([FIRST, (4, 1, 1, 25)])
    assert steps == [(0, [0]), (25, [1])]


def test_two_requests_at_once_to_an_idle_engine_start_together():
    _, steps = served([FIRST, (4, 1, 1, 25), (4, 1, 1, 25)])
    assert steps == [(0, [0]), (25, [1, 2])]


def test_an_end_at_max_tokens_computes_nothing_in_vain_and_frees_its_place_a_step_later():
    """One place: request 1 ends at 20, the step at 20 was decided at 10, nothing is scheduled, and request 2 is at once."""
    run, steps = served([FIRST, (4, 2, 2, 1), (4, 2, 2, 1), (4, 1, 1, 1)], max_num_seqs=1)
    assert steps == [(0, [0]), (10, [1]), (20, [1]), (30, [2]), (40, [2]), (50, [3])]
    assert request_times(run).finish_ticks.tolist() == [10, 30, 50, 60]


def test_where_others_run_the_place_of_a_finished_request_is_taken_a_step_later():
    """Two places: request 1 ends at 20; the step at 20 goes without a successor, the step at 30 has one."""
    _, steps = served([FIRST, (4, 2, 2, 1), (4, 5, 5, 1), (4, 2, 2, 1)], max_num_seqs=2)
    assert steps == [
        (0, [0]), (10, [1, 2]), (20, [1, 2]), (30, [2]), (40, [2, 3]), (50, [2, 3]),
    ]  # fmt: skip


def test_after_an_eos_a_token_is_computed_in_vain():
    run, steps = served([FIRST, (4, 2, 9, 1), (4, 4, 4, 1)])
    assert steps == [(0, [0]), (10, [1, 2]), (20, [1, 2]), (30, [-1, 2]), (40, [2])]
    assert request_times(run).finish_ticks.tolist() == [10, 30, 50]


def test_the_last_eos_of_all_delays_the_next_request():
    """The step in vain runs alone from 30 to 40."""
    _, steps = served([FIRST, (4, 2, 9, 1), (4, 1, 1, 31)])
    assert steps == [(0, [0]), (10, [1]), (20, [1]), (30, [-1]), (40, [2])]


def test_a_request_at_the_longest_length_computes_nothing_in_vain():
    _, steps = served([FIRST, (62, 2, 9, 1)])
    assert steps == [(0, [0]), (10, [1]), (20, [1])]


def test_without_it_every_decision_knows_all_that_happened():
    _, steps = served([FIRST, (4, 2, 9, 1), (4, 5, 5, 1), (4, 2, 2, 11)], max_num_seqs=2, async_scheduling=False)
    assert steps == [(0, [0]), (10, [1, 2]), (20, [1, 2]), (30, [2, 3]), (40, [2, 3]), (50, [2])]


def test_blocks_come_back_a_step_later():
    """Ten usable blocks: requests 1 and 2 hold five each; request 1 ends at 30 and request 3, of five blocks, is admitted to
    the step at 40."""
    _, steps = served([FIRST, (18, 2, 2, 1), (14, 6, 6, 1), (20, 1, 1, 1)], num_gpu_blocks_override=11)
    assert [now for now, computed in steps if 3 in computed] == [40]


class Victims(Observer):
    """Writes down which finished requests are preempted."""

    def __init__(self) -> None:
        self.finished: list[tuple[int, int]] = []

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        self._state = engine.state

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        state = self._state
        self.finished += [
            (now, each.index) for each in plan.preempted if each in state.finished or each in state.overrunning
        ]


@pytest.mark.parametrize("users", [None, Users(2, np.zeros(3, dtype=np.int64))], ids=["open", "closed"])
def test_a_request_that_is_preempted_as_it_finishes_is_answered(users):
    """Seven blocks of two: at 50 the first request holds three, and the second four, with the 8 tokens at its EOS. The step
    at 50 does not know of the EOS and asks for a block for a ninth token, so the second preempts itself. In a closed loop its
    user then sends the third."""
    work = Workload("story", [0, 0, 0], [1, 4, 1], [6, 5, 1], max_tokens=np.array([6, 10, 1]), users=users)
    chosen = settings(
        policy="vllm-v1",
        model=str(DATA / "config.json"),
        block_size=2,
        num_gpu_blocks_override=8,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        outside_ms=0,
    )
    victims = Victims()
    run = simulate(chosen, work, TenTicks(), observers=[victims])
    assert victims.finished == [(50, 1)]
    times = request_times(run)
    assert times.finish_ticks[:2].tolist() == [60, 50] and times.recomputed.tolist() == [0, 1, 0]
    assert len(times.index) == 3
    assert users is None or run.workload.arrival_ticks.tolist() == [0, 0, 50]
