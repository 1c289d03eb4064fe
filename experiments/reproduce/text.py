"""A figure's document as text: terminal output, and sentences that the page shares with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean

from ...reports.page.table import Column, Table
from ...reports.page.terminal_tables import print_payload
from ...reports.style.labels import is_percent
from ..paper.comparison import Payload
from ..paper.figures.waste import by_policy
from ..paper.grades import LIMITS, PERCENT, POINTS, grade
from ..paper.paper import FIG2
from ..paper.rows import Row, passed, value_name
from ..runs.output import Report

WASTE = "waste"
#: The rule of the grades, for the scorecard and the summary.
RULE = (
    "Grades by the worst predicted value: pass within {:g} % of the published value, near within {:g} %, miss beyond; of"
    " percentages, {:g} and {:g} points."
).format(*LIMITS[PERCENT], *LIMITS[POINTS])
SUMMARY_NOTE = (
    "Errors are simulated - published, of predicted values only: in points where the value is itself a percentage, else"
    f" in percent of the published value. Values on which a number was fitted are counted apart, as they show no accuracy. {RULE}"
)
_DECIMALS = 3


def print_figure(payload: Payload, report: Report) -> None:
    """Print the table, the sensitivity to the step time, and the remarks."""
    print_payload(for_reports(payload), report.console)
    if "sensitivity" in payload:
        report.print_line()
        print_payload({"figure": payload["figure"], **payload["sensitivity"]}, report.console)
    report.print_line()
    for text in [*finding_lines(payload), *payload["basis"], *payload.get("remarks", ())]:
        report.print_line(text)
    report.print_line()


def for_reports(payload: Payload) -> Payload:
    """The payload in the form of the tables and pictures of reports."""
    if payload["figure"] == WASTE:
        return payload | {"rows": by_policy(payload["rows"])}
    return payload | {"rows": [row | {"fitted": row["kind"] == "fitted"} for row in payload["rows"]]}


def finding_lines(payload: Payload) -> list[str]:
    """The findings as lines that start with their grade."""
    return [f"{given.capitalize()}: {text}" for given, text in checks(payload)]


def checks(payload: Payload) -> list[tuple[str, str]]:
    """The findings, each with its grade; those without a published value pass or fail."""
    return [
        (found.get("grade", "pass" if passed(found) else "fail"), found["finding"])
        for found in payload.get("findings", ())
    ]


def summary_rows(documents: Iterable[Payload]) -> list[Row]:
    """Accuracy of each figure with predicted and published values, one row per figure.

    ``predicted`` and ``fitted`` count values; ``mean_error`` and ``worst_error`` are of the predicted ones, in
    ``unit``, and ``grade`` is that of the worst; ``findings`` counts the findings of the figure, and ``passed`` those that
    pass. The waste table has no row beside Fig 2: its published values are the same, and have one grade.
    """
    found = list(documents)
    again = WASTE if any(document["figure"] == FIG2.figure for document in found) else None
    return [row for document in found if document["figure"] != again for row in _summary(document)]


def _summary(document: Payload) -> Iterator[Row]:
    """One row for values in points, and one for other values."""
    for unit in (POINTS, PERCENT):
        rows = known_values(document, unit)
        predicted = [row for row in rows if row.get("kind") == "predicted"]
        if predicted:
            findings, errors = document.get("findings", ()), _errors(predicted, document.get("x_is", ""))
            yield {
                "figure": document["figure"],
                "predicted": len(predicted),
                "fitted": sum(row.get("kind") == "fitted" for row in rows),
                "unit": unit,
                **errors,
                "grade": grade(errors["worst_error"], unit),
                "findings": len(findings),
                "passed": sum(passed(found) for found in findings),
            }


def known_values(document: Payload, unit: str) -> list[Row]:
    """The rows of a unit with an error that measures accuracy."""
    return [
        row
        for row in document["rows"]
        if row.get("error") is not None and _comparable(row) and is_percent(row["metric"]) == (unit == POINTS)
    ]


def predicted_errors(document: Payload, unit: str) -> list[float]:
    """The errors of all predicted values of a unit."""
    return [_error(row) for row in known_values(document, unit) if row.get("kind") == "predicted"]


def worst_value(document: Payload, unit: str) -> Row:
    """The row of the predicted value of a unit with the largest error."""
    return _worst(row for row in known_values(document, unit) if row.get("kind") == "predicted")


def _worst(rows: Iterable[Row]) -> Row:
    return max(rows, key=lambda row: abs(_error(row)))


def _error(row: Row) -> float:
    return row["error"] if is_percent(row["metric"]) else 100 * row["error"] / row["published"]


def _comparable(row: Row) -> bool:
    """Whether an error measures accuracy: values of formulas are excluded, and zeros have no percentage."""
    return row.get("how") != "formula" and (is_percent(row["metric"]) or bool(row["published"]))


def _errors(rows: list[Row], x_is: str) -> Row:
    worst = _worst(rows)
    return {
        "mean_error": round(fmean(abs(_error(row)) for row in rows), _DECIMALS),
        "worst_error": round(_error(worst), _DECIMALS),
        "worst_at": value_name(worst, x_is=x_is),
    }


def summary_lines(rows: Iterable[Row]) -> list[dict[str, str | int]]:
    """The summary as text cells of a table."""
    return [
        {
            "figure": row["figure"],
            "predicted": row["predicted"],
            "fitted": row["fitted"],
            "mean error": f"{row['mean_error']:.1f} {row['unit']}",
            "worst": f"{row['worst_error']:+.1f} {row['unit']}",
            "at": row["worst_at"],
            "grade": row["grade"],
        }
        for row in rows
    ]


def print_summary(documents: Iterable[Payload], report: Report) -> None:
    """The summary as a table."""
    lines = summary_lines(summary_rows(documents))
    if not lines:
        return
    columns = [Column(name, not isinstance(cell, int), wraps=True) for name, cell in lines[0].items()]
    table = Table(*columns, title="Accuracy against the paper")
    for line in lines:
        table.add_row(*line.values())
    report.console.print(table)
    report.print_line(SUMMARY_NOTE)
    report.print_line()
