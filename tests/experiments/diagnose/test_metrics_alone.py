"""From the scrapes of an overloaded server alone, in an open or a closed loop: the gain of the remedy is that on its own requests."""

from __future__ import annotations

import json
from math import expm1

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.diagnose.run import observation, step_cost
from fragmeter.experiments.diagnose.server import server_of
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.sim import Workload, simulate
from fragmeter.sim.config.unread import only_read
from fragmeter.sim.metrics.openmetrics import openmetrics
from fragmeter.sim.runs.run import Run
from fragmeter.sim.workload.users import Users
from fragmeter.traces import Trace, workload

LINE = "vllm serve llama-3.1-8b --max-model-len 16K --gpu-memory-utilization 0.3"


def load(count: int, rate: float | None, users: int | None) -> Workload:
    """Exponential lengths of 1,000 and 300 tokens; Poisson arrivals, or users that wait for answers."""
    rng = np.random.default_rng(7)
    prompts, outputs = (
        np.minimum(np.ceil(rng.exponential(mean, count)), 4 * mean).astype(np.int64) for mean in (1000, 300)
    )
    gaps = np.zeros(count) if rate is None else np.rint(rng.exponential(1e9 / rate, count))
    trace = Trace("load", prompts, outputs, np.cumsum(gaps.astype(np.int64)) * 1000)
    return workload(trace, users=None if users is None else Users(users, np.zeros(count, dtype=np.int64)))


def run(line: str, work: Workload) -> Run:
    chosen = server_of(parse_serve(line), "h100-80gb", None, None).settings()
    return simulate(only_read(chosen, work), work, step_cost(chosen))


def scraped(served: Run, times: set[float] | None) -> str:
    """Its metrics as ``simulate --openmetrics`` writes them, every 5 s or at some of these times."""
    lines = "".join(openmetrics([served], "llama-3.1-8b", 5.0)).splitlines()
    kept = (line for line in lines if times is None or line.startswith("#") or float(line.rpartition(" ")[2]) in times)
    return "\n".join(kept) + "\n"


def diagnose(folder, *tokens: object) -> dict:
    out = folder / "diagnosis.json"
    arguments = ["--metrics", folder / "metrics.txt", "--num-prompts", 1000, "--seeds", 3, "--jobs", 1, "--json", out]
    line = ["diagnose", "--serve", LINE, "--gpu", "h100-80gb", *arguments, *tokens]
    assert status([*map(str, line)]) == DONE
    return json.loads(out.read_text())


def gains(found: dict, work: Workload) -> tuple[float, float]:
    """The gain of the best larger share of the memory: in the diagnosis, and on the server's own requests."""
    (change,) = (each for each in found["changes"] if each["change"].keys() == {"gpu-memory-utilization"})
    lines = LINE, LINE.replace("0.3", change["change"]["gpu-memory-utilization"])
    now, then = (observation(run(line, work), None).cost for line in lines)
    return change["gain"], -expm1(then - now)


def in_flight(found: dict) -> float:
    """Simulated requests in flight while requests arrive, relative to the measured ones."""
    simulated, measured = found["as_served"], found["measured"]["server"]
    return (simulated["arriving_running"] + simulated["arriving_waiting"]) / (measured["running"] + measured["waiting"])


class TestOverloaded:
    """Behind an open loop of 25 requests/s for 40 s; behind 90 clients that wait."""

    OPEN, CLOSED = load(1000, 25.0, None), load(1000, None, 90)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "times", [{10.0, 35.0}, pytest.param(None, marks=pytest.mark.slow)], ids=["two scrapes", "every 5 s"]
    )
    def test_an_open_loop_is_open(self, times, tmp_path, capsys):
        (tmp_path / "metrics.txt").write_text(scraped(run(LINE, self.OPEN), times))
        found = diagnose(tmp_path)
        assert found["load"]["request_rate"] == pytest.approx(25, rel=0.1) and not found["load"]["max_concurrency"]
        printed = " ".join(capsys.readouterr().out.split())
        assert "of clients that do not wait for answers: requests in flight grow from" in printed
        diagnosed, truth = gains(found, self.OPEN)
        assert diagnosed == pytest.approx(truth, abs=0.1)
        # As many users as were in flight gain much less: the model of before.
        users = found["measured"]["server"]["running"] + found["measured"]["server"]["waiting"]
        diagnosed, truth = gains(diagnose(tmp_path, "--max-concurrency", round(users)), self.OPEN)
        assert diagnosed < truth - 0.2

    @pytest.mark.slow
    @pytest.mark.parametrize("times", [{10.0, 80.0}, None], ids=["two scrapes", "every 5 s"])
    def test_a_closed_loop_is_closed(self, times, tmp_path, capsys):
        (tmp_path / "metrics.txt").write_text(scraped(run(LINE, self.CLOSED), times))
        found = diagnose(tmp_path)
        assert found["load"]["max_concurrency"] == pytest.approx(90, abs=1) and not found["load"]["request_rate"]
        printed = " ".join(capsys.readouterr().out.split())
        if times is None:
            assert "of clients that wait for answers: requests in flight stay," in printed
        else:
            assert "the metrics do not say whether clients wait for answers: requests in flight," in printed
        diagnosed, truth = gains(found, self.CLOSED)
        assert diagnosed == pytest.approx(truth, abs=0.1)
        # At the rate that the server serves there is no such queue.
        rate = found["measured"]["server"]["loop"]["arrival_rate"]
        assert in_flight(found) == pytest.approx(1, abs=0.1)
        assert in_flight(diagnose(tmp_path, "--request-rate", rate)) < 0.7

    @pytest.mark.slow
    def test_one_scrape_does_not_tell(self, tmp_path, capsys):
        (tmp_path / "metrics.txt").write_text(scraped(run(LINE, self.OPEN), {35.0}))
        users = diagnose(tmp_path)["load"]["max_concurrency"]
        # With given lengths the clients are those of the metrics as well.
        assert users and diagnose(tmp_path, "--input-len", 1000)["load"]["max_concurrency"] == users
        printed = " ".join(capsys.readouterr().out.split())
        assert "the metrics do not say whether clients wait for answers: a single scrape" in printed
