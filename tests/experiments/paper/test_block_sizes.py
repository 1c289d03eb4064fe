"""Figs 18b and 19b: steps by context, which values are fitted, and findings on both sides; over made-up latencies."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.paper.bench import Bench
from fragmeter.experiments.paper.block_sizes import block_sizes
from fragmeter.experiments.paper.block_sizes.block_sizes import (
    ALPACA,
    EXTRA_MS,
    SHAREGPT,
    SWAP,
    SizeCase,
    fig18b,
    fig19b,
    measure,
    scales,
)
from fragmeter.experiments.paper.context_cost import ContextCost, reading_ms
from fragmeter.experiments.paper.fit import CONTEXT_STEP_SCALE as SCALE
from fragmeter.experiments.paper.paper import Source, source
from fragmeter.experiments.paper.published import paper_figures, usual_length
from fragmeter.experiments.paper.rows import passed, value_row
from fragmeter.sim import Workload
from fragmeter.sim.cost import PaperCost
from fragmeter.sim.types.ticks import PER_MS

TRACES = os.environ.get("FRAGMETER_TRACES")
SIZES = paper_figures()["fig18b"]["block_sizes"]


class TestTheCostByContext:
    @given(decodes=st.integers(1, 300), scale=st.floats(0.5, 2))
    def test_at_fig_1_s_length_it_is_the_paper_s(self, decodes, scale):
        ours = ContextCost(scale).step_ticks(decodes, decodes * usual_length(), 7, 28)
        paper = PaperCost(scale).step_ticks(decodes, 0, 7, 28)
        # Each coefficient is rounded to a tick.
        assert abs(ours - paper) <= decodes * (usual_length() + 2)

    def test_by_hand(self):
        # 819,200 bytes at 1,555 GB/s; 2 * (25.7 + (0.42 - 330 * 0.000526817) * 10 + 0.000526817 * 1000 + 0.047 * 5).
        assert reading_ms() == pytest.approx(819_200 / 1.555e9)
        found = ContextCost(2.0).step_ticks(10, 1000, 5, 0) / PER_MS
        assert found == pytest.approx(2 * (25.7 + 4.2 - 3300 * reading_ms() + 1000 * reading_ms() + 0.235), abs=1e-5)

    @given(decodes=st.integers(1, 300), context=st.integers(1, 10**6), extra=st.floats(0, 0.01))
    def test_a_line_is_the_step(self, decodes, context, extra):
        cost = ContextCost(1.1, 8, extra)
        base, slope, until = cost.decode_line(decodes, context)
        assert until is None and base + slope * context == cost.step_ticks(decodes, context, 0, 0)

    def test_an_inefficient_kernel_takes_so_much_more_a_token(self):
        plain, slow = (ContextCost(2.0, 1, extra).step_ticks(3, 1000, 0, 0) for extra in (0, 0.001))
        assert slow - plain == 2 * PER_MS


def test_leaps_and_steps_agree_under_it():
    """Its steps grow while a leap lasts."""
    work = Workload("made up", np.zeros(3), np.array([40, 7, 90]), np.array([30, 60, 9]))
    settings = block_sizes.paper_settings(policy="vllm-sosp23", num_gpu_blocks_override=16)
    runs = [block_sizes.simulate(replace(settings, leap=leap), work, ContextCost(1.0)).log for leap in (True, False)]
    assert runs[0].end_ticks == runs[1].end_ticks and runs[0].num_steps == runs[1].num_steps


def test_small_blocks_are_slow_and_swapping_is_not_recomputing():
    quick = source(seeds=1)
    work = quick.workload(SizeCase(SHAREGPT, 0, 1, duration_s=60).experiment, 0)
    by_size = {size: measure(work, SizeCase(SHAREGPT, 0, size, duration_s=60), SCALE) for size in (1, 16)}
    assert by_size[1] > 1.3 * by_size[16]
    without = measure(work, SizeCase(SHAREGPT, 0, 1, duration_s=60, extra_ms=0.0), SCALE)
    assert without == pytest.approx(by_size[16], rel=0.02)


@pytest.fixture
def made_up(monkeypatch):
    """Predictable latencies in place of runs: by block size, with 1 % of step time and the seed."""

    def latency(_, case: SizeCase, of_load: float) -> float:
        published = paper_figures()["fig18b"][case.load][SIZES.index(case.block_size)]
        swap = 0.1 if case.preemption_mode == SWAP else 0
        return published * (1 + 10 * (case.change - 1)) + case.seed * 0.001 + swap

    monkeypatch.setattr(block_sizes, "measure", latency)
    monkeypatch.setattr(block_sizes, "in_parallel", lambda call, jobs: (call(*job) for job in jobs))
    block_sizes.latencies.cache_clear()
    yield
    block_sizes.latencies.cache_clear()


def rows_of(payload: dict) -> dict:
    return {(row["series"], row["x"]): row for row in payload["rows"]}


@pytest.mark.slow
def test_each_figure_lists_the_fitted_constants_of_its_runs(made_up):
    """Fig 19b takes all of Fig 18b but Alpaca's scale, and the times of copies as it swaps."""
    one, other = (
        {(each["name"], each["on"]) for each in figure(Bench(Source((0,))))["constants"]} for figure in (fig18b, fig19b)
    )
    assert {name for name, _ in one - other} == {"step-time scale"} and len(one - other) == 1
    assert {on for _, on in other - one} == {"Fig 19a, swaps of all block sizes"} and len(other - one) == 4
    assert sum("Fig 18b's ShareGPT" in on for _, on in one & other) == len(EXTRA_MS)


class TestFig18b:
    @pytest.mark.slow
    def test_what_was_fitted_on_it_is_marked_and_the_rest_is_predicted(self, made_up):
        rows = rows_of(fig18b(Bench(Source((0,)))))
        assert [*rows] == [(load, size) for load in (SHAREGPT, ALPACA) for size in SIZES]
        fitted = [key for key, row in rows.items() if row["kind"] == "fitted"]
        assert fitted == [*((SHAREGPT, size) for size in EXTRA_MS), (ALPACA, 64)]
        assert all(row["how"] == "digitised" for row in rows.values())

    @pytest.mark.slow
    def test_how_far_values_move(self, made_up):
        row = rows_of(fig18b(Bench(Source((0,)))))[SHAREGPT, 16]
        assert (row["simulated"], row["step_1pct"]) == (0.1, 0.01)
        assert (row["minimum"], row["maximum"]) == (0.1, 0.101)

    @pytest.mark.slow
    def test_findings_hold_on_the_published_values(self, made_up):
        payload = fig18b(Bench(Source((0,))))
        assert [passed(found) for found in payload["findings"]] == [True] * 6
        assert payload["findings"] == block_sizes.findings(payload["rows"])

    @pytest.mark.parametrize(
        ("load", "size", "times", "overturned"),
        [
            (SHAREGPT, 8, 9.0, []), (SHAREGPT, 32, 1.21, [0]), (SHAREGPT, 64, 0.4, [0, 1]), (SHAREGPT, 256, 0.4, [0, 3]),
            (ALPACA, 1, 1.21, [4]), (ALPACA, 4, 0.2, [2, 4]), (ALPACA, 64, 9.0, []), (ALPACA, 128, 1.21, [5]),
            (ALPACA, 256, 0.02, [2, 5]),
        ],
    )  # fmt: skip
    def test_a_value_elsewhere_overturns_what_is_said_of_it_and_no_more(self, load, size, times, overturned):
        """Of what is fitted, nothing."""
        fitted = [*((SHAREGPT, x) for x in (1, 2, 4, 8)), (ALPACA, 64)]
        rows = []
        for series, x in product((SHAREGPT, ALPACA), SIZES):
            known = paper_figures()["fig18b"][series][SIZES.index(x)]
            found = known * times if (series, x) == (load, size) else known
            kind = "fitted" if (series, x) in fitted else "predicted"
            rows.append(value_row(series, block_sizes.METRIC, known, [found], x=x, kind=kind))
        assert [place for place, found in enumerate(block_sizes.findings(rows)) if not passed(found)] == overturned

    def test_the_step_time_that_a_value_asks_for_is_that_of_a_power_law(self):
        """1 % of step time moves these by 10 %, so that twice the latency asks for 2 ** (1 / 10) of it."""
        rows = [{"x": x, "published": y, "simulated": 2.0, "step_1pct": 0.2} for x, y in ((16, 4.0), (32, 2.0))]
        text = block_sizes.step_change_text(rows)
        assert "step times changed by +0.0% to +7.2%" in text and " 16 and more" in text


class TestFig19b:
    def test_nothing_of_it_was_fitted(self, made_up):
        payload = fig19b(Bench(Source((0,))))
        assert {row["kind"] for row in payload["rows"]} == {"predicted"}
        swap, recompute = (rows_of(payload)[mode, 256] for mode in ("swap", "recompute"))
        assert (swap["simulated"], recompute["simulated"]) == (1.5, 1.4)

    def test_the_quicker_series_is_compared_where_the_figure_is_clear(self, made_up):
        """Made-up swaps are always slower: so they are published to be at 1, 2, 4 and 8, and not at 128 and 256."""
        found = fig19b(Bench(Source((0,))))["findings"][0]
        assert not passed(found)
        assert "quicker at 4 of the 6 block sizes" in found["finding"] and "5%: 1, 2, 4, 8." in found["finding"]


needs_traces = pytest.mark.skipif(not TRACES, reason="FRAGMETER_TRACES names no folder with the exact pairs")


@pytest.mark.slow
@needs_traces
class TestTheFits:
    def test_the_kernel_meets_fig_18b_where_it_was_fitted(self):
        exact = source(Path(TRACES) / "sosp23_sharegpt_opt.csv.gz")
        work = exact.workload(SizeCase(SHAREGPT, 0, 1).experiment, 0)
        published = dict(zip(SIZES, paper_figures()["fig18b"][SHAREGPT]))
        for size in EXTRA_MS:
            assert measure(work, SizeCase(SHAREGPT, 0, size), SCALE) == pytest.approx(published[size], rel=0.05)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=needs_traces)])
def test_alpaca_s_scale_meets_it_at_64_on_drawn_lengths_and_on_the_exact_pairs(exact):
    paths = [Path(TRACES) / f"sosp23_{name}_opt.csv.gz" for name in ("sharegpt", "alpaca")] if exact else [None, None]
    known = source(paths[0], alpaca_trace=paths[1])
    of_load = scales(known)
    work = known.alpaca.workload(SizeCase(ALPACA, 0, 64).experiment, 0)
    assert measure(work, SizeCase(ALPACA, 0, 64), of_load[ALPACA]) == pytest.approx(1.95, rel=0.03)
    assert of_load[ALPACA] > of_load[SHAREGPT] == SCALE
