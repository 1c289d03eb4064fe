"""Tests all claims and writes the tables of docs/results/claims.md: ``python -m tools.claims --markdown FILE``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fragmeter.experiments.runs.output import Report
from fragmeter.sim.types.errors import UserError

from .claims import SEEDS, compare_claims
from .table import TABLES, counts, markdown_parts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.claims", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds, from 0")
    parser.add_argument("--markdown", help="page with places for the tables; - for standard output")
    parser.add_argument("--json", help="file for all rows")
    chosen = parser.parse_args(arguments)
    try:
        report = Report(chosen.json, markdown=chosen.markdown)
        payload = compare_claims(range(chosen.seeds))
        for title, counted in TABLES.values():
            report.print_line(f"{title}: {counts(payload[counted])}")
        report.markdown_parts("Claims about paged attention", lambda: markdown_parts(payload))
        report.data(payload)
    except UserError as error:
        print(f"tools.claims: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
