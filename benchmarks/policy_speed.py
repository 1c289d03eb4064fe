"""How fast each policy is simulated, on one core: requests a second, and steps a leap.

    python benchmarks/policy_speed.py                 every policy
    python benchmarks/policy_speed.py vllm-v1 tgi     some

ShareGPT-like requests (embedded set) that declare the true output, OPT-13B on an A100-40GB, at 80 % of what the
policy serves when all requests are there at the start. CPU seconds without drawing the workload, the ledger's
integrals included, the best of three.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from fragmeter.sim.engine.run import Run, simulate
from fragmeter.sim.engine.settings import settings
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import synthetic_pairs, workload

DATASET = "vllm_sosp23_sharegpt_opt"
REQUESTS = 20_000
LOAD = 0.8
TRIES = 3


def requests(count: int, rate: float) -> Workload:
    """``count`` requests at ``rate`` a second (inf: all at once)."""
    return workload(synthetic_pairs(DATASET, count, 0, 2048), rate, 0, "true")


def served(policy: str, work: Workload) -> tuple[float, Run]:
    """CPU seconds of a run, and the run."""
    start = time.process_time()
    run = simulate(settings(policy=policy), work)
    assert run.window.num_steps == run.log.num_steps
    return time.process_time() - start, run


def report(policies: list[str]) -> None:
    """A line a policy."""
    for policy in policies:
        _, flood = served(policy, requests(REQUESTS // 4, np.inf))
        rate = LOAD * (REQUESTS // 4) / (flood.log.end_ticks / 1e12)
        work = requests(REQUESTS, rate)
        seconds, run = min((served(policy, work) for _ in range(TRIES)), key=lambda pair: pair[0])
        leaps = len(run.log.rows["steps"])
        print(f"{policy:18} {REQUESTS / seconds:9,.0f} requests/s  {run.log.num_steps / leaps:5.1f} steps a leap")


def known(policy: str) -> str:
    """The name of a policy; not ``choices``, which refuse an empty ``nargs="*"`` in Python 3.11."""
    if policy not in POLICIES:
        raise argparse.ArgumentTypeError(f"{policy!r} is none of {', '.join(POLICIES)}")
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", type=known, metavar="POLICY", help="all if none is named")
    report(parser.parse_args().policies or list(POLICIES))


if __name__ == "__main__":
    main()
