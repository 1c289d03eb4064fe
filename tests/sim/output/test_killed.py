"""A command that is killed leaves what was there before or what it makes, whole, and goes on to the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from cli_runs import command
from fragmeter.reports.data.results import read_result
from paths import TESTS

SIMULATE = ("simulate", "--num-prompts", "2000", "--request-rate", "20")
SWEEP = ("sweep", "--num-prompts", "300", "--grid", "request_rate=2:4", "--grid", "seed=0:1", "--jobs", "2")
REPRODUCE = ("reproduce", "fig11")
#: Kills of each command, 200 in all.
KILLS = {"simulate": 80, "sweep": 70, "reproduce": 50}


@pytest.mark.slow
@pytest.mark.parametrize("names", ["exchange", pytest.param("rename", marks=pytest.mark.slow)])
def test_a_folder_that_is_replaced_is_whole_whenever_its_command_is_killed(names, tmp_path):
    """By an exchange of names, or by two renames where the system has no exchange; killed at every step of it."""
    script = TESTS / "helpers" / "killed_replacement.py"
    done = subprocess.run([sys.executable, script, tmp_path, names], capture_output=True, text=True, timeout=300)
    assert done.stderr == "" and int(done.stdout) > 200


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def completed(*tokens: object) -> float:
    """Run a command to its end; the seconds that it takes."""
    begin = time.perf_counter()
    subprocess.run(command(*tokens), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def killed(tokens: Sequence[object], delay_s: float) -> bool:
    """Run a command and kill it, with its workers, after a while; whether it was not done by then."""
    program = subprocess.Popen(command(*tokens), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        program.wait(timeout=delay_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    return program.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(KILLS["simulate"], marks=pytest.mark.slow)])
def test_simulate_leaves_the_old_result_or_the_new_one(kills, tmp_path):
    out, draw = tmp_path / "run", random.Random(1)
    whole, seconds = [], 0.0
    for seed in (0, 1):
        seconds = completed(*SIMULATE, "--seed", seed, "--out", out)
        whole.append(contents(out))
    done = 0
    while done < kills:
        seed = draw.randrange(2)
        done += killed([*SIMULATE, "--seed", seed, "--out", out], draw.uniform(0, seconds))
        assert contents(out) in whole
        assert len(read_result(out).requests) == 2000
    completed(*SIMULATE, "--seed", 1, "--out", out)
    assert contents(out) == whole[1]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), [("sweep", SWEEP), ("reproduce", REPRODUCE)])
def test_what_is_finished_is_whole_and_goes_on_to_the_same_bytes(name, tokens, tmp_path):
    draw = random.Random(2)
    seconds = completed(*tokens, "--out", tmp_path / "in-peace")
    whole = contents(tmp_path / "in-peace")
    done = number = 0
    while done < KILLS[name]:
        # What a killed run has finished the next one finds, until there is no more to do.
        out, was_killed = tmp_path / f"out-{number}", True
        while was_killed:
            was_killed = killed([*tokens, "--out", out], draw.uniform(0, 1.2 * seconds))
            done += was_killed
            for path, content in (contents(out) if out.exists() else {}).items():
                # What was being written has another name.
                assert Path(path).name.startswith(".fragmeter-") or content == whole[path] or json.loads(content)
        completed(*tokens, "--out", out)
        assert contents(out) == whole
        number += 1
