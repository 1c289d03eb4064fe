"""``fragmeter explore``: its page, what it refuses, and what an interruption leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli_runs import command
from fragmeter.experiments.cli.app import DONE, MISTAKE, status

SMALL = ["explore", "--num-prompts", "20", "--request-rate", "2", "--input-len", "40", "--output-len", "30"]
ONE = ["--grid", "policy=orca", "--grid", "max_tokens=64", "--num-gpu-blocks-override", "200"]


def explored(folder: Path, *tokens: str, jobs: int = 1) -> dict:
    files = ["--out", str(folder / "page.html"), "--json", str(folder / "page.json"), "--jobs", str(jobs)]
    assert status([*SMALL, *tokens, *files]) == DONE
    return json.loads((folder / "page.json").read_text())


@pytest.mark.slow
def test_the_page_and_its_data(tmp_path):
    found = explored(tmp_path, *ONE, "--vary", "block_size=16,32")
    assert found == {
        "page": str(tmp_path / "page.html"), "states": 2, "runs": 2, "failed": 0, "policies": ["orca"],
        "axes": {"max_tokens": ["64"], "block_size": ["16", "32"]},
    }  # fmt: skip
    page = (tmp_path / "page.html").read_text()
    assert "Where does the KV cache go?" in page and len(page) < 150_000


@pytest.mark.slow
def test_workers_do_not_change_the_bytes(tmp_path):
    pages = []
    for jobs in (1, 2):
        explored(tmp_path, *ONE, "--vary", "block_size=16,32", jobs=jobs)
        pages.append((tmp_path / "page.html").read_bytes())
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_policies_that_do_not_read_a_slider_are_run_once_for_it(tmp_path):
    axes = ["--grid", "policy=orca,orca-pow2", "--grid", "max_tokens=64,128", "--block-size", "16"]
    found = explored(tmp_path, *axes, "--num-gpu-blocks-override", "200")
    assert (found["states"], found["runs"]) == (2, 3)


def test_a_run_that_cannot_be_made_has_its_reason_on_the_page(tmp_path):
    found = explored(tmp_path, *ONE[:4], "--vary", "num_gpu_blocks_override=200,2", "--block-size", "16")
    assert (found["runs"], found["failed"]) == (2, 1)
    assert "the pool holds none of the requests" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["--vary", "nothing=1"], "vary = 'nothing=1': nothing is not a setting"),
        (["--grid", "pool_tokens=x"], "grid = 'pool_tokens=x': must be tokens, a whole number"),
        (["--grid", "policy=orca", "--grid", "max_tokens=10"], "max_tokens = 10: the longest output has 30 tokens"),
        (["--grid", "policy=vllm-sosp23", "--max-tokens", "64"], "vllm-sosp23 reserves nothing by it"),
        (["--grid", "policy=vllm-v1", "--vary", "block_size=16,0"], "block_size"),
        (
            ["--grid", "policy=orca", "--max-tokens", "64", "--num-gpu-blocks-override", "2", "--block-size", "16"],
            "holds none of the requests",
        ),
    ],
)
def test_mistakes_are_one_line_and_leave_no_page(tokens, text, tmp_path, capsys):
    assert status([*SMALL, *tokens, "--out", str(tmp_path / "page.html")]) == MISTAKE
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_an_interruption_leaves_the_former_page(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("former")
    process = subprocess.Popen(
        command("explore", "--out", page, "--jobs", "2"), stderr=subprocess.PIPE, start_new_session=True
    )
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert len(complaint.splitlines()) <= 1
    assert page.read_text() == "former" and [*tmp_path.iterdir()] == [page]
