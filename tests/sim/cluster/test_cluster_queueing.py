"""Replicas with a batch of one are servers of a queueing system: its waits are known, or lie between known ones."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, sqrt

import numpy as np
import pytest

from engine_runs import settings_of
from fragmeter.sim.cluster import cluster, cluster_times, simulate_cluster
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool
from queueing import MEAN_TOKENS, TOKEN_TICKS, erlang_arrivals_wait, erlang_c_wait
from ramp_cost import RampCost

REQUESTS, BATCHES = 8_000, 20
SYSTEMS = [(2, 0.5), (4, 0.8), (8, 0.7)]


def test_the_formulas_agree_where_there_is_one_server():
    for load in (0.3, 0.8):
        assert erlang_c_wait(1, load) == pytest.approx(load / (1 - load))
        assert erlang_arrivals_wait(1, load) == pytest.approx(load / (1 - load))


@lru_cache
def wait(router: str, servers: int, load: float) -> tuple[float, float]:
    """Mean wait in mean services, and its standard deviation by the means of batches."""
    rng = np.random.default_rng(7)
    outputs = np.ceil(rng.exponential(MEAN_TOKENS, size=REQUESTS)).astype(np.int64)
    service = outputs.mean() * TOKEN_TICKS
    gaps = rng.exponential(service / load / servers, size=REQUESTS)
    longest = int(outputs.max()) + 16
    settings = settings_of("vllm-sosp23", Pool(ceil(longest / 16) + 9, 16), Limits(longest, max_num_seqs=1))
    work = Workload("servers", np.cumsum(np.rint(gaps).astype(np.int64)), np.ones_like(outputs), outputs)
    queues = cluster(num_replicas=servers, router=router)
    run = simulate_cluster(settings, work, queues, RampCost(base_ticks=TOKEN_TICKS))
    times = cluster_times(run)
    waits = (times.first_scheduled_ticks - times.arrival_ticks) / service
    means = waits.reshape(BATCHES, -1).mean(axis=1)
    return float(waits.mean()), float(means.std(ddof=1)) / sqrt(BATCHES)


@pytest.mark.parametrize("router", ["round-robin", "least-outstanding-tokens"])
@pytest.mark.parametrize(("servers", "load"), SYSTEMS)
def test_a_wait_lies_between_one_queue_and_queues_apart(router, servers, load):
    """M/M/k from below, with servers that are never idle while a request waits, and k separate M/M/1 from above."""
    mean, deviation = wait(router, servers, load)
    assert erlang_c_wait(servers, load) - 4 * deviation < mean < load / (1 - load) + 4 * deviation


@pytest.mark.parametrize(("servers", "load"), SYSTEMS)
def test_round_robin_waits_as_the_formula_says(servers, load):
    """Each server is an E_k/M/1."""
    mean, deviation = wait("round-robin", servers, load)
    assert abs(mean - erlang_arrivals_wait(servers, load)) < 4 * deviation


@pytest.mark.parametrize(("servers", "load"), SYSTEMS)
def test_a_router_that_looks_at_replicas_shortens_waits(servers, load):
    assert wait("least-outstanding-tokens", servers, load)[0] < 0.9 * wait("round-robin", servers, load)[0]
