"""Writes ``tests/data/probe/turns.jsonl`` anew: a probe's file of the real vLLM, for tests that run without vLLM.

    cd tests; python -m real_vllm.golden data/probe/turns.jsonl

The workload has sessions in a tight pool: preemptions, evictions and hits. A step takes 10 ms.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from .ours import scaled
from .workloads import Case, turns

STEP_NS = 10_000_000
NOTE = "a seeded workload (turns/22) on the scheduler of the vLLM wheel, without a device; written by tests/real_vllm"


def golden_case() -> Case:
    """The recorded workload; its clock has nanoseconds."""
    case = turns(22)
    scale = STEP_NS // case.step_ticks
    return replace(case, workload=scaled(case.workload, scale), step_ticks=STEP_NS)


def main(path: Path) -> None:
    """Record the workload; name the model in the header by no path, and hashes, which are salted, by numbers."""
    from .test_probe import probed

    probed(golden_case(), path)
    header, *steps = path.read_text().splitlines(keepends=True)
    numbers: dict[int, int] = {}
    lines = [json.loads(step) for step in steps]
    for event in (event for line in lines for event in line.get("events", ()) if event[0] == "contents"):
        event[2:] = [numbers.setdefault(each, len(numbers)) for each in event[2:]]
    steps = [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
    fixed = json.loads(header) | {"model": "stand-in", "note": NOTE}
    path.write_text(json.dumps(fixed, separators=(",", ":")) + "\n" + "".join(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
