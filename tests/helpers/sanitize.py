"""Runs of the compiled core under AddressSanitizer and UndefinedBehaviorSanitizer, beside the same runs in Python.

    python tests/helpers/sanitize.py               300 runs: alone, with looks, with block maps, and behind routers
    python tests/helpers/sanitize.py --runs 3000

The core is compiled anew with gcc, in a temporary folder. The first error ends the program with its report. Leaks are not looked
for, as Python keeps memory at its end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "helpers")]

from cluster_runs import ROUTERS, TIGHT, unrefused
from core_loads import POLICIES, Load, columns, compiled_in, loaded, sources_in
from fragmeter.sim import settings
from fragmeter.sim.cluster import cluster, routed_core, simulate_cluster
from fragmeter.sim.engine import core
from fragmeter.sim.recording.blocks import record
from fragmeter.sim.types import user_files
from fragmeter.sim.types.errors import SettingError

FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
#: The library that must be loaded before Python's own memory is.
PRELOADED = "libasan.so"


def routed(load: Load, router: str, **switches: object) -> list[object]:
    """All columns of three replicas behind a router."""
    fleet = cluster(num_replicas=3, router=router, **TIGHT)
    with unrefused():
        run = simulate_cluster(settings(**load.chosen, **switches), load.work, fleet, load.cost)
    return [columns(part) for part in run.runs]


def compare(load: Load, router: str) -> None:
    """Four runs of the core: alone, with looks of which one ends it, with a block map, and behind a router."""
    python = load.run(core=False)
    assert columns(load.run()) == columns(python)
    looks = load.looks_of(python)
    seen = [load.watched(*looks, **switches)[1] for switches in ({}, {"core": False})]
    assert seen[0] == seen[1]
    assert mapped(load) == mapped(load, core=False)
    assert routed(load, router) == routed(load, router, core=False)


def mapped(load: Load, **switches: object) -> object:
    """A block map, or why there is none."""
    try:
        _, blocks = record(settings(**load.chosen, **switches), load.work, load.cost)
    except SettingError as error:
        return str(error)
    return blocks.bucket.tolist(), blocks.sequence.tolist(), blocks.references.tolist()


def run_all(library: Path, runs: int) -> None:
    """So many runs of a library of the core."""
    module = loaded(library)
    with (
        mock.patch.object(core, "compiled", lambda: (module, "sanitized")),
        mock.patch.object(routed_core, "compiled", lambda: (module, "sanitized")),
        # Small buffers: the core has to give control back more often. And the sanitizer marks all that is asked for.
        mock.patch.object(core, "_LEAPS", 20),
        mock.patch.object(user_files, "MOST_BYTES", 1 << 20),
    ):
        for seed in range(-(-runs // 4)):
            compare(Load(seed, POLICIES[seed % len(POLICIES)]), ROUTERS[seed % len(ROUTERS)])
    print(f"{runs} runs of the core: no error, and the same columns as in Python")


def main() -> int:
    """The program; the runs are in a process of their own, in which the sanitizer is loaded first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.library:
        run_all(options.library, options.runs)
        return 0
    found = subprocess.run(["cc", f"-print-file-name={PRELOADED}"], check=True, capture_output=True, text=True)
    with TemporaryDirectory() as folder:
        library = compiled_in(sources_in(Path(folder)), *FLAGS)
        environment = os.environ | {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
        command = [sys.executable, __file__, "--library", str(library), "--runs", str(options.runs)]
        return subprocess.run(command, check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
