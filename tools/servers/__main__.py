"""Simulates the measured servers and writes the tables of docs/results/servers.md: ``python -m tools.servers --markdown FILE``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fragmeter.experiments.runs.output import Report
from fragmeter.sim.output.files import write_whole
from fragmeter.sim.types.errors import UserError

from .board import ACCEPTED, accepted_text
from .page import markdown_parts
from .servers import compare_servers, print_servers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 2 for an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.servers", description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder with the requests of the runs that need a file of them")
    parser.add_argument(
        "--accept-medians", action="store_true", help="later runs are compared with these medians by class"
    )
    parser.add_argument("--markdown", help="page with places for the tables; - for standard output")
    parser.add_argument("--json", help="file for all rows")
    chosen = parser.parse_args(arguments)
    if chosen.accept_medians and chosen.runs is None:
        parser.error("--accept-medians stores medians over all runs; give --runs FOLDER")
    try:
        report = Report(chosen.json, markdown=chosen.markdown)
        payload = compare_servers(chosen.runs)
        print_servers(payload, report)
        if chosen.accept_medians:
            write_whole(ACCEPTED, accepted_text(payload["classes"]))
        report.markdown_parts("Measured servers beside the simulation", lambda: markdown_parts(payload))
        report.data(payload)
    except UserError as error:
        print(f"tools.servers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
