"""The sliders of a plan: as planned they have the plan's own fleets, and elsewhere the closed forms."""

from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace

import pytest

from fragmeter.experiments.capacity import plan, what_if
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.max_rate import go_ahead
from fragmeter.experiments.capacity.what_if import LENGTHS, OBJECTIVES, RATES, changed_rates
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.slo_check import Goal
from fragmeter.reports.explore.what_if import NO_RATE, WhatIf
from fragmeter.sim import Settings
from fragmeter.sim.metrics.objectives import objectives

LINE = [
    "plan", "--model", "llama-3.1-8b", "--gpu", "h200,l40s", "--max-num-seqs", "8", "--goodput", "ttft:500", "tpot:50",
    "--request-rate", "25", "--input-len", "200", "--output-len", "20", "--max-model-len", "1000", "--jobs", "1",
    "--num-prompts", "300", "--seeds", "4",
]  # fmt: skip
START = (1.0, 1.0, 1.0, 1.0)
#: Factors on the rate, on the objectives, and on prompts and outputs, in the order in which the page numbers its states.
STATES = [
    (rate, goal, *lengths)
    for rate, goal, lengths in product(RATES, OBJECTIVES, [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 2.0)])
]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> SimpleNamespace:
    """A plan: its page, its data and its sliders."""
    out, kept = tmp_path_factory.mktemp("plan") / "out", []

    def keeping(*arguments) -> WhatIf:
        kept.append(what_if.what_if(*arguments))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "what_if", keeping)
        assert status([*LINE, "--out", str(out)]) == DONE
    return SimpleNamespace(
        page=out / "plan.html", data=json.loads((out / "plan.json").read_text()), sliders=kept[0], offers=kept[0].offers
    )


def fleets(planned, place: int) -> dict[tuple[float, float, float, float], int]:
    return dict(zip(STATES, planned.offers[place].replicas, strict=True))


@pytest.mark.slow
def test_as_planned_the_sliders_have_the_fleets_of_the_plan(planned):
    assert "What would it cost if" in planned.page.read_text()
    assert len(planned.data["candidates"]) == len(planned.offers) == 2
    for place, (each, offer) in enumerate(zip(planned.data["candidates"], planned.offers, strict=True)):
        replicas = fleets(planned, place)[START]
        assert replicas == each["bill"]["replicas"]
        assert replicas * offer.gpus_a_replica == each["bill"]["gpus"]
        assert replicas * offer.price_a_replica == pytest.approx(each["bill"]["per_hour"])


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_worse_takes_no_fewer_replicas(planned, place):
    """A higher rate, tighter objectives, and longer prompts. Longer outputs may be better: see the next test."""
    found = fleets(planned, place)
    for axis, values in enumerate((RATES, OBJECTIVES[::-1], LENGTHS)):
        for state in STATES:
            at = values.index(state[axis])
            if at + 1 == len(values) or (worse := (*state[:axis], values[at + 1], *state[axis + 1 :])) not in found:
                continue
            before, after = found[state], found[worse]
            assert after >= before if before > 0 and after > 0 else after == NO_RATE


def test_shorter_outputs_raise_the_tail_of_a_tight_tpot(planned):
    """A prefill of 200 tokens delays a larger share of 10 output tokens than of 20."""
    found = fleets(planned, [offer.gpu for offer in planned.offers].index("l40s"))
    assert found[4.0, 1.0, 1.0, 0.5] < found[4.0, 1.0, 1.0, 1.0] < found[4.0, 1.0, 1.0, 2.0]
    assert found[4.0, 0.5, 1.0, 0.5] >= found[4.0, 0.5, 1.0, 1.0]


def test_double_the_rate_takes_double_the_replicas_less_the_margin(planned):
    for place, each in enumerate(planned.data["candidates"]):
        found, replicas = fleets(planned, place), each["bill"]["replicas"]
        sure = each["fleet"]["sure_rate"] / planned.data["wanted_request_rate"]
        assert 2 * replicas / max(1.0, sure) <= found[2.0, 1.0, 1.0, 1.0] <= 2 * replicas
        assert found[0.5, 1.0, 1.0, 1.0] == -(-replicas // 2)


def load(prompt: int, output: int) -> Load:
    requests = Requests(num_prompts=300, input_len=prompt, output_len=output)
    return Load(Inputs(settings=Settings(model="llama-3.1-8b", gpu="l40s"), requests=requests))


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "outputs"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.5)])
def test_the_rates_are_those_of_a_search_with_these_lengths(prompts, outputs):
    chosen = Settings(model="llama-3.1-8b", gpu="l40s", max_num_seqs=8, max_model_len=1000)
    goal = Goal(objectives(["ttft:500", "tpot:50"]))
    found = changed_rates(chosen, load(200, 20), goal, 0, prompts, outputs, 5.0)
    searched = go_ahead(chosen, load(round(200 * prompts), round(20 * outputs)), goal, 0)
    assert found[OBJECTIVES.index(1.0)] == searched.found.rate
    assert found == sorted(found)
