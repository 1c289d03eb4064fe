"""Writes experiments/measured/facts/data_sheet_errors.json: the measured servers, simulated from the data sheets of their cards.

python docs/data_sheets.py [FOLDER with the files of requests]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fragmeter.experiments.reproduce.servers import data_sheet_rows
from fragmeter.sim.output.files import write_whole

FACTS = Path(__file__).parents[1] / "experiments" / "measured" / "facts" / "data_sheet_errors.json"


def main() -> None:
    """Simulate and write, one run a line."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    rows = ",\n".join(json.dumps(row) for row in data_sheet_rows(folder))
    write_whole(FACTS, f"[\n{rows}\n]\n")


if __name__ == "__main__":
    main()
