"""Labels of a payload's values in pictures and tables, and their number formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...sim.metrics.views import PAPER_VIEW, SLOT_CATEGORIES, UNUSED, View

Row = Mapping[str, Any]
"""One row of a payload: a value of one series, in design.md's form."""

Numbers = dict[str, list[Any]]
"""A table as plain data: ``columns`` (headings) and ``rows`` (lists of text, numbers or None)."""

#: Metrics of Fig 3, which counts slots, and their categories of the paper's view.
CATEGORY_SLOTS = {"token_slots": "token_states", "reserved_slots": "reservation", "internal_slots": "internal"}
METRICS: dict[str, str] = {
    **{f"{key}_pct": each.label for key, each in (PAPER_VIEW.categories | SLOT_CATEGORIES).items()},
    "unused_pct": UNUSED.label,
    **{metric: PAPER_VIEW.categories[key].label for metric, key in CATEGORY_SLOTS.items()},
    "batched_requests": "batched requests",
    "param_gb": "weights, GB",
    "kv_gb": "KV cache, GiB",
    "kv_slots_k": "KV slots, thousands",
    "decode_tokens_per_s": "decode throughput",
    "normalized_latency_s_per_token": "normalised latency",
    "times_naive_static": "times naive static's throughput",
    "crossing_req_per_s": "rate at 0.5 s/token",
}

UNITS: dict[str, str] = {
    "_pct": "% of the KV pool",
    "_requests": "requests",
    "_tokens_per_s": "tokens/s",
    "_s_per_token": "s/token",
    "_req_per_s": "req/s",
    "_ms": "ms",
    "_tokens": "tokens",
    "_slots": "slots",
}
"""Units by how a metric's name ends."""

PARAMETERS: dict[str, tuple[str, str]] = {
    "scale": ("s", "step-time scale s"),
    "survival": ("q", "beam survival q"),
}
"""Parameters for which values are shown at several settings: key of the rows, letter, and label."""


def view_metrics(view: View) -> list[str]:
    """Keys of a row with the percentages of a view, which add up to 100."""
    return [f"{key}_pct" for key in view.categories]


def definitions_of(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Label and definition of the categories of the paper's view that the rows have values of."""
    found = {row["metric"] for row in rows}
    known = {CATEGORY_SLOTS.get(metric, metric.removesuffix("_pct")) for metric in found}
    return PAPER_VIEW.definitions(key for key in PAPER_VIEW.categories if key in known)


#: Decimals of values below each bound.
_DECIMALS = ((0.2, 3), (100, 2), (1000, 1))


def metric_label(metric: str) -> str:
    """A metric in words, without its unit."""
    return METRICS.get(metric, metric.removesuffix("_pct").removesuffix("_ms").replace("_", " "))


def is_percent(metric: str) -> bool:
    """Whether a metric counts percent of the KV pool, so that differences are points."""
    return metric.endswith("_pct")


def unit(metric: str) -> str:
    """The unit of a metric, for an axis or a heading; the metric's label if it has no unit."""
    return next((named for end, named in UNITS.items() if metric.endswith(end)), metric_label(metric))


def number(metric: str, value: float | None) -> str:
    """A value as text: percentages with one decimal, slots with none, others with about four digits; ``-`` for None."""
    if value is None:
        return "-"
    if is_percent(metric):
        return f"{value:.1f}"
    if metric.endswith("_slots"):
        return f"{value:,.0f}"
    decimals = next((decimals for below, decimals in _DECIMALS if abs(value) < below), 0)
    return f"{value:,.{decimals}f}"


def difference(row: Row) -> str:
    """The error of the simulated value: signed points for a percentage, else signed percent of the published value."""
    error = row.get("error")
    if error is None:
        return "-"
    if is_percent(row["metric"]) or not row["published"]:
        return signed(error)
    return f"{signed(100 * error / row['published'])}%"


def signed(value: float) -> str:
    """A difference with its sign and one decimal; never ``-0.0``."""
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, 1) + 0.0:+.1f}"


def origin(row: Row) -> str:
    """``fitted`` if the cost model is fitted on this value, else ``predicted``."""
    return "fitted" if row.get("fitted") else "predicted"


def has_range(rows: Iterable[Row]) -> bool:
    """Whether any row has the range over seeds."""
    return any(row.get("minimum") is not None for row in rows)


def has_step(rows: Iterable[Row]) -> bool:
    """Whether any row has the change for 1 % of step time."""
    return any(row.get("step_1pct") is not None for row in rows)


def step_text(row: Row) -> str:
    """Change of a value for 1 % of step time, in percentage points for a percentage, else in percent of the value."""
    moved = row.get("step_1pct")
    if moved is None:
        return "-"
    if is_percent(row["metric"]) or not row["simulated"]:
        return f"{moved:.1f}"
    return f"{100 * moved / row['simulated']:.1f}%"


def series_of(rows: Iterable[Row], key: str = "series") -> list[str]:
    """The distinct values of ``key``, in order of first appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def parameter_of(rows: Iterable[Row]) -> str | None:
    """The first swept parameter (of ``PARAMETERS``) that is a key of a row; None if there is none."""
    return next((key for row in rows for key in PARAMETERS if key in row), None)


def comparison_numbers(rows: Iterable[Row]) -> Numbers:
    """A comparison's rows as a table: the published value, the simulated value, and the origin of each.

    Errors, and the change for 1 % of step time, are text: points of a percentage, else percent.
    """
    return _comparison(list(rows), step_text, difference)


def comparison_data(rows: Iterable[Row]) -> Numbers:
    """As ``comparison_numbers``, but errors and the change for 1 % of step time are numbers as in the rows, in all digits."""
    return _comparison(list(rows), lambda row: row.get("step_1pct"), lambda row: row.get("error"))


def _comparison(rows: Sequence[Row], step: Callable[[Row], Any], error: Callable[[Row], Any]) -> Numbers:
    ranged, at_x = has_range(rows), any(row.get("x") is not None for row in rows)
    moving = has_step(rows)
    columns = ["Series", "Value", *(["At"] if at_x else []), "Published", "How", "Simulated"]
    columns += [*(["Lowest seed", "Highest seed"] if ranged else []), *(["Per 1 % of step"] if moving else [])]
    lines = [
        [*_comparison_row(row, at_x, ranged), *([step(row)] if moving else []), error(row), origin(row)] for row in rows
    ]
    return {"columns": [*columns, "Error", "Origin"], "rows": lines}


def _comparison_row(row: Row, at_x: bool, ranged: bool) -> list[Any]:
    percent = is_percent(row["metric"])
    value = f"{metric_label(row['metric'])}{', %' if percent else ''}"
    cells = [row["series"], value, *([row.get("x")] if at_x else []), row["published"], row.get("how")]
    return [*cells, row["simulated"], *([row.get("minimum"), row.get("maximum")] if ranged else [])]


def file_stem(title: str) -> str:
    """A title as a file name without an ending: lower-case words joined by hyphens."""
    return "-".join(re.findall(r"\w+", title.lower(), re.ASCII)) or "figure"


def counted(number: int, what: str) -> str:
    """A number of things."""
    return f"{number:,} {what}{'s' * (number != 1)}" if number else f"no {what}s"
