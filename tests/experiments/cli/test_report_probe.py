"""``fragmeter report`` of the file that ``fragmeter.probe`` writes on a server."""

from __future__ import annotations

import json

import pytest

from fragmeter.experiments.cli.app import MISTAKE, status
from fragmeter.sim.policy import vllm_real
from paths import ROOT

PROBE = ROOT / "tests" / "data" / "probe" / "turns.jsonl"


@pytest.mark.slow
def test_the_page_shows_the_measured_waste(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert status(["report", str(PROBE), "--out", str(page), "--json", str(tmp_path / "data.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "vLLM 0.33.0, 12 requests in 2.0 s" in out
    assert "measured on a live server, 34.7 % of the KV cache held tokens (mean over time)" in out
    text = page.read_text()
    assert "vLLM 0.33.0: measured on a live server by fragmeter.probe." in text
    assert "From when the API server gets a request." in text
    assert "numbers of a simulation alone" not in text
    assert json.loads((tmp_path / "data.json").read_text())["runs"][0]["requests"] == 12


@pytest.mark.slow
def test_a_server_beside_a_simulation(tmp_path, capsys):
    run = ["simulate", "--num-prompts", "20", "--request-rate", "5", "--out", str(tmp_path / "run")]
    assert status(run) == 0
    page = tmp_path / "page.html"
    assert status(["report", str(PROBE), str(tmp_path / "run"), "--out", str(page)]) == 0
    capsys.readouterr()
    text = page.read_text()
    assert "Which serves turns.jsonl and Synthetic sharegpt better: turns.jsonl or run?" in text
    assert "These runs served different requests; compare them with care." in text


@pytest.mark.slow
def test_the_rest_of_a_killed_server_is_named(tmp_path, capsys):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(PROBE.read_bytes()[:-3000])
    assert status(["report", str(cut), "--out", str(tmp_path / "page.html")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "more requests had not finished; the file ends early, as that of a killed server does" in out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prompt_tokens\n7\n", ", line 1: is no JSON; record it anew with fragmeter.probe"),
        (PROBE.read_text().replace('"free":5', '"free":4', 1), ", line 2: free = 4: the block tables leave 5; record"),
    ],
)
def test_a_mistake_is_one_line(text, complaint, tmp_path, capsys):
    path = tmp_path / "probe.jsonl"
    path.write_text(text)
    assert status(["report", str(path), "--out", str(tmp_path / "page.html")]) == MISTAKE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"fragmeter: {path}{complaint}")
    assert not (tmp_path / "page.html").exists()


def test_a_policy_that_needs_vllm_names_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(vllm_real, "find_spec", lambda name: None)
    assert status(["simulate", "--policy", "vllm-real", "--num-prompts", "5", "--request-rate", "1"]) == MISTAKE
    captured = capsys.readouterr()
    assert captured.err == (
        "fragmeter: policy = 'vllm-real': the package vllm is not installed; pip install vllm==0.33.0\n"
    )
