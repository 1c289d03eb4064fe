"""``tasks``: searches side by side, what they find again in a folder, and the smallest number that passes."""

from __future__ import annotations

from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_runs import settings_of
from fragmeter.experiments.capacity import tasks
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.max_rate import Ahead, SeedRate
from fragmeter.experiments.capacity.page import PLAN
from fragmeter.experiments.capacity.tasks import Runner, Search, Task, result, results, smallest, task
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.parallel import Workers
from fragmeter.experiments.runs.points import Store
from fragmeter.experiments.runs.slo_check import Goal, SloCheck
from fragmeter.sim.config.settings import Settings
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.output.folders import OutputFolder
from fragmeter.sim.types.errors import UserError
from oracle import Limits, Pool
from trials import ended

CHOSEN = settings_of("vllm-v1", Pool(64, 16), Limits(64))
LOAD = Load(Inputs(requests=Requests(num_prompts=100, dataset="alpaca")))
GOAL = Goal(Objectives(ttft=5))
done: Counter[tuple[Any, ...]] = Counter()


def rate_of(settings: Settings, load: Load, goal: Goal, seed: int, rate: float) -> float:
    done[seed, rate] += 1
    if rate < 0:
        raise UserError("below 0")
    return rate * seed if rate < 100 else inf


def ahead_of(settings: Settings, load: Load, goal: Goal, seed: int) -> Ahead:
    return Ahead(SloCheck(True, 8, 7, {"ttft": 1}), None, SeedRate(46), 2.5)


def sides_of(settings: Settings, load: Load, goal: Goal, seed: int) -> tuple[float, bool]:
    return 0.1 * seed, True


def rate(seed: int, value: float) -> Task[float]:
    return task(rate_of, CHOSEN, seed, value)


def runner(folder: Path | None = None) -> Runner:
    store = None if folder is None else Store(OutputFolder(folder, PLAN))
    return Runner(LOAD, GOAL, Workers(jobs=1), store)


def test_each_search_gets_its_results_in_the_order_of_its_tasks_and_equal_tasks_run_once():
    done.clear()

    def two_rounds(first: int) -> Search[list[float]]:
        begun = yield from results(rate(seed, 2.0) for seed in (first, 3, first + 1))
        assert (yield from results([])) == []
        return [*begun, (yield from result(rate(3, sum(begun))))]

    found = runner().side_by_side({"one": two_rounds(1), "other": two_rounds(4)})
    assert [*found.items()] == [("one", [2.0, 6.0, 4.0, 36.0]), ("other", [8.0, 6.0, 10.0, 72.0])]
    assert done[3, 2.0] == 1 and set(done.values()) == {1}


def test_an_error_is_raised_in_its_own_search_alone():
    def careful(value: float) -> Search[object]:
        try:
            return (yield from results([rate(1, 1.0), rate(2, value)]))
        except UserError as error:
            return str(error)

    assert runner().side_by_side({0: careful(-1.0), 1: careful(5.0)}) == {0: "below 0", 1: [1.0, 10.0]}
    with pytest.raises(UserError, match="below 0"):
        runner().side_by_side({0: result(rate(1, -1.0))})


def test_what_is_kept_has_the_values_and_the_types_of_what_was_found(tmp_path, monkeypatch):
    asked: list[Task[Any]] = [rate(2, 4.0), rate(2, 400.0), Task(ahead_of, CHOSEN, 0), Task(sides_of, CHOSEN, 3)]
    (found,) = runner(tmp_path / "out").side_by_side({0: results(asked)}).values()
    monkeypatch.setattr(tasks, "carry_out", lambda *_: pytest.fail("done a second time"))
    (again,) = runner(tmp_path / "out").side_by_side({0: results(asked)}).values()
    assert again == found == [8.0, inf, ahead_of(CHOSEN, LOAD, GOAL, 0), (0.1 * 3, True)]
    assert list(map(type, again)) == list(map(type, found))


@pytest.mark.slow
@given(st.integers(1, 99), st.integers(0, 60), st.integers(0, 150), st.integers(1, 40), st.data())
def test_the_smallest_number_that_passes(start, more, answer, stride, data):
    numbers, asked = range(start, start + more + 1), []
    near = data.draw(st.sampled_from(numbers))

    def passes(number: int) -> Search[bool]:
        asked.append(number)
        return number >= answer
        yield

    found, _ = ended(smallest(passes, numbers, near, stride), lambda _: None)
    assert found == next((number for number in numbers if number >= answer), None)
    assert len(set(asked)) == len(asked) and set(asked) <= {*numbers} and asked[0] == near
