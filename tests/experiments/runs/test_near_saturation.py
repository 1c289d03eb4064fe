"""Latency as a range near saturation: its ends are runs with other step times, and light loads have none."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.runs import near_saturation
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.near_saturation import LatencyRange, ServedLoad, saturation_of
from fragmeter.experiments.runs.serving import prepare, serve
from fragmeter.experiments.sweep.report import read_sweep
from fragmeter.sim import simulate
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import Pacing

BUSY = ["--num-prompts", "300", "--request-rate"]


def ranged(rate: float, num_prompts: int = 300, **fields):
    inputs = Inputs(
        settings=settings(**fields), requests=Requests(num_prompts=num_prompts), pacing=Pacing(request_rate=rate)
    )
    load = prepare(inputs)
    return saturation_of(load, serve(load)).near


@pytest.mark.slow
@pytest.mark.parametrize(("cost", "rate"), [("fitted", "3"), ("paper", "2.2")])
def test_its_ends_are_runs_with_other_step_times(cost, rate, tmp_path, capsys):
    """The paper's cost has a scale of 1.125 of its own."""
    target = tmp_path / "summary.json"
    assert status(["simulate", *BUSY, rate, "--cost", cost, "--json", str(target)]) == DONE
    found = json.loads(target.read_text())["near_saturation"]
    assert "Near saturation: with steps 5% shorter and longer, mean TTFT " in capsys.readouterr().out
    for end, factor in (("shorter", 0.95), ("longer", 1.05)):
        scale = f"{factor * (1.125 if cost == 'paper' else 1):.6g}"
        assert status(["simulate", *BUSY, rate, "--cost", cost, "--step-scale", scale, "--json", str(target)]) == DONE
        summary = json.loads(target.read_text())
        assert found[end] == {name: pytest.approx(summary[name]) for name in near_saturation.RANGED}
    assert found["shorter"]["mean_ttft_ms"] < found["longer"]["mean_ttft_ms"]


def test_a_light_load_has_none():
    assert ranged(0.5) is None and ranged(3.0) is not None


def test_long_outputs_do_not_hide_the_waiting_of_ttft():
    """Waiting is most of TTFT and little of the whole latency, which itself moves by a fifth."""
    l4 = settings(policy="vllm-v1", model="llama-3.1-8b", gpu="l4", max_model_len=8192)
    load = prepare(Inputs(settings=l4, requests=Requests(num_prompts=200), pacing=Pacing(request_rate=1.3)))
    run = serve(load)
    times = request_times(run)
    waited = (times.first_scheduled_ticks - times.arrival_ticks).mean()
    assert waited < 0.1 * (times.finish_ticks - times.arrival_ticks).mean()
    load_class, found = saturation_of(load, run)
    assert found is not None and load_class == "busy"
    assert found.longer["mean_ttft_ms"] > 2.5 * found.shorter["mean_ttft_ms"]
    assert found.longer["mean_e2el_ms"] < 1.5 * found.shorter["mean_e2el_ms"]


def test_a_cluster_has_one():
    inputs = Inputs(settings=settings(), requests=Requests(num_prompts=600), pacing=Pacing(request_rate=5))
    load = prepare(inputs, Cluster(num_replicas=2))
    assert saturation_of(load, serve(load)).near is not None


def test_requests_that_come_together_have_none():
    """Their latency is in proportion to the step time."""
    work = Workload("together", np.zeros(100), np.full(100, 300), np.full(100, 200))
    load = prepare(Inputs(settings=settings()), given=work)
    assert saturation_of(load, serve(load)).near is None


def test_users_of_a_closed_loop_may_take_all_places():
    """Their requests come when others are answered, and do not wait; more users than places wait, and only that is a load."""
    found = {}
    for users in (4, 8):
        pacing = Pacing(max_concurrency=users)
        inputs = Inputs(settings=settings(max_num_seqs=4), requests=Requests(num_prompts=40), pacing=pacing)
        load = prepare(inputs)
        found[users] = saturation_of(load, serve(load))
    assert found[4] == ("light", None)
    assert found[8].load in ("busy", "overload") and found[8].near is None


def test_large_loads_are_not_served_again(monkeypatch):
    monkeypatch.setattr(near_saturation, "MOST_REQUESTS", 299)
    assert ranged(3.0) is None


@pytest.mark.parametrize(("rate", "expected"), [(0.5, "light"), (2.7, "busy"), (30.0, "overload")])
def test_classes_of_load(rate, expected):
    inputs = Inputs(settings=settings(), requests=Requests(num_prompts=300), pacing=Pacing(request_rate=rate))
    load = prepare(inputs)
    assert ServedLoad.of(serve(load), load.work).load_class == expected


def test_taken_places_make_a_load_busy():
    """No request waits: at 0.1 requests/s of about 10 s each one of two places is taken, and with one place nearly all."""
    gaps = np.arange(20) * 11 * PER_SECOND
    work = Workload("evenly", gaps, np.full(20, 300), np.full(20, 400))
    busy = {}
    for places in (1, 2):
        run = simulate(settings(max_num_seqs=places, max_num_batched_tokens=2048), work)
        served = ServedLoad.of(run, work)
        assert not served.waits
        busy[places] = served.load_class
    assert busy == {1: "busy", 2: "light"}


def test_time_outside_of_the_engine_is_no_wait(tmp_path):
    """It is most of TTFT here."""
    own = {"gpu": "h100-80gb", "model": "llama-3.1-8b", "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    own |= {"data_parallel_size": 1, "enable_expert_parallel": False, "quantization": None, "kv_cache_dtype": "auto"}
    own |= {"enforce_eager": False, "async_scheduling": True, "vllm_release": "0.19", "cost": "fitted"}
    server = tmp_path / "server.json"
    constants = {
        "schema_version": 1,
        "kind": "server",
        "source": "made up",
        "server": own,
        "constants": {"outside_ms": 500},
    }
    server.write_text(json.dumps(constants))
    chosen = settings(policy="vllm-v1", model="llama-3.1-8b", gpu="h100-80gb", vllm_release="0.19", server=str(server))
    work = Workload("few", np.arange(10) * PER_SECOND, np.full(10, 300), np.full(10, 20))
    served = ServedLoad.of(simulate(chosen, work), work)
    assert served.times.ttft_ms.mean() > 500 and not served.waits


NEAR = ["--cost", "paper", "--num-prompts", "150"]


def simulated(rate: float, target, *more: str):
    assert status(["simulate", *NEAR, "--request-rate", str(rate), *more, "--json", str(target)]) == DONE
    return json.loads(target.read_text())


@pytest.mark.slow
def test_a_sweep_has_the_ranges_of_its_points(tmp_path, capsys):
    """In its file and on its page; a light point has none."""
    line = ["sweep", *NEAR, "--jobs", "1", "--grid", "request_rate=0.3,2.4", "--out", str(tmp_path / "out")]
    assert status(line) == DONE
    shown = capsys.readouterr().out
    light, near = pd.read_parquet(tmp_path / "out" / "sweep.parquet").to_dict("records")
    found = simulated(2.4, tmp_path / "one.json")
    assert found["evidence"]["load"] == near["load"] == "busy" and light["load"] == "light"
    for end in ("shorter", "longer"):
        for name in near_saturation.RANGED:
            assert near[f"near_saturation.{end}.{name}"] == found["near_saturation"][end][name]
            assert np.isnan(light[f"near_saturation.{end}.{name}"])
    ends = LatencyRange(*(found["near_saturation"][end] for end in ("shorter", "longer"))).ends("mean_ttft_ms")
    assert "Near saturation: 1 point," in shown and shown.count(f" {ends}") == 1
    assert read_sweep(tmp_path / "out").points["near_saturation"].tolist()[0] == ""
    assert status(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]) == DONE
    assert "Mean TTFT with steps 5 % shorter and longer (ms)" in (tmp_path / "page.html").read_text()


def test_a_comparison_has_the_mean_range_of_each_side(tmp_path, capsys):
    """A run that is not near saturation counts with its own latency."""
    target = tmp_path / "compared.json"
    sides = ["--set", "request_rate=2.4", "--set", "request_rate=0.3"]
    assert status(["compare", *NEAR, "--jobs", "1", "--seeds", "2", *sides, "--json", str(target)]) == DONE
    (near,) = json.loads(target.read_text())["near_saturation"]
    runs = [simulated(2.4, tmp_path / "one.json", "--seed", str(seed)) for seed in (0, 1)]
    assert (near["side"], near["runs"]) == ("request_rate=2.4", sum("near_saturation" in run for run in runs))
    for end in ("shorter", "longer"):
        each = [run.get("near_saturation", {}).get(end, run)["mean_ttft_ms"] for run in runs]
        assert near[end]["mean_ttft_ms"] == pytest.approx(np.mean(each))
    shown = capsys.readouterr().out
    assert "  steps -5% " in shown and "  steps +5% " in shown
    assert "request_rate=2.4: latency is near saturation in " in " ".join(shown.split())
