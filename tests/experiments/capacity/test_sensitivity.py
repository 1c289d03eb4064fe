"""The inputs that a bill depends on: closed forms, and simulations with all times scaled alike."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity.answer import Answer
from fragmeter.experiments.capacity.detail import detail
from fragmeter.experiments.capacity.fleet import Decision, Fleet, Tried, highest_rate, serve
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.max_rate import MaxRate
from fragmeter.experiments.capacity.sensitivity import (
    PRICE,
    STEP_TIME,
    WANTED,
    Change,
    changed_rate,
    changes,
    influences,
)
from fragmeter.experiments.capacity.text import headroom_text, rate_text
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.near_saturation import with_steps
from fragmeter.experiments.runs.slo_check import Goal, SloCheck
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.config.settings import settings
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
    # 4 x 0.8 = 3.2, and 4 x 1.25 / 1.1 = 4.5.
    assert (step.lower.replicas, step.higher.replicas) == (4, 5)
    assert (price.higher.percent, price.higher.replicas) == (pytest.approx(10), 4)
    # 4 x 1.1 / 1.1 is 4, not a rounding error more.
    assert (wanted.lower.replicas, wanted.higher.replicas) == (4, 4)
    assert (ttft.lower.percent, ttft.higher.bill) == (0, 20 / 22)


@given(st.integers(1, 200), st.floats(1.0, 20.0), st.floats(0.3, 1.1), st.floats(0.9, 3.0), st.sampled_from([1, 4]))
def test_a_change_for_the_worse_never_needs_fewer_replicas_nor_one_for_the_better_more(
    count, margin, lower, higher, engines
):
    """Whatever the fleet takes above the wanted rate: with one replica fewer it may take too little. Searches that find a little more
    for the worse, or less for the better, do not turn it round."""
    replicas = engines * count
    for found in influences(
        rates((20 / lower, 20 / higher), (20 / higher, 20 / lower)), 20.0, margin, replicas, engines
    ):
        worse, better = (found.lower, found.higher) if found.name == "ttft" else (found.higher, found.lower)
        assert better.replicas <= replicas <= worse.replicas
        assert found.higher.replicas % engines == 0
    six = influences({Change(STEP_TIME, factor): 20 / factor for factor in (0.9, 1.1)}, 20.0, 1.63, 6)
    assert {each.name: each.higher.replicas for each in six} == {STEP_TIME: 6, PRICE: 6, WANTED: 6}


def test_replicas_that_share_experts_come_together():
    """As above, in multiples of 4: 3.2 are 4, and 4.5 are 8."""
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_plan_says_what_its_bill_depends_on(tmp_path, capsys):
    out = tmp_path / "plan"
    load = ["--goodput", "ttft:500", "tpot:50", "--num-prompts", "100", "--seeds", "1", "--request-rate", "12"]
    tokens = ["plan", "--model", "llama-3.1-8b", "--gpu", "a100-80gb,h200", *load, "--sensitivity", "--out", str(out)]
    assert status(tokens) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    what = "What matters most, by the change of the bill, as if replicas were divisible, for inputs that are 10% lower and higher: "
    assert what in printed and "--sensitivity" not in printed
    document = json.loads((out / "plan.json").read_text())
    best, other = document["candidates"]
    assert {each["name"] for each in best["sensitivity"]} == {STEP_TIME, PRICE, WANTED, "ttft", "tpot"}
    assert "sensitivity" not in other
    assert "Sensitivity of the bill" in (out / "plan.html").read_text()

    with (out / "plan.csv").open() as file:
        assert [row["gpu"] for row in csv.DictReader(file)] == [
            best["candidate"]["gpu"],
            other["candidate"]["gpu"],
        ]
    answer, _, headings, rule, *rows = (out / "plan.md").read_text().splitlines()
    assert answer == f"**{document['recommendation']}**"
    assert headings.count("|") == rule.count("|") == rows[0].count("|")
    assert rows[0].startswith(f"| {best['candidate']['gpu']} |") and rows[1].startswith(
        f"| {other['candidate']['gpu']} |"
    )


def test_a_plan_has_the_range_of_its_fleet():
    """The ends are the fleet's runs with other step times; in half of the load latency is no range."""
    chosen = settings(cost="paper")
    load, fleet = Load(Inputs(settings=chosen, requests=Requests(num_prompts=300))), Cluster(num_replicas=2)
    goal = Goal(Objectives(ttft=60_000))
    found = {rate: detail(chosen, load, goal, 0, fleet, rate, rate) for rate in (2.0, 3.8)}
    assert (found[2.0]["load"], found[2.0]["near_saturation"]) == ("light", None)
    near, work = found[3.8]["near_saturation"], load.draw(0, 2).at(3.8)
    for end, factor in (("shorter", 0.95), ("longer", 1.05)):
        times = serve(with_steps(chosen, factor), work, fleet).times
        assert near[end]["mean_ttft_ms"] == times.ttft_ms.mean()
    assert near["longer"]["mean_ttft_ms"] > 1.5 * near["shorter"]["mean_ttft_ms"] and found[3.8]["load"] == "busy"


def test_a_fleet_that_meets_the_goal_at_every_rate_has_no_number():
    fleet = Fleet(2, 2, (Tried(2, (1.0, 1.0), Decision.ENOUGH),), (inf, inf), seeds=2)
    found = MaxRate(SloCheck(True, 80, 80, {}), 3.0, (2.0,), 5)
    answer = Answer(None, found=found, wanted=4.0, fleet=fleet, detail={})
    assert (headroom_text(answer), rate_text(answer)) == ("every rate", "every rate")
