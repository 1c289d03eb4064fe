"""Time and memory of whole commands against requests, blocks, replicas and sessions: the tables of docs/scale.md.

    python benchmarks/scale.py                     all tables (minutes)
    python benchmarks/scale.py blocks sessions     some
    python benchmarks/scale.py small replicas --before FOLDER --turns 5

Each row is one ``fragmeter simulate`` in a process of its own: CPU seconds (user and system), and its largest memory. Ten million
requests take minutes, and 15 GB on the disk of temporary files. With ``--before`` the command also runs with the package in
FOLDER/fragmeter, in turns, and a row has both and the ratio of each pair. More than one turn come after one that is not
measured, which leaves Python's bytecode.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

SMALL = (10, 100, 1_000)
REQUESTS = (100_000, 200_000, 400_000, 1_000_000, 10_000_000)
BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
REPLICAS = (1, 10, 100, 1_000)
SESSIONS = (1_000, 4_000, 16_000)
TURNS = 5
POLICIES = (("vllm-sosp23", "paper"), ("vllm-v1", "fitted"))
V1 = ("--policy", "vllm-v1", "--cost", "fitted")


#: What a table measures: the first cells of a row, and the arguments of its command.
Row = tuple[str, tuple[object, ...]]


def simulate(arguments: tuple[object, ...], package: Path | None = None) -> tuple[float, float]:
    """CPU seconds and MB of one command, of the package in this folder."""
    command = [sys.executable, "-m", "fragmeter", "simulate", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if package is not None:
        environment["PYTHONPATH"] = str(package)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def requests(folder: Path) -> Iterator[Row]:
    """Requests of one replica, and results of all of them."""
    for policy, cost in POLICIES:
        chosen = "--policy", policy, "--cost", cost, "--request-rate", 1.5
        for count in REQUESTS:
            yield f"`{policy}`, `{cost}` | {count:,}", (*chosen, "--num-prompts", count, *_out(folder))


def small(folder: Path) -> Iterator[Row]:
    """Small runs without tables: most of it is the start of the program."""
    for count in SMALL:
        yield f"{count:,}", ("--num-prompts", count, "--json", folder / "summary.json")


def blocks(folder: Path) -> Iterator[Row]:
    """Blocks of the pool."""
    for number in BLOCKS:
        load = "--num-prompts", 50_000, "--request-rate", 1.5, "--num-gpu-blocks-override", number
        yield f"{number:,}", (*V1, *load, *_out(folder))


def replicas(folder: Path) -> Iterator[Row]:
    """Replicas behind a router that looks at them."""
    for number in REPLICAS:
        fleet = ("--num-replicas", number, "--router", "kv-aware") if number > 1 else ()
        load = "--num-prompts", 20_000, "--request-rate", 1.5 * number
        yield f"{number:,}", (*V1, *load, *fleet, *_out(folder))


def sessions(folder: Path) -> Iterator[Row]:
    """Sessions: a turn has the turns before it as its prefix, and is sent after the answer to the last of them."""
    for number in SESSIONS:
        trace = folder / "sessions.jsonl"
        turns = [_turn(session, turn) for session in range(number) for turn in range(TURNS)]
        turns.sort(key=lambda row: row["arrival_s"])
        trace.write_text("".join(json.dumps(row) + "\n" for row in turns))
        yield f"{number:,}", (*V1, "--trace", trace, "--think-time", 30, *_out(folder))


def _out(folder: Path) -> tuple[object, ...]:
    return "--out", folder / "result"


def _turn(session: int, turn: int) -> dict[str, int]:
    arrival_s = 3 * session + 60 * turn
    return {
        "arrival_s": arrival_s,
        "prompt_tokens": 100 + 150 * turn,
        "output_tokens": 50,
        "session_id": session,
    }


def measured(arguments: tuple[object, ...], turns: int, before: Path | None) -> str:
    """The last cells of a row: medians of the turns, and the ratio of the two versions, lowest to highest."""
    versions = (None,) if before is None else (before, None)
    if turns > 1:
        for version in versions:
            simulate(arguments, version)
    found = [[simulate(arguments, version) for version in versions] for _ in range(turns)]
    cells = [
        f"{median(seconds for seconds, _ in used):.2f} s | {median(megabytes for _, megabytes in used):,.0f} MB"
        for used in zip(*found, strict=True)
    ]
    if before is not None:
        ratios = [turn[0][0] / turn[1][0] for turn in found]
        cells.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return " | ".join(cells)


TABLES = {"small": small, "requests": requests, "blocks": blocks, "replicas": replicas, "sessions": sessions}


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all if none is named")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a folder with the version before, as fragmeter")
    parser.add_argument("--turns", type=int, default=1, help="measurements of a row")
    options = parser.parse_args()
    for name in options.tables or TABLES:
        with TemporaryDirectory() as folder:
            print(f"\n{name}", flush=True)
            for label, arguments in TABLES[name](Path(folder)):
                print(f"| {label} | {measured(arguments, options.turns, options.before)} |", flush=True)


if __name__ == "__main__":
    main()
