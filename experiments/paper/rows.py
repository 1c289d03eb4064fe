"""Rows of one value beside the published one, in design.md's form, with sensitivities; and findings over several rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ...reports.style.labels import metric_label

Row = dict[str, Any]
#: Factors on the step time for ``step_1pct``.
STEP_CHANGES = (0.99, 1.01)
#: Seeds for the range of single ones, if only one is requested.
OTHER_SEEDS = (0, 1, 2)
_DECIMALS = 3


def value_row(
    series: str,
    metric: str,
    published: float | None,
    values: Sequence[float],
    *,
    x: float | None = None,
    how: str = "label",
    kind: str = "predicted",
    other_seeds: Sequence[float] = (),
    step_1pct: float | None = None,
    decimals: int = _DECIMALS,
) -> Row:
    """One value beside the published one.

    Args:
        values: One value per seed; ``simulated`` is their mean, None if there are none.
        how: Origin of the published value: label, digitised or text.
        kind: ``predicted``, or ``fitted`` if a number is fitted on this value.
        other_seeds: The value with single seeds, for ``minimum`` and ``maximum``; by default ``values``, if several.
        step_1pct: The larger change if all steps are 1 % longer or 1 % shorter.
    """
    simulated = round(fmean(values), decimals) if values else None
    cells = {
        "series": series,
        "metric": metric,
        "x": x,
        "published": published,
        "how": None if published is None else how,
        "simulated": simulated,
        "error": None if published is None or simulated is None else round(simulated - published, decimals),
        "kind": kind,
    }
    seen = [*values, *other_seeds]
    if len(seen) > 1:
        cells |= {"minimum": round(min(seen), decimals), "maximum": round(max(seen), decimals)}
    if step_1pct is not None:
        cells["step_1pct"] = round(step_1pct, decimals)
    return cells


def moved(base: Sequence[float], *changed: Sequence[float]) -> float:
    """The largest distance of the mean from ``base`` to any of the others."""
    return max(abs(fmean(values) - fmean(base)) for values in changed)


def as_finding(text: str, passes: bool) -> dict[str, Any]:
    """A finding of a document: a sentence with the number and its limit, and whether the number passes."""
    return {"finding": text, "passes": passes}


def passed(finding: Mapping[str, Any]) -> bool:
    """Whether a finding of a document passes."""
    return bool(finding["passes"])


def within(rows: Iterable[Row], limit: float, text: str, relative: bool = True) -> dict[str, Any]:
    """A finding: whether all predicted values of these rows are within a limit of the published ones.

    Args:
        limit: A share of the published value; points with ``relative=False``.
        text: The subject of the finding.
    """
    named = [(row, _distance(row, relative)) for row in rows if row["kind"] == "predicted" and row["error"] is not None]
    worst, distance = max(named, key=lambda pair: abs(pair[1]))
    passes = all(abs(distance) <= limit for _, distance in named)
    at = value_name(worst, with_metric=len({row["metric"] for row, _ in named}) > 1)
    worst_text, bound = (f"{distance:+.1%}", f"{limit:.0%}") if relative else (f"{distance:+.2f}", f"{limit:g} points")
    return as_finding(f"{text} within {bound}: worst {worst_text} ({at}), of {len(named)} predicted values.", passes)


def ordered(rows: Sequence[Row], what: str = "") -> dict[str, Any]:
    """A finding: whether the series have the published order, without ties between series that are published apart.

    Args:
        what: The rows' metric, if the figure has several.
    """
    found, published = (_order(rows, side) for side in ("simulated", "published"))
    of = f" by {what}" if what else ""
    beside = "" if found == published else f"; published {published}"
    return as_finding(f"The order{of} is the published one: {found}{beside}.", found == published)


def _order(rows: Sequence[Row], side: str) -> str:
    first, *others = sorted(rows, key=lambda row: row[side])
    order = first["series"]
    for row, before in zip(others, [first, *others], strict=False):
        order += f" {'=' if row[side] == before[side] else '<'} {row['series']}"
    return order


def value_name(row: Row, with_metric: bool = True) -> str:
    """The name of a value."""
    parts = [row["series"], metric_label(row["metric"]) if with_metric else ""]
    return ", ".join(filter(None, [*parts, "" if row.get("x") is None else f"{row['x']:g}"]))


def _distance(row: Row, relative: bool) -> float:
    return row["error"] / row["published"] if relative else row["error"]
