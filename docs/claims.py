"""Writes docs/claims.md from the document of ``fragmeter reproduce claims --json FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fragmeter.reports.page.table import markdown

HEAD = """\
# Claims about paged attention, tested

`fragmeter reproduce claims` tests 35 claims of four popular texts (A to D), and claims of other systems.
This page is its result, written by `make claims`; nothing in it is edited by hand.

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
TABLES = (
    ("rows", "totals", "Claims of four texts"),
    ("other_systems", "other_systems_totals", "Claims of other systems"),
)


def page(document: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    parts = [HEAD.format(seeds=len(document["seeds"]))]
    for rows, totals, title in TABLES:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in document[totals].items())
        parts.append(f"## {title}\n\n{counts}.\n\n" + "\n".join(_table(document[rows])) + "\n")
    return "\n".join(parts)


def _table(rows: list[Mapping[str, Any]]) -> list[str]:
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


if __name__ == "__main__":
    Path(__file__).with_name("claims.md").write_text(
        page(json.loads(Path(sys.argv[1]).read_text("utf-8"))), encoding="utf-8"
    )
