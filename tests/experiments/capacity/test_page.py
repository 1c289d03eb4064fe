"""The files of a plan: the flat table of candidates, and the sections of the page."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.reports.figures.plan import cost_bars
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


@pytest.mark.slow
def test_the_table_has_what_a_planner_reads(out):
    rows, plan = rows_of(out), json.loads((out / "plan.json").read_text())
    candidates = plan["candidates"]
    assert list(rows[0]) == [
        "gpu", "max_num_seqs", "replicas_low", "replicas_high", "prefill_replicas_high", "gpus_high", "bill_low_per_hour", "bill_high_per_hour",
        "cost_per_million_tokens", "currency", "request_rate_per_replica", "headroom", "headroom_with_confidence", "rate_is_known",
        "request_rate_bound", "cost_bound", "limit", "limit_cause", "attainment", "p90_ttft_ms", "p90_tpot_ms", "kv_cache_pct", "error",
    ]  # fmt: skip
    for row, each in zip(rows, candidates, strict=True):
        assert (row["gpu"], row["max_num_seqs"]) == (each["candidate"]["gpu"], each["candidate"]["max_num_seqs"])
        if "bill" in each:
            cost = each["bill"]
            assert [int(row["replicas_low"]), int(row["replicas_high"])] == [cost["fewest_replicas"], cost["replicas"]]
            assert float(row["bill_high_per_hour"]) == pytest.approx(cost["per_hour"]) and row["error"] == ""
            assert (float(row["attainment"]), row["limit_cause"]) == (each["attained"], each["limit"]["cause"])
            assert row["currency"] == "USD" and (
                float(row["headroom"]) >= 0 if row["headroom"] else row["rate_is_known"] == "False"
            )
            fleet = each["fleet"]
            sure = fleet["sure_rate"] if row["rate_is_known"] == "True" and fleet["seeds"] > 1 else None
            with_confidence = row["headroom_with_confidence"]
            assert (with_confidence == "") == (sure is None)
            if sure is not None:
                assert float(with_confidence) == pytest.approx(sure / plan["wanted_request_rate"] - 1)
            assert all(len(value.replace(".", "").lstrip("0")) <= 12 for value in row.values() if value[:1].isdigit())
        else:
            assert row["error"] == each["refused"] and row["replicas_low"] == row["headroom"] == ""
    assert ["bill" in each for each in candidates] == [True, True, False, False]


def test_parquet_has_the_same_columns(out):
    assert list(pd.read_parquet(out / "plan.parquet").columns) == list(rows_of(out)[0])


@pytest.mark.slow
def test_candidates_that_all_fail_have_a_table(tmp_path):
    assert status([*PLAN, "--gpu", "rtx-4090", "--max-model-len", "131072", "--out", str(tmp_path / "out")]) == DONE
    (row,) = rows_of(tmp_path / "out")
    assert list(row) == ["gpu", "error"] and "KV cache" in row["error"]


@pytest.mark.slow
def test_a_single_candidate_has_no_others(out, tmp_path):
    assert status([*PLAN, "--gpu", "h200", "--request-rate", "12", "--out", str(tmp_path / "out")]) == DONE
    assert "Other candidates" not in (tmp_path / "out" / "plan.html").read_text()
    assert "Other candidates" in (out / "plan.html").read_text()


@pytest.mark.slow
def test_the_costs_of_bursts_are_marked_in_pictures(tmp_path):
    """At 3 requests/s runs of 150 requests are a load on an H200, and a burst on an A100, which answers later."""
    burst = [*PLAN[:-4], "--num-prompts", "150", "--seeds", "1", "--gpu", "a100-80gb,h200", "--request-rate", "3"]
    assert status([*burst, "--jobs", "1", "--out", str(tmp_path / "out")]) == DONE
    page = (tmp_path / "out" / "plan.html").read_text()
    assert [(row["gpu"], row["cost_bound"]) for row in rows_of(tmp_path / "out")] == [
        ("h200", ""),
        ("a100-80gb", "at least"),
    ]
    specs = [
        json.loads(text)
        for text in re.findall(r'<script type="application/json" id="spec-\d+">(.*?)</script>', page, re.S)
    ]
    costs, *_ = (each["data"] for each in specs)
    assert costs[0]["marker"]["pattern"]["shape"] == ["", "/"] and costs[0]["customdata"] == ["", "at least "]
    names = [trace["name"] for each in specs for trace in each["data"] if "name" in trace]
    assert "h200" in names and "a100-80gb (lower bound)" in names


@pytest.mark.parametrize("bound", [False, True])
def test_only_a_lower_bound_is_hatched_and_has_no_upper_end(bound):
    row = {"candidate": "h200", "cost": 4.0, "lowest": 2.0, "highest": None if bound else 5.0}
    figure = cost_bars([row], "EUR per hour")
    assert figure.layout.meta["numbers"]["rows"] == [["h200", 4.0, 2.0, None if bound else 5.0]]
    (bar,) = figure.data
    assert bar.error_x.array == ((0.0,) if bound else (1.0,))
    assert (bar.marker.pattern.shape == ("/",)) == bound == ("lower bound" in figure.layout.title.subtitle.text)


def test_a_long_name_has_short_lines_beside_its_bar():
    name = "h100-80gb, tensor_parallel_size=4, checkpoint=RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"
    rows = [{"candidate": each, "cost": 4.0, "lowest": 4.0, "highest": 4.0} for each in ("h200", name)]
    figure = cost_bars(rows, "EUR per hour")
    short, long = figure.layout.yaxis.ticktext
    assert short == "h200" and all(len(line) <= 26 for line in long.split("<br>"))
    assert long.replace("<br>", "").replace(" ", "") == name.replace(" ", "")
    assert figure.layout.yaxis.tickvals == figure.data[0].y == ("h200", name)
    assert figure.layout.height >= 130 + 30 + 14 * (1 + long.count("<br>"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "source"),
    [
        ([], "drawn from a summary of 84,226 requests, vllm_sosp23_sharegpt_opt (sosp-ae-39/sosp-ae-astra, "),
        (["--dataset", "alpaca"], "drawn from a summary of 52,002 requests, alpaca52k_opt (Stanford Alpaca, "),
        (["--trace", "azure.csv"], "the file azure.csv (--trace), format: Azure LLM inference"),
    ],
)
def test_the_source_of_the_requests_is_named(load, source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"2023-11-16 18:15:{place % 60:02},{500 + place},50\n" for place in range(60))
    Path("azure.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    assert status([*PLAN, "--gpu", "h200", *load, "--request-rate", "12", "--out", "out"]) == DONE
    assert f"Requests: {source}" in " ".join(capsys.readouterr().out.split())
    assert json.loads(Path("out/plan.json").read_text())["requests"].startswith(source)
    for name in ("plan.md", "plan.html"):
        assert f"Requests: {source.split(' (')[0]}" in Path("out", name).read_text()
