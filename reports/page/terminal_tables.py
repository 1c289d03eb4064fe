"""Tables for the terminal, 80 columns wide at most.

The console decides on colour and bold: rich shows them on a terminal and writes plain text to a pipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ...sim.metrics.views import PAPER_VIEW, UNUSED, VIEWS, Category, View, amount, definition_lines, sums
from ...sim.types.optional import not_none
from ..style.labels import (
    PARAMETERS,
    Row,
    definitions_of,
    difference,
    has_range,
    has_step,
    is_percent,
    metric_label,
    number,
    origin,
    parameter_of,
    series_of,
    step_text,
    unit,
)
from .table import Column, Table

Payload = dict[str, Any]
"""``{"figure", "workload", "rows"}`` as written by ``--json``; see design.md, "The command line"."""

_ERROR_NOTE = "error: simulated - published, in points; where marked %, of the published value"


def comparison_table(payload: Payload) -> Table:
    """A table of simulated values, with the published value and the error beside each.

    It has a line for each value, under the name of its series where a series has several.
    """
    rows = payload["rows"]
    ranged, moving = has_range(rows), has_step(rows)
    grouped = len(rows) > len(series_of(rows))
    at_x, known = any(row.get("x") is not None for row in rows), _known_alike(rows)
    table = Table(
        # With many columns, the column of series names shrinks.
        Column("" if grouped else "series", is_text=True, wraps=at_x),
        *(Column(name, name in ("how", "origin")) for name in _headings(ranged, moving, at_x, known is None)),
        gap=1 if ranged and (moving or not is_percent(rows[0]["metric"])) else 2,
    )
    # If values differ in x alone, the first line has the series' name.
    along = at_x and len(series_of(rows, "metric")) == 1
    for name in series_of(rows):
        mine = [row for row in rows if row["series"] == name]
        if grouped and not along:
            table.add_row(name, bold=True)
        for row in mine:
            label = f"  {metric_label(row['metric'])}" if grouped else name
            if along:
                label = name if row is mine[0] else ""
            is_last = grouped and row is mine[-1]
            table.add_row(label, *_cells(row, ranged, moving, at_x, known is None), ends_group=is_last)
    return table


def _known_alike(rows: list[Row]) -> str | None:
    """Short origin of the published values, if a long word for all of them would take a needed column."""
    found = {row.get("how") for row in rows if row["published"] is not None}
    return "digitised" if has_range(rows) and has_step(rows) and found == {"digitised"} else None


def _headings(ranged: bool, moving: bool, at_x: bool, how: bool) -> Iterator[str]:
    yield from ["at"] if at_x else []
    yield from ("published", "simulated")
    yield from ["seeds"] if ranged else []
    yield from ["per 1%"] if moving else []
    yield from ("error", "how", "origin") if how else ("error", "origin")


def _cells(row: Row, ranged: bool, moving: bool, at_x: bool, how: bool) -> Iterator[str]:
    metric = row["metric"]
    if at_x:
        yield "-" if row.get("x") is None else f"{row['x']:g}"
    yield number(metric, row["published"])
    yield number(metric, row["simulated"])
    if ranged:
        low, high = row.get("minimum"), row.get("maximum")
        yield "-" if low is None else f"{number(metric, low)}..{number(metric, high)}"
    if moving:
        yield step_text(row)
    yield difference(row)
    if how:
        yield row.get("how") or "-"
    yield origin(row)


def waste_table(payload: Payload, view: View = PAPER_VIEW) -> Table:
    """The waste table: one line per policy, with the categories of a view; in the paper's view also throughput and batch."""
    rates = ["output\ntokens/s", "\nbatch"] if view is PAPER_VIEW else []
    table = Table("policy", *(_in_two_lines(each.label) for each in shown_categories(payload, view)), *rates, gap=1)
    for row in payload["rows"]:
        shares = (f"{_share(row, each):.1f}" for each in shown_categories(payload, view))
        ends = f"{row['output_tokens_per_s']:,.0f}", f"{row['batched_requests']:.1f}"
        table.add_row(row["policy"], *shares, *ends[: len(rates)])
    return table


def shown_categories(payload: Payload, view: View) -> list[Category]:
    """Columns of the waste table: the paper's categories and the part that is free, or the slots' without those empty in every
    row."""
    if view is PAPER_VIEW:
        return [*view.categories.values(), UNUSED]
    return [each for each in view.categories.values() if any(_share(row, each) for row in payload["rows"])]


def _share(row: Row, category: Category) -> float:
    """Percent of the pool in a category, from a row's buckets."""
    return amount({bucket: row[f"{bucket}_pct"] for bucket in category.buckets}, category)


def _in_two_lines(heading: str) -> str:
    """A heading, divided behind its first words; one of a single word is in the second line."""
    *first, last = heading.split()
    return f"{' '.join(first)}\n{last}"


def sensitivity_table(payload: Payload) -> Table:
    """Each value at each setting of a parameter in the rows: one line per value, one column per setting."""
    rows = payload["rows"]
    key = not_none(parameter_of(rows))
    settings = sorted({row[key] for row in rows})
    table = Table("", "published", *(f"{PARAMETERS[key][0]}={setting:.2f}" for setting in settings), gap=2)
    for name in series_of(rows):
        table.add_row(name, bold=True)
        values = _by_value([row for row in rows if row["series"] == name])
        for place, ((metric, x), mine) in enumerate(values.items(), start=1):
            at = {row[key]: row["simulated"] for row in mine}
            label = f"  {metric_label(metric)}" + ("" if x is None else f", {x:g}")
            cells = [number(metric, value) for value in (mine[0]["published"], *map(at.get, settings))]
            table.add_row(label, *cells, ends_group=place == len(values))
    return table


def _by_value(rows: list[Row]) -> dict[tuple[str, float | None], list[Row]]:
    """The rows of a series by metric and x."""
    values: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        values.setdefault((row["metric"], row.get("x")), []).append(row)
    return values


def print_payload(payload: Payload, console: Console) -> None:
    """Print a payload under its title, as the table that fits it: waste, values by parameter, or a comparison.

    Categories of the KV pool are defined below the table, and the title names their view: ``payload["view"]`` of the waste
    table, the paper's of others.
    """
    rows = payload["rows"]
    is_waste = payload["figure"] == "waste"
    view: View = VIEWS[payload.get("view", "paper")] if is_waste else PAPER_VIEW
    parameter = parameter_of(rows)
    definitions = [] if is_waste else definitions_of(rows)
    if is_waste:
        subject, table = "% of the KV pool, by policy", waste_table(payload, view)
        definitions = [(each.label, each.definition) for each in shown_categories(payload, view)]
        remark = "" if view is PAPER_VIEW else "\n  ".join((f"In {PAPER_VIEW.title}", *sums()))
    elif parameter is not None:
        subject, table, remark = f"{_subject(rows)}, by {PARAMETERS[parameter][1]}", sensitivity_table(payload), ""
    else:
        known = _known_alike(rows)
        remark = _ERROR_NOTE if known is None else f"published: {known}; {_ERROR_NOTE}"
        subject, table = f"{_subject(rows)}, published and simulated", comparison_table(payload)
    of = f", {view.title}" if definitions else ""
    console.print(f"{payload['figure']}: {subject}{of}", style="bold", markup=False, highlight=False)
    console.print(payload["workload"], markup=False, highlight=False)
    console.print(table, highlight=False)
    for text in (*definition_lines(definitions), *([remark] if remark else [])):
        console.print(text, style="dim", markup=False, highlight=False)


def _subject(rows: list[Row]) -> str:
    metrics = series_of(rows, "metric")
    if len(metrics) == 1:
        return f"mean {metric_label(metrics[0])}"
    units = {unit(metric) for metric in metrics}
    return units.pop() if len(units) == 1 else "several values"
