"""States of the machine: a full disk, closed streams, no docstrings, no home, little memory. Each is a line or works; never an
internal fault."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import command
from fragmeter.sim.types.errors import UserError, user_paths

SIMULATE = ("simulate", "--num-prompts", "3", "--request-rate", "1")
FULL = "standard output: No space left on device"


def shell(tokens: tuple[str, ...], redirection: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``fragmeter`` in a shell that redirects its streams."""
    line = f"{shlex.join(command(*tokens))} {redirection}"
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=os.environ | environment, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens", [("list", "gpus"), ("--help",), ("--version",), SIMULATE], ids=lambda words: words[0]
)
def test_standard_output_on_a_full_disk(tokens):
    done = shell(tokens, "> /dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith(f"fragmeter: {FULL}") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_end_a_run(closed, tmp_path):
    """A result file that got the number of a closed stream would also get what is printed."""
    open_run, closed_run = tmp_path / "open", tmp_path / "closed"
    assert shell((*SIMULATE, "--out", str(open_run))).returncode == 0
    assert shell((*SIMULATE, "--out", str(closed_run)), closed).returncode == 0
    names = sorted(path.name for path in open_run.iterdir())
    assert sorted(path.name for path in closed_run.iterdir()) == names
    assert [(closed_run / name).read_bytes() for name in names] == [(open_run / name).read_bytes() for name in names]


@pytest.mark.slow
def test_a_mistake_keeps_its_status_where_nothing_can_be_printed():
    assert shell(("simulate", "--bogus"), ">&- 2>&-").returncode == 2


@pytest.mark.slow
def test_without_docstrings_every_verb_runs(tmp_path):
    """``PYTHONOPTIMIZE=2`` takes the docstrings, which flags take their help from."""
    code = (
        "from fragmeter.experiments.cli.app import VERBS, status\n"
        f"lines = [{SIMULATE!r}, *((verb, '--help') for verb in VERBS)]\n"
        "raise SystemExit(max(status(line) for line in lines))"
    )
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_doctor_without_a_home_says_what_does_not_work():
    done = shell(("doctor",), HOME="/proc/none", XDG_CACHE_HOME="/proc/none")
    assert (done.returncode, done.stderr) == (0, "")
    assert "yes  simulator" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [150, 200, 300, 600])
def test_an_address_space_that_is_too_small(megabytes, tmp_path):
    """Where libraries load at all, the program says that memory is missing, or serves."""
    line = f"ulimit -v {megabytes * 1024}; exec {shlex.join(command(*SIMULATE, '--out', 'run'))}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    if done.returncode == 2:
        assert done.stderr.startswith("fragmeter: more memory than this machine has"), done.stderr
    assert "internal fault" not in done.stderr and "cannot be written" not in done.stderr
    assert (done.returncode == 0) == Path(tmp_path, "run", "run.json").exists()


def test_a_lack_of_memory_is_no_place_that_cannot_be_written():
    with pytest.raises(MemoryError), user_paths("."):
        raise OSError(12, "Cannot allocate memory")
    with pytest.raises(UserError, match="cannot be written"), user_paths("."):
        raise OSError(28, "No space left on device")
