"""``fragmeter report``: a page of one run or several, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from page_tables import table_with

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,7,5\n0,9,3\n0.1,30,4\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Two policies on one load, one of them with a block map."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "three.csv").write_text(TRACE)
    for policy, flags in (("orca-max", ["--record-blocks"]), ("vllm-v1", [])):
        arguments = ["simulate", "--trace", folder / "three.csv", "--policy", policy, "--out", folder / policy, *flags]
        assert status([*map(str, arguments)]) == DONE
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A run on another load."""
    folder = tmp_path_factory.mktemp("other") / "orca-max"
    flags = ["--policy", "orca-max", "--num-prompts", "16", "--request-rate", "4", "--record-blocks"]
    assert status(["simulate", *flags, "--out", str(folder)]) == DONE
    return folder


def report(*tokens: object) -> int:
    return status(["report", *map(str, tokens)])


@pytest.mark.slow
def test_one_page_of_two_runs(results, tmp_path, capsys):
    page, data = tmp_path / "deep" / "report.html", tmp_path / "summary.json"
    assert report(results / "orca-max", results / "vllm-v1", "--out", page, "--json", data) == DONE
    printed = capsys.readouterr().out
    # Paragraphs are wrapped to the terminal.
    said = " ".join(printed.split())
    assert "orca-max, 3 requests in" in said and "with blocks" in said
    assert "vllm-v1 has no block map; simulate --record-blocks records one." in said
    assert printed.endswith(f"Report: {page}\n")
    summary = json.loads(data.read_text())
    assert [(run["name"], run["requests"], run["has_blocks"]) for run in summary["runs"]] == [
        ("orca-max", 3, True),
        ("vllm-v1", 3, False),
    ]
    html = page.read_text()
    for title in ("The block map", "Memory over time", "Runs of free blocks", "Requests over time"):
        assert html.count(f">{title}</h2>") == 1
    assert "Which serves three better: orca-max or vllm-v1?" in html


@pytest.mark.slow
def test_the_usage_on_the_page_is_that_of_the_summary(results, tmp_path):
    """Each usage of the page, with its mean and its span, beside ``summary.json`` of the same run."""
    page = tmp_path / "report.html"
    assert report(results / "orca-max", results / "vllm-v1", "--out", page) == DONE
    shown = table_with(page.read_text(), "KV cache usage")
    totals = {row["Run"]: row for row in table_with(page.read_text(), "Run", "Model")}
    assert len(shown) == 4
    for run in ("orca-max", "vllm-v1"):
        waste = json.loads((results / run / "summary.json").read_text())["waste"]
        start_s, end_s = waste["window_s"]
        for unit in ("by blocks", "by tokens"):
            (row,) = (row for row in shown if (row["Run"], row["KV cache usage"]) == (run, unit))
            for of in ("iterations", "time"):
                wanted = waste[f"mean_over_{of}_pct"]["usage"][unit.replace(" ", "_")]
                assert 0 < wanted <= 100
                assert float(row[f"Mean over {of} (%)"]) == pytest.approx(wanted, abs=0.051)
            assert row["Span"] == f"{start_s:g} to {end_s:,.1f} s"
        live = waste["mean_over_time_pct"]["buckets"]["live"]
        without_tokens = sum(float(totals[run][name]) for name in ("Waste of the KV cache (%)", "Idle (%)"))
        assert without_tokens == pytest.approx(100 - live, abs=0.11)


@pytest.mark.slow
def test_a_run_without_a_map_has_the_other_sections(results, tmp_path):
    assert report(results / "vllm-v1", "--out", tmp_path / "report.html") == DONE
    html = (tmp_path / "report.html").read_text()
    assert ">The block map</h2>" not in html and ">Runs of free blocks</h2>" not in html
    assert ">Requests over time</h2>" in html


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(results, tmp_path):
    for name in ("one.html", "two.html"):
        assert report(results / "orca-max", "--out", tmp_path / name) == DONE
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def damaged(results: Path, tmp_path: Path, name: str, content: bytes) -> Path:
    """A copy of a result of which one file has other content."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in (results / "orca-max").iterdir():
        (folder / path.name).write_bytes(content if path.name == name else path.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (
            "summary.json",
            b"{",
            "holds a damaged result, or another version's (summary.json: is not JSON); make it again by",
        ),
        ("summary.json", b"{}", "holds a damaged result"),
        ("run.json", b"[]", "holds a damaged result"),
        ("run.json", b'{"settings": {"policy": "orca-max"}}', "holds a damaged result"),
        ("residencies.parquet", b"PAR1", "holds a damaged result"),
        (
            "blocks.npz",
            b"no map",
            "is not a recorded block map; record it anew with fragmeter simulate --record-blocks",
        ),
    ],
)
def test_a_damaged_result_is_refused_in_a_line(results, tmp_path, capsys, name, content, complaint):
    folder = damaged(results, tmp_path, name, content)
    assert report(folder, "--out", tmp_path / "report.html") == MISTAKE
    said = capsys.readouterr().err
    assert complaint in said and str(folder) in said and said.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "name", ["requests.parquet", "residencies.parquet", "steps.parquet", "memory.parquet", "blocks.npz"]
)
def test_files_of_different_runs_are_refused_in_a_line(results, other, tmp_path, capsys, name):
    folder = damaged(results, tmp_path, name, (other / name).read_bytes())
    assert report(folder, "--out", tmp_path / "report.html") == MISTAKE
    said = capsys.readouterr().err
    assert f"{folder}: holds a damaged result" in said and said.count("\n") == 1


def test_a_place_below_a_file_is_refused_in_a_line(results, tmp_path, capsys):
    (tmp_path / "file").write_bytes(b"")
    place = tmp_path / "file" / "below"
    for flags in (["--out", place], ["--out", tmp_path / "page.html", "--perfetto", place]):
        assert report(results / "orca-max", *flags) == MISTAKE
        said = capsys.readouterr().err
        assert f"{place}: cannot be written" in said and said.count("\n") == 1


def test_a_result_of_another_version_is_refused_in_a_line(results, tmp_path, capsys):
    content = io.BytesIO()
    pd.read_parquet(results / "orca-max" / "residencies.parquet").drop(columns="begun").to_parquet(content)
    folder = damaged(results, tmp_path, "residencies.parquet", content.getvalue())
    assert report(folder, "--out", tmp_path / "report.html") == MISTAKE
    said = capsys.readouterr().err
    assert "or another version's (residencies.parquet: has no column begun); make it again by" in said


@pytest.mark.parametrize(
    ("folders", "complaint"),
    [
        ([], "folders = 0: name 1 to 4 folders that simulate --out has written"),
        (["a", "b", "c", "d", "e"], "folders = 5: name 1 to 4 folders"),
        (["nowhere"], "nowhere: is not a result folder (No such file or directory: run.json); make one by"),
    ],
)
def test_mistakes_are_one_line(folders, complaint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report(*folders) == MISTAKE
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_block_map_needs_a_place(capsys):
    assert status(["simulate", "--num-prompts", "3", "--request-rate", "1", "--record-blocks"]) == MISTAKE
    assert "record_blocks = True: has no place; give --out" in capsys.readouterr().err
