"""Fleets divided into prefill and decode: their division, its search, and their saturated rate."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from fragmeter.experiments.capacity.fleet import highest_rate, saturated_split_rate
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.split import best_share, divided, fewest_replicas
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.slo_check import Goal, saturated_rate
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.types.errors import SettingError

CHOSEN = settings(policy="vllm-v1", model="llama-3.1-8b", gpu="a100-80gb", cost="fitted")
GOAL = Goal(Objectives(ttft=300, tpot=25))


def load(num_prompts: int) -> Load:
    return Load(Inputs(settings=CHOSEN, requests=Requests(num_prompts=num_prompts)))


def test_every_fleet_has_both_kinds():
    for replicas in range(2, 40):
        for share in (0.0, 0.2, 0.5, 0.99):
            found = divided(replicas, "round-robin", "auto", share)
            assert found.size == replicas and found.prefill_replicas >= 1 and found.decode_replicas >= 1
            assert abs(found.prefill_replicas - share * replicas) <= 1
    assert divided(5, "kv-aware", "2") == Cluster(prefill_replicas=2, decode_replicas=3, router="kv-aware")
    assert divided(5, "kv-aware", "none") == Cluster(num_replicas=5, router="kv-aware")


@pytest.mark.parametrize(("value", "fewest"), [("none", 1), ("auto", 2), ("1", 2), ("7", 8)])
def test_the_smallest_fleet(value, fewest):
    assert fewest_replicas(value) == fewest


@pytest.mark.parametrize("value", ["0", "-1", "some", "1.5"])
def test_values_that_are_none(value):
    with pytest.raises(SettingError, match="must be none, auto or a number of 1 or more"):
        fewest_replicas(value)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [pytest.param("sharegpt", marks=pytest.mark.slow), "alpaca"])
def test_the_best_share_is_that_of_the_highest_rate(dataset):
    """Beside every division of five replicas. Prompts of Alpaca are short: one replica prefills for four."""
    requests = Load(Inputs(settings=CHOSEN, requests=Requests(num_prompts=600, dataset=dataset)))
    rates = {
        prefill: highest_rate(CHOSEN, requests, GOAL, 0, divided(5, "round-robin", str(prefill)), 30.0, None)
        for prefill in range(1, 5)
    }
    share = best_share(CHOSEN, requests, GOAL, 0, 5, "round-robin", 30.0)
    assert rates[round(5 * share)] == max(rates.values())
    assert len({*rates.values()}) > 1


@pytest.mark.slow
def test_where_prefill_limits_it_the_saturated_rate_is_that_of_prefills():
    """Two replicas prefill and six decode: twice the rate of one replica that serves outputs of one token."""
    work = load(1200).draw(0).at(inf)
    work = replace(work, output_tokens=np.minimum(work.output_tokens, 20))
    found = saturated_split_rate(CHOSEN, work, Cluster(prefill_replicas=2, decode_replicas=6))
    one = replace(work, output_tokens=np.ones_like(work.output_tokens))
    assert found == pytest.approx(2 * saturated_rate(CHOSEN, one), rel=0.05)


def test_too_few_requests_do_not_fill_a_fleet():
    work = load(100).draw(0).at(inf)
    assert saturated_split_rate(CHOSEN, work, Cluster(prefill_replicas=1, decode_replicas=4)) is None


SMALL = ["--goodput", "ttft:300", "tpot:25", "--num-prompts", "300", "--seeds", "1"]


@pytest.mark.slow
def test_a_plan_divides_a_fleet(tmp_path, capsys):
    tokens = ["plan", "--model", "llama-3.1-8b", "--gpu", "a100-80gb", *SMALL, "--request-rate", "25"]
    assert (
        status([*tokens, "--prefill-replicas", "none,1,auto", "--explain", "--json", str(tmp_path / "plan.json")])
        == DONE
    )
    found = {
        each["candidate"]["prefill_replicas"]: each
        for each in json.loads((tmp_path / "plan.json").read_text())["candidates"]
    }
    assert "prefill_replicas" not in found["none"]
    auto = found["auto"]
    assert 1 <= auto["prefill_replicas"] < auto["fleet"]["replicas"]
    assert auto["limit"]["cause"] == {"ttft": "prefill", "tpot": "decode"}[auto["limit"]["objective"]]
    prefill = auto["prefill_replicas"]
    text = (
        f"({prefill} replica{'s' if prefill > 1 else ''} for prefill, {auto['fleet']['replicas'] - prefill} for decode)"
    )
    assert text in " ".join(capsys.readouterr().out.split())
    # The recommended fleet takes the wanted rate, by the same search on its own.
    cluster = divided(auto["fleet"]["replicas"], "round-robin", str(prefill))
    assert auto["fleet"]["rates"][0] >= 25 and cluster.prefill_replicas == prefill


def test_a_division_is_of_a_fleet(capsys):
    assert status(["plan", "--model", "llama-3.1-8b", "--gpu", "h200", *SMALL, "--prefill-replicas", "auto"]) == MISTAKE
    assert "is of a fleet, for a wanted rate; give --request-rate" in capsys.readouterr().err
    tokens = ["plan", "--model", "llama-3.1-8b", "--gpu", "h200", *SMALL, "--request-rate", "5"]
    assert status([*tokens, "--prefill-replicas", "0"]) == MISTAKE
    assert "prefill_replicas = '0': must be none, auto or a number of 1 or more" in capsys.readouterr().err
