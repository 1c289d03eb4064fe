"""The tables of docs/results/claims.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fragmeter.experiments.paper.comparison import Payload
from fragmeter.reports.page.table import Column, Table

TABLES = {
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


def counts(totals: Mapping[str, int]) -> str:
    """Totals in words."""
    return ", ".join(f"{count} {outcome}" for outcome, count in totals.items())


def markdown_parts(payload: Payload) -> dict[str, str]:
    """The parts of docs/results/claims.md that are computed, by the names of their places."""
    parts = {"seeds": str(len(payload["seeds"]))}
    for name, (title, counted) in TABLES.items():
        parts |= {
            f"totals of {title}": f"{counts(payload[counted])}.",
            title: "\n".join(claims_table(payload[name]).markdown()),
        }
    return parts
