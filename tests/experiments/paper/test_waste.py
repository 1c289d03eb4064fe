"""The waste table: every policy on one trace, and findings that the numbers decide."""

from __future__ import annotations

import pytest

from fragmeter.experiments.paper.bench import Bench
from fragmeter.experiments.paper.figures.waste import METRICS, NAMES, by_policy, findings, waste_table
from fragmeter.experiments.paper.fit import fit
from fragmeter.experiments.paper.paper import FIG2, source
from fragmeter.experiments.paper.published import published_fig2
from fragmeter.experiments.paper.rows import passed

PAPER_VIEW = ["token_states_pct", "paper_reservation_pct", "paper_internal_pct", "paper_external_and_others_pct"]
POPULAR_VIEW = [
    "token_states_pct", "popular_reservation_pct", "popular_internal_pct", "popular_external_pct",
    "popular_unused_pct",
]  # fmt: skip


@pytest.fixture(scope="module")
def table() -> dict:
    bench = Bench(source(seeds=2))
    return waste_table(bench, fit(bench))


@pytest.fixture(scope="module")
def lines(table) -> dict[str, dict]:
    return {line["policy"]: line for line in by_policy(table["rows"])}


def test_one_trace_one_pool_and_a_row_for_every_policy_and_metric(table):
    assert table["workload"] == "Synthetic vllm_sosp23_sharegpt_opt, 4 req/s, 900 s, seed 0"
    assert table["num_blocks"] == 983
    assert {row["kind"] for row in table["rows"]} == {"predicted"}
    assert [(row["series"], row["metric"]) for row in table["rows"]] == [
        (NAMES[policy], metric) for policy in NAMES for metric in METRICS
    ]


def test_every_value_says_how_far_it_moves(table):
    assert all({"minimum", "maximum", "step_1pct"} <= row.keys() for row in table["rows"])
    rates = {row["series"]: row for row in table["rows"] if row["metric"] == "requests_per_s"}
    assert all(0 < row["step_1pct"] < 0.02 * row["simulated"] for row in rates.values())
    values = [row for row in table["rows"] if row["metric"] == "paper_internal_pct"]
    assert all(row["minimum"] <= row["simulated"] <= row["maximum"] for row in values)
    assert sum(row["minimum"] < row["maximum"] for row in values) >= 5
    assert all(0 <= row["step_1pct"] < 2 for row in values) and any(row["step_1pct"] > 0 for row in values)


@pytest.mark.parametrize("view", [PAPER_VIEW, POPULAR_VIEW], ids=["paper", "popular"])
def test_a_view_is_the_whole_pool(view, lines):
    for line in lines.values():
        assert sum(line[metric] for metric in view) == pytest.approx(100, abs=0.004)


def test_the_views_differ_by_what_counts_as_internal_and_by_what_is_free(lines):
    for line in lines.values():
        over_estimate = line["popular_reservation_pct"] - line["paper_reservation_pct"]
        assert line["paper_internal_pct"] - line["popular_internal_pct"] == pytest.approx(over_estimate, abs=0.003)
        unused = line["paper_external_and_others_pct"] - line["popular_external_pct"]
        assert line["popular_unused_pct"] == pytest.approx(unused, abs=0.003)


def test_throughput_is_over_the_whole_run(lines):
    mean_output = source().workload(FIG2, seed=0).output_tokens.mean()
    for line in lines.values():
        ratio = line["output_tokens_per_s"] / line["requests_per_s"]
        assert ratio == pytest.approx(mean_output, rel=0.005)


def test_four_of_the_policies_stand_beside_fig2(table):
    beside = {
        (row["series"], row["metric"].removeprefix("paper_")): row["published"]
        for row in table["rows"]
        if row["published"] is not None
    }
    assert beside == {key: value for key, value in published_fig2().items() if value is not None}


def test_what_is_said_of_these_systems_holds_here(table):
    assert [(passed(found), found["finding"].split(":")[0]) for found in table["findings"]] == [
        (True, "Continuous batching removes the internal waste of static batches, slots of sequences that have ended"
         " and padding"),
        (True, "It removes only part of what the paper calls internal, which counts slots for output that never comes"),
        (True, "Reservation and external waste stay even where every output length is known beforehand"),
        (True, "Paging leaves little of the three"),
        (True, "Less waste is more throughput, in token states and output tokens/s"),
        (True, "Where clients declare no max_tokens, as here, Orca as its own paper has it reserves what Orca (Max)"
         f" does ({_value(table, 'Orca', 'popular_reservation_pct'):.1f} % and"
         f" {_value(table, 'Orca (Max)', 'popular_reservation_pct'):.1f} %) and batches as many requests"
         f" ({_value(table, 'Orca', 'batched_requests'):.2f} and"
         f" {_value(table, 'Orca (Max)', 'batched_requests'):.2f})."),
    ]  # fmt: skip


def _value(table: dict, series: str, metric: str) -> float:
    return next(row["simulated"] for row in table["rows"] if (row["series"], row["metric"]) == (series, metric))


#: A change to one value, and the finding that it overturns.
OVERTURNED = {
    "idle slots": ("Orca (Max)", "popular_internal_pct", 1.5, 0),
    "static batches waste nothing": ("FasterTransformer", "popular_internal_pct", 0.9, 0),
    "all cured": ("Orca (Max)", "paper_internal_pct", 0.5, 1),
    "worse than static": ("Orca (Max)", "paper_internal_pct", 90.0, 1),
    "nothing reserved": ("Orca (Oracle)", "popular_reservation_pct", 0.0, 2),
    "nothing external": ("Orca (Oracle)", "popular_external_pct", 0.0, 2),
    "paging wastes": ("vLLM", "popular_internal_pct", 3.0, 3),
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
