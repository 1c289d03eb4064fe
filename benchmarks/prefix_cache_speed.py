"""How fast prefix caching is simulated, on one core: requests a second, and ratios to the same run without.

    python benchmarks/prefix_cache_speed.py                    sessions that are drawn
    python benchmarks/prefix_cache_speed.py --trace FILE       a trace with hash_ids, as Mooncake's conversations

Llama-3.1-8B on eight H100-80GB, a load that is served without a queue to speak of. Every measurement runs in a
process of its own. Times are CPU seconds of that process, without imports and without reading the trace, the ledger's
integrals and the summary of the cache included, the best of three.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from fragmeter.sim.engine.run import simulate
from fragmeter.sim.engine.settings import settings
from fragmeter.sim.metrics.prefix_cache import prefix_cache
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import read_with_content, workload

MODEL_TOKENS = 131_072
REPLICA = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "tensor_parallel_size": 8, "max_model_len": MODEL_TOKENS}
LIMITS = {"max_num_batched_tokens": 16_384, "max_num_seqs": 1024}
#: Policy, block size, and whether prefixes are cached.
RUNS = [
    *(("vllm-v1", size, caching) for size in (512, 16) for caching in (False, True)),
    *(("sglang", 1, caching) for caching in (False, True)),
]
TRIES = 3


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


def measure(work: Workload, policy: str, block_size: int, caching: bool) -> dict[str, float]:
    """One measurement, in this process."""
    chosen = settings(policy=policy, block_size=block_size, enable_prefix_caching=caching, **REPLICA, **LIMITS)
    start = time.process_time()
    run = simulate(chosen, work)
    window, cache = run.window, prefix_cache(run)
    return {
        "seconds": time.process_time() - start,
        "requests": len(work),
        "leaps": len(run.log.rows["steps"]),
        "steps": run.log.num_steps,
        "cached_pct": 100 * window.share_of_time("cached"),
        "hit_pct": 100 * cache["hit_rate"] if cache else 0.0,
        "evicted_blocks": cache["evicted_blocks"] if cache else 0,
    }


def apart(trace: Path | None, place: int) -> dict[str, float]:
    """The quickest of some measurements, each in a process of its own: what neighbours on the machine do only adds."""
    command = [sys.executable, __file__, "--measure", str(place), *(["--trace", str(trace)] if trace else [])]
    outputs = (subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(TRIES))
    return min(map(json.loads, outputs), key=lambda run: run["seconds"])


def report(trace: Path | None) -> None:
    """All measurements, as a table."""
    plain: dict[tuple[str, int], float] = {}
    for place, (policy, block_size, caching) in enumerate(RUNS):
        run = apart(trace, place)
        # Each pair begins with the plain run.
        ratio = run["seconds"] / plain.setdefault((policy, block_size), run["seconds"])
        print(
            f"{policy:8} block {block_size:3} {'cached' if caching else 'plain':6}"
            f"  {run['requests'] / run['seconds']:8,.0f} requests/s  {ratio:5.1f} x the time of plain"
            f"  {run['steps'] / run['leaps']:5.1f} steps a leap  {run['hit_pct']:4.1f} % hit"
            f"  {run['evicted_blocks']:11,} evicted  {run['cached_pct']:4.1f} % cached"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids or session_id")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is None:
        report(arguments.trace)
    else:
        work = workload(read_with_content(arguments.trace)) if arguments.trace else sessions()
        print(json.dumps(measure(work, *RUNS[arguments.measure])))


if __name__ == "__main__":
    main()
