"""The step time by context beside the one that knows no context."""

from __future__ import annotations

import pytest

from fragmeter.experiments.paper.context_cost import ContextCost, Server
from fragmeter.experiments.paper.rate_sweep.costs import Steps
from fragmeter.sim.cost import PaperCost
from fragmeter.sim.cost.paper import MS_PER_DECODE, MS_PER_PREFILL_TOKEN, STEP_MS
from fragmeter.sim.types.ticks import PER_MS


@pytest.mark.parametrize(
    "model, gpu, tp", [("opt-13b", "a100-40gb", 1), ("opt-66b", "a100-40gb", 4), ("opt-175b", "a100-80gb", 8)]
)
def test_both_costs_are_equal_at_the_context_that_fig_1_is_read_at(model, gpu, tp):
    """And apart by the reading of the memory elsewhere: 2 * layers * hidden * 2 bytes a token, divided by the GPUs."""
    steps = Steps(model, gpu, tp)
    step, decode, prefill = steps.ratios()
    constant = PaperCost(
        step_ms=step * STEP_MS,
        ms_per_decode=decode * MS_PER_DECODE,
        ms_per_prefill_token=prefill * MS_PER_PREFILL_TOKEN,
    )
    by_context = steps.cost()
    at = [cost.step_ticks(40, 40 * 330, 0, 0) for cost in (constant, by_context)]
    assert at[0] == pytest.approx(at[1], rel=1e-6)
    layers, hidden = {"opt-13b": (40, 5120), "opt-66b": (64, 9216), "opt-175b": (96, 12288)}[model]
    bandwidth = {"a100-40gb": 1_555e9, "a100-80gb": 2_039e9}[gpu]
    more = by_context.step_ticks(40, 40 * 1330, 0, 0) - by_context.step_ticks(40, 40 * 330, 0, 0)
    assert more / PER_MS == pytest.approx(40_000 * 4 * layers * hidden / tp / bandwidth * 1000, rel=1e-4)
    assert constant.step_ticks(40, 40 * 1330, 0, 0) == at[0]


def test_copies_read_and_write_at_the_data_sheet_s_bandwidth():
    # A chunk of 2,048 slots: 819,200 bytes each, at 1,555 GB/s.
    assert Steps().cost().copy_ticks(2048) / PER_MS == pytest.approx(2 * 2048 * 819_200 / 1_555e9 * 1000, rel=1e-6)


def test_a_context_cost_of_opt_13b_is_the_one_of_before():
    assert ContextCost(1.07).describe() == ContextCost(1.07, server=Server("opt-13b", "a100-40gb", 1)).describe()
