"""How much faster replicas behind a router are on the compiled core than in Python, on one core: CPU seconds, in turns.

    python benchmarks/fleet_speed.py                      100,000 requests over 10 and over 1,000 replicas, three turns
    python benchmarks/fleet_speed.py --count 20000 --replicas 10 --router kv-aware --turns 1

ShareGPT-like requests (embedded set), 1.5 a second for each replica, OPT-13B on A100-40GBs, fitted step times. Behind
``prefix-affine`` they are of users with a prefix of their own, ten requests each. Each measurement runs in a process of its own; both sides alternate, so that what else the machine does falls on both.
Times are CPU seconds of ``simulate_cluster`` in that process. Both sides must send each request to the same replica and
record the same columns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from statistics import median

import numpy as np

from fragmeter.sim import settings
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.config.cluster import ROUTERS
from fragmeter.sim.engine.core import compiled
from fragmeter.sim.workload.content import PromptContent
from fragmeter.traces import synthetic_pairs, workload

DATASET = "vllm_sosp23_sharegpt_opt"
MODEL_TOKENS = 2048
#: Requests/s of a replica.
RATE = 1.5
#: Requests of a user, in the mean.
TURNS_OF_A_USER = 10
POLICIES = ("vllm-sosp23", "vllm-v1")


def measure(core: bool, policy: str, router: str, replicas: int, count: int) -> dict[str, float | str]:
    """One measurement, in this process; the digest is of all that the replicas record, and where requests went."""
    work = workload(synthetic_pairs(DATASET, count, 0, MODEL_TOKENS), RATE * replicas)
    if router == "prefix-affine":
        users = np.random.default_rng(0).integers(0, max(1, count // TURNS_OF_A_USER), count)
        work = replace(work, content=PromptContent.of_sessions(users))
    chosen = settings(policy=policy, cost="fitted", core=core)
    start = time.process_time()
    run = simulate_cluster(chosen, work, cluster(num_replicas=replicas, router=router))
    served = time.process_time() - start
    digest = hashlib.sha256()
    for rows, part in zip(run.rows, run.runs, strict=True):
        digest.update(rows.tobytes())
        for table in (part.log.rows, part.log.residencies, part.log.evictions, part.log.chunks):
            for name, column in table.items():
                digest.update(name.encode() + column.tobytes())
    return {"run": served, "digest": digest.hexdigest()}


def apart(core: bool, policy: str, router: str, replicas: int, count: int) -> dict[str, float | str]:
    """One measurement in a process of its own."""
    options = ["--policy", policy, "--router", router, "--replicas", str(replicas), "--count", str(count)]
    command = [sys.executable, __file__, "--measure", str(int(core)), *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(policy: str, router: str, replicas: int, count: int, turns: int) -> None:
    """Print both sides, and the median ratio."""
    case = policy, router, replicas, count
    pairs = [(apart(False, *case), apart(True, *case)) for _ in range(turns)]
    assert all(python["digest"] == core["digest"] for python, core in pairs), "the two sides differ"
    ratios = [python["run"] / core["run"] for python, core in pairs]
    print(
        f"{policy:<12}{router:<26}{replicas:>6,}   python {median(python['run'] for python, _ in pairs):7.2f} s   core"
        f" {median(core['run'] for _, core in pairs):7.2f} s   {median(ratios):5.1f} times"
        f" ({min(ratios):.1f} to {max(ratios):.1f} in {turns} turns)",
        flush=True,
    )


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--replicas", type=int, action="append")
    parser.add_argument("--policy", choices=POLICIES, action="append")
    parser.add_argument("--router", choices=ROUTERS, action="append")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    policies, routers, sizes = given.policy or POLICIES, given.router or ROUTERS, given.replicas or (10, 1_000)
    if given.measure is not None:
        print(json.dumps(measure(bool(given.measure), policies[0], routers[0], sizes[0], given.count)))
        return
    if compiled()[0] is None:
        sys.exit(f"the core is {compiled()[1]}")
    for policy in policies:
        for router in routers:
            for replicas in sizes:
                compare(policy, router, replicas, given.count, given.turns)


if __name__ == "__main__":
    main()
