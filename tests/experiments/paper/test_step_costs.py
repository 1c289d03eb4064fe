"""Step times that depend on the context, and those that do not, over all figures: the rule, by hand."""

from __future__ import annotations

from math import exp

import pytest

from fragmeter.experiments.paper.bench import Bench
from fragmeter.experiments.paper.context_cost import ContextCost, Server, Terms, published_step_times
from fragmeter.experiments.paper.figures.step_costs import GROUPS, compare_step_costs, medians
from fragmeter.experiments.paper.fit import CONTEXT_STEP_SCALE
from fragmeter.experiments.paper.paper import Source
from fragmeter.experiments.paper.rate_sweep.costs import Steps
from fragmeter.sim.engine.replica import FITTED_STEP_SCALE
from fragmeter.sim.types.ticks import PER_MS


def row(figure: str, error: float | None) -> dict:
    return {"figure": figure, "log_error": error}


def test_figures_have_equal_weights_however_many_values_they_have():
    """Fig 2's three values weigh a third each, Fig 17's one value as much as all of them."""
    rows = [row("fig2", 0.1), row("fig2", -0.2), row("fig2", 0.3), row("fig17", 0.9), row("fig16", -0.8)]
    found = medians(rows)
    assert found["Fig 2"] == 0.2 and found["Fig 17"] == 0.9 and found["Fig 16"] == 0.8
    # Ascending weights: 1/3, 2/3, 1, 2, 3; half of 3 is reached at 0.8. Without weights it would be 0.3.
    assert found["all figures"] == 0.8


@pytest.mark.parametrize(
    "model, gpu, tp", [("opt-13b", "a100-40gb", 1), ("opt-66b", "a100-40gb", 4), ("opt-175b", "a100-80gb", 8)]
)
def test_both_costs_are_equal_at_the_context_that_fig_1_is_read_at(model, gpu, tp):
    """And apart by the reading of the memory elsewhere: 2 * layers * hidden * 2 bytes a token, divided by the GPUs."""
    constant, by_context = (Steps(model, gpu, tp, terms=terms).cost() for terms in (Terms.NEITHER, Terms.CONTEXT))
    at = [cost.step_ticks(40, 40 * 330, 0, 0) for cost in (constant, by_context)]
    assert at[0] == pytest.approx(at[1], rel=1e-6)
    layers, hidden = {"opt-13b": (40, 5120), "opt-66b": (64, 9216), "opt-175b": (96, 12288)}[model]
    bandwidth = {"a100-40gb": 1_555e9, "a100-80gb": 2_039e9}[gpu]
    more = by_context.step_ticks(40, 40 * 1330, 0, 0) - by_context.step_ticks(40, 40 * 330, 0, 0)
    assert more / PER_MS == pytest.approx(40_000 * 4 * layers * hidden / tp / bandwidth * 1000, rel=1e-4)
    assert constant.step_ticks(40, 40 * 1330, 0, 0) == at[0]


@pytest.mark.parametrize(
    "model, gpu, tp, measured", [("opt-13b", "a100-40gb", 1, "opt-13b"), ("opt-66b", "a100-40gb", 4, "opt-66b")]
)
def test_beyond_95_sequences_a_step_takes_distserve_s_other_line(model, gpu, tp, measured):
    """By the two published formulas, both of which are written out here; the scale multiplies the whole step."""
    lines = {"opt-13b": ((19.562534, 0.0506057), (16.838630, 0.1400026))}
    lines["opt-66b"] = (32.984824, 0.1131739), (34.049765, 0.1625698)
    (small, per_small), (large, per_large) = lines[measured]
    plain, longer = (Steps(model, gpu, tp, terms=terms).cost() for terms in (Terms.CONTEXT, Terms.CONTEXT_AND_BATCH))
    for cost_of, batch in ((plain, 95), (longer, 95), (plain, 96), (longer, 96), (longer, 300)):
        step = cost_of.step_ticks(batch, 20 * batch, 40, 0)
        base, slope, until = cost_of.decode_line(batch, 20 * batch)
        assert until is None and base + slope * 20 * batch == cost_of.step_ticks(batch, 20 * batch, 0, 0)
        more = (step - plain.step_ticks(batch, 20 * batch, 40, 0)) / PER_MS
        expected = large - small + (per_large - per_small) * batch if cost_of is longer and batch > 95 else 0
        assert more == pytest.approx(expected, abs=1e-6)


def test_opt_175b_takes_opt_66b_s_longer_steps_by_the_weights_on_a_gpu():
    """DistServe did not measure it: 21.9 billion weights on each of eight GPUs, where OPT-66B has 16.5 on each of four."""
    (ms, per_sequence), (base, per_base) = (
        Server(model, gpu, tp).large_batch_ms()
        for model, gpu, tp in (("opt-175b", "a100-80gb", 8), ("opt-66b", "a100-40gb", 4))
    )
    assert ms / base == pytest.approx(per_sequence / per_base) == pytest.approx(1.33, abs=0.01)
    assert published_step_times()["large_batches"]["beyond_sequences"] == 95


def test_a_context_cost_of_opt_13b_is_the_one_of_before():
    assert ContextCost(1.07).describe() == ContextCost(1.07, server=Server("opt-13b", "a100-40gb", 1)).describe()


@pytest.fixture(scope="module")
def document() -> dict:
    """On drawn lengths, of two figures that take few runs: one of shares of the pool, one of request rates."""
    return compare_step_costs(Bench(Source((0,))), ("Fig 2", "Fig 17"))


def test_a_document_has_every_value_under_both_costs(document):
    values = {name: [row for row in document["rows"] if row["cost"] == name] for name in Terms}
    assert [[r["figure"], r["series"], r["metric"], r["published"]] for r in values[Terms.NEITHER]] == [
        [r["figure"], r["series"], r["metric"], r["published"]] for r in values[Terms.CONTEXT]
    ]
    assert len(values[Terms.NEITHER]) == 13 + 4
    # Fig 2 prints 0.0 for the internal fragmentation of Orca (Oracle): it has no logarithm.
    without = [(r["series"], r["metric"]) for r in values[Terms.NEITHER] if r["log_error"] is None]
    assert ("Orca (Oracle)", "internal_pct") in without
    assert document["predicted_values"] == 17 - len(without)


def test_errors_are_logarithms_of_the_ratio(document):
    for r in document["rows"]:
        if r["log_error"] is not None:
            assert exp(r["log_error"]) == pytest.approx(r["simulated"] / r["published"], rel=1e-3)
    assert document["errors"][Terms.NEITHER] == medians([r for r in document["rows"] if r["cost"] == Terms.NEITHER])


def test_each_candidate_has_one_fitted_constant_and_its_own_values(document):
    assert [document["fitted"][name]["constants"] for name in Terms] == [1, 1, 1]
    scales = [document["fitted"][name]["step_scale"] for name in Terms]
    assert scales == [FITTED_STEP_SCALE, CONTEXT_STEP_SCALE, CONTEXT_STEP_SCALE]
    # Contexts of Fig 17 are four times as long as those of Fig 1: its rates fall by a good part.
    rates = {(r["cost"], r["series"]): r["simulated"] for r in document["rows"] if r["figure"] == "fig17"}
    assert rates[Terms.CONTEXT, "vLLM"] < 0.95 * rates[Terms.NEITHER, "vLLM"]
    assert document["adopted"] == min(document["errors"], key=lambda name: document["errors"][name]["all figures"])


@pytest.mark.slow
def test_the_value_that_is_fitted_on_has_no_error():
    published = [figure for figures in GROUPS.values() for figure in figures]
    assert len(published) == len(set(published)) == 19
    bars = compare_step_costs(Bench(Source((0,))), ("Fig 13",))["rows"]
    fitted = {(r["figure"], r["series"]) for r in bars if r["kind"] == "fitted"}
    assert fitted == {("fig13a", "vLLM")} and all(r["log_error"] is None for r in bars if r["kind"] == "fitted")


@pytest.mark.slow
def test_all_figures_have_values_beside_the_published_ones():
    document = compare_step_costs(Bench(Source((0,))))
    assert set(document["errors"][Terms.NEITHER]) == {*GROUPS, "all figures"}
    assert document["predicted_values"] > 80
