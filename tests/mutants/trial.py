"""The tests beside a mutant: in a package that is the checkout but for one module."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from paths import ROOT, TESTS

from .nearest import nearest
from .operators import Mutant, mutated
from .watch import FILE, MODULE, TOO_LONG

#: Seconds of the clock after which the tests beside a mutant are stopped. They wait for something that never comes, as
#: ``watch`` ends what computes for ever.
_SECONDS = 900
#: Exit statuses of pytest: all passed, some failed, and what cannot be collected.
_PASSED, _FAILED, _INTERRUPTED = 0, 1, 2
#: In place of an exit status: this process stopped the tests. Signals by which a mutant ends its own process.
_STOPPED = -1000
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class Trial(NamedTuple):
    """Result of a mutant.

    Attributes:
        killed_by: The first test that failed, or why the tests ended; None where all passed.
        seconds: How long the tests ran.
    """

    mutant: Mutant
    killed_by: str | None
    seconds: float


def try_all(chosen: Sequence[Mutant], jobs: int | None = None) -> Iterator[Trial]:
    """The trials of mutants, as they end; as many at a time as there are cores, or ``jobs``."""
    with ThreadPoolExecutor(jobs or os.cpu_count()) as threads:
        for ended in as_completed([threads.submit(try_out, mutant) for mutant in chosen]):
            yield ended.result()


def report(trials: Iterable[Trial]) -> str:
    """The score, and the mutants that survived."""
    every = list(trials)
    alive = sorted(trial.mutant.key for trial in every if trial.killed_by is None)
    lines = [f"{len(every) - len(alive)} of {len(every)} mutants were killed.", *(f"survived: {key}" for key in alive)]
    return "\n".join(lines)


def try_out(mutant: Mutant) -> Trial:
    """Run the nearest tests beside a mutant, up to the first that fails.

    Raises:
        RuntimeError: They did not run, or did not import the mutant.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = package_with(mutant, Path(folder))
        status, output = _run(mutant, Path(folder), file)
        if status == -signal.SIGTERM:
            # Ended from outside, which says nothing of the mutant.
            status, output = _run(mutant, Path(folder), file)
    return Trial(mutant, _killed_by(mutant, status, output), time.monotonic() - began)


def _killed_by(mutant: Mutant, status: int, output: str) -> str | None:
    if status == _PASSED:
        return None
    if status in (TOO_LONG, _STOPPED):
        return "a test that takes too long"
    if -status in _CRASHES:
        return f"a crash, signal {-status}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if status not in (_FAILED, _INTERRUPTED) or failed is None:
        raise RuntimeError(f"{mutant.key}: the tests ended with status {status}:\n{output[-3000:]}")
    return failed[1]


def package_with(mutant: Mutant, folder: Path) -> Path:
    """Make a package ``fragmeter`` of links to the checkout, but for the mutated module. Returns the module's file."""
    package, source = folder / "fragmeter", ROOT / "fragmeter"
    for part in Path(mutant.path).parts:
        package.mkdir()
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__") and not entry.name.startswith("."):
                (package / entry.name).symlink_to(entry)
        package, source = package / part, source / part
    package.write_text(mutated(mutant, source.read_text()))
    return package


def _run(mutant: Mutant, folder: Path, file: Path) -> tuple[int, str]:
    """Exit status and output of pytest; a status below 0 is a signal."""
    module = ".".join(["fragmeter", *Path(mutant.path).with_suffix("").parts])
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{TESTS}",
        FILE: str(file),
        MODULE: module,
        "OMP_NUM_THREADS": "1",
        # The folder that they run in is a checkout, which has the package without the mutant.
        "PYTHONSAFEPATH": "1",
    }
    # Workers of a run of all tests are not those of this one.
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable, "-m", "pytest", f"--rootdir={TESTS}", "-c", str(ROOT / "setup.cfg"), "-x", "-q", "--no-header",
        "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "mutants.watch", "-m", "not slow",
        *(str(TESTS / name) for name in nearest(mutant.path)),
    ]  # fmt: skip
    running = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = running.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return _STOPPED, ""
    return running.returncode, output
