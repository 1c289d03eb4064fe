"""How much faster the compiled core is than the engine in Python, on one core: CPU seconds, in turns.

    python benchmarks/core_speed.py                       100,000 requests, five turns
    python benchmarks/core_speed.py --count 1000000 --turns 1
    python benchmarks/core_speed.py --case vllm-v1 --cost fitted
    python benchmarks/core_speed.py --case uncached

ShareGPT-like requests (embedded set), OPT-13B on an A100-40GB at 1.5 requests/s, for each policy that the core has and each
cost model that the policy takes; ``uncached`` is vllm-v1 without a prefix cache,
``prefixes`` with requests that begin with one of 200 common texts. Each measurement runs in a
process of its own; both sides alternate, so that what else the machine does falls on both. Times are CPU seconds of that
process, without imports and without drawing the workload: of the run, and of the run with the ledger's integrals.
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
from typing import Any

import numpy as np

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.core import compiled
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.workload.content import PromptContent
from fragmeter.traces import synthetic_pairs, workload

DATASET = "vllm_sosp23_sharegpt_opt"
MODEL_TOKENS = 2048
RATE = 1.5
#: The settings and the cost models of each case.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "vllm-sosp23": ({"policy": "vllm-sosp23"}, ("paper", "roofline", "fitted")),
    "vllm-v1": ({"policy": "vllm-v1"}, ("roofline", "fitted")),
    "prefixes": ({"policy": "vllm-v1"}, ("roofline", "fitted")),
    "uncached": ({"policy": "vllm-v1", "enable_prefix_caching": False}, ("roofline", "fitted")),
}


def measure(core: bool, case: str, cost: str, count: int) -> dict[str, float | str]:
    """One measurement, in this process; the digest is of all columns of the ledger, and of what a prefix cache did."""
    work = workload(synthetic_pairs(DATASET, count, 0, MODEL_TOKENS), RATE)
    if case == "prefixes":
        text = np.random.default_rng(0).integers(0, 200, count)
        pieces = np.minimum(work.prompt_tokens, 128 + 8 * (text % 64))
        work = replace(work, content=PromptContent(np.arange(count + 1), text, pieces))
    chosen = settings(**CASES[case][0], cost=cost, core=core)
    start = time.process_time()
    run = simulate(chosen, work)
    served = time.process_time()
    assert run.window.num_steps == run.log.num_steps
    accounted = time.process_time()
    digest = hashlib.sha256()
    cache = run.replica.cache_log
    cached = (cache.look_up_columns(), cache.change_columns()) if cache else ()
    for table in (run.log.rows, run.log.residencies, run.log.evictions, run.log.chunks, *cached):
        for name, column in table.items():
            digest.update(name.encode() + column.tobytes())
    return {"run": served - start, "run and integrals": accounted - start, "digest": digest.hexdigest()}


def apart(core: bool, case: str, cost: str, count: int) -> dict[str, float | str]:
    """One measurement in a process of its own."""
    options = ["--measure", str(int(core)), "--case", case, "--cost", cost, "--count", str(count)]
    command = [sys.executable, __file__, *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(case: str, cost: str, count: int, turns: int) -> None:
    """Print both sides and their ratio, turn by turn, and the median ratio."""
    pairs = [(apart(False, case, cost, count), apart(True, case, cost, count)) for _ in range(turns)]
    assert all(python["digest"] == core["digest"] for python, core in pairs), "the two sides differ"
    for what in ("run", "run and integrals"):
        ratios = [python[what] / core[what] for python, core in pairs]
        print(
            f"{case:<12}{cost:<9}{what:<18} python {median(python[what] for python, _ in pairs):7.3f} s   core"
            f" {median(core[what] for _, core in pairs):7.3f} s   {median(ratios):5.1f} times"
            f" ({min(ratios):.1f} to {max(ratios):.1f} in {turns} turns)"
        )


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--cost", choices=CASES["vllm-sosp23"][1], action="append")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = options.case or [*CASES]
    if options.measure is not None:
        print(json.dumps(measure(bool(options.measure), cases[0], options.cost[0], options.count)))
        return
    if compiled()[0] is None:
        sys.exit(f"the core is {compiled()[1]}")
    for case in cases:
        for cost in CASES[case][1]:
            if not options.cost or cost in options.cost:
                compare(case, cost, options.count, options.turns)


if __name__ == "__main__":
    main()
