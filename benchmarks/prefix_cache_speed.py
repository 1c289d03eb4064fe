"""How fast prefix caching is simulated, on one core: requests a second, and ratios to the same run without.

    python benchmarks/prefix_cache_speed.py                    sessions that are drawn
    python benchmarks/prefix_cache_speed.py --trace FILE       a trace with hash_ids, as Mooncake's conversations
    python benchmarks/prefix_cache_speed.py --unshared         30,000 requests of which no two begin alike
    python benchmarks/prefix_cache_speed.py --before FOLDER    and another version of the code, in FOLDER/fragmeter
    python benchmarks/prefix_cache_speed.py --worth --trace FILE    the worth of the cached slots and its bounds, beside the run

Llama-3.1-8B on eight H100-80GB (``--unshared``: on one), a load that is served without a queue to speak of. Every measurement
runs in a process of its own. Times are CPU seconds of that process, without imports and without reading the trace: of the run,
and of the run with the ledger's integrals and the summary of the cache. Runs with caching, without, and of the version before
take turns, so that what else the machine does slows all of them; of ``--tries`` times each the best counts. ``us a block`` is what
caching adds to the run for each block that prompts and outputs fill.
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

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.cache_bounds import cache_summary
from fragmeter.sim.metrics.prefix_cache import prefix_cache
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import read_with_content, workload

MODEL_TOKENS = 131_072
REPLICA = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "tensor_parallel_size": 8, "max_model_len": MODEL_TOKENS}
LIMITS = {"max_num_batched_tokens": 16_384, "max_num_seqs": 1024}
#: Policy and block size.
RUNS = [("vllm-v1", 512), ("vllm-v1", 16), ("sglang", 1)]
UNSHARED_RUNS = [("vllm-v1", 16)]
UNSHARED_REPLICA = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "max_model_len": 4096}
UNSHARED_LIMITS = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}


def sessions(count: int = 12_000, turns: int = 8, at_a_time: int = 100, per_second: float = 3.4) -> Workload:
    """Sessions, so many at a time, that take turns: each prompt is what was said before and some 1,500 tokens more."""
    rng = np.random.default_rng(0)
    row = np.arange(count).reshape(-1, turns, at_a_time)
    fresh, outputs = rng.integers(500, 2_500, size=row.shape), rng.integers(50, 600, size=row.shape)
    prompts = np.cumsum(fresh + outputs, axis=1) - outputs
    arrivals = np.cumsum(rng.exponential(1 / per_second, size=count)) * 1e12
    session = np.broadcast_to(row[:, :1], row.shape)
    content = PromptContent.of_sessions(session.ravel())
    return Workload("sessions", arrivals, prompts.ravel(), outputs.ravel(), content=content)


def unshared(count: int = 30_000, per_second: float = 20) -> Workload:
    """Requests of some 400 tokens and 280 more."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(5.6, 0.9, count), 4, 1800).astype(np.int64)
    outputs = np.clip(rng.lognormal(5.3, 0.8, count), 4, 900).astype(np.int64)
    return Workload("unshared", np.cumsum(rng.exponential(1 / per_second, count)) * 1e12, prompts, outputs)


def measure(work: Workload, policy: str, block_size: int, caching: bool) -> dict[str, float]:
    """One measurement, in this process."""
    replica = UNSHARED_REPLICA | UNSHARED_LIMITS if work.name == "unshared" else REPLICA | LIMITS
    chosen = settings(
        policy=policy,
        block_size=block_size,
        enable_prefix_caching=caching,
        # Both sides in Python: the compiled core has no runs without caching.
        core=False,
        **replica,
    )
    start = time.process_time()
    run = simulate(chosen, work)
    seconds = time.process_time() - start
    window, cache = run.window, prefix_cache(run)
    return {
        "seconds": seconds,
        "seconds_with_summary": time.process_time() - start,
        "requests": len(work),
        "blocks": int((-(-(work.prompt_tokens + work.output_tokens - 1) // block_size)).sum()),
        "leaps": len(run.log.rows["steps"]),
        "steps": run.log.num_steps,
        "cached_pct": 100 * window.share_of_time("cached"),
        "hit_pct": 100 * cache["hit_rate"] if cache else 0.0,
        "evicted_blocks": cache["evicted_blocks"] if cache else 0,
    }


def apart(load: list[str], folder: Path | None, run: list[str]) -> dict[str, float]:
    """A measurement in a process of its own, with the ``fragmeter`` of a folder, or with the one that is installed."""
    environment = os.environ if folder is None else os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, __file__, *load, "--measure", *run]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def report(load: list[str], runs: list[tuple[str, int]], before: Path | None, tries: int) -> None:
    """All measurements, as a table."""
    for policy, block_size in runs:
        kinds = {"plain": (None, "0"), "cached": (None, "1")} | ({} if before is None else {"before": (before, "1")})
        best: dict[str, dict[str, float]] = {}
        for _ in range(tries):
            for kind, (folder, caching) in kinds.items():
                run = apart(load, folder, [policy, str(block_size), caching])
                least = best.setdefault(kind, run)
                for name in ("seconds", "seconds_with_summary"):
                    least[name] = min(least[name], run[name])
        plain = best["plain"]
        for kind, run in best.items():
            seconds, with_summary = run["seconds"], run["seconds_with_summary"]
            print(
                f"{policy:8} block {block_size:3} {kind:6}"
                f"  {run['requests'] / seconds:8,.0f} requests/s ({run['requests'] / with_summary:,.0f} with summary)"
                f"  {seconds / plain['seconds']:5.2f} x the time of plain"
                f" ({with_summary / plain['seconds_with_summary']:.2f} with summary)"
                f"  {1e6 * (seconds - plain['seconds']) / run['blocks']:7.3f} us a block"
                f"  {run['steps'] / run['leaps']:5.1f} steps a leap  {run['hit_pct']:4.1f} % hit"
                f"  {run['evicted_blocks']:11,} evicted  {run['cached_pct']:4.1f} % cached"
            )


def report_worth(work: Workload, tries: int) -> None:
    """Time of the worth and the bounds of a run on four H200 in the compiled core, and of the run; the least of the tries."""
    chosen = settings(policy="vllm-v1", model="llama-3.1-8b", gpu="h200", tensor_parallel_size=4)
    seconds = []
    for _ in range(tries):
        start = time.process_time()
        run = simulate(chosen, work)
        served, _ = time.process_time(), run.window
        begun = time.process_time()
        cache_summary(run)
        seconds.append((served - start, time.process_time() - begun))
    of_run, of_worth = map(min, zip(*seconds, strict=True))
    print(f"run {of_run:.3f} s, worth and bounds {of_worth:.3f} s: {of_worth / of_run:.2f} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument("--trace", type=Path, help="JSON lines with hash_ids or session_id")
    loads.add_argument("--unshared", action="store_true", help="requests of which no two begin alike")
    parser.add_argument("--before", type=Path, help="folder with another version of the package")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--worth", action="store_true", help="only the worth of the cached slots, in this process")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is None and not arguments.worth:
        load = ["--trace", str(arguments.trace)] if arguments.trace else ["--unshared"] if arguments.unshared else []
        report(load, UNSHARED_RUNS if arguments.unshared else RUNS, arguments.before, arguments.tries)
        return
    if arguments.trace:
        work = workload(read_with_content(arguments.trace))
    else:
        work = unshared() if arguments.unshared else sessions()
    if arguments.worth:
        report_worth(work, arguments.tries)
        return
    policy, block_size, caching = arguments.measure
    print(json.dumps(measure(work, policy, int(block_size), caching == "1")))


if __name__ == "__main__":
    main()
