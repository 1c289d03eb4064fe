"""The waste table: every policy on one trace, and findings that the numbers decide."""

from __future__ import annotations

from statistics import mean

import pytest

from fragmeter.experiments.paper.bench import Bench
from fragmeter.experiments.paper.comparison import compare
from fragmeter.experiments.paper.figures.waste import METRICS, NAMES, by_policy, findings, waste_table
from fragmeter.experiments.paper.fit import fit
from fragmeter.experiments.paper.paper import FIG2, source
from fragmeter.experiments.paper.published import published_fig2
from fragmeter.experiments.paper.rows import passed
from fragmeter.experiments.reproduce.scorecard import badge
from fragmeter.reports.style.labels import view_metrics
from fragmeter.sim.metrics.views import PAPER_VIEW, SLOTS_VIEW, VIEWS


@pytest.fixture(scope="module")
def table() -> dict:
    bench = Bench(source(seeds=2))
    return waste_table(bench, fit(bench))


@pytest.fixture(scope="module")
def lines(table) -> dict[str, dict]:
    return {line["policy"]: line for line in by_policy(table["rows"])}


@pytest.mark.slow
def test_one_trace_one_pool_and_a_row_for_every_policy_and_metric(table):
    assert table["workload"] == "Synthetic vllm_sosp23_sharegpt_opt, 4 req/s, 900 s, mean of seeds 0 to 1"
    assert table["num_blocks"] == 983
    assert {row["kind"] for row in table["rows"]} == {"predicted"}
    assert [(row["series"], row["metric"]) for row in table["rows"]] == [
        (NAMES[policy], metric) for policy in NAMES for metric in METRICS
    ]


def test_every_value_says_how_far_it_moves(table):
    assert all({"minimum", "maximum", "step_1pct"} <= row.keys() for row in table["rows"])
    rates = {row["series"]: row for row in table["rows"] if row["metric"] == "requests_per_s"}
    assert all(0 < row["step_1pct"] < 0.02 * row["simulated"] for row in rates.values())
    values = [row for row in table["rows"] if row["metric"] == "internal_pct"]
    assert all(row["minimum"] <= row["simulated"] <= row["maximum"] for row in values)
    assert sum(row["minimum"] < row["maximum"] for row in values) >= 5
    assert all(0 <= row["step_1pct"] < 2 for row in values) and any(row["step_1pct"] > 0 for row in values)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_the_whole_pool(view, lines):
    for line in lines.values():
        assert sum(line[metric] for metric in view_metrics(view)) == pytest.approx(100, abs=0.005)


def test_a_category_is_the_sum_of_its_slots(lines):
    for line in lines.values():
        slots = {bucket: line[f"{bucket}_pct"] for bucket in SLOTS_VIEW.categories}
        for name, value in PAPER_VIEW.grouped(slots).items():
            assert line[f"{name}_pct"] == pytest.approx(value, abs=0.003)


def test_every_value_of_fig2_is_that_of_fig2(table):
    """One quantity, one value, one grade: the table and the figure are measured with the same seeds."""
    bench = Bench(source(seeds=2))
    figure = compare(FIG2, bench, fit(bench), scales=())
    same = ("series", "metric", "published", "simulated", "error", "minimum", "maximum")
    rows = {(row["series"], row["metric"]): row for row in table["rows"]}
    assert len(figure["rows"]) == 16
    for row in figure["rows"]:
        assert {name: rows[row["series"], row["metric"]][name] for name in same} == {name: row[name] for name in same}
    assert badge(table | {"figure": "waste"}) == badge(figure)


def test_throughput_is_over_the_whole_run(lines):
    mean_output = mean(source().workload(FIG2, seed=seed).output_tokens.mean() for seed in (0, 1))
    for line in lines.values():
        ratio = line["output_tokens_per_s"] / line["requests_per_s"]
        assert ratio == pytest.approx(mean_output, rel=0.005)


def test_four_of_the_policies_stand_beside_fig2(table):
    beside = {(row["series"], row["metric"]): row["published"] for row in table["rows"] if row["published"] is not None}
    assert beside == {key: value for key, value in published_fig2().items() if value is not None}


def test_what_is_said_of_these_systems_holds_here(table):
    assert [(passed(found), found["finding"].split(":")[0]) for found in table["findings"]] == [
        (True, "Continuous batching removes one part of internal, slots of ended sequences and padding"),
        (True, "It leaves the other part, slots for output that never comes"),
        (True, "Two kinds stay even where every output length is known beforehand"),
        (True, "Paging leaves little"),
        (True, "Less waste is more throughput, in token states and output tokens/s"),
        (True, "Where clients declare no max_tokens, as here, Orca as its own paper has it has the reservation of Orca (Max)"
         f" ({_value(table, 'Orca', 'reservation_pct'):.1f} % and"
         f" {_value(table, 'Orca (Max)', 'reservation_pct'):.1f} %), the internal"
         f" ({_value(table, 'Orca', 'internal_pct'):.1f} % and"
         f" {_value(table, 'Orca (Max)', 'internal_pct'):.1f} %) and the batch"
         f" ({_value(table, 'Orca', 'batched_requests'):.2f} and"
         f" {_value(table, 'Orca (Max)', 'batched_requests'):.2f} requests)."),
    ]  # fmt: skip


def _value(table: dict, series: str, metric: str) -> float:
    return next(row["simulated"] for row in table["rows"] if (row["series"], row["metric"]) == (series, metric))


#: A change to one value, and the finding that it overturns.
OVERTURNED = {
    "idle slots": ("Orca (Max)", "finished_hold_pct", 1.5, 0),
    "static batches waste nothing": ("FasterTransformer", "finished_hold_pct", 0.9, 0),
    "all cured": ("Orca (Max)", "over_estimate_pct", 0.5, 1),
    "nothing reserved": ("Orca (Oracle)", "reservation_pct", 0.0, 2),
    "paging wastes": ("vLLM", "internal_pct", 3.0, 3),
    "paging leaves gaps": ("vLLM", "stranded_pct", 3.0, 3),
    "paging is slow": ("vLLM", "output_tokens_per_s", 1.0, 4),
    "Orca has no more in use": ("Orca (Max)", "token_states_pct", 3.0, 4),
    "orcas differ": ("Orca", "batched_requests", 9.0, 5),
}


@pytest.mark.parametrize(("series", "metric", "value", "finding"), OVERTURNED.values(), ids=OVERTURNED)
def test_other_numbers_overturn_a_finding_and_no_other(series, metric, value, finding, table):
    rows = [
        row | ({"simulated": value} if (row["series"], row["metric"]) == (series, metric) else {})
        for row in table["rows"]
    ]
    assert [passed(found) for found in findings(rows)] == [at != finding for at in range(6)]
