"""`python -m mutants [--seed N] [--count N] [--jobs N] [--only TEXT]`: try out a draw by hand, and print what becomes of each."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

for _folder in ("", "helpers"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / _folder))

from mutants.draw import COUNT, SEED, all_mutants, drawn
from mutants.trial import report, try_all

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--only", default="", help="those of the draw with this text in their key")
    given = parser.parse_args()
    chosen = [mutant for mutant in drawn(given.seed, all_mutants(), given.count) if given.only in mutant.key]
    trials = []
    for trial in try_all(chosen, given.jobs):
        trials.append(trial)
        print(f"{trial.seconds:6.0f} s  {trial.mutant.key}\n          {trial.killed_by or 'SURVIVED'}", flush=True)
    print(report(trials))
