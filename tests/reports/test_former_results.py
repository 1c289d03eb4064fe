"""Result folders of the schema version before: ``tests/data/result_v1`` was written by fragmeter 0.1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.reports.data.results import read_result
from fragmeter.sim.cost import shares
from fragmeter.sim.metrics.result import FORMER_TABLES
from paths import DATA

FORMER = DATA / "result_v1"
#: The run that it is of.
RUN = (
    *("--model", "toy-opt", "--num-gpu-blocks-override", "40", "--max-model-len", "300", "--cost", "roofline"),
    *("--num-prompts", "8", "--request-rate", "4"),
)


@pytest.fixture
def former(tmp_path) -> Path:
    return shutil.copytree(FORMER, tmp_path / "former")


def test_tables_and_columns_are_read_under_the_names_of_today():
    result = read_result(FORMER)
    written = {name: pd.read_parquet(FORMER / f"{name}.parquet") for name in ("stays", "steps")}
    assert result.about["schema_version"] == 1
    assert result.residencies["end_ticks"].tolist() == written["stays"]["end_ticks"].tolist()
    assert result.steps["batch_size"].tolist() == written["steps"]["width"].tolist()
    assert "width" not in result.steps


@pytest.mark.slow
def test_a_report_and_a_comparison_take_them(former, tmp_path, capsys):
    assert status(["report", str(former), "--out", str(tmp_path / "page.html")]) == DONE
    assert status(["compare", str(former), str(former)]) == DONE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("version", [0, 3, "2", None])
def test_another_version_is_refused_in_one_line_that_names_both(former, version, capsys):
    about = json.loads((former / "run.json").read_text())
    (former / "run.json").write_text(json.dumps(about | {"schema_version": version}))
    assert status(["compare", str(former), str(former)]) == MISTAKE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"schema_version = {version}: this fragmeter reads 1 and 2" in lines[0]


def test_a_new_result_replaces_them(former):
    assert status(["simulate", *RUN, "--out", str(former)]) == DONE
    assert (former / "residencies.parquet").is_file()
    assert not any((former / f"{name}.parquet").exists() for name in FORMER_TABLES.values())
    assert json.loads((former / "run.json").read_text())["schema_version"] == 2


def test_the_same_run_of_today_has_the_same_numbers(former, tmp_path, monkeypatch):
    # 0.1 assumed 1 us of every kernel; tables say more.
    monkeypatch.setattr(shares, "SMALL_KERNEL_US", 1.0)
    monkeypatch.setattr(shares, "GEMM_US", 1.0)
    assert status(["simulate", *RUN, "--out", str(tmp_path / "new")]) == DONE
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (former, tmp_path / "new")]
    for mean in ("mean_over_iterations_pct", "mean_over_time_pct"):
        assert summaries[0]["waste"][mean].pop("popular_view")
        # Since written beside the views.
        assert summaries[1]["waste"][mean].pop("usage")["by_tokens"] == summaries[0]["waste"][mean]["buckets"]["live"]
    assert summaries[1].pop("request_throughput_while_arriving") > summaries[1]["request_throughput"]
    assert {summaries[1].pop(name) for name in ("sharing", "kv_offloading", "speculative_decoding")} == {None}
    assert summaries[0] == summaries[1]
