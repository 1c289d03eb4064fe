"""The table of claims, in words: one for the terminal, the page and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.padding import Padding
from rich.text import Text

from ...reports.page.page import Section
from ...reports.page.table import Column, Table
from ..paper.bench import Bench
from ..paper.comparison import Payload
from ..runs.output import Report

_BETWEEN = "\n\n"
_INDENT = 3
_TABLES = {
    "rows": ("Claims of four texts", "totals"),
    "other_systems": ("Claims of other systems", "other_systems_totals"),
}


def claims_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each claim: what is said where, the outcome with its rule, the numbers, and the reason."""
    table = Table(*(Column(name, is_text=True) for name in ("", "where", "claim", "outcome", "result", "reason")))
    for row in rows:
        condition = "" if row["condition"] is None else f" {row['condition']}"
        outcome = f"{row['outcome']}{condition}. Rule: {row['rule']}"
        table.add_row(row["number"], row["text"], row["claim"], outcome, _gives(row), row["why"])
    return table


def _gives(row: Mapping[str, Any]) -> str:
    parts = [f"{row['how']}: {row['gives']}"]
    if row["decides"] is not None:
        name = row["decides"].replace("_pct", ", %").replace("_", " ")
        step = "" if row["step_1pct"] is None else f", {row['step_1pct']:+.2g} if steps are 1 % longer"
        parts.append(f"over seeds {name} {row['minimum']:.4g} to {row['maximum']:.4g}{step}")
    if row["differs"]:
        parts.append(f"unlike expected: {'; '.join(row['differs'])}")
    if row["experiment"] is not None:
        parts.append(f"to be measured by {row['experiment']}")
    return ". ".join(parts)


def print_claims(payload: Payload, report: Report) -> None:
    """Write the totals, and each claim with its outcome, its numbers and the reason."""
    report.print_line(f"{payload['figure']}: {payload['workload']}", style="bold")
    for name, (title, counted) in _TABLES.items():
        report.print_line()
        report.print_line(f"{title}: {_counts(payload[counted])}", style="bold")
        for row in claims_table(payload[name]).records():
            report.print_line()
            report.print_line(f"{row['']}. {row['claim']} ({row['where']})")
            for line in (row["outcome"], row["result"], row["reason"]):
                report.console.print(Padding(Text(line), (0, 0, 0, _INDENT)))
    report.print_line()
    for text in payload["basis"]:
        report.print_line(text)
    report.print_line()


def _counts(totals: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in totals.items())


def show_claims(payload: Payload, _: Bench) -> list[Section]:
    """A section a table, the totals first."""
    words = _BETWEEN.join([f"{payload['workload']}.", *payload["basis"]])
    return [
        Section(title, f"{_counts(payload[counted])}.{_BETWEEN}{words}", rows=claims_table(payload[name]).records())
        for name, (title, counted) in _TABLES.items()
    ]


def markdown_parts(payload: Payload) -> dict[str, str]:
    """The parts of docs/results/claims.md that are computed, by the names of their places."""
    parts = {"seeds": str(len(payload["seeds"]))}
    for name, (title, counted) in _TABLES.items():
        parts |= {
            f"totals of {title}": f"{_counts(payload[counted])}.",
            title: "\n".join(claims_table(payload[name]).markdown()),
        }
    return parts
