"""What pictures and tables call the values of a payload, and how they write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
"""One row of a payload: a value of one series, in design.md's form."""

Numbers = dict[str, list]
"""A table as plain data: ``columns`` (headings) and ``rows`` (lists of text, numbers or None)."""

METRICS: dict[str, str] = {
    "token_states_pct": "token states",
    "reservation_pct": "reservation",
    "internal_pct": "internal",
    "external_and_others_pct": "external & others",
    "batched_requests": "batched requests",
}

PARAMETERS: dict[str, tuple[str, str]] = {
    "scale": ("s", "step-time scale s"),
    "survival": ("q", "beam survival q"),
}
"""What values are told at several settings of: key of the rows, its letter, and what it is called."""

VIEWS: dict[str, dict[str, tuple[str, str]]] = {
    "paper": {
        "token_states_pct": ("token states", "token_states"),
        "paper_reservation_pct": ("reservation", "reservation"),
        "paper_internal_pct": ("internal", "internal"),
        "paper_external_and_others_pct": ("external & others", "external"),
    },
    "popular": {
        "token_states_pct": ("token states", "token_states"),
        "popular_reservation_pct": ("reservation", "reservation"),
        "popular_internal_pct": ("internal", "internal"),
        "popular_external_pct": ("external", "external"),
        "popular_unused_pct": ("free & cached", "unused"),
    },
}
"""The waste table's columns, view by view: key of the row, label, part of the palette. A view adds up to 100."""


def metric_label(metric: str) -> str:
    """A metric in words, without its unit."""
    return METRICS.get(metric, metric.removesuffix("_pct").replace("_", " "))


def is_percent(metric: str) -> bool:
    """Whether a metric counts percent of the KV pool, so that differences are points."""
    return metric.endswith("_pct")


def unit(metric: str) -> str:
    """The unit of a metric, for an axis or a heading."""
    return "% of the KV pool" if is_percent(metric) else "requests"


def number(metric: str, value: float | None) -> str:
    """A value as text: percentages with one decimal, others with two; ``-`` where there is none."""
    if value is None:
        return "-"
    return f"{value:.1f}" if is_percent(metric) else f"{value:,.2f}"


def difference(row: Row) -> str:
    """How far the simulated value is off: signed points of a percentage, else signed percent of the published."""
    error = row.get("error")
    if error is None:
        return "-"
    if is_percent(row["metric"]) or not row["published"]:
        return signed(error)
    return f"{signed(100 * error / row['published'])}%"


def signed(value: float) -> str:
    """A difference with its sign and one decimal; nothing is ever ``-0.0``."""
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, 1) + 0.0:+.1f}"


def origin(row: Row) -> str:
    """``fitted`` where the cost model was fitted on this very value, ``predicted`` everywhere else."""
    return "fitted" if row.get("fitted") else "predicted"


def has_range(rows: Iterable[Row]) -> bool:
    """Whether any row carries the range over seeds."""
    return any(row.get("minimum") is not None for row in rows)


def series_of(rows: Iterable[Row], key: str = "series") -> list[str]:
    """The distinct values of ``key``, in order of first appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def parameter_of(rows: Iterable[Row]) -> str | None:
    """Which of ``PARAMETERS`` the rows carry, if any."""
    return next((key for row in rows for key in PARAMETERS if key in row), None)


def comparison_numbers(rows: Iterable[Row]) -> Numbers:
    """A comparison's rows as a table: what is published, what is simulated, and how each came about."""
    rows = list(rows)
    ranged, at_x = has_range(rows), any(row.get("x") is not None for row in rows)
    columns = ["Series", "Value", *(["At"] if at_x else []), "Published", "How", "Simulated"]
    columns += [*(["Lowest seed", "Highest seed"] if ranged else []), "Error", "Origin"]
    return {"columns": columns, "rows": [_comparison_row(row, at_x, ranged) for row in rows]}


def _comparison_row(row: Row, at_x: bool, ranged: bool) -> list:
    percent = is_percent(row["metric"])
    value = f"{metric_label(row['metric'])}{', %' if percent else ''}"
    cells = [row["series"], value, *([row.get("x")] if at_x else []), row["published"], row.get("how")]
    cells += [row["simulated"], *([row.get("minimum"), row.get("maximum")] if ranged else [])]
    return [*cells, row.get("error"), origin(row)]
