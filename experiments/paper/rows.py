"""Rows of one value beside the published one, in design.md's form, with sensitivities; and findings over several rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ...reports.style.labels import metric_label
from .grades import PASS, PERCENT, grade

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
        kind: ``predicted``; ``fitted`` if a number is fitted on this value; ``arithmetic`` if it is a closed formula.
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


def accuracy(rows: Iterable[Row], subject: str, unit: str = PERCENT, x_is: str = "") -> dict[str, Any]:
    """A finding with a ``grade``: how far the predicted values of these rows are from the published ones, by the worst.

    Args:
        unit: Of the errors: ``POINTS``, or ``PERCENT`` of the published value.
        x_is: See ``place_text``.
    """
    named = [(row, _distance(row, unit)) for row in rows if row["kind"] == "predicted" and row["error"] is not None]
    worst, distance = max(named, key=lambda pair: abs(pair[1]))
    at = value_name(worst, with_metric=len({row["metric"] for row, _ in named}) > 1, x_is=x_is)
    error = f"{distance:+.1f} %" if unit == PERCENT else f"{distance:+.2f} points"
    given = grade(distance, unit)
    count = f"of {len(named)} predicted value{'s' if len(named) > 1 else ''}"
    return as_finding(f"{subject}: worst {error} ({at}), {count}.", given == PASS) | {"grade": given}


def ordered(rows: Sequence[Row], what: str = "") -> dict[str, Any]:
    """A finding: whether the series have the published order, without ties between series that are published apart.

    Args:
        what: The rows' metric, if the figure has several.
    """
    found, published = (_order(rows, side) for side in ("simulated", "published"))
    of = f" by {what}" if what else ""
    beside = ", as published" if found == published else f"; published {published}"
    return as_finding(f"Order{of}: {found}{beside}.", found == published)


def _order(rows: Sequence[Row], side: str) -> str:
    first, *others = sorted(rows, key=lambda row: row[side])
    order = first["series"]
    for row, before in zip(others, [first, *others], strict=False):
        order += f" {'=' if row[side] == before[side] else '<'} {row['series']}"
    return order


def value_name(row: Row, with_metric: bool = True, x_is: str = "") -> str:
    """The name of a value.

    Args:
        x_is: See ``place_text``.
    """
    parts = [row["series"], metric_label(row["metric"]) if with_metric else ""]
    return ", ".join(filter(None, [*parts, "" if row.get("x") is None else place_text(row["x"], x_is)]))


def place_text(x: float, x_is: str) -> str:
    """A place on an axis: "block size 8" of the axis "block size, tokens", "6 sequences a request" of one without a unit.

    Args:
        x_is: The document's ``x_is``; empty for an axis without a name.
    """
    name, _, unit = x_is.partition(", ")
    return f"{name} {x:g}" if unit else f"{x:g} {x_is}".rstrip()


def _distance(row: Row, unit: str) -> float:
    return 100 * row["error"] / row["published"] if unit == PERCENT else row["error"]
