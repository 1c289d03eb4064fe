"""Which values a number was fitted on: those that design.md and the figures' own words name, and no others."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from fragmeter.experiments.paper.bench import Bench
from fragmeter.experiments.paper.comparison import compared_rows
from fragmeter.experiments.paper.figures import fig12, fig14, fig16, fig17
from fragmeter.experiments.paper.fit import fit
from fragmeter.experiments.paper.paper import FIG2, FIG13A, FIG13B, Source
from fragmeter.experiments.reproduce.figures import FIGURES
from fragmeter.experiments.runs.parallel import at_most
from paths import ROOT

DOCUMENT = ROOT / "docs" / "results" / "reproduction.md"
BOTH_SCALES = {("FasterTransformer", ""), ("vLLM", "")}
#: By figure the series, and the place in it, with a value on which a number was fitted; other figures have none.
FITTED = {
    "fig1": {("the paper's step cost", str(batch)) for batch in range(4, 41, 4)},
    "fig19a": {("recompute", "16"), *((f"swap {way}", size) for way in ("in", "out") for size in ("8", "256"))},
    "fig12a": {("FasterTransformer", "")},
    "fig12b": BOTH_SCALES,
    "fig12c": BOTH_SCALES,
    "fig13a": {("vLLM", "")},
    "fig14b": {("vLLM", "")},
    "fig14e": {("vLLM", "")},
    "fig15": {("beam search, Alpaca", "2"), ("beam search, ShareGPT, a survival of its own", "2")},
    "fig18b": {("Alpaca 30.1 req/s", "64"), *(("ShareGPT 2.01 req/s", size) for size in ("1", "2", "4", "8"))},
}
SHORT = Source((0, 1))
FITTING_S = 60
PANELS = {
    **{f"fig12{letter}": partial(fig12.build_panel, letter, SHORT, FITTING_S) for letter in fig12.PANELS},
    **{f"fig14{letter}": partial(fig14.build_panel, letter, SHORT, 40) for letter in fig14.PANELS},
    **{f"fig16, {name}": partial(fig16.build_panel, name, SHORT, 10) for name in fig16.PREFIX_TOKENS},
    "fig17": partial(fig17.build_panel, SHORT, FITTING_S),
}


def fitted_in_the_document() -> dict[str, set[tuple[str, str]]]:
    """By figure, from the tables that have a column of origins."""
    found: dict[str, set[tuple[str, str]]] = {}
    for section in DOCUMENT.read_text("utf-8").split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        tables = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in lines if line.startswith("|")]
        if tables and "origin" in tables[0]:
            series, at, origin = map(tables[0].index, ("series", "at", "origin"))
            name = heading.lower().replace(" ", "")
            found[name] = {(row[series], row[at]) for row in tables[1:] if row[origin] == "fitted"}
    return found


def test_the_document_marks_these_and_no_others():
    found = fitted_in_the_document()
    assert found.keys() == {name for name, figure in FIGURES.items() if figure.in_all}
    assert {name: marked for name, marked in found.items() if marked} == FITTED


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_says_which_of_its_series_were_fitted(name):
    panel = PANELS[name]()
    expected = {series for series, _ in FITTED.get(name, set())}
    assert {series for series in panel.systems if panel.kind(series) == "fitted"} == expected
    if name.startswith("fig12"):
        on = {series: f"Fig {name.removeprefix('fig')}'s {series} crossing ({panel.published[series]:g} req/s)"
              for series in panel.systems}  # fmt: skip
        assert {series for series, value in on.items() if panel.scales[series].on == value} == expected


@pytest.mark.parametrize("experiment", [FIG2, FIG13A, FIG13B], ids=lambda experiment: experiment.figure)
def test_short_runs_of_the_pool_and_of_the_batch_mark_vllm_s_batch_of_fig_13a_alone(experiment):
    bench = Bench(Source((0,)))
    with at_most(1):
        rows = compared_rows(replace(experiment, duration_s=40, window_s=(10, 40)), bench, fit(bench))
    assert len(rows) == 4 * len(experiment.metrics)
    marked = {(row["series"], "") for row in rows if row["kind"] == "fitted"}
    assert marked == FITTED.get(experiment.figure, set())
