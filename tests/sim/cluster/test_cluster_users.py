"""Users of a closed loop and requests of several sequences on several replicas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from closed_loops import check_times_sent
from cluster_runs import ROUTERS, TIGHT, all_times, asking, same_cluster, serve_apart, serve_cluster, unrefused
from engine_runs import cached_if_known, settings_of, times_of, workload_of
from fragmeter.sim import simulate
from fragmeter.sim.cluster import ClusterRun, FleetSchedule, cluster, cluster_summary, simulate_cluster
from fragmeter.sim.cluster.result import cluster_table_of
from fragmeter.sim.cluster.summary import cluster_times
from fragmeter.sim.metrics.result import table_of
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.workload.content import NO_SESSION
from fragmeter.sim.workload.users import Users
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool, Request
from strategies import Case, LineCost, crowded_cases, small_cases

THINKS = st.sampled_from([0, 0, 1, 150, 5000, 200_000])


def drawn_users(case: Case, data: st.DataObject) -> Users:
    n = len(case.requests)
    names = [data.draw(st.sampled_from([NO_SESSION, NO_SESSION, 1, 2])) for _ in range(n)]
    return Users(data.draw(st.sampled_from([None, 1, 2, 4])), [data.draw(THINKS) for _ in range(n)], names)


def checked(run: ClusterRun, users: Users, arrivals: np.ndarray) -> None:
    """Every request is served once, when its user sends it, and N users spend their time on N = X (R + Z), to the tick."""
    times = cluster_times(run)
    assert len(times.index) == len(arrivals) - run.refused.sum()
    at_least_a_tick = replace(users, think_ticks=np.maximum(users.think_ticks, 1))
    idle = check_times_sent(times, run.end_ticks, at_least_a_tick, arrivals)
    if users.max_concurrency is not None:
        busy = int((times.finish_ticks - times.arrival_ticks).sum())
        assert busy + idle == users.max_concurrency * run.end_ticks


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=4)
@given(
    case=st.one_of(small_cases(), crowded_cases()),
    replicas=st.integers(1, 3),
    router=st.sampled_from(ROUTERS),
    data=st.data(),
)
def test_users_of_a_cluster_obey_the_response_time_law_and_leap_as_they_step(policy, case, replicas, router, data):
    """Also where the fleet changes its size."""
    users, served = drawn_users(case, data), []
    work = replace(workload_of(case.requests, case.limits.max_model_len, case.content), users=users)
    sizes = [replicas, *data.draw(st.lists(st.integers(1, 3), max_size=2))]
    schedule = FleetSchedule((0, 1000, 4000)[: len(sizes)], tuple(sizes), 500) if len(sizes) > 1 else None
    for leap in (True, False):
        chosen = settings_of(policy, case.pool, case.limits, leap=leap, **cached_if_known(policy, case))
        with unrefused():
            behind = cluster(num_replicas=replicas, router=router, **TIGHT)
            served.append(simulate_cluster(chosen, work, behind, case.cost, schedule=schedule))
    same_cluster(*served)
    checked(served[0], users, work.arrival_ticks)


@pytest.mark.slow
@hypothesis_settings(max_examples=12)
@given(case=crowded_cases(), data=st.data(), router=st.sampled_from(ROUTERS))
def test_users_of_one_replica_behind_a_router_are_those_of_a_replica_alone(case, data, router):
    users = drawn_users(case, data)
    users = replace(users, think_ticks=users.think_ticks + 1)
    work = replace(workload_of(case.requests, case.limits.max_model_len), users=users)
    chosen = settings_of("vllm-v1", case.pool, case.limits, async_scheduling=True)
    with unrefused():
        run = simulate_cluster(chosen, work, cluster(router=router, **TIGHT), case.cost)
    assert all_times(run) == times_of(simulate(chosen, work, case.cost))


@pytest.mark.slow
@hypothesis_settings(max_examples=8)
@given(case=crowded_cases(), data=st.data(), leap=st.booleans())
def test_users_wait_for_decode_replicas(case, data, leap):
    users = drawn_users(case, data)
    run = serve_apart("vllm-v1", case, 2, 2, users=users, leap=leap)
    checked(run, users, workload_of(case.requests, case.limits.max_model_len).arrival_ticks)


def test_an_answer_of_one_token_comes_from_the_prefill_replica():
    case = Case([Request(0, 4, 1), Request(0, 4, 3)] * 2, Pool(100, 4, 0), Limits(64), LineCost())
    users = Users(1, [0] * 4)
    run = serve_apart("vllm-v1", case, users=users)
    checked(run, users, np.zeros(4, dtype=np.int64))
    assert [rows.tolist() for rows in run.rows] == [[0, 1, 2, 3], [1, 3]]


def test_an_answer_of_one_replica_brings_a_request_to_another():
    """One user, round robin: steps take 101 ticks, 7 more for each token of a prompt, and 13 for each decode."""
    work = replace(workload_of([Request(0, 4, 1)] * 3, 64), users=Users(1, [0, 50, 0]))
    run = simulate_cluster(
        settings_of("vllm-sosp23", Pool(100, 4, 0), Limits(64)), work, cluster(num_replicas=2), LineCost()
    )
    times = cluster_times(run)
    step = int(times.finish_ticks[0])
    assert list(zip(times.arrival_ticks.tolist(), times.finish_ticks.tolist())) == [
        (0, step),
        (step + 1, 2 * step + 1),
        (2 * step + 51, 3 * step + 51),
    ]
    assert [rows.tolist() for rows in run.rows] == [[0, 2], [1]]


def test_users_of_a_fleet_that_grows_use_the_new_replica():
    work = replace(workload_of([Request(0, 4, 5)] * 40, 64), users=Users(4, [0] * 40))
    chosen, arguments = settings_of("vllm-sosp23", Pool(100, 4, 0), Limits(64)), (cluster(num_replicas=1), LineCost())
    schedule = FleetSchedule((0, 1000), (1, 2), 500)
    run = simulate_cluster(chosen, work, *arguments, schedule=schedule)
    checked(run, Users(4, [0] * 40), np.zeros(40, dtype=np.int64))
    sent = cluster_times(run).arrival_ticks[np.sort(run.rows[1])]
    assert len(sent) > 10 and sent.min() >= 1500


def samples_of(case: Case, data: st.DataObject) -> Workload:
    counts = [data.draw(st.integers(1, 3)) for _ in case.requests]
    return replace(workload_of(case.requests, case.limits.max_model_len, case.content), n=counts)


@pytest.mark.slow
@hypothesis_settings(max_examples=8)
@given(case=crowded_cases(), data=st.data(), router=st.sampled_from(ROUTERS))
def test_samples_on_one_replica_behind_a_router_are_those_of_a_replica_alone(case, data, router):
    work, chosen = samples_of(case, data), settings_of("vllm-v1", case.pool, case.limits)
    alone = simulate(chosen, work, case.cost)
    with unrefused():
        run = simulate_cluster(chosen, work, cluster(router=router, **TIGHT), case.cost)
    assert all_times(run) == times_of(alone)
    for name in ("requests", "residencies", "gaps"):
        ours, theirs = cluster_table_of(run, name), table_of(alone, name)
        shared = [column for column in theirs if column in ours]
        assert ours[shared].equals(theirs[shared])
    found, wanted = cluster_summary(run), summary(alone)
    names = ("total_output_tokens", "mean_ttft_ms", "mean_e2el_ms", "waste", "prefix_cache")
    assert [found[name] for name in names] == [wanted[name] for name in names]


@pytest.mark.slow
@hypothesis_settings(max_examples=8)
@given(case=crowded_cases(), data=st.data(), replicas=st.integers(2, 3), closed=st.booleans())
def test_the_samples_of_a_request_go_to_one_replica(case, data, replicas, closed):
    """Round robin, with assignments that are known and with requests that are sent one by one; also of users."""
    work, chosen = samples_of(case, data), settings_of("vllm-v1", case.pool, case.limits)
    users = drawn_users(case, data) if closed else None
    work, served = replace(work, users=users), []
    for looks in (False, True):
        with unrefused(), asking(looks):
            served.append(simulate_cluster(chosen, work, cluster(num_replicas=replicas), case.cost))
    same_cluster(*served)
    run = served[0]
    counted = [number for place in range(replicas) for number in run.sequence_rows(place)]
    assert sorted(counted) == [
        row
        for request in np.flatnonzero(~run.refused)
        for row in range(work.first_sequences[request], work.first_sequences[request] + work.num_sequences[request])
    ]
    assert sum(len(part.log.residencies["index"]) >= len(part.workload.sequences) for part in run.runs) == replicas
    if users is not None:
        checked(run, users, work.arrival_ticks)
    else:
        order = np.flatnonzero(~run.refused)
        assert [rows.tolist() for rows in run.rows] == [order[place::replicas].tolist() for place in range(replicas)]
    assert serve_cluster("vllm-v1", case, replicas, "round-robin").refused.tolist() == run.refused.tolist()
