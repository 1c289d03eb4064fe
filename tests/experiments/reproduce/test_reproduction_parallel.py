"""``fragmeter reproduce all`` by several processes: the bytes of a single process, in every order and after kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.reproduce import reproduction
from fragmeter.experiments.reproduce.figures import FIGURES
from fragmeter.experiments.runs import parallel
from fragmeter.sim.output.folders import MARKER
from fragmeter.sim.output.interrupts import INTERRUPTED

#: Quick figures, of which some are taken to be long and so go to workers.
SECONDS = {"table1": None, "fig1": 10, "fig3": 30, "fig11": 10}
SHARING = {"fig1": "runs", "fig11": "runs"}
SCRIPT = """
from dataclasses import replace
from fragmeter.experiments.cli import app as cli
from fragmeter.experiments.reproduce import reproduction

seconds, sharing = {seconds}, {sharing}
some = {{
    name: replace(reproduction.FIGURES[name], seconds=seconds[name], shares=sharing.get(name)) for name in seconds
}}
reproduction.FIGURES = some
raise SystemExit(cli.status(["reproduce", "all", "--seeds", "1", "--jobs", "{jobs}", "--out", "{out}"]))
"""


@pytest.fixture(scope="module", autouse=True)
def some() -> Iterator[None]:
    """A few figures in place of all; workers know the real ones by their names."""
    chosen = {
        name: replace(FIGURES[name], seconds=seconds, shares=SHARING.get(name)) for name, seconds in SECONDS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduction, "FIGURES", chosen)
        yield


def rerun(out: Path, jobs: int) -> int:
    return status(["reproduce", "all", "--seeds", "1", "--jobs", str(jobs), "--out", str(out)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(some, tmp_path_factory) -> dict[str, bytes]:
    """The files of one process, and what it prints."""
    out = tmp_path_factory.mktemp("alone")
    printed = StringIO()
    with redirect_stdout(printed):
        assert rerun(out, jobs=1) == DONE
    return contents(out) | {"printed": printed.getvalue().replace(str(out), "OUT").encode()}


def left(out: Path, capsys) -> dict[str, bytes]:
    """What a command left, and printed."""
    captured = capsys.readouterr()
    assert captured.err == ""
    return contents(out) | {"printed": captured.out.replace(str(out), "OUT").encode()}


@pytest.mark.slow
def test_workers_leave_the_bytes_of_one_process_and_print_its_text(alone, tmp_path, capsys):
    assert rerun(tmp_path, jobs=2) == DONE
    assert sorted(alone) == sorted([*(f"{name}.json" for name in SECONDS), MARKER, reproduction.PAGE, "printed"])
    assert left(tmp_path, capsys) == alone


@pytest.fixture
def handed_out(monkeypatch) -> list[list[str]]:
    """Jobs as they are handed out, by the names of their figures; those that were handed out last come back first."""
    names: list[list[str]] = []

    def last_first(call, jobs, total, workers) -> Iterator:
        jobs = list(jobs)
        names.extend([rerun.name for rerun in group] for (group,) in jobs)
        yield from (call(*job) for job in reversed(jobs))

    monkeypatch.setattr(reproduction, "as_they_finish", last_first)
    return names


@pytest.mark.slow
def test_the_longest_begin_and_those_that_share_runs_go_to_one_worker(alone, handed_out, tmp_path, capsys):
    assert rerun(tmp_path, jobs=2) == DONE
    assert handed_out == [["fig3"], ["fig1", "fig11"]]
    assert left(tmp_path, capsys) == alone
    capsys.readouterr()
    for name in ("fig1", "fig3"):
        (tmp_path / f"{name}.json").unlink()
    assert rerun(tmp_path, jobs=2) == DONE
    assert handed_out[2:] == [["fig3"], ["fig1"]]
    assert left(tmp_path, capsys) == alone


@pytest.mark.slow
def test_a_figure_is_kept_before_the_next_is_made(tmp_path, monkeypatch):
    def broken(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(reproduction.FIGURES, "fig11", replace(reproduction.FIGURES["fig11"], make=broken))
    assert rerun(tmp_path, jobs=1) == INTERRUPTED
    assert sorted(contents(tmp_path)) == ["fig1.json", "fig3.json", MARKER, reproduction.PAGE, "table1.json"]


@pytest.mark.slow
def test_what_is_killed_goes_on_and_leaves_the_same_bytes(alone, tmp_path, capsys):
    """SIGKILL to the program and its workers, as soon as a worker has kept a figure."""
    out = tmp_path / "out"
    script = textwrap.dedent(SCRIPT).format(seconds=SECONDS, sharing=SHARING, jobs=2, out=out)
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    kept = [out / f"{name}.json" for name, seconds in SECONDS.items() if seconds]
    while program.poll() is None and not any(path.exists() for path in kept):
        with suppress(subprocess.TimeoutExpired):
            program.wait(timeout=0.05)
    os.killpg(program.pid, signal.SIGKILL)
    program.communicate(timeout=60)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert before.keys() & set(kept)
    assert rerun(out, jobs=2) == DONE
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert left(out, capsys) == alone


def test_one_core_is_what_a_worker_has(monkeypatch):
    monkeypatch.setattr(parallel.joblib, "cpu_count", lambda: 8)
    numbers = []
    monkeypatch.setattr(parallel, "_on_cores", lambda call, jobs, workers, _: numbers.append(workers) or iter(()))
    jobs = [(number,) for number in range(100)]
    list(parallel.in_parallel(abs, jobs))
    with parallel.at_most(3):
        list(parallel.in_parallel(abs, jobs))
        list(parallel.as_they_finish(abs, jobs, 100, parallel.Workers()))
    with parallel.at_most(1):
        assert list(parallel.in_parallel(abs, jobs)) == list(range(100))
    list(parallel.in_parallel(abs, jobs))
    assert numbers == [8, 3, 3, 8]


@pytest.mark.parametrize("jobs", ["0", "-1", "x"])
def test_jobs_that_cannot_be_are_refused_in_one_line(jobs, capsys):
    assert status(["reproduce", "table1", "--jobs", jobs]) == MISTAKE
    error = capsys.readouterr().err
    assert "jobs" in error and jobs in error and error.count("\n") == 1
