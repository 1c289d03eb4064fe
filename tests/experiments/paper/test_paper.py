"""The paper's figures: on its own length pairs within the limits set, and on drawn ones in the mean over seeds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fragmeter.experiments.paper.bench import Bench, Case, Measured
from fragmeter.experiments.paper.comparison import compared_rows, lengths_lines, row
from fragmeter.experiments.paper.fit import CONTEXT_STEP_SCALE, Fit, fit
from fragmeter.experiments.paper.paper import FIG2, FIG13A, SERIES, source
from fragmeter.experiments.paper.published import (
    published_fig2,
    published_fig13a,
    published_mean_tokens,
    published_slots,
)
from fragmeter.sim.engine.replica import FITTED_STEP_SCALE
from fragmeter.sim.policy import POLICIES

TRACES = os.environ.get("FRAGMETER_TRACES")


def worst(rows: list[dict]) -> float:
    """The largest distance from a published value."""
    return max(abs(cells["error"]) for cells in rows if cells["error"] is not None)


class TestFacts:
    def test_fig2_names_every_bar_and_all_but_three_are_printed(self):
        bars = published_fig2()
        assert len(bars) == 16
        assert [key for key, value in bars.items() if value is None] == [
            ("vLLM", metric) for metric in ("reservation_pct", "internal_pct", "external_and_others_pct")
        ]
        whole = [value for (series, _), value in bars.items() if series == "Orca (Max)"]
        assert sum(whole) == pytest.approx(100, abs=0.15)

    def test_fig13a_table1_and_fig11(self):
        assert list(published_fig13a().values()) == [7.0, 9.81, 13.62, 30.42]
        assert published_slots() == 15_700
        assert published_mean_tokens() == (161.31, 337.99)

    def test_every_series_has_a_policy(self):
        assert set(SERIES.values()) <= set(POLICIES)
        assert list(SERIES) == list(dict.fromkeys(series for series, _ in published_fig2()))


class TestSource:
    def test_drawn_pairs_differ_by_seed_and_come_again(self):
        drawn = source(seeds=3)
        assert drawn.seeds == (0, 1, 2)
        one, again, other = (drawn.workload(FIG2, seed) for seed in (0, 0, 1))
        assert one.sha256() == again.sha256() != other.sha256()
        assert drawn.description(FIG13A) == (
            "Synthetic vllm_sosp23_sharegpt_opt, 2 req/s, 3600 s, mean of seeds 0 to 2"
        )

    def test_a_file_takes_the_papers_one_seed_unless_more_are_asked_for(self, tmp_path):
        file = tmp_path / "pairs.csv"
        file.write_text("input,output\n7,5\n2000,100\n9,3\n")
        assert source(file).seeds == (0,)
        assert source(file, seeds=2).seeds == (0, 1)
        served = source(file).workload(FIG2, 0)
        assert set(zip(served.prompt_tokens.tolist(), served.output_tokens.tolist())) == {(7, 5), (9, 3)}
        assert source(file).description(FIG2) == "pairs, 4 req/s, 900 s, seed 0"


class TestRow:
    @staticmethod
    def measured(value: float) -> Measured:
        return Measured(983, 16, {"internal_pct": value}, {"internal_pct": value / 2})

    def test_the_mean_over_seeds_with_its_range(self):
        assert row("vLLM", "internal_pct", 1.0, [self.measured(1.0), self.measured(2.0)]) == {
            "series": "vLLM", "metric": "internal_pct", "x": None, "published": 1.0, "how": "label",
            "simulated": 1.5, "error": 0.5, "kind": "predicted", "minimum": 1.0, "maximum": 2.0, "over_time": 0.75,
        }  # fmt: skip

    def test_one_seed_has_no_range_and_what_is_not_published_no_error(self):
        assert row("vLLM", "internal_pct", None, [self.measured(1.00049)], kind="fitted") == {
            "series": "vLLM", "metric": "internal_pct", "x": None, "published": None, "how": None,
            "simulated": 1.0, "error": None, "kind": "fitted", "over_time": 0.5,
        }  # fmt: skip


def test_a_bench_runs_a_case_once_and_answers_in_order(monkeypatch):
    bench = Bench(source(seeds=2))
    cases = [Case(FIG2, seed, policy, 1.0) for seed in (1, 0) for policy in ("static", "fastertransformer")]
    first = bench.measure([*cases, cases[0]], "")
    assert first[0] == first[4] and len({run.values["batched_requests"] for run in first}) == 4
    monkeypatch.setattr("fragmeter.experiments.paper.bench.measure", lambda *_: pytest.fail("ran again"))
    assert bench.measure_groups({"a": cases[2:], "b": cases[:1]}, "") == {"a": first[2:4], "b": first[:1]}


@pytest.fixture(scope="module")
def exact_bench() -> Bench:
    if not TRACES:
        pytest.skip("FRAGMETER_TRACES names no folder with the exact pairs")
    return Bench(source(Path(TRACES) / "sosp23_sharegpt_opt.csv.gz"))


@pytest.fixture(scope="module")
def exact_fit(exact_bench) -> Fit:
    return fit(exact_bench)


class TestOnTheExactPairs:
    def test_these_are_the_papers_pairs(self, exact_bench):
        assert list(lengths_lines(exact_bench)) == [
            "Lengths: 79,731 pairs fit the model, means 161.31 and 337.99 tokens;"
            " the paper's Fig 11 prints 161.31 and 337.99."
        ]

    def test_the_scale_is_fitted_here_and_is_the_one_of_drawn_lengths(self, exact_fit):
        assert exact_fit.describe()["kind"] == "fitted on this workload"
        assert exact_fit.scale == CONTEXT_STEP_SCALE

    def test_the_scale_without_the_context_is_the_one_that_comes_with_the_simulator(self, exact_bench):
        assert fit(exact_bench, by_context=False).scale == FITTED_STEP_SCALE

    def test_the_mean_batch_rises_with_the_step_time_and_so_is_fit_to_be_fitted_on(self, exact_fit):
        values = [value for scale, value in exact_fit.scan if scale <= 1.2]
        assert values == sorted(values)

    def test_fig2_within_half_a_point(self, exact_bench, exact_fit):
        rows = compared_rows(FIG2, exact_bench, exact_fit)
        assert sum(cells["error"] is not None for cells in rows) == 13
        assert worst(rows) <= 0.5

    def test_fig13a_within_3_percent(self, exact_bench, exact_fit):
        rows = compared_rows(FIG13A, exact_bench, exact_fit)
        assert [cells["kind"] for cells in rows] == ["predicted", "predicted", "predicted", "fitted"]
        assert max(abs(cells["error"]) / cells["published"] for cells in rows) <= 0.03


def test_three_seeds_of_drawn_lengths_come_near_fig2():
    """Within five points, since single seeds differ by a few; the slow test holds ten to the limit set."""
    bench = Bench(source(seeds=3))
    assert worst(compared_rows(FIG2, bench, fit(bench))) <= 5


@pytest.mark.slow
def test_the_mean_over_ten_seeds_of_drawn_lengths_is_within_3_5_points_of_fig2():
    bench = Bench(source())
    assert bench.source.seeds == tuple(range(10))
    assert worst(compared_rows(FIG2, bench, fit(bench))) <= 3.5
