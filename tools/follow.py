"""Compare ``vllm-v1`` or ``sglang`` with a release of its system that is newer than the one it follows: ``make follow``.

    PYTHONPATH=NEWEST python -m tools.follow sglang --seeds 20

The environment has the pinned release, and the folder NEWEST another one. Printed are the files of ``WATCHED`` that changed (their
lines go to ``--diff``); and of the seeded workloads of the tests how many differ, with the first step of the first that does.
With 0 differences the pin can move. Exit status 1 where a workload differs, or where the comparison does not run, which
is how a changed interface shows.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: Of each system the folders and files that decide, below its package.
WATCHED = {
    "vllm": ("v1/core",),
    "sglang": (
        "srt/managers/scheduler.py",
        "srt/managers/schedule_batch.py",
        "srt/managers/schedule_policy.py",
        "srt/mem_cache/unified_radix_cache.py",
        "srt/mem_cache/unified_cache",
        "srt/mem_cache/allocator",
    ),
}
_TESTS = Path(__file__).parents[1] / "tests"


def changed(system: str, before: Path, after: Path) -> dict[str, list[str]]:
    """Unified diffs of the watched files whose text differs, by name."""
    names: set[str] = set()
    for package in (before, after):
        for watched in WATCHED[system]:
            path = package / watched
            found = path.rglob("*.py") if path.is_dir() else [path]
            names.update(each.relative_to(package).as_posix() for each in found)
    diffs = {
        name: list(difflib.unified_diff(_lines(before / name), _lines(after / name), name, name))
        for name in sorted(names)
    }
    return {name: diff for name, diff in diffs.items() if diff}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def differences(system: str, seeds: int) -> Iterator[tuple[str, object]]:
    """Name of each workload of the tests and its first difference; None where every step is equal."""
    sys.path.insert(0, str(_TESTS))
    ours, server, workloads = (
        importlib.import_module(f"real_{system}.{each}") for each in ("ours", "server", "workloads")
    )
    steps = importlib.import_module("tools.live.step_log" if system == "vllm" else "real_sglang.steps")
    for kind, make in workloads.KINDS.items():
        for seed in range(seeds):
            case: Any = make(seed)
            yield f"{kind}/{seed}", steps.first_difference(server.serve(case), ours.serve(case))


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=sorted(WATCHED))
    parser.add_argument("--seeds", type=int, default=20, help="workloads of each kind")
    parser.add_argument("--diff", type=Path, help="file for the diffs of the watched files")
    given = parser.parse_args()
    spec = find_spec(given.system)
    if spec is None or spec.origin is None:
        parser.error(f"{given.system} is not installed here")
    pinned, newest = Path(sysconfig.get_path("purelib")) / given.system, Path(spec.origin).parent
    print(f"{given.system} {version(given.system)}, beside the pinned release")
    diffs = changed(given.system, pinned, newest)
    for name, diff in diffs.items():
        marks = [line[0] for line in diff[2:]]
        print(f"  {name}: +{marks.count('+')} -{marks.count('-')} lines")
    if given.diff is not None:
        given.diff.write_text("".join(line for diff in diffs.values() for line in diff))
    served = differing = 0
    try:
        for name, difference in differences(given.system, given.seeds):
            served += 1
            differing += difference is not None
            if difference is not None and differing == 1:
                print(f"first difference: {name}, {difference}"[:600])
    except Exception as error:
        print(f"the comparison does not run: {type(error).__name__}: {error}"[:600])
        return 1
    print(f"{served} workloads, {differing} differ")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
