"""Writes docs/claims.md from the document of ``fragmeter reproduce claims --json FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HEAD = """\
# What is said of paged attention, put to the test

`fragmeter reproduce claims` tests 35 claims of four popular texts (A to D), and what other systems say of themselves.
This page is its result, written by `make claims`; nothing in it is edited by hand.

A claim has a *probe*: numbers, by simulation or arithmetic, and a rule that makes a verdict of them. The rule is made
of parts, each a statement that one number decides by a bound. The claim **holds** if all parts do, **holds only** for
those that do, and **does not hold** if none does. What needs something that is not here **cannot be tested**; the row
names the experiment that would. So does a number that is smaller than what is said and only bounds it from below,
because something that raises it is not modelled (the speed of another's software, stages of a pipeline that work at
the same time): it refutes nothing, and the row says what factor is left. Verdicts are never typed in:
`tests/test_claims_verdicts.py` moves every number across its bound.

Numbers are means over {seeds} seeds of synthetic lengths. The one that decides is told with its range over the seeds
and with how far it moves if all steps take 1 % longer, where it hangs on the step time fitted to OPT-13B at all. With
`--out DIR` each claim is kept as soon as it is done, so that an interrupted run goes on where it was. No GPU was
used.

Rates of beams (claims 5 and 13, and vLLM's blog) are those of `fragmeter reproduce fig14f`: its requests, step times
and search. The first seed's are the figure's own; here they are means over the seeds.

`fragmeter reproduce anyscale` has the workload behind "23x" by itself, at every output cap.
"""
TABLES = (
    ("rows", "totals", "Claims of four texts"),
    ("other_systems", "other_systems_totals", "What other systems say of themselves"),
)


def page(document: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    parts = [HEAD.format(seeds=len(document["seeds"]))]
    for rows, totals, title in TABLES:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in document[totals].items())
        parts.append(f"## {title}\n\n{counts}.\n\n" + "\n".join(_table(document[rows])) + "\n")
    return "\n".join(parts)


def _table(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    yield "| | where | claim | verdict | what comes out | why |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        condition = "" if row["condition"] is None else f" {row['condition']}"
        cells = (
            row["number"],
            row["text"],
            row["claim"],
            f"**{row['verdict']}**{condition}. Rule: {row['rule']}",
            _gives(row),
            row["why"],
        )
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _gives(row: Mapping[str, Any]) -> str:
    told = [f"{row['how']}: {row['gives']}"]
    if row["decides"] is not None:
        name = row["decides"].replace("_pct", ", %").replace("_", " ")
        step = "" if row["step_1pct"] is None else f", {row['step_1pct']:+.2g} if steps are 1 % longer"
        told.append(f"over seeds {name} {row['minimum']:.4g} to {row['maximum']:.4g}{step}")
    if row["differs"]:
        told.append(f"*not as foreseen: {'; '.join(row['differs'])}*")
    if row["experiment"] is not None:
        told.append(f"to be measured by {row['experiment']}")
    return ". ".join(told)


if __name__ == "__main__":
    Path(__file__).with_name("claims.md").write_text(
        page(json.loads(Path(sys.argv[1]).read_text("utf-8"))), encoding="utf-8"
    )
