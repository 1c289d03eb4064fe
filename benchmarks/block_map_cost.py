"""What a block map costs: time and memory of a run without and with --record-blocks.

    python benchmarks/block_map_cost.py [--requests 60 5000]

Every command is a process of its own, imports included. CPU seconds are those of all its threads, wall seconds those of
a machine as busy as the first line says, memory the most that was resident. The ratio is of CPU seconds, and the memory
beside it what the map takes more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from fragmeter.sim.recording.blocks import load

#: Blocks of the largest pool that a user has asked about; None is the GPU's.
POOLS = (None, 1_190_296)
POLICIES = {
    "vllm-sosp23": [],
    "vllm-v1": ["--enable-prefix-caching"],
    "sglang": [],
    "lightllm": [],
    "vattention": [],
    "orca": [],
    "orca-max": [],
}
RATE = "1.7"


class Cost(NamedTuple):
    """Of a process that is over; memory in MB."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def cost_of(words: list[str]) -> Cost:
    """Run ``fragmeter simulate``."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "fragmeter", "simulate", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"fragmeter simulate {' '.join(words)} has failed")
    return Cost(time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def row(policy: str, pool: int | None, requests: int, out: Path) -> str:
    """A line of the table."""
    words = ["--policy", policy, *POLICIES[policy], "--num-prompts", str(requests), "--request-rate", RATE]
    words += ["--out", str(out)] + ([] if pool is None else ["--num-gpu-blocks-override", str(pool)])
    plain, mapped = cost_of(words), cost_of([*words, "--record-blocks"])
    moments, blocks = load(out / "blocks.npz").bucket.shape
    return (
        f"{policy:12} {pool or 'default':>9} {requests:>8,} {plain.wall_s:7.1f} {mapped.wall_s:7.1f}"
        f" {plain.cpu_s:7.1f} {mapped.cpu_s:7.1f} {mapped.cpu_s / plain.cpu_s:5.2f}"
        f" {plain.peak_mb:7.0f} {mapped.peak_mb - plain.peak_mb:+7.0f}  {moments:,} x {blocks:,}"
    )


def report(requests: list[int]) -> None:
    """All measurements."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("policy        blocks  requests  wall s    with   CPU s    with ratio      MB    more  moments x blocks")
    with tempfile.TemporaryDirectory() as place:
        for count in requests:
            for pool in POOLS:
                for policy in POLICIES:
                    print(row(policy, pool, count, Path(place) / "run"), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[60, 5_000])
    report(parser.parse_args().requests)
