"""Intervals from errors of measured servers: planted errors are covered, and no error narrows an interval that is judged on it."""

from __future__ import annotations

from math import exp, expm1

import numpy as np
import pytest

from fragmeter.experiments.measured.intervals import (
    LEAST_RUNS,
    METRICS,
    SHARE,
    Calibrated,
    Interval,
    levels_of,
    run_errors,
)
from fragmeter.experiments.measured.servers_like import stored_rows
from tools.servers.coverage import COVERAGE, coverage, half_width, judged, score

#: Spread of the errors between servers, by card.
SPREADS = {"small": 0.02, "middle": 0.06, "large": 0.2}


def row(server: str, error: float, gpu: str = "small", metric: str = "tpot", **more) -> dict:
    """A run with a planted log(measured / simulated)."""
    about = {
        "run": f"{server} {error}",
        "server": server,
        "gpu": gpu,
        "backend": "FA3",
        "kind": "dense",
        "load": "open loop",
    }
    return about | {"busy": False, "overload": False, "standing": "seen", "errors": {metric: expm1(-error)}} | more


def drawn(rng: np.random.Generator, servers: int = 8, runs: int = 3, bias: float = 0.0) -> list[dict]:
    """Servers of each card: most of an error is that of the server, and its runs share it."""
    rows = []
    for gpu, spread in SPREADS.items():
        for number in range(servers):
            server = bias * spread + spread * rng.standard_normal()
            rows += [row(f"{gpu} {number}", server + 0.3 * spread * rng.standard_normal(), gpu) for _ in range(runs)]
    return rows


def levels(gpu: str = "small", metric: str = "tpot", **more):
    found = levels_of(row("x", 0.0, gpu) | more, metric)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bias", [0.0, 1.5])
def test_planted_errors_are_covered_as_often_as_asked_for(bias):
    """A server that no interval has seen, of each card, in many draws; also where the simulation is wrong in one direction."""
    rng, inside, half_widths = np.random.default_rng(3), [], {gpu: [] for gpu in SPREADS}
    for _ in range(40):
        calibrated = Calibrated(run_errors(drawn(rng, bias=bias), "tpot"))
        for gpu, spread in SPREADS.items():
            interval = calibrated.interval(levels(gpu))
            half_widths[gpu].append(half_width(interval))
            new = bias * spread + spread * rng.standard_normal(200)
            inside.append(np.mean([interval.holds(exp(each)) for each in new]))
    assert abs(np.mean(inside) - SHARE) < 0.05
    # One width for all would be as often right.
    small, middle, large = (np.median(half_widths[gpu]) for gpu in SPREADS)
    assert 1.3 * small < middle < large / 1.8


@pytest.mark.slow
def test_the_errors_of_a_server_have_no_part_in_the_interval_that_judges_it():
    rows = drawn(np.random.default_rng(5))
    other = [each | {"errors": {"tpot": 0.5}} if each["server"] == "middle 2" else each for each in rows]
    before, after = ({each.run.run: each for each in judged(run_errors(found, "tpot"))} for found in (rows, other))
    own = [name for name in before if name.startswith("middle 2 ")]
    assert len(own) == 3
    assert all(before[name].interval == after[name].interval for name in own)
    assert sum(before[name].interval != after[name].interval for name in before) == len(rows) - len(own)
    assert all(after[name].measured == pytest.approx(1 / 1.5) for name in own)


def test_a_server_is_scored_by_the_spread_of_the_others():
    """With its own error in it, the spread would be a third of that error."""
    rows = [row(str(number), 0.01 * (-1) ** number) for number in range(8)] + [row("odd", 1.0)]
    assert Calibrated(run_errors(rows, "tpot")).quantile > 10


def test_fitted_runs_narrow_no_interval():
    rows = drawn(np.random.default_rng(7))
    fitted = [row(f"fitted {number}", 0.0, standing="fitted") for number in range(30)]
    assert run_errors(rows + fitted, "tpot") == run_errors(rows, "tpot")
    seen = [each | {"standing": "unseen"} for each in fitted]
    intervals = [Calibrated(run_errors(found, "tpot")).interval(levels()) for found in (rows, rows + seen)]
    assert half_width(intervals[1]) < 0.5 * half_width(intervals[0])


def test_a_server_has_one_vote():
    rows = drawn(np.random.default_rng(9))
    often = rows + [
        each | {"run": f"{each['run']} again {number}"}
        for each in rows
        if each["server"] == "large 1"
        for number in range(9)
    ]
    once, again = (Calibrated(run_errors(found, "tpot")).interval(levels("large")) for found in (rows, often))
    assert once == pytest.approx(again)


def test_a_small_class_has_no_interval():
    """Of too few runs, and of one server; the class without its load may be large enough."""
    rows = drawn(np.random.default_rng(11))
    few = [row(f"new {number}", 0.01, "new") for number in range(LEAST_RUNS - 1)]
    assert Calibrated(run_errors(rows + few, "tpot")).interval(levels("new")) is None
    closed = row("new closed", 0.01, "new", load="closed loop")
    found = Calibrated(run_errors([*rows, *few, closed], "tpot"))
    assert found.depth(levels("new")) == found.depth(levels("new", load="at once")) == 1
    assert found.interval(levels("new")) == found.interval(levels("new", load="at once"))
    alone = [row("alone", number / 100, "alone") for number in range(9)]
    assert Calibrated(run_errors(rows + alone, "tpot")).interval(levels("alone")) is None


def test_too_few_servers_give_no_interval():
    """9 of 10 new servers are between the errors of nine others at best."""
    rows = [row(str(number), number / 100) for number in range(9)]
    assert Calibrated(run_errors(rows[:8], "tpot")).interval(levels()) is None
    assert Calibrated(run_errors(rows, "tpot")).interval(levels()) is not None


def test_ttft_of_requests_that_wait_and_throughput_below_overload_are_apart():
    queued, calm = row("a", 0.1, metric="ttft", busy=True, overload=True), row("b", 0.1, metric="ttft")
    edge = row("c", 0.1, metric="ttft", busy=True)
    assert not set(levels_of(queued, "ttft")) & set(levels_of(calm, "ttft"))
    assert levels_of(edge, "ttft") == levels_of(queued, "ttft") and levels_of(edge, "throughput") is None
    assert levels_of(queued, "tpot") == levels_of(calm, "tpot")
    assert levels_of(calm, "throughput") is None and levels_of(queued, "throughput") is not None


def test_the_interval_score():
    """Winkler's: a miss costs 2 / (1 - 0.9) times its distance."""
    interval = Interval(0.9, 1.1)
    assert [score(interval, value) for value in (1.0, 1.2, 0.85)] == pytest.approx(
        [0.2, 0.2 + 20 * 0.1, 0.2 + 20 * 0.05]
    )
    assert half_width(interval) == pytest.approx(0.1)


@pytest.mark.parametrize(("quantile", "covered"), [(0.0, 0.0), (50.0, 1.0)])
def test_intervals_that_hold_too_few_or_all_runs_fail(monkeypatch, quantile, covered):
    monkeypatch.setattr(Calibrated, "quantile", quantile)
    whole = coverage(stored_rows())[0]
    assert whole["coverage"] == pytest.approx(covered, abs=0.01) and whole["outcome"] == "fail"


@pytest.fixture(scope="module")
def found() -> dict:
    """The intervals of the measured servers, by metric and class."""
    return {(each["metric"], each["class"]): each for each in coverage(stored_rows())}


class TestMeasuredServers:
    @pytest.mark.slow
    @pytest.mark.parametrize("metric", [metric for metric in METRICS if metric != "throughput"])
    def test_coverage_without_the_server_is_as_asked_for(self, found, metric):
        """And the score is better than that of the past errors of the class."""
        whole = found[metric, None]
        assert COVERAGE[0] <= whole["coverage"] <= COVERAGE[1]
        assert whole["interval_score"] < whole["box_score"]
        assert whole["outcome"] == "pass" and whole["servers"] >= 15

    def test_throughput_has_too_few_servers(self, found):
        assert ("throughput", None) not in found
        rows = run_errors(stored_rows(), "throughput")
        assert rows and all(Calibrated(rows).interval(each.levels) is None for each in rows)

    @pytest.mark.parametrize(
        ("server_class", "most"), [("h100-80gb FA3 dense, open loop", 0.08), ("a100-80gb FA2 dense", 0.15)]
    )
    def test_intervals_of_tpot_are_narrow_enough(self, found, server_class, most):
        each = found["tpot", server_class]
        assert 0.02 < (each["high"] - each["low"]) / 2 <= most and each["low"] < 1 < each["high"]
