"""How fast the simulator is, on one core: requests a second, bytes a request, and ratios.

    python benchmarks/engine_speed.py            all of it, some minutes
    python benchmarks/engine_speed.py --quick    a tenth of the size

ShareGPT-like requests (embedded set), OPT-13B on an A100-40GB, policy vllm-sosp23 at 80 % of
saturation. Every measurement runs in a process of its own. Times are CPU seconds of that process, without
imports and without drawing the workload, the ledger's integrals included, the best of three; that of the
whole command is wall time, once.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import simpy

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.traces import synthetic_pairs, workload

DATASET = "vllm_sosp23_sharegpt_opt"
MODEL_TOKENS = 2048
LOAD = 0.8
TRIES = 3


def requests(count: int, rate: float):
    """The workload: ``count`` requests at ``rate`` a second (inf: all at once)."""
    return workload(synthetic_pairs(DATASET, count, 0, MODEL_TOKENS), rate)


def saturation(count: int) -> float:
    """Requests a second that the policy serves when they are all there at the start."""
    run = simulate(settings(), requests(count, np.inf))
    return count / (run.log.end_ticks / 1e12)


def cpu_seconds(work) -> float:
    """CPU time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def simpy_seconds(events: int) -> float:
    """CPU time of as many bare SimPy timeouts: the floor under a simulation of one event a leap."""

    def tick(env):
        for _ in range(events):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(tick(env))
    return cpu_seconds(env.run)


def measure(kind: str, count: int, rate: float) -> dict[str, float]:
    """One measurement, in this process."""
    work, runs = requests(count, rate), []

    def serve():
        runs.append(simulate(settings(ids=kind == "ids", leap=kind != "step"), work))
        assert runs[0].window.num_steps == runs[0].log.num_steps

    seconds = cpu_seconds(serve)
    leaps = len(runs[0].log.rows["steps"])
    return {
        "seconds": seconds,
        "leaps": leaps,
        "steps": runs[0].log.num_steps,
        "tokens": int(work.output_tokens.sum()),
        "floor_seconds": simpy_seconds(leaps),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def apart(kind: str, count: int, rate: float) -> dict[str, float]:
    """The quickest of some measurements, each in a process of its own: what neighbours on the machine do only adds."""
    command = [sys.executable, __file__, "--measure", kind, "--count", str(count), "--rate", repr(rate)]
    outputs = (subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(TRIES))
    return min(map(json.loads, outputs), key=lambda run: run["seconds"])


def command_seconds(count: int, rate: float) -> float:
    """Wall time of the whole command: start-up, drawing the workload, serving it, writing the results."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fragmeter", "simulate", "--num-prompts", str(count)]
        command += ["--request-rate", repr(rate), "--out", str(Path(folder) / "out")]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start


def report(scale: int) -> None:
    """All measurements, as a table."""
    rate = LOAD * saturation(20_000 // scale)
    events = 1_000_000 // scale
    print(f"Python {platform.python_version()}: {1e6 * simpy_seconds(events) / events:.2f} us for a bare SimPy event")
    print(f"load: {rate:.3f} requests/s, {LOAD:.0%} of saturation\n")
    sizes = [10_000 // scale, 100_000 // scale, 1_000_000 // scale]
    runs = {count: apart("leap", count, rate) for count in sizes}
    for count, run in runs.items():
        each, floor = run["seconds"] / count, run["seconds"] / run["floor_seconds"]
        print(
            f"{count:>9,} requests  {1 / each:>9,.0f} requests/s  {1e6 * each:6.2f} us each"
            f"  {run['tokens'] / run['seconds'] / 1e6:5.1f} M tokens/s  {run['steps'] / run['leaps']:4.1f} steps a leap"
            f"  {floor:4.1f} x bare SimPy"
        )
    small, large = sizes[0], sizes[-1]
    memory = (runs[large]["peak_bytes"] - runs[small]["peak_bytes"]) / (large - small)
    flat = (runs[large]["seconds"] / large) / (runs[small]["seconds"] / small)
    print(f"\nmemory a request          {memory:8.0f} bytes (peak, workload and accounts included)")
    print(f"cost of a request         {flat:8.2f} x that at {small:,} requests")
    for kind, count, text in (("ids", large, "with block ids"), ("step", sizes[1], "step by step")):
        seconds = apart(kind, count, rate)["seconds"]
        ratio = runs[count]["seconds"] / seconds
        print(f"{text:25} {count / seconds:8,.0f} requests/s, {ratio:.2f} of leaping without, {count:,} requests")
    seconds = command_seconds(large, rate)
    print(f"{'the whole command':25} {large / seconds:8,.0f} requests/s, {large:,} requests with --out, wall time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--measure", choices=("leap", "step", "ids"), help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.count, arguments.rate)))
    else:
        report(10 if arguments.quick else 1)


if __name__ == "__main__":
    main()
