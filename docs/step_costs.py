"""Writes docs/step-costs.md from the document of ``fragmeter reproduce step-costs --json FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fragmeter.experiments.paper.figures.step_costs import GROUPS, MEDIAN_NOTE
from fragmeter.reports.page.table import markdown
from fragmeter.reports.style.labels import metric_label, number, signed

HEAD = """\
# Every figure under each step time

`fragmeter reproduce step-costs` serves the loads of the paper's figures under three step times of OPT-13B and states the median error of each.
This page is its result on {workload}, written by `make step-costs`; nothing in it is edited by hand. No GPU was used.

{candidates}

Each has one fitted constant beside the coefficients above, its scale s, on vLLM's bar of Fig 13a. The {predicted} other values are predicted: nothing else
is fitted, neither a scale for another model, load or figure, nor a part of a sample or beam (Fig 14), nor a kernel of small blocks (Fig 18b). So these values
differ from those of [reproduction.md](reproduction.md#fitted-constants), which fits 16 constants, each on one published value, for the 116 predicted values that
depend on the step time or on beams (of 28 constants and 179 predicted values in all).
[rates.md](rates.md#step-time) explains the terms and the rule.
"""
MEANINGS = {
    "constant": "25.7 ms, 0.42 ms a sequence and 0.047 ms a prompt token, whatever the context",
    "by context": "0.246 ms a sequence and 0.53 us a token of its context in place of 0.42 ms a sequence; the step time of all figures",
    "by context and batch": "the same, and in batches of more than 95 sequences what DistServe measured beyond",
}


def page(document: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    costs = list(document["errors"])
    fitted = document["fitted"]
    candidates = "\n".join(f"- **{cost}**, s = {fitted[cost]['step_scale']:g}: {MEANINGS[cost]}." for cost in costs)
    head = HEAD.format(
        workload=document["workload"].removeprefix("step-costs: "),
        candidates=candidates,
        predicted=document["predicted_values"],
    )
    parts = [head, "## Median errors\n", "\n".join(_medians(document["errors"])), ""]
    for group, figures in GROUPS.items():
        rows = [row for row in document["rows"] if row["figure"] in figures]
        parts += [f"## {group}\n", "\n".join(_table(rows, costs)), ""]
    return "\n".join(parts)


def _medians(errors: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield f"Median of abs(log(simulated / published)), of each figure and, in the last line, of all. {MEDIAN_NOTE}\n"
    groups = next(iter(errors.values()))
    yield from markdown(["", *errors], ([group, *(f"{of[group]:.3f}" for of in errors.values())] for group in groups))


def _table(rows: Sequence[Mapping[str, Any]], costs: Sequence[str]) -> list[str]:
    by_value: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_value.setdefault((row["figure"], row["series"], row["metric"], row["x"]), {})[row["cost"]] = row
    lines = []
    for (figure, series, metric, x), of in by_value.items():
        published = of[costs[0]]["published"]
        at = "" if x is None else f"{x:g}"
        cells = [figure.removeprefix("fig"), series, metric_label(metric), at, number(metric, published)]
        cells += [text for cost in costs for text in (number(metric, of[cost]["simulated"]), _error(of[cost]))]
        lines.append(cells)
    pairs = [name for cost in costs for name in (cost, "error")]
    return markdown(["figure", "series", "value", "at", "published", *pairs], lines)


def _error(row: Mapping[str, Any]) -> str:
    """In points of a percentage, else in percent of the published value; a fitted value has none."""
    if row["kind"] == "fitted":
        return "fitted"
    if row["metric"].endswith("_pct"):
        return f"{signed(row['error'])} points"
    return f"{signed(100 * row['error'] / row['published'])}%"


if __name__ == "__main__":
    text = page(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    (Path(__file__).parent / "step-costs.md").write_text(text, "utf-8")
