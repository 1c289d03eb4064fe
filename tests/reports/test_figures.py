"""Figures: every mark is a value of the table it was drawn from."""

from __future__ import annotations

import re

import plotly.io
import pytest

from contrast import contrast
from fragmeter.reports.figures.figures import bars as bars_of
from fragmeter.reports.figures.figures import (
    curves,
    fig2,
    fig13a,
    fig15,
    waste,
    with_limit,
)
from fragmeter.reports.style.palette import BUCKETS, DARK, PARTS, STATES, dark
from fragmeter.sim.metrics.views import PAPER_VIEW, SLOTS_VIEW
from pools import waste_row

METRICS = ["token_states_pct", "reservation_pct", "internal_pct", "external_and_others_pct"]
LABELS = ["token states", "reservation", "internal", "external & others"]
PUBLISHED = {"Orca (Max)": [20.4, 13.3, 57.3, 8.9], "vLLM": [96.3, None, None, None]}
SIMULATED = {"Orca (Max)": [20.5, 13.0, 57.5, 9.0], "vLLM": [96.1, 0.0, 1.7, 2.2]}


def comparison(spread: float | None = None) -> dict:
    rows = []
    for series in PUBLISHED:
        for metric, published, simulated in zip(METRICS, PUBLISHED[series], SIMULATED[series]):
            error = None if published is None else simulated - published
            row = {"series": series, "metric": metric, "x": None, "published": published, "how": "label"}
            row |= {"simulated": simulated, "error": error}
            row |= {} if spread is None else {"minimum": simulated - spread, "maximum": simulated + 2 * spread}
            rows.append(row)
    return {"figure": "fig2", "workload": "made up", "rows": rows}


def batches() -> dict:
    values = [("Orca (Max)", 7.0, 7.21, False), ("vLLM", 30.42, 30.5, True)]
    rows = [
        {"series": name, "metric": "batched_requests", "x": None, "published": published, "how": "label"}
        | {"simulated": simulated, "error": simulated - published, "fitted": fitted}
        for name, published, simulated, fitted in values
    ]
    return {"figure": "fig13a", "workload": "made up", "rows": rows}


def bars(figure) -> dict[tuple[str, str, str], float]:
    """Every bar of a figure by series, side and part."""
    return {
        (*map(str, key), trace.name): value for trace in figure.data for key, value in zip(trace.customdata, trace.x)
    }


def all_texts(figure) -> str:
    return " ".join(note.text for note in figure.layout.annotations)


class TestFig2:
    def test_every_bar_is_the_value_in_the_table(self):
        expected = {}
        for side, table in (("published", PUBLISHED), ("simulated", SIMULATED)):
            for series, values in table.items():
                expected |= {(series, side, label): v for label, v in zip(LABELS, values) if v is not None}
        expected["vLLM", "published", "not published"] = pytest.approx(3.7)
        assert bars(fig2(comparison())) == expected

    def test_the_published_bar_lies_above_the_simulated_one_and_both_are_named(self):
        figure = fig2(comparison())
        names = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext))
        for trace in figure.data:
            assert all(names[y] == side for y, (_, side) in zip(trace.y, trace.customdata))
        top, bottom = (next(y for y, name in names.items() if name == side) for side in ("published", "simulated"))
        low, high = figure.layout.yaxis.range
        assert low > high and top < bottom

    def test_the_heading_tells_the_largest_error_with_its_sign(self):
        assert "largest error -0.3 points" in all_texts(fig2(comparison()))

    def test_bars_are_labelled_where_there_is_room(self):
        internal = next(trace for trace in fig2(comparison()).data if trace.name == "internal")
        assert list(internal.text) == ["57.3", "57.5", ""]

    def test_a_wholly_published_figure_has_no_legend_for_what_is_missing(self):
        rows = [row for row in comparison()["rows"] if row["series"] == "Orca (Max)"]
        remainder = fig2(comparison() | {"rows": rows}).data[-1]
        assert (remainder.name, list(remainder.x), remainder.showlegend) == ("not published", [], False)


class TestFig13a:
    def test_every_bar_is_the_value_in_the_table(self):
        published, simulated = fig13a(batches()).data
        assert (published.name, list(published.x)) == ("published", [7.0, 30.42])
        assert (simulated.name, list(simulated.x)) == ("simulated", [7.21, 30.5])

    def test_values_and_errors_are_written_and_the_fitted_one_is_marked(self):
        figure = fig13a(batches())
        assert {note.text for note in figure.layout.annotations} == {"7.00", "7.21", "30.42", "30.50"}
        orca, vllm = figure.layout.yaxis.ticktext
        assert "+3.0%" in orca and "fitted" not in orca
        assert "+0.3%, fitted" in vllm

    def test_a_range_over_seeds_becomes_a_whisker(self):
        payload = batches()
        for row in payload["rows"]:
            row |= {"minimum": row["simulated"] - 1, "maximum": row["simulated"] + 2}
        published, simulated = fig13a(payload).data
        assert list(simulated.error_x.array) == pytest.approx([2, 2])
        assert list(simulated.error_x.arrayminus) == pytest.approx([1, 1])
        assert published.error_x.array is None

    def test_what_is_not_published_has_no_bar(self):
        payload = batches()
        payload["rows"][0] |= {"published": None, "error": None}
        published, simulated = fig13a(payload).data
        assert (list(published.x), list(simulated.x)) == ([30.42], [7.21, 30.5])


class TestFig15:
    ROWS = [
        {"series": "beam search", "metric": "memory_saved_pct", "x": n, "how": how, "published": published}
        | {"simulated": 53.0, "error": None if published is None else 53.0 - published, "fitted": n == 2}
        for n, how, published in ((2, "label", 52.5), (4, None, None), (6, "formula", 50.0))
    ]

    def test_a_lane_says_how_many_sequences_and_what_was_fitted(self):
        figure = fig15({"rows": self.ROWS, "workload": "made up"})
        first, second = figure.layout.yaxis.ticktext
        assert first.startswith("2<br>") and "+0.5, fitted" in first
        assert second == "4"
        assert "<b>beam search</b>" in [note.text for note in figure.layout.annotations]
        assert figure.data[1].customdata[0] == ["beam search, 2", "53.0 %"]

    def test_what_is_not_published_or_stands_beside_a_formula_has_no_bar(self):
        figure = fig15({"rows": self.ROWS, "workload": "made up"})
        assert [list(trace.x) for trace in figure.data] == [[52.5], [53.0, 53.0]]
        assert [row[2] for row in figure.layout.meta["numbers"]["rows"]] == [2, 4, 6]


WASTE_ROWS = [
    waste_row("orca-max", 300.0, 7.0, live=20.0, reserved=13.0, over_estimate=57.0, stranded=4.0, free=6.0),
    waste_row("vllm-sosp23", 900.0, 30.0, live=96.0, block_tail=1.5, free=2.5),
]


class TestWaste:
    @pytest.mark.parametrize(
        ("view", "parts"),
        [
            (
                PAPER_VIEW,
                {"token states": [20, 96], "reservation": [13, 0], "internal": [57, 1.5], "external & others": [10, 2.5]},
            ),
            (
                SLOTS_VIEW,
                {"live": [20, 96], "reserved": [13, 0], "over estimate": [57, 0], "block tail": [0, 1.5], "round up": [0, 0],
                 "finished hold": [0, 0], "stranded": [4, 0], "cached": [0, 0], "free": [6, 2.5]},
            ),
        ],
    )  # fmt: skip
    def test_every_bar_is_the_value_in_the_table(self, view, parts):
        figure = waste(WASTE_ROWS, view)
        assert {trace.name: list(trace.x) for trace in figure.data} == parts
        assert [label for label, _ in figure.layout.meta["definitions"]] == list(parts)
        assert {tuple(trace.y) for trace in figure.data} == {(0, 1)}
        assert [name.split("<br>")[0] for name in figure.layout.yaxis.ticktext] == ["orca-max", "vllm-sosp23"]

    def test_the_numbers_hold_throughput_and_batch_size(self):
        numbers = waste(WASTE_ROWS).layout.meta["numbers"]
        assert numbers["columns"][-2:] == ["Output tokens/s", "Batched requests"]
        assert [row[-2:] for row in numbers["rows"]] == [[300.0, 7.0], [900.0, 30.0]]


class TestPalette:
    def test_every_colour_of_a_figure_has_one_dark_form(self):
        assert len(set(DARK.values())) == len(DARK)
        assert all(colour == colour.lower() for pair in DARK.items() for colour in pair)

    def test_the_nine_buckets_differ_in_both_schemes(self):
        assert list(BUCKETS) == (
            "live reserved over_estimate block_tail round_up finished_hold stranded cached free".split()
        )
        assert len({hue.light for hue in BUCKETS.values()}) == len({hue.dark for hue in BUCKETS.values()}) == 9

    @pytest.mark.parametrize("hue", {*BUCKETS.values(), *PARTS.values(), *STATES.values()})
    def test_text_on_a_fill_is_legible_in_both_schemes(self, hue):
        assert contrast(hue.text, hue.light) >= 4.5
        assert contrast(dark(hue.text), hue.dark) >= 4.5

    def test_contrast_is_that_of_the_standard(self):
        assert contrast("#000000", "#ffffff") == pytest.approx(21)
        assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)

    def test_figures_use_palette_colours_only(self):
        figure = fig2(comparison())
        used = set(re.findall("#[0-9a-fA-F]{6}", plotly.io.to_json(figure)))
        assert used and used <= set(DARK) | {hue.text for hue in BUCKETS.values()}


def along(*values: tuple[str, float, float | None, float]) -> dict:
    rows = [
        {"series": name, "metric": "time_ms", "x": x, "published": published, "how": "digitised"}
        | {"simulated": simulated, "error": None, "step_1pct": 0.5}
        for name, x, published, simulated in values
    ]
    return {"figure": "fig19a", "workload": "made up", "x_is": "block size", "rows": rows}


class TestCurves:
    def test_every_mark_is_a_value_and_published_ones_are_dotted(self):
        figure = curves(along(("in", 1, 9.0, 8.0), ("in", 256, None, 7.0), ("out", 1, 3.0, 2.0)))
        drawn = {(trace.name, trace.line.dash): list(zip(trace.x, trace.y)) for trace in figure.data}
        assert drawn == {
            ("in, published", "dot"): [(1, 9.0)],
            ("in", "solid"): [(1, 8.0), (256, 7.0)],
            ("out, published", "dot"): [(1, 3.0)],
            ("out", "solid"): [(1, 2.0)],
        }
        assert [trace.name for trace in figure.data if trace.showlegend] == ["in", "out"]
        assert (figure.layout.xaxis.type, figure.layout.xaxis.title.text) == ("log", "block size")
        assert figure.layout.yaxis.title.text == "ms"
        assert len(figure.layout.meta["numbers"]["rows"]) == 3

    def test_several_models_of_one_measured_curve_have_it_once(self):
        figure = curves(along(("paper", 1, 9.0, 8.0), ("roofline", 1, 9.0, 5.0)))
        assert [(trace.name, list(trace.y)) for trace in figure.data if trace.showlegend] == [
            ("published", [9.0]), ("paper", [8.0]), ("roofline", [5.0]),
        ]  # fmt: skip

    def test_logarithmic_axes_have_whole_labels_and_the_limit_has_one(self):
        """On 2 to 128 on either side: 20 points have ticks at 1, 2 and 5, and not at 6, 7, 8."""
        rows = [("in", 2 * 64 ** (at / 19), None, 2 * 64 ** (at / 19)) for at in range(20)]
        figure = with_limit(curves(along(*rows)), 30, "30 ms")
        assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"
        assert [float(text) for text in figure.layout.xaxis.ticktext] == [1, 2, 5, 10, 20, 50, 100, 200]
        assert [float(text) for text in figure.layout.yaxis.ticktext] == [1, 2, 5, 10, 20, 50, 100, 200, 30]
        assert figure.data[-1].y == (30, 30)
        assert len(with_limit(curves(along(*rows)), 50, "50 ms").layout.yaxis.tickvals) == 8

    def test_an_axis_that_does_not_reach_far_is_not_logarithmic(self):
        figure = curves(along(("in", 4, 9.0, 8.0), ("in", 40, 10.0, 7.0)))
        assert figure.layout.xaxis.type is None and figure.layout.yaxis.rangemode == "tozero"


class TestBars:
    def test_several_values_of_a_series_have_bars_of_their_own(self):
        twice = along(("A", 1, 2.0, 3.0))["rows"] * 2
        rows = [row | {"metric": f"mean_{part}_tokens"} for row, part in zip(twice, "ab")]
        figure = bars_of({"workload": "made up", "rows": [row | {"x": None} for row in rows]})
        names = [text.partition("<")[0] for text in figure.layout.yaxis.ticktext]
        assert names == ["A, mean a tokens", "A, mean b tokens"]
        assert figure.layout.xaxis.title.text == "tokens"

    def test_what_is_not_published_has_no_bar(self):
        figure = bars_of(along(("A", 1, None, 3.0), ("B", 1, 2.0, 3.0)))
        assert [len(trace.x) for trace in figure.data] == [1, 1]
