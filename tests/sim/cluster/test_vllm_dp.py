"""Router ``vllm-dp``: when the coordinator publishes, and how the client chooses. ``tests/real_vllm`` has vLLM's own beside it."""

from __future__ import annotations

import numpy as np
import pytest

from cluster_runs import same_cluster
from fragmeter.sim import settings
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.cluster.coordinator import MILLISECOND, Coordinator, Counts
from fragmeter.sim.policy.registry import POLICIES
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import synthetic_pairs, workload

ONE, TWO, THREE = Counts(1, 0, 0.5), Counts(0, 2, 0.5), Counts(1, 2, 0.75)


def at(ms: float) -> int:
    return round(ms * MILLISECOND)


def test_counts_are_published_every_tenth_of_a_second_while_they_change():
    found = Coordinator(2, lock_step=False)
    found.report(0, at(30), ONE)
    assert found.news(at(100)) is None
    assert found.news(at(100) + 1) == [ONE, Counts()]
    # Nothing was published for over 100 ms: at once, for those that arrive later.
    found.report(1, at(250.5), TWO)
    assert found.news(at(250.5)) is None
    found.report(0, at(250.5), TWO)
    assert found.news(at(250.5) + 1) == [TWO, TWO]
    # It counts whole milliseconds, and waits anew after each report.
    found.report(0, at(260.75), ONE)
    assert found.news(at(350.75)) is None
    assert found.news(at(350.75) + 1) == [ONE, TWO]


def test_counts_that_stay_are_published_every_five_seconds():
    found = Coordinator(1, lock_step=False)
    assert found.news(at(5000)) is None
    assert found.news(at(5000) + 1) == [Counts()]
    assert found.news(at(14_999)) == [Counts()] and found.news(at(15_000)) is None
    # A report with the counts of the last one is none.
    found.report(0, at(15_100), Counts(kv_cache_usage=0.9))
    assert found.news(at(19_999)) == [Counts()]


def test_engines_in_lock_step_publish_whole_steps():
    found = Coordinator(2, lock_step=True)
    found.report(0, at(120), ONE)
    # 50 ms at least, and then the counts of both.
    assert found.news(at(170)) is None and found.news(at(170) + 1) == [ONE, Counts()]
    found.report(0, at(200), TWO)
    found.report(1, at(200), TWO)
    found.report(0, at(230), THREE)
    # Those before the last step, and 100 ms later the last ones.
    assert found.news(at(270) + 1) == [TWO, TWO]
    assert found.news(at(370)) is None and found.news(at(370) + 1) == [THREE, TWO]


@pytest.mark.parametrize("leap", [True, False])
def test_a_burst_goes_round_and_a_full_engine_gets_none(leap):
    """Four requests at once go round. The long one fills its engine's pool, and a request waits there: the engine's score is 2 and more."""
    arrivals = np.array([0, 0, 0, 0, 3_000, 3_100, 3_200]) * MILLISECOND
    prompts, outputs = np.array([500, 20, 500, 20, 20, 20, 20]), np.array([400, 2, 400, 2, 2, 2, 2])
    chosen = settings(
        policy="vllm-v1", num_gpu_blocks_override=60, max_model_len=1000, enable_prefix_caching=False, leap=leap
    )
    run = simulate_cluster(
        chosen, Workload("burst", arrivals, prompts, outputs), cluster(num_replicas=2, router="vllm-dp")
    )
    assert [rows.tolist() for rows in run.rows] == [[0, 2], [1, 3, 4, 5, 6]]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_leaps_change_no_choice_under_any_policy(policy):
    asked = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 60, seed=0, max_model_len=2048), request_rate=8)
    runs = [
        simulate_cluster(settings(policy=policy, leap=leap), asked, cluster(num_replicas=3, router="vllm-dp"))
        for leap in (True, False)
    ]
    same_cluster(*runs)


@pytest.mark.slow
def test_it_divides_prefilled_requests_too():
    asked = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 60, seed=0, max_model_len=2048), request_rate=8)
    apart = cluster(prefill_replicas=2, decode_replicas=3, router="vllm-dp", decode_router="vllm-dp")
    runs = [simulate_cluster(settings(policy="vllm-v1", leap=leap), asked, apart) for leap in (True, False)]
    same_cluster(*runs)
    assert min(len(rows) for rows in runs[0].rows[2:]) > 5
