"""What ``fragmeter.probe`` adds to a step of vLLM's scheduler.

    python benchmarks/probe_overhead.py [--repeats 5]       needs vLLM; `make test-vllm` installs it

The scheduler of the installed vLLM serves a batch of requests without a device, with and without the probe in turns.
Measured are ``schedule`` and ``update_from_output``, the two calls of a step, in CPU time; the median of the repeats is
printed, and the bytes of the file for each step. The overhead is time that the CPU needs while the GPU waits, or computes
the step before (asynchronous scheduling).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fragmeter import probe
from fragmeter.sim.memory.accounting.kv_groups import PageGroups
from fragmeter.sim.real_vllm.core import Core
from fragmeter.sim.types.sequence import Sequence

BATCHES = (32, 256, 1024)
PROMPT, OUTPUT, BLOCK = 400, 200, 16


class Measured(NamedTuple):
    """A run: seconds in the two calls, steps, and bytes of the file."""

    seconds: float
    steps: int
    file_bytes: int


class Stopwatch:
    """Adds up the CPU time of methods of an object."""

    def __init__(self, owner: object, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call):
        def timed(*args, **kwargs):
            start = time.thread_time()
            result = call(*args, **kwargs)
            self.seconds += time.thread_time() - start
            return result

        return timed


def serve(batch: int, path: Path | None) -> Measured:
    """Serve ``batch`` requests at once."""
    os.environ.pop(probe.PATH, None)
    if path is not None:
        os.environ[probe.PATH] = str(path)
    blocks = batch * (-(-(PROMPT + OUTPUT) // BLOCK)) + 1
    core = Core(
        2048,
        {"block_size": BLOCK, "enable_prefix_caching": True, "num_gpu_blocks_override": blocks},
        {
            "max_num_seqs": batch,
            "max_num_batched_tokens": 8192,
            "async_scheduling": False,
            "scheduler_cls": "fragmeter.probe.ProbeScheduler",
        },
        PageGroups(),
        None,
    )
    watch = Stopwatch(core.scheduler, "schedule", "update_from_output")
    for index in range(batch):
        core.add(Sequence(index, PROMPT, OUTPUT, OUTPUT))
    steps = 0
    while core.schedule().tokens:
        core.end_steps(in_flight=0)
        steps += 1
    core.scheduler.shutdown()
    return Measured(watch.seconds, steps, path.stat().st_size if path else 0)


def main() -> None:
    """Print a row for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"{'batch':>6}{'without':>12}{'with':>12}{'added':>12}{'ratio':>8}{'bytes a step':>14}")
    with tempfile.TemporaryDirectory() as folder:
        for batch in BATCHES:
            path = Path(folder) / f"{batch}.jsonl"
            pairs = [(serve(batch, None), serve(batch, path)) for _ in range(repeats)]
            us = [[1e6 * each.seconds / each.steps for each in pair] for pair in pairs]
            without, with_probe = (median(side) for side in zip(*us))
            added, ratio = median(b - a for a, b in us), median(b / a for a, b in us)
            size = pairs[0][1].file_bytes / pairs[0][1].steps
            print(f"{batch:>6}{without:>9.0f} us{with_probe:>9.0f} us{added:>9.0f} us{ratio:>8.2f}{size:>14.0f}")


if __name__ == "__main__":
    main()
