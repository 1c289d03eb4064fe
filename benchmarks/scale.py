"""Time and memory of whole commands against requests, blocks, replicas and sessions: the tables of docs/scale.md.

    python benchmarks/scale.py                     all tables (minutes)
    python benchmarks/scale.py blocks sessions     some

Each row is one ``fragmeter simulate`` in a process of its own: CPU seconds (user and system), and its largest memory. Ten million
requests take minutes, and 15 GB on the disk of temporary files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

REQUESTS = (100_000, 200_000, 400_000, 1_000_000, 10_000_000)
BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
REPLICAS = (1, 10, 100, 1_000)
SESSIONS = (1_000, 4_000, 16_000)
TURNS = 5
POLICIES = (("vllm-sosp23", "paper"), ("vllm-v1", "fitted"))
V1 = ("--policy", "vllm-v1", "--cost", "fitted")


def simulate(*arguments: object) -> tuple[float, float]:
    """CPU seconds and MB of one command."""
    command = [sys.executable, "-m", "fragmeter", "simulate", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def with_results(folder: Path, *arguments: object) -> tuple[float, float]:
    """As ``simulate``, with a result folder."""
    return simulate(*arguments, "--out", folder / "result")


def requests(folder: Path) -> Iterator[str]:
    """Requests of one replica, and results of all of them."""
    for policy, cost in POLICIES:
        chosen = "--policy", policy, "--cost", cost, "--request-rate", 1.5
        for count in REQUESTS:
            seconds, megabytes = with_results(folder, *chosen, "--num-prompts", count)
            yield f"`{policy}`, `{cost}` | {count:,} | {seconds:.1f} s | {megabytes:,.0f} MB"


def blocks(folder: Path) -> Iterator[str]:
    """Blocks of the pool."""
    for number in BLOCKS:
        load = "--num-prompts", 50_000, "--request-rate", 1.5, "--num-gpu-blocks-override", number
        yield _row(f"{number:,}", with_results(folder, *V1, *load))


def replicas(folder: Path) -> Iterator[str]:
    """Replicas behind a router that looks at them."""
    for number in REPLICAS:
        fleet = ("--num-replicas", number, "--router", "kv-aware") if number > 1 else ()
        load = "--num-prompts", 20_000, "--request-rate", 1.5 * number
        yield _row(f"{number:,}", with_results(folder, *V1, *load, *fleet))


def sessions(folder: Path) -> Iterator[str]:
    """Sessions: a turn has the turns before it as its prefix, and is sent after the answer to the last of them."""
    for number in SESSIONS:
        trace = folder / "sessions.jsonl"
        turns = [_turn(session, turn) for session in range(number) for turn in range(TURNS)]
        turns.sort(key=lambda row: row["arrival_s"])
        trace.write_text("".join(json.dumps(row) + "\n" for row in turns))
        load = "--trace", trace, "--think-time", 30
        yield _row(f"{number:,}", with_results(folder, *V1, *load))


def _turn(session: int, turn: int) -> dict[str, int]:
    arrival_s = 3 * session + 60 * turn
    return {
        "arrival_s": arrival_s,
        "prompt_tokens": 100 + 150 * turn,
        "output_tokens": 50,
        "session_id": session,
    }


def _row(first: str, used: tuple[float, float]) -> str:
    return f"{first} | {used[0]:.1f} s | {used[1]:,.0f} MB"


TABLES = {"requests": requests, "blocks": blocks, "replicas": replicas, "sessions": sessions}


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all if none is named")
    for name in parser.parse_args().tables or TABLES:
        with TemporaryDirectory() as folder:
            print(f"\n{name}", flush=True)
            for row in TABLES[name](Path(folder)):
                print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
