"""Captured against eager: on the CPU a capture is the call itself, replayed into the same result."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from fragmeter.gpu.check import graph_checks, graphs
from fragmeter.gpu.devices import devices, program
from fragmeter.gpu.model import graphs as skeleton_graphs

CPU = devices.open("cpu")
CHECKS = {
    "kernel": lambda: graph_checks.kernel(CPU, "float32"),
    "paged": lambda: graph_checks.skeleton(CPU, "fp32"),
    "contiguous": lambda: graph_checks.skeleton(CPU, "fp32", paged=False),
}
each_check = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)


def faithful(work):
    result = work()
    return (lambda: result.copy_(work())), result


def stale(work):
    """What a graph does that keeps the values it was captured with."""
    result = work().clone()
    return (lambda: None), result


@pytest.mark.slow
@each_check
def test_a_replay_of_other_values_is_compared(check, monkeypatch):
    monkeypatch.setattr(skeleton_graphs, "capture", faithful)
    found = check()
    assert found.passes and found.error <= found.tolerance, found


@pytest.mark.slow
@each_check
def test_a_replay_that_is_stale_is_found(check, monkeypatch):
    monkeypatch.setattr(skeleton_graphs, "capture", stale)
    found = check()
    assert not found.passes and found.error > 0.1, found


def test_the_program_writes_what_came_of_each(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(program, "gpu", lambda name: CPU)
    good, nan = graph_checks.Check("kernel", 0.0, 0.0), graph_checks.Check("step", float("nan"), 1e-3)
    monkeypatch.setattr(graph_checks, "CHECKS", (lambda device: good, lambda device: nan))
    assert graphs.main(["--json", str(tmp_path / "graphs.json")]) == 1
    checks = json.loads((tmp_path / "graphs.json").read_text())["checks"]
    assert [(check["error"], check["passes"]) for check in checks] == [(0.0, True), (None, False)]
    assert "FAILED step: error nan" in capsys.readouterr().out


def test_a_cpu_has_no_graphs(capsys):
    assert graphs.main(["--device", "cpu"]) == 2
    assert capsys.readouterr().err == "fragmeter: device = 'cpu': must be a GPU: cuda, or cuda: and a number\n"
