"""Batch and throughput over time: no token and no second is lost, wherever the spans' edges fall."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from expanded import expand
from fragmeter.reports.data.over_time import MOST_SPANS, over_time
from fragmeter.reports.figures.figures import batch_over_time, throughput_over_time
from fragmeter.reports.style.look import data_of
from fragmeter.sim import Run, Workload, settings, simulate, summary
from fragmeter.sim.cluster import Cluster, cluster_summary, simulate_cluster
from fragmeter.sim.cluster.result import cluster_requests_table, cluster_residencies_table
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.residencies import residencies_table
from fragmeter.sim.metrics.result import requests_table, steps_table
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.traces import synthetic_pairs, workload

POLICIES = (
    "static", "orca-max", "vllm-sosp23", "vllm-v0", "vllm-v1", "sarathi", "tgi", "trtllm-max-util", "fastgen",
    "lightllm", "sglang", "vattention",
)  # fmt: skip
SMALL_POOL = {"vllm-sosp23": 150, "vllm-v0": 150, "vllm-v1": 150, "sarathi": 150, "trtllm-max-util": 150}


def load(n: int = 1) -> Workload:
    lengths = synthetic_pairs("vllm_sosp23_sharegpt_opt", 20, seed=5, max_model_len=2048)
    return workload(lengths, request_rate=4, n=n)


def run_of(policy: str, n: int = 1) -> Run:
    pool = SMALL_POOL.get(policy)
    return simulate(settings(policy=policy, num_gpu_blocks_override=pool, cost="roofline"), load(n))


def spans_of(run: Run) -> pd.DataFrame:
    return over_time(requests_table(run), residencies_table(run), steps_table(run))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 2])
def test_the_spans_add_up_to_the_run(policy, n):
    run = run_of(policy, n)
    found, said = spans_of(run), summary(run)
    assert len(found) == MOST_SPANS and found["end_s"].iloc[-1] == said["duration"]
    assert found["output_tokens"].sum() == pytest.approx(said["total_output_tokens"], rel=1e-12)
    assert found["prompt_tokens"].sum() == pytest.approx(run.log.rows["prefill_tokens"].sum(), rel=1e-12)
    assert found[["running", "waiting", "output_tokens", "prompt_tokens"]].min().min() >= -1e-6
    span_s = said["duration"] / MOST_SPANS
    times = request_times(run)
    if n == 1:
        # A request that was sent and has not finished runs or waits.
        assert (found["running"] + found["waiting"]).sum() * span_s == pytest.approx(times.e2el_ms.sum() / 1e3)
    if not (run.log.evictions["residency"] >= 0).any():
        waited_s = (times.first_scheduled_ticks - times.arrival_ticks).sum() / PER_SECOND
        assert found["waiting"].sum() * span_s >= waited_s * (1 - 1e-9)
        assert n > 1 or found["waiting"].sum() * span_s == pytest.approx(waited_s)


@pytest.mark.parametrize("policy", ["orca-max", "vllm-sosp23", "vllm-v1"])
def test_each_span_has_the_tokens_of_its_steps(policy):
    """Held to a list of all steps, each of which gives a token to all in it: no edge is off by more than its step."""
    run = run_of(policy)
    steps, found = expand(steps_table(run)), spans_of(run)
    assert (np.asarray(run.log.rows["slope_ticks"]) > 0).any() and len(run.log.rows["steps"]) < len(steps) / 2
    ends, tokens = (steps["start_ticks"] + steps["ticks"]).to_numpy(), per_step(run)
    edges = (found["end_s"] * PER_SECOND).round().to_numpy()
    done = np.searchsorted(ends, edges + 1, side="right")
    sums = np.concatenate([[0], np.cumsum(tokens)])
    here = found["output_tokens"].cumsum().to_numpy()
    under_way = np.append(tokens, 0)[done]
    assert (here >= sums[done] - 1e-3).all() and (here <= sums[done] + under_way + 1e-3).all()


def per_step(run: Run) -> np.ndarray:
    """Tokens of every step, in order."""
    return np.repeat(run.log.rows["growing"], run.log.rows["steps"])


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "n"), [("vllm-v1", 1), ("vllm-v1", 2), ("vllm-sosp23", 2)])
def test_requests_are_counted_where_they_are(policy, n):
    """Span by span, by counting the requests at 40 moments of each."""
    run = run_of(policy, n)
    found, times, residencies = spans_of(run), request_times(run), residencies_table(run)
    assert sum(summary(run)["preemptions"].values()) > 0
    for place in range(0, MOST_SPANS, 29):
        start, end = (found[name].iloc[place] * PER_SECOND for name in ("start_s", "end_s"))
        running, waiting = [], []
        for moment in start + (np.arange(40) + 0.5) * (end - start) / 40:
            there = residencies[(residencies["start_ticks"] <= moment) & (moment < residencies["end_ticks"])]
            running.append(len(there))
            under_way = ((times.arrival_ticks <= moment) & (moment < times.finish_ticks)).sum()
            waiting.append(under_way - there["request"].nunique())
        # Each of those that come and go within the span is seen to 1 part in 40.
        assert found["running"].iloc[place] == pytest.approx(np.mean(running), abs=len(residencies) / 200)
        assert found["waiting"].iloc[place] == pytest.approx(np.mean(waiting), abs=len(residencies) / 200)
        steady = len(set(running)) == 1
        assert not steady or found["running"].iloc[place] == pytest.approx(running[0], abs=0.15)


@pytest.mark.parametrize("roles", [{"num_replicas": 2}, {"prefill_replicas": 1, "decode_replicas": 1}])
def test_replicas_are_added_up(roles):
    run = simulate_cluster(settings(policy="vllm-v1"), load(), Cluster(**roles))
    steps = [steps_table(part).assign(replica=number) for number, part in enumerate(run.runs)]
    found = over_time(cluster_requests_table(run), cluster_residencies_table(run), pd.concat(steps, ignore_index=True))
    assert found["output_tokens"].sum() == pytest.approx(cluster_summary(run)["total_output_tokens"])


def test_a_run_without_steps_has_no_spans():
    one = Workload("one", np.array([0]), np.array([900]), np.array([5]))
    refused = simulate(settings(policy="vllm-v1", num_gpu_blocks_override=2), one)
    assert summary(refused)["refused"] == 1 and len(spans_of(refused)) == 0


def test_the_figures_draw_the_table():
    tables = {"a": spans_of(run_of("orca-max")), "b": spans_of(run_of("vllm-v1"))}
    batch, pace = batch_over_time(tables), throughput_over_time(tables)
    assert [trace.name for trace in batch.data] == ["a, running", "a, waiting", "b, running", "b, waiting"]
    assert data_of(batch)["Waiting"].tolist() == [*tables["a"]["waiting"], *tables["b"]["waiting"]]
    assert [trace.name for trace in pace.data] == ["a", "b"]
    spans_s = tables["b"]["end_s"] - tables["b"]["start_s"]
    assert pace.data[1].y[:-1] == pytest.approx(tables["b"]["output_tokens"] / spans_s, abs=1e-3)
    numbers = pace.layout.meta["numbers"]["rows"]
    assert [row[1] for row in numbers] == [int(load().output_tokens.sum())] * 2
    assert numbers[1][2] == pytest.approx(load().output_tokens.sum() / tables["b"]["end_s"].iloc[-1])
