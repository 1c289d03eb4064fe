"""A healthy simulation that the metrics of its server contradict; and one of a server as simulated, or a little slower."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.diagnose.causes import Case
from fragmeter.experiments.diagnose.contradictions import contradictions
from fragmeter.experiments.diagnose.load import ServedLoad
from fragmeter.experiments.diagnose.run import Observation, observation, step_cost
from fragmeter.experiments.diagnose.server import server_of
from fragmeter.experiments.measured.scrapes import read_scrapes
from fragmeter.experiments.measured.server_metrics import Histogram, ServerMetrics, served_load
from fragmeter.experiments.runs.slo_check import Goal
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.sim import simulate
from fragmeter.sim.config.unread import only_read
from fragmeter.sim.metrics.objectives import objectives
from fragmeter.sim.metrics.openmetrics import openmetrics
from fragmeter.traces import Trace, workload

LINE = "vllm serve llama-3.1-8b --max-model-len 16K"
GOAL = ["--goodput", "ttft:500", "tpot:50"]


def scraped(
    path: Path, rate: float, step_scale: float, line: str = LINE, mean_output: int = 250, every_s: float = 5.0
) -> float:
    """Write the metrics of a server with longer steps, and return the share of its requests that meet the objectives."""
    rng = np.random.default_rng(3)
    means = (300, mean_output)
    prompts, outputs = (np.ceil(rng.exponential(mean, 1000)).clip(2, 4 * mean).astype(np.int64) for mean in means)
    arrivals = np.cumsum(np.rint(rng.exponential(1e9 / rate, 1000)).astype(np.int64)) * 1000
    work = workload(Trace("load", prompts, outputs, arrivals))
    chosen = replace(server_of(parse_serve(line), "h100-80gb", None, None).settings(), step_scale=step_scale)
    served = simulate(only_read(chosen, work), work, step_cost(chosen))
    path.write_text("".join(openmetrics([served], "llama-3.1-8b", every_s)))
    return 1 - observation(served, Goal(objectives(GOAL[1:]))).cost


def diagnose(path: Path, *tokens: str) -> dict:
    out = path.with_suffix(".json")
    draws = ["--num-prompts", "600", "--seeds", "2", "--jobs", "1", "--json", str(out)]
    assert status(["diagnose", "--serve", LINE, "--gpu", "h100-80gb", "--metrics", str(path), *draws, *tokens]) == DONE
    return json.loads(out.read_text())


@pytest.mark.slow
def test_a_server_that_misses_its_objectives_is_not_healthy(tmp_path, capsys):
    """Steps take 5 times as long as predicted: the simulation meets the objectives, and the server does not."""
    path = tmp_path / "metrics.txt"
    assert scraped(path, 12.0, 5.0) < 0.5
    found = diagnose(path, *GOAL)
    assert found["state"] == "contradicted"
    # The share of the objectives that the server's own histogram bounds.
    of_tpot = next(each for each in found["contradictions"] if each["name"] == "tpot")
    assert of_tpot["measured"] < 0.5 < 0.9 < of_tpot["simulated"]
    printed = " ".join(capsys.readouterr().out.split())
    assert " Contradicted: in the simulation " in printed and "Healthy" not in printed
    assert "have a TPOT within 50 ms by the server's own histogram" in printed
    assert "give a benchmark of the server" in printed


@pytest.mark.slow
@pytest.mark.parametrize("step_scale", [1.0, 3.0])
def test_objectives_that_the_gpu_cannot_meet_are_missed_and_contradict_only_another_server(
    tmp_path, capsys, step_scale
):
    """A step takes longer than the TPOT that is asked for, in the simulation as in a server that is simulated right: no flag helps,
    and the server is not healthy, nor is its simulation wrong. One with steps three times as long is another server."""
    path = tmp_path / "metrics.txt"
    scraped(path, 12.0, step_scale)
    found = diagnose(path, "--goodput", "ttft:500", "tpot:2")
    printed = " ".join(capsys.readouterr().out.split())
    if step_scale == 1:
        assert found["state"] == "misses" and not found["contradictions"]
        share = f"{1 - found['as_served']['cost']:.1%}"
        answer = f" Misses its objectives: {share} of the requests meet ttft:500 tpot:2, and 90% are asked for"
        assert answer in printed
        assert f"requests) {share} " in printed and "Healthy" not in printed
    else:
        assert found["state"] == "contradicted"
        # Not by the objectives, which the simulation misses too.
        assert {each["name"] for each in found["contradictions"]} & {"mean_tpot_ms", "mean_e2el_ms"}
        assert not {each["name"] for each in found["contradictions"]} & {"ttft", "tpot", "e2el", "objectives"}


@pytest.mark.slow
def test_longer_latencies_contradict_unless_the_server_meets_the_objectives(tmp_path):
    path = tmp_path / "metrics.txt"
    assert scraped(path, 12.0, 1.7) > 0.99
    assert diagnose(path, *GOAL)["state"] == "healthy"
    found = diagnose(path)
    assert found["state"] == "contradicted"
    assert {each["name"] for each in found["contradictions"]} == {"mean_tpot_ms", "mean_e2el_ms"}


@pytest.mark.slow
def test_a_limit_between_two_buckets_is_missed_only_if_the_wider_one_is(tmp_path):
    """A fourth of the requests have a TPOT of more than 10 ms, the bucket below the limit of 12 ms; means are within their factors."""
    path = tmp_path / "metrics.txt"
    scraped(path, 12.0, 1.2)
    assert diagnose(path, "--goodput", "ttft:500", "tpot:10")["state"] == "contradicted"
    assert diagnose(path, "--goodput", "ttft:500", "tpot:12")["state"] == "healthy"


def test_a_queue_that_is_not_simulated_names_the_missing_flag(tmp_path, capsys):
    """The server has a --max-num-seqs that the pasted line lacks."""
    path = tmp_path / "metrics.txt"
    scraped(path, 12.0, 1.0, f"{LINE} --max-num-seqs 12")
    # As many clients wait for answers, or not: the queue is not simulated.
    found = diagnose(path, "--request-rate", "12")
    assert found["state"] == "contradicted"
    assert "waiting" in {each["name"] for each in found["contradictions"]}
    printed = " ".join(capsys.readouterr().out.split())
    assert "never more than 12 run while others wait, as with --max-num-seqs 12, and the line has 1,024" in printed
    # It runs fewer in the server, of which shorter steps are no reason.
    assert "steps are shorter than predicted" not in printed


@pytest.mark.parametrize(
    ("flag", "rate", "mean_output", "limit"),
    [
        # Three of them finish in a step.
        ("--max-num-seqs 64", 400.0, 25, 64),
        ("--max-num-seqs 64", 60.0, 250, 64),
        # The KV cache limits those that run, by their lengths.
        ("--num-gpu-blocks-override 2000", 400.0, 25, None),
        ("--num-gpu-blocks-override 2000", 60.0, 250, None),
        # The tokens of a step limit them, and with answers this short any number of them would be near enough to the most.
        ("--max-num-batched-tokens 2048", 400.0, 2, None),
        ("--max-num-batched-tokens 2048", 400.0, 5, None),
    ],
)
def test_a_limit_on_sequences_is_not_a_full_cache(flag, rate, mean_output, limit, tmp_path):
    path = tmp_path / "metrics.txt"
    scraped(path, rate, 1.0, f"{LINE} {flag}", mean_output, 0.25)
    assert served_load(read_scrapes(path)).running_limit == limit


def in_flight(measured: float, rate: float | None, max_concurrency: int | None = None) -> list[tuple[float, float]]:
    """Measured and simulated requests in flight that contradict each other. 20 are in the draws in the mean; E2EL is 5 s."""
    lengths = np.full(4, 100)
    arrivals = np.arange(4, dtype=np.int64) * 10**12 if rate is None else None
    load = ServedLoad(Trace("load", lengths, lengths, arrivals), rate, max_concurrency, 600, "here")
    seen = Observation(**dict.fromkeys((each.name for each in fields(Observation)), 0.0))
    seen = replace(seen, arriving_running=20.0, mean_e2el_ms=5000.0)
    metrics = ServerMetrics(10, running=measured, waiting=0.0)
    found = contradictions(Case(server_of(parse_serve(LINE), "h100-80gb", None, None), load, seen, metrics), None, None)
    assert all(each.name == "in_flight" for each in found)
    return [(each.measured, each.simulated) for each in found]


def test_an_open_loop_has_as_many_in_flight_as_littles_law_says():
    """At 12 requests/s 60: 90 are fewer than twice as many, and 150 are more."""
    assert in_flight(90.0, 12.0) == []
    assert in_flight(150.0, 12.0) == [(150.0, 60.0)]
    # At 2 requests/s 10, fewer than in the draws.
    assert in_flight(39.0, 2.0) == [] and in_flight(41.0, 2.0) == [(41.0, 20.0)]
    # Clients that wait, and requests that arrive at once, have no rate.
    assert in_flight(90.0, 12.0, 20) == in_flight(90.0, inf) == [(90.0, 20.0)]


@pytest.mark.slow
@pytest.mark.parametrize("step_scale", [0.87, 1.0, 1.15])
@pytest.mark.parametrize("goal", [[], GOAL], ids=["latency index", "objectives"])
def test_steps_within_the_usual_error_are_no_contradiction(step_scale, goal, tmp_path):
    path = tmp_path / "metrics.txt"
    scraped(path, 12.0, step_scale)
    found = diagnose(path, *goal)
    assert (found["state"], found["contradictions"]) == ("healthy", [])


def test_the_buckets_beside_a_limit_bound_a_share():
    tpots = Histogram(10, 0.04, (0.01, 0.04, 0.1), (0.2, 0.5, 0.9))
    assert tpots.shares_within(0.05) == (0.5, 0.9)
    assert tpots.shares_within(0.04) == (0.5, 0.5)
    assert tpots.shares_within(0.005) == (0.0, 0.2) and tpots.shares_within(1.0) == (0.9, 1.0)
