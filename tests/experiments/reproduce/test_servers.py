"""Measured servers beside their simulation: requests from figures, and constants that come back."""

from __future__ import annotations

import json
import runpy

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.reproduce import servers
from fragmeter.experiments.reproduce.servers import ServerRun, facts, fit_constants, shared_prefix_workload
from fragmeter.sim import simulate
from fragmeter.sim.cost import ServerConstants
from fragmeter.sim.metrics.summary import summary
from paths import ROOT

STAGE = next(fact for fact in facts()["runs"] if fact["name"] == "h100-80gb llama-2-7b roleplay 6/s")
SHORT = STAGE | {"shared_prefix": STAGE["shared_prefix"] | {"requests": 200}}


def test_requests_are_those_of_the_figures():
    about = STAGE["shared_prefix"]
    work = shared_prefix_workload("x", **about)
    prompts = about["system_prompts"] * about["users"]
    assert len(work) == 7200 and set(work.output_tokens) == {251}
    lengths = work.prompt_tokens[:prompts]
    assert 770 <= lengths.min() and lengths.max() <= 806 and np.median(lengths) == pytest.approx(784, abs=1)
    assert lengths.mean() == pytest.approx(785.84, abs=1.5)
    run = simulate(ServerRun(SHORT).settings, ServerRun(SHORT).workload)
    # After the first use of each prompt only its last block is computed, of 16 tokens at most.
    assert summary(run)["prefix_cache"]["hit_rate"] == pytest.approx(1 - (50 * 785 + 150 * 8.5) / (200 * 785), abs=0.05)


def test_planted_constants_come_back():
    planted = ServerConstants(outside_ms=9.0, step_us=350.0)
    run = ServerRun(SHORT)
    run.measured = run.simulated(planted)
    found = fit_constants([run])
    assert found.step_us == pytest.approx(350, rel=0.03)
    assert found.outside_ms == pytest.approx(9, abs=0.3)


def test_constants_are_not_negative():
    run = ServerRun(SHORT)
    fast = run.simulated(ServerConstants())
    run.measured = {name: value * 0.8 for name, value in fast.items()}
    assert fit_constants([run]) == ServerConstants(0.0, 0.0)


def test_every_run_has_a_source_and_its_latencies():
    assert len(facts()["runs"]) == 17
    for fact in facts()["runs"]:
        assert fact["source"] and {"ttft_ms", "e2el_ms"} <= set(fact["measured"])


def test_the_command_says_what_is_fitted_and_what_is_predicted(tmp_path, monkeypatch, capsys):
    kept = [SHORT, SHORT | {"name": "h100-80gb other 6/s"}, facts()["runs"][0]]
    monkeypatch.setattr(servers, "facts", lambda: {"notes": [], "runs": kept})
    target = tmp_path / "found.json"
    assert status(["reproduce", "servers", "--json", str(target)]) == DONE
    found = json.loads(target.read_text())
    kinds = {(row["run"], row["constants"]): row["kind"] for row in found["rows"]}
    assert kinds == {
        (SHORT["name"], "nothing"): "predicted",
        ("h100-80gb other 6/s", "nothing"): "predicted",
        (SHORT["name"], "h100 llama-2-7b"): "fitted",
        ("h100-80gb other 6/s", "h100 llama-2-7b"): "predicted",
    }
    assert found["left_out"] == [kept[2]["name"]]
    for row in found["rows"]:
        assert row["error"] == pytest.approx(row["simulated"] / row["measured"] - 1)


def test_the_page_of_the_documentation_has_every_run(tmp_path):
    found = servers.compare_servers(None)
    text = runpy.run_path(str(ROOT / "docs" / "servers.py"))["page"](json.loads(json.dumps(found)))
    for name in {row["run"] for row in found["rows"]}:
        assert text.count(f"| {name} | ") == 3
    assert (ROOT / "docs" / "servers.md").read_text("utf-8").count("| pass |") == 15


def test_a_folder_without_the_requests_is_one_line(tmp_path, capsys):
    assert status(["reproduce", "servers", "--runs", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "rtx4090_llama31_8b_requests.csv.gz" in error and error.count("\n") == 1
