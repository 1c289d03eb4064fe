"""Terminal tables: what is printed, in 80 columns, without colour in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fragmeter.reports.page.terminal_tables import print_payload
from fragmeter.sim.metrics.views import PAPER_VIEW, SLOTS_VIEW, UNUSED
from pools import waste_row

METRICS = ["token_states_pct", "reservation_pct", "internal_pct", "external_and_others_pct"]


def printed(payload: dict, **console: object) -> str:
    stream = io.StringIO()
    print_payload(payload, Console(file=stream, width=80, **console))
    return stream.getvalue()


def lines(payload: dict) -> list[list[str]]:
    """Every printed line, cut at runs of two blanks or more."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed(payload).splitlines()]


def row(series: str, metric: str, published: float | None, simulated: float, **more: object) -> dict:
    error = None if published is None else simulated - published
    how = None if published is None else "label"
    cells = {"series": series, "metric": metric, "x": None, "published": published, "how": how}
    return cells | {"simulated": simulated, "error": error} | more


def fig2(**more: object) -> dict:
    rows = [row("Orca (Oracle)", metric, 20.4 + at, 20.5 + at, **more) for at, metric in enumerate(METRICS)]
    rows += [row("vLLM", METRICS[0], 96.3, 96.26, **more), row("vLLM", METRICS[3], None, 2.04, **more)]
    return {"figure": "fig2", "workload": "made up", "rows": rows}


FIG13A = {
    "figure": "fig13a",
    "workload": "made up",
    "rows": [
        row("Orca (Max)", "batched_requests", 7.0, 7.07),
        row("vLLM", "batched_requests", 30.42, 30.42, fitted=True),
    ],
}

WASTE = {
    "figure": "waste",
    "workload": "made up",
    "rows": [
        waste_row(
            "fastertransformer", 12_345.6, 7.0, live=20.0, reserved=13.0, over_estimate=50.0, block_tail=3.0, round_up=1.0,
            finished_hold=4.0, stranded=3.0, free=6.0,
        )
    ],
}  # fmt: skip

SCALE = {
    "figure": "fig2",
    "workload": "made up",
    "rows": [
        row("Orca (Oracle)", metric, 20.4, 20.0 + scale, scale=scale)
        for metric in METRICS
        for scale in (1.0, 1.05, 1.1, 1.15, 1.2, 1.25)
    ],
}


def test_fig2_prints_published_simulated_error_how_and_origin_by_series():
    table = lines(fig2())
    assert ["published", "simulated", "error", "how", "origin"] in table
    assert ["token states", "20.4", "20.5", "+0.1", "label", "predicted"] in table
    assert table.index(["Orca (Oracle)"]) < table.index(["vLLM"])
    after_vllm = table[table.index(["vLLM"]) :]
    assert ["token states", "96.3", "96.3", "+0.0", "label", "predicted"] in after_vllm
    assert ["external & others", "-", "2.0", "-", "-", "predicted"] in after_vllm


def test_a_single_metric_has_a_line_a_series_and_marks_what_is_fitted():
    table = lines(FIG13A)
    assert ["fig13a: mean batched requests, published and simulated"] in table
    assert ["Orca (Max)", "7.00", "7.07", "+1.0%", "label", "predicted"] in table
    assert ["vLLM", "30.42", "30.42", "+0.0%", "label", "fitted"] in table


def test_ranges_over_seeds_have_a_column():
    table = lines(fig2(minimum=17.96, maximum=22.0))
    assert ["token states", "20.4", "20.5", "18.0..22.0", "+0.1", "label", "predicted"] in table


def test_values_at_an_x_say_where():
    payload = {"figure": "fig12a", "workload": "made up", "rows": [row("vLLM", "batched_requests", 1.5, 3.0, x=0.25)]}
    assert ["vLLM", "0.25", "1.50", "3.00", "+100.0%", "label", "predicted"] in lines(payload)


def test_the_waste_table_is_the_papers_view_with_the_free_part_apart():
    text = printed(WASTE)
    words = [line.split() for line in text.splitlines()]
    assert "the paper's view" in text.splitlines()[0]
    assert ["fastertransformer", "20.0", "13.0", "57.0", "10.0", "6.0", "12,346", "7.0"] in words
    assert "policy states reservation internal others free tokens/s batch".split() in words
    assert [category.defined for category in (*PAPER_VIEW.categories.values(), UNUSED)] == text.splitlines()[-5:]


def test_slots_have_columns_of_their_own_and_say_how_they_add_up_to_the_papers():
    text = printed(WASTE | {"view": "slots"})
    assert "what becomes of each slot" in text.splitlines()[0]
    assert ["fastertransformer", *"20.0 13.0 50.0 3.0 1.0 4.0 3.0 6.0".split()] in map(str.split, text.splitlines())
    defined = [line for line in text.splitlines() if ": slots " in line]
    # No policy of the table caches, and empty buckets have no column.
    assert defined == [each.defined for bucket, each in SLOTS_VIEW.categories.items() if bucket != "cached"]
    assert "internal = over estimate + block tail + finished hold" in " ".join(text.split())


def test_the_scale_table_has_a_column_a_scale():
    table = lines(SCALE)
    assert ["published", "s=1.00", "s=1.05", "s=1.10", "s=1.15", "s=1.20", "s=1.25"] in table
    assert ["external & others", "20.4", "21.0", "21.1", "21.1", "21.1", "21.2", "21.2"] in table


def test_a_value_at_several_x_has_a_line_each_in_either_table():
    values = [row("beams", "memory_saved_pct", 50.0 + x, 51.0 + x, x=x) for x in (2, 4)]
    compared = lines({"figure": "fig15", "workload": "made up", "rows": values})
    assert ["beams", "2", "52.0", "53.0", "+1.0", "label", "predicted"] in compared
    assert ["4", "54.0", "55.0", "+1.0", "label", "predicted"] in compared
    moved = [value | {"survival": at, "simulated": value["simulated"] + at} for value in values for at in (0.9, 0.95)]
    table = lines({"figure": "fig15", "workload": "made up", "rows": moved})
    assert ["published", "q=0.90", "q=0.95"] in table
    assert ["memory saved, 4", "54.0", "55.9", "56.0"] in table
    assert ["fig15: mean memory saved, by beam survival q"] in table


@pytest.mark.parametrize(
    "payload", [fig2(), fig2(minimum=17.96, maximum=22.0), FIG13A, WASTE, SCALE, WASTE | {"view": "slots"}]
)
def test_nothing_is_cut_or_wrapped_in_80_columns_and_a_pipe_gets_no_colour(payload):
    text = printed(payload)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and "\x1b" not in text
    wide = io.StringIO()
    print_payload(payload, Console(file=wide, width=200))
    assert len(wide.getvalue().splitlines()) == len(text.splitlines())


def test_a_terminal_gets_its_headings_in_bold():
    assert "\x1b[1m" in printed(FIG13A, force_terminal=True, color_system="standard")
