"""The fuzzer as a program: runs cases, prints those that fail, and how many of each kind ended with which exit status.

python tests/fuzz/fuzz.py                      every kind, as many cases as it has by default
python tests/fuzz/fuzz.py --kinds grid serve --cases 500 --first 1000
python tests/fuzz/fuzz.py --again grid 1017    one case again, with its traceback
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "helpers")]

import fuzz_cases  # noqa: F401
from fuzzing import KINDS, fuzz, run_case


def table(counts: dict[str, Counter[int]]) -> str:
    """Cases of each kind by their exit status."""
    statuses = sorted({code for count in counts.values() for code in count})
    rows = [["kind", "cases", *map(str, statuses)]]
    for name, count in counts.items():
        rows.append([name, str(count.total()), *(str(count[code] or "") for code in statuses)])
    total = sum(counts.values(), Counter())
    rows.append(["all", str(total.total()), *(str(total[code]) for code in statuses)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    """The program; its exit status is 1 where a case fails."""
    parser = argparse.ArgumentParser(description="Fuzz every command.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cases", type=int, help="of each kind; by default its own number")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--again", nargs=2, metavar=("KIND", "SEED"), help="run one case and show what it says")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzzed-") as place:
        if options.again:
            os.environ["FRAGMETER_DEBUG"] = "1"
            found = run_case(options.again[0], int(options.again[1]), Path(place))
            print(found.ran.stdout.encode("utf-8", "backslashreplace").decode(), found.ran.stderr, found, sep="\n")
            return bool(found.complaints)
        counts: dict[str, Counter[int]] = {}
        failed = 0
        for name in options.kinds:
            counts[name] = Counter()
            for found in fuzz(name, options.cases or KINDS[name][1], Path(place), options.first):
                counts[name][found.ran.status] += 1
                if found.complaints:
                    failed += 1
                    print(found, flush=True)
    print(table(counts))
    print(f"{failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
