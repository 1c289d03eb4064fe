"""How fast each policy is simulated, on one core: requests a second, and steps a leap.

    python benchmarks/policy_speed.py                    every policy
    python benchmarks/policy_speed.py vllm-v1 tgi        some
    python benchmarks/policy_speed.py --before FOLDER    and another version of the code, in FOLDER/fragmeter

ShareGPT-like requests (embedded set) that declare the true output, OPT-13B on an A100-40GB with the pool of the paper,
at 80 % of what the policy serves when all requests are there at the start. Every measurement runs in a process of its
own. Times are CPU seconds without drawing the workload, the ledger's integrals included, the best of ``--tries``.

With ``--before`` both versions take turns over the same requests and print the ratio of their speeds. Both schedule
synchronously and without a prefix cache, because versions differ in these defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from fragmeter.sim.config.settings import Settings, settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import synthetic_pairs, workload

DATASET = "vllm_sosp23_sharegpt_opt"
REQUESTS = 20_000
LOAD = 0.8
#: Settings that some version has another default for, or does not have.
SAME = {
    "cost": "paper",
    "num_gpu_blocks_override": 983,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2560,
    "watermark": 0.01,
}
SYNCHRONOUS = {"async_scheduling": False, "enable_prefix_caching": False}


def requests(count: int, rate: float) -> Workload:
    """``count`` requests at ``rate`` a second (inf: all at once)."""
    return workload(synthetic_pairs(DATASET, count, 0, 2048), rate, 0, "true")


def chosen(policy: str, *, paired: bool) -> Settings:
    """The settings of a run."""
    if not paired:
        return settings(policy=policy)
    known = {}
    for name, value in (SAME | SYNCHRONOUS).items():
        try:
            simulate(settings(policy=policy, **{name: value}), requests(2, np.inf))
        except SettingError:
            continue
        known[name] = value
    return settings(policy=policy, **known)


def measure(policy: str, rate: float, *, paired: bool) -> dict[str, float]:
    """CPU seconds of a run, and its steps, in this process."""
    of_run = chosen(policy, paired=paired)
    work = requests(REQUESTS if rate < np.inf else REQUESTS // 4, rate)
    start = time.process_time()
    run = simulate(of_run, work)
    assert run.window.num_steps == run.log.num_steps
    seconds = time.process_time() - start
    return {
        "seconds": seconds,
        "requests": len(work),
        "end_s": run.log.end_ticks / 1e12,
        "steps": run.log.num_steps,
        "leaps": len(run.log.rows["steps"]),
    }


def apart(folder: Path | None, policy: str, rate: float, *, paired: bool) -> dict[str, float]:
    """A measurement in a process of its own, with the ``fragmeter`` of a folder, or with the one that is installed."""
    environment = os.environ if folder is None else os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, __file__, policy, "--rate", str(rate), *["--paired"] * paired]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def report(policies: list[str], before: Path | None, tries: int) -> None:
    """A line a policy."""
    paired = before is not None
    for policy in policies:
        flood = apart(None, policy, np.inf, paired=paired)
        rate = LOAD * flood["requests"] / flood["end_s"]
        folders = (None, before) if paired else (None,)
        turns = [[apart(folder, policy, rate, paired=paired) for folder in folders] for _ in range(tries)]
        best = [min(runs, key=lambda run: run["seconds"]) for runs in zip(*turns, strict=True)]
        speeds = [run["requests"] / run["seconds"] for run in best]
        line = f"{policy:18} {speeds[0]:9,.0f} requests/s  {best[0]['steps'] / best[0]['leaps']:5.1f} steps a leap"
        if paired:
            same = "the same" if best[0]["steps"] == best[1]["steps"] else "other"
            line += f"  {speeds[1]:9,.0f} before  {speeds[0] / speeds[1]:5.2f} x the speed  ({same} number of steps)"
        print(line, flush=True)


def known(policy: str) -> str:
    """The name of a policy; not ``choices``, which refuse an empty ``nargs="*"`` in Python 3.11."""
    if policy not in POLICIES:
        raise argparse.ArgumentTypeError(f"{policy!r} is none of {', '.join(POLICIES)}")
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", type=known, metavar="POLICY", help="all if none is named")
    parser.add_argument("--before", type=Path, help="folder with another version of the package")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--paired", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rate is not None:
        print(json.dumps(measure(arguments.policies[0], arguments.rate, paired=arguments.paired)))
        return
    report(arguments.policies or list(POLICIES), arguments.before, arguments.tries)


if __name__ == "__main__":
    main()
