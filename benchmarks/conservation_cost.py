"""What the checks of every run cost: CPU seconds of this version beside those of one without the checks, in turns.

    git worktree add /tmp/before/fragmeter REVISION          a version before them; build its core with setup.py build_ext
    python benchmarks/conservation_cost.py --before /tmp/before [--count 100000] [--turns 9]

The checks are that no bucket of any row is below 0 (``Accounts.require_conserved``), that no more blocks are taken than there
are (``advance`` of the memories, and ``_core_batch.h``), that all slots are free at the end, and that every request is served.
Each measurement runs in a process of its own: a small run first, for what is loaded once, then the run with the ledger's
integrals. Printed are the quickest run of both sides, and the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.traces import synthetic_pairs, workload

DATASET = "vllm_sosp23_sharegpt_opt"
MODEL_TOKENS, RATE = 2048, 1.5
#: Settings of each case, and the share of the requests that it serves.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "vllm-sosp23, compiled": ({"policy": "vllm-sosp23"}, 1),
    "vllm-v1, compiled": ({"policy": "vllm-v1"}, 1),
    "vllm-sosp23, Python": ({"policy": "vllm-sosp23", "core": False}, 0.1),
    "vllm-v1, Python": ({"policy": "vllm-v1", "core": False}, 0.1),
    "orca-max, Python": ({"policy": "orca-max"}, 0.1),
}


def measure(case: str, count: int) -> float:
    """CPU seconds of a run and its integrals, in this process."""
    chosen, share = settings(**CASES[case][0]), CASES[case][1]
    for requests in (200, max(1, int(share * count))):
        work = workload(synthetic_pairs(DATASET, requests, 0, MODEL_TOKENS), RATE)
        start = time.process_time()
        run = simulate(chosen, work)
        assert run.window.num_steps == run.log.num_steps
        seconds = time.process_time() - start
    return seconds


def apart(case: str, count: int, path: str | None) -> float:
    """One measurement in a process of its own, of the version at ``path`` or of this one."""
    environment = os.environ | ({} if path is None else {"PYTHONPATH": path})
    command = [sys.executable, __file__, "--measure", case, "--count", str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout)


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--measure")
    given = parser.parse_args()
    if given.measure:
        print(measure(given.measure, given.count))
        return
    if not given.before:
        parser.error("--before names the folder with the other version")
    for case in CASES:
        turns = [(apart(case, given.count, given.before), apart(case, given.count, None)) for _ in range(given.turns)]
        before, after = (min(side) for side in zip(*turns, strict=True))
        ratio = median(after / before for before, after in turns)
        quickest = f"{before:.3f} s and {after:.3f} s, {after / before - 1:+.1%}"
        print(f"{case:<22} quickest {quickest}; median of the ratios {ratio - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
