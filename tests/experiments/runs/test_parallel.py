"""Short calls run in this process; workers start once the rest is worth it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fragmeter.experiments.runs import parallel, sweeping
from fragmeter.experiments.runs.grid import Point
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.parallel import Workers, as_they_finish
from fragmeter.sim import Settings
from fragmeter.traces import Pacing


class Served:
    """Calls that take the given seconds by a clock of their own, and where each of them ran."""

    def __init__(self, seconds: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.now = seconds, 0.0
        self.here: list[int] = []
        self.by_workers: list[int] = []
        monkeypatch.setattr(parallel.time, "process_time", lambda: self.now)
        monkeypatch.setattr(parallel, "_on_cores", self._on_cores)

    def call(self, number: int) -> int:
        self.here.append(number)
        self.now += self.seconds[number]
        return number

    def _on_cores(self, call, jobs, cores, _):
        assert cores == 2
        self.by_workers += [number for (number,) in jobs]
        return iter(self.by_workers)

    def run(self, light: bool = True, jobs: int = 2) -> None:
        total = len(self.seconds)
        results = as_they_finish(self.call, ((number,) for number in range(total)), total, Workers(jobs=jobs), light)
        assert list(results) == list(range(total))


@pytest.mark.parametrize(
    ("seconds", "here"),
    [
        ([0.02] * 40, 40),
        ([1.0] * 40, 1),
        # The first call loads the cost model; the others are short.
        ([0.4] + [0.02] * 39, 40),
        # Points that get larger.
        ([0.01, 0.01, 0.02, 0.05, 0.5] + [1.0] * 30, 5),
        # The last one may be long: there is nothing to share.
        ([0.02] * 5 + [60.0], 6),
        ([60.0, 60.0], 2),
        ([60.0, 60.0, 60.0], 1),
        ([], 0),
    ],
)
def test_calls_run_here_until_the_rest_is_worth_the_workers(seconds, here, monkeypatch):
    served = Served(seconds, monkeypatch)
    served.run()
    assert served.here == list(range(here))
    assert served.by_workers == list(range(here, len(seconds)))


def test_calls_that_are_known_to_be_long_start_workers_at_once(monkeypatch):
    served = Served([0.01] * 8, monkeypatch)
    served.run(light=False)
    assert (served.here, served.by_workers) == ([], list(range(8)))


def test_one_job_at_a_time_needs_no_workers(monkeypatch):
    served = Served([60.0] * 3, monkeypatch)
    served.run(jobs=1)
    assert served.here == [0, 1, 2]


@pytest.mark.parametrize(
    ("points", "light"),
    [
        ([(1_000, True)] * 100, True),
        # Requests that are simulated step by step take a hundred times longer.
        ([(1_000, False)] * 29, True),
        ([(1_000, False)] * 30, False),
        ([(20_000, True)] * 149, True),
        ([(20_000, True)] * 150, False),
        ([(1_000, True), (30_000, False)], False),
        ([(99_999, True), (1, True)], False),
        ([(99_998, True), (1, True)], True),
        ([], True),
    ],
)
def test_the_requests_of_a_sweep_say_whether_workers_start_at_once(points, light):
    assert sweeping._light(points) is light


class Stored:
    """A store with the first so many points."""

    def __init__(self, count: int) -> None:
        self.count = count

    def find(self, _) -> dict | None:
        self.count -= 1
        return {} if self.count >= 0 else None

    def keep(self, *_) -> None:
        pass


@pytest.mark.parametrize(("leap", "stored", "light"), [(True, 0, True), (False, 0, False), (False, 3, True)])
def test_a_sweep_counts_the_requests_of_points_that_are_not_stored(leap, stored, light, monkeypatch):
    """Ten points of 4,000 requests take 0.04 s at least with leaps and 4 s without; seven of them 2.8 s."""
    seen = []

    def finished(call, jobs, total, workers, light):
        seen.append((total, light))
        return [sweeping.Outcome(name, {}) for name, *_ in jobs]

    monkeypatch.setattr(sweeping, "as_they_finish", finished)
    requests, pacing = Requests(num_prompts=4_000), Pacing(request_rate=1.0)
    inputs = [Inputs(settings=Settings(leap=leap, seed=seed), requests=requests, pacing=pacing) for seed in range(10)]
    points = [Point({}, each) for each in inputs]
    assert len(sweeping.sweep_points(points, Workers(jobs=2), Stored(stored))) == 10
    assert seen == [(10 - stored, light)]
