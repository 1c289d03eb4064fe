"""``fragmeter simulate --record-plan``: where plans go, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.metrics.gaps import Gaps
from fragmeter.sim.recording.plans import load
from plan_replay import replay

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,7,5\n0,9,3\n0.1,30,4\n"


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "three.csv"
    path.write_text(TRACE)
    return path


def simulate(trace: Path, *tokens: object) -> int:
    return status(["simulate", "--trace", str(trace), *map(str, tokens)])


@pytest.mark.slow
def test_a_plan_lies_beside_the_results_which_are_the_same_without(trace, tmp_path):
    for name, flags in (("plain", ()), ("recorded", ("--record-plan", "--shuffle-ids"))):
        assert simulate(trace, "--out", tmp_path / name, *flags) == DONE
    replay(load(tmp_path / "recorded" / "plan.npz"))
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "recorded").iterdir()) == sorted([*files, "plan.npz"])
    for name in set(files) - {"steps.parquet", "memory.parquet", "gaps.parquet"}:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "recorded" / name).read_bytes(), name
    plain, recorded = (read_gaps(tmp_path / name) for name in ("plain", "recorded"))
    assert plain.number == recorded.number > 0
    every = np.linspace(0, 100, plain.number)
    assert plain.percentiles_ms(every).tolist() == recorded.percentiles_ms(every).tolist()


def read_gaps(folder: Path) -> Gaps:
    """The gaps of a run: a recorded one tells them step by step, another leap by leap."""
    return Gaps.of_table(pd.read_parquet(folder / "gaps.parquet"))


def test_a_plan_is_written_to_its_folder_and_is_the_same_twice(trace, tmp_path, capsys):
    for name in ("one.npz", "two.npz"):
        assert simulate(trace, "--record-plan", tmp_path / name, "--record-steps", "2:3", "--shuffle-ids") == DONE
    assert capsys.readouterr().out.endswith(f"Plan of 3 steps: {tmp_path / 'two.npz'}\n")
    plan = load(tmp_path / "one.npz")
    assert (plan.meta["first_step"], plan.num_steps, plan.meta["shuffle_ids"]) == (2, 3, True)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


MISTAKES = {
    "no place": (["--record-plan"], "record_plan = True: has no place; name a file, or give --out"),
    "no plan": (["--record-steps", "0:4"], "record_steps = '0:4': applies only to a recorded plan; give --record-plan"),
    "no ids": (["--shuffle-ids"], "shuffle_ids = True: applies only to a recorded plan; give --record-plan"),
    "no steps": (
        ["--record-plan", "plan.npz", "--record-steps", "4:0"],
        "record_steps = '4:0': must be START:COUNT in whole steps, or START: for all that follow",
    ),
    "past the end": (
        ["--record-plan", "plan.npz", "--record-steps", "1000:4"],
        "record_steps = '1000:4': no step is in the window; begin earlier, or serve more requests",
    ),
    "no folder": (
        ["--record-plan", "missing/plan.npz"],
        "missing/plan.npz: cannot be written (No such file or directory); choose another place",
    ),
    "windows": (
        ["--record-plan", "plan.npz", "--model", "gemma-3-27b", "--gpu", "h200", "--policy", "vllm-v1"],
        "record_plan = 'vllm-v1': a plan has one table a sequence, and KV groups have several;"
        " give --disable-hybrid-kv-cache-manager",
    ),
}


@pytest.mark.parametrize(("flags", "line"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_is_said_in_a_line(flags, line, trace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert simulate(trace, *flags) == MISTAKE
    assert capsys.readouterr().err == f"fragmeter: {line}\n"
    assert list(tmp_path.iterdir()) == [trace]
