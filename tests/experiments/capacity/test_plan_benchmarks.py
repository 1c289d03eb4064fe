"""The benchmarks of plans: its probability on measured servers, and its answers beside whole searches that are kept."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest

from fragmeter.experiments.measured.intervals import RunError, run_errors
from fragmeter.experiments.measured.servers_like import stored_rows
from paths import ROOT


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_probability_is_right_as_often_as_it_says_on_measured_servers():
    calibration = benchmark("plan_calibration")
    found = calibration.cases(run_errors(stored_rows(), "tpot"))
    likely, even = ([each for each in found if low <= each.chance <= high] for low, high in ((0.9, 1), (0.4, 0.6)))
    assert len(likely) > 500 and calibration.share(likely) >= 0.85
    assert len(even) > 200 and 0.35 <= calibration.share(even) <= 0.65
    assert calibration.brier(found) < calibration.brier(found, calibration.share(found))
    page = (ROOT / "docs/plan.md").read_text("utf-8")
    assert f"{calibration.BEGIN}\n{calibration.table()}\n{calibration.END}" in page


def test_a_server_that_is_slower_than_the_others_makes_its_answers_wrong():
    """The interval of a server is found without its own errors: an outlier is not known before."""
    calibration, levels = benchmark("plan_calibration"), (("card", "load"), ("card", ""), ("dense", ""), ("",))
    errors = [RunError(f"run {place}", f"server {place}", 0.01 * place, levels) for place in range(12)]
    assert not [each for each in calibration.cases(errors) if each.chance >= 0.9 and not each.enough]
    errors.append(RunError("outlier", "outlier", 0.5, levels))
    assert [each for each in calibration.cases(errors) if each.chance >= 0.9 and not each.enough]


def kept() -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads((ROOT / "benchmarks/plan_questions.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("place", sorted(kept(), key=int)[:4])
def test_a_plan_costs_no_more_than_a_whole_search(place):
    questions = benchmark("plan_questions")
    answer = questions.planned(questions.questions()[int(place)])
    assert questions.regret(answer, kept()[place]) < 0.05
