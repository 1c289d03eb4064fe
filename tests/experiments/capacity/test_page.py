"""The files of a plan: the flat table of candidates, and the sections of the page."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.output import frames as pd

PLAN = ["plan", "--model", "llama-3.1-8b", "--goodput", "ttft:500", "tpot:50", "--num-prompts", "100", "--seeds", "1"]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Four candidates, two of which are too small for the model."""
    folder = tmp_path_factory.mktemp("plan") / "out"
    axes = ["--gpu", "h200,rtx-4090", "--max-num-seqs", "none,8", "--max-model-len", "131072"]
    assert status([*PLAN, *axes, "--request-rate", "12", "--jobs", "1", "--out", str(folder)]) == DONE
    return folder


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "plan.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_table_has_what_a_planner_reads(out):
    rows, candidates = rows_of(out), json.loads((out / "plan.json").read_text())["candidates"]
    assert list(rows[0]) == [
        "gpu", "max_num_seqs", "replicas_low", "replicas_high", "gpus_high", "bill_low_per_hour", "bill_high_per_hour",
        "cost_per_million_tokens", "currency", "request_rate_per_replica", "headroom", "rate_is_known", "limit", "limit_cause",
        "attainment", "p90_ttft_ms", "p90_tpot_ms", "kv_cache_pct", "error",
    ]  # fmt: skip
    for row, each in zip(rows, candidates, strict=True):
        assert (row["gpu"], row["max_num_seqs"]) == (each["candidate"]["gpu"], each["candidate"]["max_num_seqs"])
        if "bill" in each:
            cost = each["bill"]
            assert [int(row["replicas_low"]), int(row["replicas_high"])] == [cost["fewest_replicas"], cost["replicas"]]
            assert float(row["bill_high_per_hour"]) == cost["per_hour"] and row["error"] == ""
            assert (float(row["attainment"]), row["limit_cause"]) == (each["attained"], each["limit"]["cause"])
            assert row["currency"] == "USD" and float(row["headroom"]) >= 0
        else:
            assert row["error"] == each["refused"] and row["replicas_low"] == row["headroom"] == ""
    assert ["bill" in each for each in candidates] == [True, True, False, False]


def test_parquet_has_the_same_columns(out):
    assert list(pd.read_parquet(out / "plan.parquet").columns) == list(rows_of(out)[0])


def test_candidates_that_all_fail_have_a_table(tmp_path):
    assert status([*PLAN, "--gpu", "rtx-4090", "--max-model-len", "131072", "--out", str(tmp_path / "out")]) == DONE
    (row,) = rows_of(tmp_path / "out")
    assert list(row) == ["gpu", "error"] and "KV cache" in row["error"]


def test_a_single_candidate_has_no_others(out, tmp_path):
    assert status([*PLAN, "--gpu", "h200", "--request-rate", "12", "--out", str(tmp_path / "out")]) == DONE
    assert "Other candidates" not in (tmp_path / "out" / "plan.html").read_text()
    assert "Other candidates" in (out / "plan.html").read_text()
