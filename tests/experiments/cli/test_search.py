"""``fragmeter sweep --search``: what is asked, what is found, and searches that are cut short."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from cli_runs import command, run_here
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.runs.grid import Point
from fragmeter.experiments.runs.inputs import Inputs
from fragmeter.experiments.runs.sweeping import Outcome, Swept, run_point
from fragmeter.experiments.sweep.searching import ROUND, Axis, Wanted, search_axes
from fragmeter.sim.config.settings import Settings
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.workload import Workload
from killing import count, kill_when

pytest.importorskip("optuna")
SMALL = ["--num-prompts", "20", "--request-rate", "2", "--jobs", "1"]
BLOCKS = ["--search", "num_gpu_blocks_override=200:1000", "--maximize", "num_gpu_blocks"]


def searched(folder: Path, *tokens: object) -> pd.DataFrame:
    """The rows of a search that is run here."""
    assert status(["sweep", *SMALL, *map(str, tokens), "--out", str(folder)]) == DONE
    return pd.read_parquet(folder / "sweep.parquet")


class TestAxes:
    def test_ranges_and_choices(self):
        texts = ["block_size=1:128:log", "--request-rate=0.5:8.0", "seed=0:6:2", "model=opt-13b, a:b", "n=1:2.5:0.5"]
        assert list(search_axes(texts).items()) == [
            ("block_size", Axis(texts[0], None, 1, 128, None, True)),
            ("request_rate", Axis(texts[1], None, 0.5, 8.0)),
            ("seed", Axis(texts[2], None, 0, 6, 2)),
            ("model", Axis(texts[3], ("opt-13b", "a:b"))),
            ("n", Axis(texts[4], None, 1.0, 2.5, 0.5)),
        ]

    @pytest.mark.slow
    def test_each_is_drawn_as_it_is_said(self, tmp_path):
        tokens = ["--search", "block_size=4:16:4", "--search", "policy=orca,vllm-v0"]
        tokens += ["--search", "watermark=0.001:0.1:log", "--search", "max_num_seqs=1:256:log"]
        rows = searched(tmp_path, *tokens, "--minimize", "mean_ttft_ms", "--trials", 20)
        assert rows["trial"].tolist() == list(range(20))
        assert set(rows["block_size"]) == {4, 8, 12, 16}
        assert set(rows["policy"]) == {"orca", "vllm-v0"}
        # As many below the middle factor as above it, or so.
        assert 5 <= (rows["watermark"] < 0.01).sum() <= 15
        assert 5 <= (rows["max_num_seqs"] < 16).sum() <= 15
        assert rows["watermark"].between(0.001, 0.1).all()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("block_size", "must be NAME=VALUE,VALUE or NAME=FIRST:LAST"),
            ("blocksize=1:2", "blocksize is not a setting of fragmeter simulate"),
            ("seed=5:1", "is a range without values"),
            ("seed=0:5:log", "is a range without values"),
            ("seed=0:5:0", "is a range without values"),
            ("seed=0:5:6", "is a range of one value; give a smaller step"),
            ("seed=0:many", "must be NAME=VALUE,VALUE"),
        ],
    )
    def test_what_cannot_be_read(self, text, message):
        with pytest.raises(SettingError, match=message):
            search_axes([text])
        with pytest.raises(SettingError, match="gives seed a second time"):
            search_axes(["seed=0:1", "--seed=2:3"])


@pytest.mark.slow
def test_the_largest_is_found(tmp_path, capsys):
    rows = searched(tmp_path, *BLOCKS, "--trials", 40)
    found = rows["num_gpu_blocks_override"]
    # One of forty draws would lie so high with probability 0.64; the estimator goes there again and again.
    assert (found > 980).sum() > 4
    assert found.max() > 995
    assert str(found.idxmax()) in capsys.readouterr().out.splitlines()[2].split()[0]


@pytest.mark.slow
def test_what_is_beyond_a_limit_is_not_the_best(tmp_path, capsys):
    limit = ["--at-most", "num_gpu_blocks=500", "--json", str(tmp_path / "summary.json")]
    rows = searched(tmp_path / "out", *BLOCKS, "--trials", 40, *limit)
    summary = json.loads((tmp_path / "summary.json").read_text())
    within = rows[rows["num_gpu_blocks_override"] <= 500]["num_gpu_blocks_override"]
    assert int(summary["best"]["num_gpu_blocks_override"]) == summary["best"]["num_gpu_blocks"] == within.max() > 480
    # It knows: without a limit hardly any lie below it.
    assert len(within) > 20
    capsys.readouterr()
    searched(tmp_path / "none", *BLOCKS, "--trials", 8, "--at-most", "num_gpu_blocks=1")
    assert "No trial is within the limits" in capsys.readouterr().out


@pytest.mark.slow
def test_a_limit_may_be_0(tmp_path):
    summary_file = tmp_path / "summary.json"
    tokens = ["--search", "num_gpu_blocks_override=10:150", "--minimize", "num_gpu_blocks", "--trials", 12]
    rows = searched(tmp_path / "out", *tokens, "--at-most", "refused=0", "--json", summary_file)
    within = rows[rows["refused"] == 0]
    assert 0 < len(within) < len(rows)
    assert json.loads(summary_file.read_text())["best"]["num_gpu_blocks"] == within["num_gpu_blocks"].min()


def test_how_far_beyond_a_limit_is_a_share_of_it():
    swept = Swept(Point({}, Inputs()), "", Outcome("", {"a": 6.0, "b": -2.0, "c": 3.0}))
    beyond = Wanted("a", True, {"a": 4.0, "b": -4.0, "c": 0.0}).beyond(swept)
    assert beyond == {"a": 0.5, "b": 0.5, "c": 3.0}


@pytest.mark.slow
def test_steps_that_do_not_lead_to_the_last_value_end_below_it(tmp_path, recwarn):
    rows = searched(tmp_path, "--search", "block_size=1:8:5", "--minimize", "duration", "--trials", 8)
    assert set(rows["block_size"]) == {1, 6}
    assert not [each for each in recwarn if issubclass(each.category, UserWarning)]


@pytest.mark.parametrize(("direction", "said"), [("--maximize", True), ("--minimize", False)])
def test_a_search_for_the_worse_says_so(direction, said, tmp_path, capsys):
    searched(tmp_path, "--search", "block_size=8,16", direction, "mean_ttft_ms", "--trials", "2")
    note = "Less of mean TTFT is better; the search looks for the opposite."
    assert (note in " ".join(capsys.readouterr().out.split())) == said


@pytest.mark.slow
def test_small_is_the_best_of_what_is_minimized(tmp_path):
    summary_file = tmp_path / "summary.json"
    rows = searched(
        tmp_path / "out", *BLOCKS[:2], "--minimize", "num_gpu_blocks", "--trials", 12, "--json", summary_file
    )
    assert json.loads(summary_file.read_text())["best"]["num_gpu_blocks"] == rows["num_gpu_blocks_override"].min()


@pytest.mark.slow
def test_more_trials_continue_where_fewer_ended(tmp_path, monkeypatch):
    first = searched(tmp_path, *BLOCKS, "--trials", 10)["num_gpu_blocks_override"].tolist()
    ran = []

    def noting(name: str, settings: Settings, work: Workload, goal: None) -> Outcome:
        ran.append(settings.num_gpu_blocks_override)
        return run_point(name, settings, work)

    monkeypatch.setattr("fragmeter.experiments.runs.sweeping.run_point", noting)
    again = searched(tmp_path, *BLOCKS, "--trials", 20)["num_gpu_blocks_override"].tolist()
    assert again[:10] == first
    assert ran == [blocks for blocks in dict.fromkeys(again) if blocks not in first]
    other = searched(tmp_path / "other", *BLOCKS, "--trials", 10, "--seed", 1)["num_gpu_blocks_override"].tolist()
    assert other != first


@pytest.mark.slow
def test_a_trial_that_cannot_be_run_is_reported_as_failed(tmp_path, capsys):
    tokens = ["--search", "policy=sglang,vllm-v1", "--search", "block_size=8:16", "--maximize", "request_throughput"]
    rows = searched(tmp_path, *tokens, "--trials", 12)
    assert (rows["error"].notna() == (rows["policy"] == "sglang")).all()
    assert rows["error"].notna().any()
    assert "sglang's tree has pages" in " ".join(capsys.readouterr().out.split())
    only = ["--search", "policy=sglang", *tokens[2:], "--trials", "3", "--out", str(tmp_path / "only")]
    assert status(["sweep", *SMALL, *only]) == MISTAKE
    assert "sglang's tree has pages" in capsys.readouterr().err


@pytest.mark.slow
def test_the_estimator_gets_every_result(monkeypatch, tmp_path):
    """A trial without a result counts as running for ever, and keeps the estimator away from its neighbours."""
    import optuna

    states = []

    def noting(study, trial, value=None, state=None, **more):
        states.append((trial.number, state))
        return tell(study, trial, value, state, **more)

    tell = optuna.Study.tell
    monkeypatch.setattr(optuna.Study, "tell", noting)
    tokens = ["--search", "policy=sglang,vllm-v1", "--search", "block_size=8:16", "--maximize", "request_throughput"]
    rows = searched(tmp_path, *tokens, "--trials", 12)
    failed = optuna.trial.TrialState.FAIL
    assert states == [(place, failed if error else None) for place, error in enumerate(rows["error"].notna())]


@pytest.mark.slow
def test_a_search_that_is_killed_leaves_the_same_bytes_with_any_number_of_jobs(tmp_path):
    search = ["--search", "request_rate=1.0:4.0", "--search", "block_size=1:64:log", "--num-prompts", "300"]
    tokens = command("sweep", *search, "--minimize", "mean_ttft_ms", "--trials", 4 * ROUND, "--jobs")
    in_peace, cut_short = tmp_path / "in-peace", tmp_path / "cut-short"
    assert run_here(*tokens[3:], 2, "--out", in_peace).returncode == DONE
    total = count(in_peace)
    once = kill_when(cut_short, ROUND // 2, [*tokens, "1", "--out", cut_short])
    twice = kill_when(cut_short, once + ROUND, [*tokens, "1", "--out", cut_short])
    assert 0 < once < twice < total
    assert run_here(*tokens[3:], 1, "--out", cut_short).returncode == DONE
    assert (cut_short / "sweep.parquet").read_bytes() == (in_peace / "sweep.parquet").read_bytes()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--search", "seed=0:9"], "sweep --search takes --maximize or --minimize, and not --grid"),
        ([*BLOCKS, "--minimize", "duration"], "sweep --search takes --maximize or --minimize"),
        ([*BLOCKS, "--grid", "seed=0:1"], "sweep --search takes --maximize or --minimize, and not --grid"),
        (["--grid", "seed=0:1", "--maximize", "duration"], "sweep takes --grid, or --search with --maximize"),
        ([], "sweep takes --grid, or --search with --maximize"),
        ([*BLOCKS, "--trials", "0"], "trials = 0: must be from 1"),
        ([*BLOCKS, "--at-most", "duration"], "at_most = 'duration': must be METRIC=VALUE"),
        ([*BLOCKS, "--at-most", "duration=3", "--at-most", "duration=4"], "gives duration a second time"),
        ([*BLOCKS[:3], "speed"], "maximize = 'speed': is not a number in the summary"),
        ([*BLOCKS, "--at-most", "speed=3"], "at_most = 'speed': is not a number in the summary"),
        (["--search", "block_size=0:9", *BLOCKS[2:]], "block_size = '0': "),
        (["--search", "policy=orka,vllm-v1", *BLOCKS[2:]], "policy = 'orka': one of"),
    ],
)
def test_refused_values(tokens, message, tmp_path, capsys):
    assert status(["sweep", *SMALL, *tokens, "--out", str(tmp_path / "out")]) == MISTAKE
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert status(["sweep", *SMALL, *BLOCKS, "--out", str(tmp_path / "out")]) == MISTAKE
    assert "pip install -e '.[optuna]'" in capsys.readouterr().err
