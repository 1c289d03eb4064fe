"""The inputs that a bill depends on: closed forms, and simulations with all times scaled alike."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from fragmeter.experiments.capacity.fleet import highest_rate
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.sensitivity import (
    PRICE,
    STEP_TIME,
    WANTED,
    Change,
    changed_rate,
    changes,
    influences,
)
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.slo_check import Goal
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.engine.settings import settings
from fragmeter.sim.metrics.objectives import Objectives

GOAL = Goal(Objectives(ttft=500, tpot=60))


def rates(step: tuple[float, float], ttft: tuple[float, float]) -> dict[Change, float]:
    return {
        Change(name, factor): rate
        for name, pair in ((STEP_TIME, step), ("ttft", ttft))
        for factor, rate in zip((0.9, 1.1), pair, strict=True)
    }


def test_the_changes_of_a_goal():
    names = [(change.name, round(change.factor, 9)) for change in changes(GOAL)]
    assert names == [(name, factor) for name in (STEP_TIME, "ttft", "tpot") for factor in (0.9, 1.1)]


def test_bills_and_replicas_by_hand():
    """4 replicas serve 10/s and are sure of 11/s; steps a tenth longer leave 16 of 20 requests/s, a quarter more money."""
    found = influences(rates((25.0, 16.0), (20.0, 22.0)), 20.0, 1.1, 4)
    assert [each.name for each in found] == [STEP_TIME, PRICE, WANTED, "ttft"]
    step, price, wanted, ttft = found
    assert (step.lower.bill, step.higher.bill) == (0.8, 1.25)
    # 4 x 0.8 / 1.1 = 2.9, and 4 x 1.25 / 1.1 = 4.5.
    assert (step.lower.replicas, step.higher.replicas) == (3, 5)
    assert (price.higher.percent, price.higher.replicas) == (pytest.approx(10), 4)
    # 4 x 1.1 / 1.1 is 4, not a rounding error more.
    assert (wanted.lower.replicas, wanted.higher.replicas) == (4, 4)
    assert (ttft.lower.percent, ttft.higher.bill) == (0, 20 / 22)


def test_replicas_that_share_experts_come_together():
    """As above, in multiples of 4: 2.9 are 4, and 4.5 are 8."""
    step, *_ = influences(rates((25.0, 16.0), (20.0, 22.0)), 20.0, 1.1, 4, 4)
    assert (step.lower.replicas, step.higher.replicas) == (4, 8)


def test_an_objective_that_no_rate_meets_comes_first_and_has_no_bill():
    first, *_ = influences(rates((20.0, 20.0), (0.0, 20.0)), 20.0, 1.0, 1)
    assert first.name == "ttft" and first.range == float("inf")
    assert (first.lower.bill, first.lower.percent, first.lower.replicas) == (None, None, None)


def test_without_a_wanted_rate_there_are_no_replicas():
    found = influences(rates((25.0, 16.0), (20.0, 22.0)), 20.0, 1.0, None)
    assert WANTED not in [each.name for each in found]
    assert all(each.lower.replicas is each.higher.replicas is None for each in found)


@pytest.mark.parametrize("cost", ["fitted", "paper"])
def test_with_every_time_scaled_alike_the_rate_is_inverse(cost):
    """Steps and objectives 10 % longer: a fleet takes a rate 10 % lower. The paper's cost has a scale of its own."""
    name, gpu = ("opt-13b", "a100-40gb") if cost == "paper" else ("llama-3.1-8b", "a100-80gb")
    chosen = settings(model=name, gpu=gpu, cost=cost)
    load, cluster = Load(Inputs(settings=chosen, requests=Requests(num_prompts=300))), Cluster(num_replicas=2)
    before = highest_rate(chosen, load, GOAL, 0, cluster, 10.0, None)
    longer = Goal(Objectives(ttft=GOAL.objectives.ttft * 1.1, tpot=GOAL.objectives.tpot * 1.1))
    after = changed_rate(chosen, load, longer, 0, cluster, 10.0, None, Change(STEP_TIME, 1.1))
    assert after == pytest.approx(before / 1.1, rel=0.011)
    # Objectives alone: the goal of one is changed, and the other stays.
    looser = replace(GOAL, objectives=replace(GOAL.objectives, tpot=GOAL.objectives.tpot * 1.1))
    alone = changed_rate(chosen, load, GOAL, 0, cluster, 10.0, None, Change("tpot", 1.1))
    assert alone == highest_rate(chosen, load, looser, 0, cluster, 10.0, None) >= before


def test_a_plan_says_what_its_bill_depends_on(tmp_path, capsys):
    out = tmp_path / "plan"
    load = ["--goodput", "ttft:500", "tpot:50", "--num-prompts", "100", "--seeds", "1", "--request-rate", "12"]
    tokens = ["plan", "--model", "llama-3.1-8b", "--gpu", "a100-80gb,h200", *load, "--sensitivity", "--out", str(out)]
    assert status(tokens) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "Change of the bill, as if replicas were divisible, for inputs that are 10% lower and higher: " in printed
    document = json.loads((out / "plan.json").read_text())
    best, other = document["candidates"]
    assert {each["name"] for each in best["sensitivity"]} == {STEP_TIME, PRICE, WANTED, "ttft", "tpot"}
    assert "sensitivity" not in other
    assert "Sensitivity of the bill" in (out / "plan.html").read_text()

    with (out / "plan.csv").open() as file:
        assert [row["candidate.gpu"] for row in csv.DictReader(file)] == [
            best["candidate"]["gpu"],
            other["candidate"]["gpu"],
        ]
    answer, _, headings, rule, *rows = (out / "plan.md").read_text().splitlines()
    assert answer == f"**{document['recommendation']}**"
    assert headings.count("|") == rule.count("|") == rows[0].count("|")
    assert rows[0].startswith(f"| {best['candidate']['gpu']} |") and rows[1].startswith(
        f"| {other['candidate']['gpu']} |"
    )
