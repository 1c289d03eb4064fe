"""SIGTERM ends a program as Ctrl-C does, and a program that is killed leaves no workers behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cli_runs import run_here
from fragmeter.experiments.cli.app import DONE
from fragmeter.sim.output.interrupts import INTERRUPTED, TERMINATED

#: Step by step, so that a signal comes between points.
GRID = ["--num-prompts", "1000", "--no-leap", "--grid", "request_rate=1:3", "--grid", "seed=0:4", "--jobs", "2"]
#: A sweep with workers on a machine of any speed; by default they must be worth their start.
WITH_WORKERS = """
from fragmeter.__main__ import main
from fragmeter.experiments.runs import parallel

parallel.WORTH_WORKERS_S = 0.0
main()
"""
#: Workers that outlive the program that started them for longer are orphans.
GRACE_S = 5


def started_sweep(out: Path, finished: int) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A sweep with so many points finished, and its workers."""
    program = subprocess.Popen(
        [sys.executable, "-c", WITH_WORKERS, "sweep", *GRID, "--out", out], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        env=os.environ | {"LOKY_MAX_CPU_COUNT": "2"},
    )  # fmt: skip
    while program.poll() is None and len(list(out.glob("points/*.json"))) < finished:
        time.sleep(0.01)
    return program, psutil.Process(program.pid).children(recursive=True)


@pytest.fixture(scope="module")
def in_peace(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("in-peace") / "sweep"
    assert run_here("sweep", *GRID, "--out", out).returncode == DONE
    return out


def assert_goes_on(out: Path, in_peace: Path) -> None:
    """What is finished is not run again, and the result has the bytes of an undisturbed sweep."""
    kept = {path: path.stat().st_mtime_ns for path in out.glob("points/*.json")}
    assert kept
    assert run_here("sweep", *GRID, "--out", out).returncode == DONE
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert (out / "sweep.parquet").read_bytes() == (in_peace / "sweep.parquet").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "said", "to_all"),
    [
        pytest.param(
            signal.SIGTERM, TERMINATED, "terminated", False, id="SIGTERM to the program", marks=pytest.mark.slow
        ),
        pytest.param(signal.SIGINT, INTERRUPTED, "interrupted", True, id="Ctrl-C to its workers, too"),
        pytest.param(
            signal.SIGTERM, TERMINATED, "terminated", True, id="SIGTERM to its workers, too", marks=pytest.mark.slow
        ),
        pytest.param(
            signal.SIGINT, INTERRUPTED, "interrupted", False, id="SIGINT to the program", marks=pytest.mark.slow
        ),
    ],
)
def test_a_signal_keeps_what_is_finished_and_ends_the_workers(number, status, said, to_all, in_peace, tmp_path):
    program, workers = started_sweep(tmp_path / "out", 3)
    (os.killpg if to_all else os.kill)(program.pid, number)
    _, error = program.communicate(timeout=60)
    assert (program.returncode, error) == (status, f"fragmeter: {said}; finished results are kept\n")
    _, alive = psutil.wait_procs(workers, timeout=GRACE_S)
    assert workers and not alive
    assert_goes_on(tmp_path / "out", in_peace)


@pytest.mark.slow
def test_workers_of_a_killed_program_end_by_themselves(in_peace, tmp_path):
    program, workers = started_sweep(tmp_path / "out", 3)
    program.kill()
    _, alive = psutil.wait_procs(workers, timeout=GRACE_S)
    assert workers and not alive
    program.wait()
    assert_goes_on(tmp_path / "out", in_peace)


def test_ctrl_c_while_the_program_loads_ends_it_without_a_traceback():
    script = """
import os, signal, sys, types

cli = types.ModuleType("cli")
cli.__getattr__ = lambda name: os.kill(os.getpid(), signal.SIGINT)
sys.modules["fragmeter.experiments.cli.app"] = cli
from fragmeter.__main__ import main

main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_second_signal_does_not_disturb_the_first():
    script = """
import os, signal
from fragmeter.sim.output.interrupts import Terminated, handle, status_of

handle(lambda status: print(status))
try:
    os.kill(os.getpid(), signal.SIGTERM)
except Terminated as first:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit(status_of(first))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (TERMINATED, "143\n", "")


@pytest.mark.slow
def test_a_signal_that_is_to_be_ignored_is_ignored():
    script = """
import os, signal
from fragmeter.sim.output.interrupts import handle

signal.signal(signal.SIGTERM, signal.SIG_IGN)
handle()
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
