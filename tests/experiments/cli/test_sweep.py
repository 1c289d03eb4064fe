"""``fragmeter sweep``: a grid worked out by hand, rows that are what simulate says, and sweeps that are cut short."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from cli_runs import command, run_here
from fragmeter.experiments.cli.app import DONE, FAULT, MISTAKE, status
from fragmeter.experiments.runs.grid import axes, points
from fragmeter.experiments.runs.inputs import Inputs
from fragmeter.experiments.runs.sweeping import Outcome, run_point
from fragmeter.sim.config.settings import Settings
from fragmeter.sim.metrics.registry import metric_text
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.workload import Workload
from killing import count, kill_when
from paths import DATA

SMALL = ["--num-prompts", "20", "--request-rate", "2"]
#: Runs that need not be spread over processes, which take longer to start.
HERE = ["--jobs", "1"]


def swept(folder: Path, *tokens: object) -> pd.DataFrame:
    """The rows of a sweep that is run here."""
    assert status(["sweep", *SMALL, *HERE, *map(str, tokens), "--out", str(folder)]) == DONE
    return pd.read_parquet(folder / "sweep.parquet")


class TestGrid:
    def test_an_object_of_json_is_one_value(self):
        drafts = '{"method": "ngram", "synthetic_acceptance_rates": [0.7, 0.4], "num_speculative_tokens": 2}'
        assert axes([f"speculative_config=none,{drafts}"]) == {"speculative_config": ["none", drafts]}

    def test_values_and_ranges(self):
        texts = ["block_size=8,16,32", "--request-rate=0.1:0.5:0.1", "seed=0:2,7", "model=opt-13b, a:b"]
        assert axes(texts) == {
            "block_size": ["8", "16", "32"],
            "request_rate": ["0.1", "0.2", "0.3", "0.4", "0.5"],
            "seed": ["0", "1", "2", "7"],
            "model": ["opt-13b", "a:b"],
        }

    def test_every_combination_the_last_axis_first(self):
        base = Inputs()
        found = points(base, axes(["quantization=none,awq", "seed=1,2"]))
        assert [tuple(point.axis_values.values()) for point in found] == [
            ("none", "1"), ("none", "2"), ("awq", "1"), ("awq", "2"),
        ]  # fmt: skip
        assert [(p.inputs.settings.quantization, p.inputs.settings.seed) for p in found] == [
            (None, 1), (None, 2), ("awq", 1), ("awq", 2),
        ]  # fmt: skip
        assert base == Inputs()

    def test_settings_that_need_each_other_are_checked_together(self):
        (point,) = points(Inputs(), axes(["think_time=1.5", "max_concurrency=3"]))
        assert (point.inputs.pacing.think_time, point.inputs.pacing.max_concurrency) == (1.5, 3)

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (["block_size"], "must be NAME=VALUE,VALUE or NAME=FIRST:LAST:STEP"),
            (["block_size="], "must be NAME=VALUE,VALUE"),
            (["blocksize=8"], "blocksize is not a setting of fragmeter simulate"),
            (["seed=1", "--seed=2"], "gives seed a second time"),
            (["seed=5:1"], "the range 5:1 has no values"),
            (["seed=1:5:0"], "seed = '1:5:0': "),
            (["seed=0:nan"], "seed = '0:nan': "),
            (["seed=0:1000000000"], "or too many"),
            (["seed=0:9999", "block_size=1:9999"], "are more points than 1000000"),
            (["block_size=8,many"], "block_size = 'many': "),
            (["policy=orka"], "policy = 'orka': one of"),
        ],
    )
    def test_what_cannot_be_read_is_refused_before_anything_runs(self, texts, message):
        with pytest.raises(SettingError, match=message):
            points(Inputs(), axes(texts))


@pytest.mark.slow
def test_a_row_is_what_simulate_says(tmp_path, capsys):
    rows = swept(tmp_path, "--grid", "policy=vllm-v1,orca-max", "--grid", "seed=3:4", "--grid", "block_size=none,8")
    assert list(zip(rows["policy"], rows["seed"])) == [
        *[("vllm-v1", 3)] * 2, *[("vllm-v1", 4)] * 2, *[("orca-max", 3)] * 2, *[("orca-max", 4)] * 2,
    ]  # fmt: skip
    assert rows["block_size"].tolist() == [16, 8] * 4
    # The same requests, whatever the policy.
    assert rows.groupby("seed")["workload_sha256"].nunique().tolist() == [1, 1]
    capsys.readouterr()
    last_point = ["--policy", "orca-max", "--seed", "4", "--block-size", "8"]
    assert status(["simulate", *SMALL, *last_point, "--json", "-"]) == DONE
    summary = json.loads(capsys.readouterr().out)
    last = rows.iloc[-1]
    for name in ("duration", "completed", "p99_ttft_ms", "mean_batch", "num_gpu_blocks"):
        assert last[name] == summary[name]
    live = summary["waste"]["mean_over_iterations_pct"]["buckets"]["live"]
    assert last["waste.mean_over_iterations_pct.buckets.live"] == live


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(tmp_path, monkeypatch):
    swept(tmp_path, "--grid", "seed=0:3")
    before = (tmp_path / "sweep.parquet").read_bytes()
    ran = []

    def noting(name: str, settings: Settings, work: Workload, goal: None) -> Outcome:
        ran.append(settings.seed)
        return run_point(name, settings, work)

    monkeypatch.setattr("fragmeter.experiments.runs.sweeping.run_point", noting)
    swept(tmp_path, "--grid", "seed=0:3")
    assert ran == [] and (tmp_path / "sweep.parquet").read_bytes() == before
    # A wider grid runs what is new; a damaged point is run again.
    parts = {json.loads(part.read_text())["asked"]["seed"]: part for part in (tmp_path / "points").iterdir()}
    parts["2"].write_text(parts["2"].read_text()[:100])
    assert swept(tmp_path, "--grid", "seed=0:4")["seed"].tolist() == [0, 1, 2, 3, 4]
    assert ran == [2, 4]


def test_another_file_of_the_same_name_is_another_point(tmp_path):
    config = json.loads((DATA / "config.json").read_text())
    model = tmp_path / "config.json"
    blocks = []
    for layers in (config["num_hidden_layers"], config["num_hidden_layers"] // 2):
        model.write_text(json.dumps(config | {"num_hidden_layers": layers}))
        grid = ["--grid", "seed=0", "--model", model, "--cost", "roofline", "--gpu", "h200"]
        blocks.append(swept(tmp_path / "out", *grid)["num_gpu_blocks"].item())
    assert blocks[1] > blocks[0]


def test_a_point_that_cannot_be_run_is_a_row_that_says_why(tmp_path, capsys):
    rows = swept(tmp_path, "--grid", "cost=paper,roofline", "--gpu", "h100-80gb")
    assert "is fitted to opt-13b on one a100-40gb" in rows["error"][0]
    assert rows["completed"].isna().tolist() == [True, False]
    assert "Failed: 1 points" in capsys.readouterr().out


def test_goodput_is_shown_where_objectives_are_given(tmp_path, capsys):
    rows = swept(tmp_path / "without", "--grid", "seed=0")
    assert "goodput," not in capsys.readouterr().out and "request_goodput" not in rows
    rows = swept(tmp_path / "with", "--grid", "seed=0", "--goodput", "e2el:1000")
    shown = capsys.readouterr().out
    assert 0 < rows["request_goodput"].item() < rows["request_throughput"].item()
    assert "goodput," in shown and metric_text("request_goodput", rows["request_goodput"].item()) in shown


def test_where_no_point_can_be_run_the_first_says_why(tmp_path, capsys):
    tokens = ["sweep", *SMALL, *HERE, "--grid", "seed=0:1", "--cost", "paper", "--gpu", "h100-80gb"]
    assert status([*tokens, "--out", str(tmp_path)]) == MISTAKE
    assert "is fitted to opt-13b" in capsys.readouterr().err
    assert not (tmp_path / "sweep.parquet").exists()


def test_a_fault_of_ours_names_its_point(tmp_path, monkeypatch, capsys):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("no such slot")

    monkeypatch.setattr("fragmeter.experiments.runs.sweeping.simulate", broken)
    assert status(["sweep", *SMALL, *HERE, "--grid", "seed=7", "--out", str(tmp_path)]) == FAULT
    assert "{'seed': '7'}: KeyError: 'no such slot'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--address", "localhost:1"], "address = 'localhost:1': must be tcp://HOST:PORT"),
        (["--jobs", "0"], "jobs = '0'"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_refused_values(tokens, message, tmp_path, capsys):
    assert status(["sweep", "--grid", "seed=0:1", *tokens, "--out", str(tmp_path / "out")]) == MISTAKE
    assert message in capsys.readouterr().err


def test_a_cluster_needs_dask(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    tokens = ["--address", "tcp://localhost:1", "--out", str(tmp_path)]
    assert status(["sweep", "--grid", "seed=0:1", *SMALL, *tokens]) == MISTAKE
    assert "pip install -e '.[dask]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cluster_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fragmeter.experiments.runs.parallel._ANSWER_S", 0.5)
    pytest.importorskip("distributed")
    tokens = ["--address", "tcp://localhost:1", "--out", str(tmp_path)]
    assert status(["sweep", "--grid", "seed=0:1", *SMALL, *tokens]) == MISTAKE
    assert "address = 'tcp://localhost:1': no cluster of Dask answers there" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("")
    assert status(["sweep", "--grid", "seed=0:1", "--out", str(tmp_path)]) == MISTAKE
    assert "holds thesis.tex, which is not a file of a sweep" in capsys.readouterr().err


def killed_twice(folder: Path, jobs: int, *grid: str) -> None:
    """A sweep that is killed twice and started again leaves the bytes of one that was left in peace."""
    tokens = command("sweep", *grid, "--jobs", jobs, "--out")
    in_peace, cut_short = folder / "in-peace", folder / "cut-short"
    assert run_here(*tokens[3:], in_peace).returncode == DONE
    total = count(in_peace)
    once = kill_when(cut_short, total // 5, [*tokens, cut_short])
    twice = kill_when(cut_short, once + total // 5, [*tokens, cut_short])
    assert 0 < once < twice < total
    kept = {part.name: part.stat().st_mtime_ns for part in cut_short.glob("points/*.json")}
    assert run_here(*tokens[3:], cut_short).returncode == DONE
    for name, when in kept.items():
        assert (cut_short / "points" / name).stat().st_mtime_ns == when
    assert (cut_short / "sweep.parquet").read_bytes() == (in_peace / "sweep.parquet").read_bytes()


@pytest.mark.slow
def test_a_sweep_that_is_killed_twice_leaves_the_same_bytes(tmp_path):
    killed_twice(tmp_path, 1, "--num-prompts", "2000", "--grid", "request_rate=1:3", "--grid", "seed=0:4")


@pytest.mark.slow
def test_a_sweep_of_200_points_that_is_killed_twice_leaves_the_same_bytes(tmp_path):
    grid = ["--grid", "request_rate=1:5", "--grid", "block_size=8,16", "--grid", "seed=0:19"]
    killed_twice(tmp_path, 2, "--num-prompts", "500", *grid)


@pytest.mark.slow
def test_a_worker_of_a_cluster_that_is_killed_costs_no_point(tmp_path):
    """The scheduler gives its points to others; the bytes are those of a sweep on this machine."""
    distributed = pytest.importorskip("distributed")
    grid = ["--num-prompts", "5000", "--grid", "request_rate=1:3", "--grid", "seed=0:7"]
    tokens = command("sweep", *grid, "--out")
    subprocess.run([*tokens, tmp_path / "here"], check=True, stdout=subprocess.DEVNULL)
    on_cluster = tmp_path / "on-cluster"
    # No nanny, which would start another in its stead.
    with distributed.LocalCluster(n_workers=0, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        join = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-nanny", "--no-dashboard"]
        workers = [subprocess.Popen([*join, "--nthreads", "1"], stderr=subprocess.DEVNULL) for _ in range(3)]
        try:
            sweep = subprocess.Popen([*tokens, on_cluster, "--address", address])
            while sweep.poll() is None and count(on_cluster) < 4:
                time.sleep(0.01)
            workers[0].kill()
            finished = count(on_cluster)
            assert sweep.wait(timeout=300) == DONE
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    assert 4 <= finished < 24 == count(on_cluster)
    assert (on_cluster / "sweep.parquet").read_bytes() == (tmp_path / "here" / "sweep.parquet").read_bytes()
