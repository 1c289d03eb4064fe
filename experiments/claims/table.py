"""The table of claims, in words: on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.padding import Padding
from rich.text import Text

from ...reports.page.page import Section
from ..paper.bench import Bench
from ..paper.comparison import Payload
from ..runs.output import Report

_BETWEEN = "\n\n"
_INDENT = 3
_TABLES = {
    "rows": ("Claims of four texts", "totals"),
    "other_systems": ("Claims of other systems", "other_systems_totals"),
}


def print_claims(payload: Payload, report: Report) -> None:
    """Write the totals, and each claim with its outcome, its numbers and the reason."""
    report.print_line(f"{payload['figure']}: {payload['workload']}", style="bold")
    for name, (title, counted) in _TABLES.items():
        report.print_line()
        report.print_line(f"{title}: {_counts(payload[counted])}", style="bold")
        for row in payload[name]:
            report.print_line()
            report.print_line(f"{row['number']}. {row['claim']} ({row['text']})")
            for line in _lines(row):
                report.console.print(Padding(Text(line), (0, 0, 0, _INDENT)))
    report.print_line()
    for text in payload["basis"]:
        report.print_line(text)
    report.print_line()


def _counts(totals: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in totals.items())


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"{_outcome_text(row)} Rule: {row['rule']}."
    yield f"{row['how']}: {row['gives']}."
    yield row["why"]
    if row["decides"] is not None:
        yield _sensitivity(row)
    if row["differs"]:
        yield f"Unlike expected: {'; '.join(row['differs'])}."
    if row["experiment"] is not None:
        yield f"Measurement: {row['experiment']}."


def _outcome_text(row: Mapping[str, Any]) -> str:
    condition = "" if row["condition"] is None else f" {row['condition']}"
    return f"{row['outcome'].upper()}{condition}."


def _sensitivity(row: Mapping[str, Any]) -> str:
    name = row["decides"].replace("_pct", ", %").replace("_", " ")
    step = "" if row["step_1pct"] is None else f"; steps 1 % longer: {row['step_1pct']:+.2g}"
    return f"Seeds: {name} from {row['minimum']:.4g} to {row['maximum']:.4g}{step}."


def show_claims(payload: Payload, _: Bench) -> list[Section]:
    """A section a table, the totals first."""
    words = _BETWEEN.join([f"{payload['workload']}.", *payload["basis"]])
    return [
        Section(title, f"{_counts(payload[counted])}.{_BETWEEN}{words}", rows=list(_page_rows(payload[name])))
        for name, (title, counted) in _TABLES.items()
    ]


def _page_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        outcome, gives, why, *more = _lines(row)
        yield {
            "": row["number"],
            "Where": row["text"],
            "Claim": row["claim"],
            "Outcome": outcome,
            "Result": " ".join([gives, *more]),
            "Why": why,
        }
