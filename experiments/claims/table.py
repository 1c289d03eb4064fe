"""The table of claims, in words: on the terminal, on the page and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.padding import Padding
from rich.text import Text

from ...reports.page.page import Section
from ...reports.page.table import markdown
from ..paper.bench import Bench
from ..paper.comparison import Payload
from ..runs.output import Report

_HEAD = """\
# Claims about paged attention, tested

`fragmeter reproduce claims` tests 35 claims of four popular texts (A to D), and claims of other systems.
This page is its result, written by `fragmeter reproduce claims --markdown FILE`; nothing in it is edited by hand.

A claim has a *probe*: numbers from simulation or arithmetic, and a rule that derives the outcome from them. The rule
consists of parts. Each part is a statement that one number decides by a bound. The outcome is **pass** if all parts
pass, **partial pass** if some do, and **fail** if none does. A claim that needs what is not available here is **not
testable**; its row names the experiment that would test it. So is a claim with a number that is below the claimed value
and only a lower bound, because the model leaves out something that raises it (the speed of another system's software,
stages of a pipeline that work at the same time). Such a number refutes nothing, and the row gives the remaining factor.
Outcomes are computed: `tests/experiments/claims/test_claims_outcomes.py` moves every number across its bound.

Numbers are means over {seeds} seeds of synthetic lengths. The deciding number is reported with its range over the seeds
and, if it depends on the step time fitted to OPT-13B, with its change if all steps take 1 % longer. With `--out DIR`
each claim is stored when it is finished, and an interrupted run continues from there. No GPU was used.

Waste is what these texts mean by it: every slot that holds no token, free ones too. Reservation: slots that a coming token fills.

Rates of beams (claims 5 and 13, and vLLM's blog) are those of `fragmeter reproduce fig14f`: its requests, step times
and search. The first seed's are the figure's own; here they are means over the seeds.

`fragmeter reproduce anyscale` has the workload behind "23x" by itself, at every output cap.
"""
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


def claims_markdown(payload: Payload) -> str:
    """docs/results/claims.md."""
    parts = [_HEAD.format(seeds=len(payload["seeds"]))]
    for name, (title, counted) in _TABLES.items():
        parts.append(
            f"## {title}\n\n{_counts(payload[counted])}.\n\n" + "\n".join(_markdown_table(payload[name])) + "\n"
        )
    return "\n".join(parts)


def _markdown_table(rows: list[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        condition = "" if row["condition"] is None else f" {row['condition']}"
        cells = (
            row["number"],
            row["text"],
            row["claim"],
            f"**{row['outcome']}**{condition}. Rule: {row['rule']}",
            _gives(row),
            row["why"],
        )
        lines.append(cells)
    return markdown(("", "where", "claim", "outcome", "result", "reason"), lines)


def _gives(row: Mapping[str, Any]) -> str:
    parts = [f"{row['how']}: {row['gives']}"]
    if row["decides"] is not None:
        name = row["decides"].replace("_pct", ", %").replace("_", " ")
        step = "" if row["step_1pct"] is None else f", {row['step_1pct']:+.2g} if steps are 1 % longer"
        parts.append(f"over seeds {name} {row['minimum']:.4g} to {row['maximum']:.4g}{step}")
    if row["differs"]:
        parts.append(f"*unlike expected: {'; '.join(row['differs'])}*")
    if row["experiment"] is not None:
        parts.append(f"to be measured by {row['experiment']}")
    return ". ".join(parts)
