"""Fleets of changing size: which replica takes a request, and the laws of queues while replicas join and leave."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import ceil, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cluster_runs import ROUTERS, Views, serve_cluster, watched
from engine_runs import settings_of
from fragmeter.sim.cluster import FleetSchedule, Lifetime, cluster, cluster_summary, cluster_table_of, cluster_times
from fragmeter.sim.cluster.run import simulate_cluster
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.result import TABLES
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool
from queueing import MEAN_TOKENS, TOKEN_TICKS, erlang_arrivals_wait, erlang_c_wait
from ramp_cost import RampCost
from strategies import crowded_cases

cases = crowded_cases()
PHASE, BATCHES = 8_000, 20


@st.composite
def schedules(draw) -> FleetSchedule:
    """Up to five changes at any times of a small case."""
    times = sorted(draw(st.sets(st.integers(1, 1_500), max_size=5)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=len(times) + 1, max_size=len(times) + 1))
    return FleetSchedule((0, *times), tuple(sizes), draw(st.integers(0, 500)))


def test_replicas_join_after_their_start_up_and_the_newest_leaves_first():
    schedule = FleetSchedule((0, 100, 200, 210), (1, 3, 2, 3), startup_ticks=30)
    assert schedule.lifetimes == (
        Lifetime(0, 0, None),
        Lifetime(100, 130, None),
        Lifetime(100, 130, 200),
        Lifetime(210, 240, None),
    )
    taking = {now: list(schedule.taking_requests(now)) for now in (0, 129, 130, 199, 200, 239, 240)}
    assert taking == {0: [0], 129: [0], 130: [0, 1, 2], 199: [0, 1, 2], 200: [0, 1], 239: [0, 1], 240: [0, 1, 3]}
    # 0 and 1 to the end, 2 until its last finish, 3 from its order.
    assert (
        sum(gone - ordered for ordered, gone in schedule.paid_spans([400, 390, 215, 395], 400)) == 400 + 300 + 115 + 190
    )


def test_a_replica_that_has_not_started_when_the_size_falls_never_joins():
    schedule = FleetSchedule((0, 10, 20), (1, 2, 1), startup_ticks=50)
    assert schedule.lifetimes[1] == Lifetime(10, 60, 20)
    assert all(list(schedule.taking_requests(now)) == [0] for now in (0, 15, 20, 60, 100))
    assert sum(gone - ordered for ordered, gone in schedule.paid_spans([100, 0], 100)) == 100 + 10


@pytest.mark.parametrize(
    ("times", "sizes", "startup", "message"),
    [
        ((0, 5), (1,), 0, "sizes"),
        ((1,), (1,), 0, "from_ticks"),
        ((0, 5, 5), (1, 2, 1), 0, "from_ticks"),
        ((0,), (0,), 0, "sizes = 0"),
        ((0,), (1025,), 0, "sizes = 1025"),
        ((0,), (1,), -1, "startup_ticks = -1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(times, sizes, startup, message):
    with pytest.raises(SettingError, match=message):
        FleetSchedule(times, sizes, startup)


@pytest.mark.parametrize("router", ROUTERS)
@hypothesis_settings(max_examples=8)
@given(case=cases, schedule=schedules(), policy=st.sampled_from(["vllm-v1", "vllm-sosp23"]))
def test_requests_go_to_replicas_that_take_them_and_none_is_lost(router, case, schedule, policy):
    """Nothing before a replica has started and nothing while it drains; every request is served once, and the time-integral
    of the number in the system is the sum of the times in it (Little's law), to the tick."""
    noting = Views()
    with watched() as clocks, noting.noted():
        run = serve_cluster(policy, case, schedule.sizes[0], router, looks=True, schedule=schedule, core=False)
    assert not noting.differences
    changes = run.schedule is not None
    assert len(run.rows) == (len(schedule.lifetimes) if changes else schedule.sizes[0])
    for rows, life in zip(run.rows, schedule.lifetimes, strict=True):
        assert all(life.takes_requests(now) for now in run.workload.arrival_ticks[rows].tolist())
    assert sorted(np.concatenate(run.rows).tolist()) == np.flatnonzero(~run.refused).tolist()
    times = [request_times(part) for part in run.runs]
    assert sum(len(each.index) for each in times) == int((~run.refused).sum())
    sojourns = sum(int((each.finish_ticks - each.arrival_ticks).sum()) for each in times)
    assert clocks[0].request_ticks == sojourns


@pytest.mark.slow
@hypothesis_settings(max_examples=8)
@given(case=cases, schedule=schedules())
def test_round_robin_known_beforehand_is_round_robin_sent_one_by_one(case, schedule):
    split, sent = (
        serve_cluster("vllm-v1", case, schedule.sizes[0], "round-robin", looks, schedule) for looks in (False, True)
    )
    assert [rows.tolist() for rows in split.rows] == [rows.tolist() for rows in sent.rows]
    assert cluster_summary(split) == cluster_summary(sent)


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
@hypothesis_settings(max_examples=3)
@given(case=cases, size=st.integers(1, 3))
def test_a_constant_schedule_is_the_fleet_without_one(router, case, size):
    """A change to the same size changes nothing either."""
    schedule = FleetSchedule((0, 500), (size, size), startup_ticks=100)
    fleet, scheduled = (serve_cluster("vllm-v1", case, size, router, schedule=each) for each in (None, schedule))
    assert cluster_summary(fleet) == cluster_summary(scheduled)
    for name in TABLES:
        assert cluster_table_of(fleet, name).equals(cluster_table_of(scheduled, name))


LOAD, SIZES = 0.7, (2, 4, 2)


@lru_cache
def phases(router: str) -> list[tuple[int, float, float]]:
    """Sizes 2, 4, 2 at the same load: of each phase the servers, the mean wait in mean services, and its deviation."""
    rng = np.random.default_rng(11)
    outputs = np.ceil(rng.exponential(MEAN_TOKENS, size=PHASE * len(SIZES))).astype(np.int64)
    service = outputs.mean() * TOKEN_TICKS
    gaps = rng.exponential(service / LOAD, size=len(outputs)) / np.repeat(SIZES, PHASE)
    arrivals = np.cumsum(np.rint(gaps).astype(np.int64))
    starts = (0, *(int(arrivals[PHASE * phase]) for phase in range(1, len(SIZES))))
    longest = int(outputs.max()) + 16
    settings = settings_of("vllm-sosp23", Pool(ceil(longest / 16) + 9, 16), Limits(longest, max_num_seqs=1))
    work = Workload("servers", arrivals, np.ones_like(outputs), outputs)
    run = simulate_cluster(
        settings,
        work,
        cluster(num_replicas=SIZES[0], router=router),
        RampCost(base_ticks=TOKEN_TICKS),
        schedule=FleetSchedule(starts, SIZES),
    )
    times = cluster_times(run)
    waits = (times.first_scheduled_ticks - times.arrival_ticks) / service
    found = []
    for (first, stop), servers in zip(pairwise(range(0, len(work) + 1, PHASE)), SIZES, strict=True):
        means = waits[first:stop].reshape(BATCHES, -1).mean(axis=1)[1:]
        found.append((servers, float(means.mean()), float(means.std(ddof=1)) / sqrt(len(means))))
    return found


def test_round_robin_waits_as_the_formula_says_while_the_size_follows_the_rate():
    """In each phase every server gets each k-th Poisson arrival."""
    for servers, mean, deviation in phases("round-robin"):
        assert abs(mean - erlang_arrivals_wait(servers, LOAD)) < 4 * deviation


@pytest.mark.slow
@pytest.mark.parametrize("router", ["round-robin", "least-outstanding-tokens"])
def test_while_the_size_follows_the_rate_a_wait_lies_between_one_queue_and_queues_apart(router):
    """M/M/k of the phase's servers from below, and k separate M/M/1 from above."""
    for servers, mean, deviation in phases(router):
        assert erlang_c_wait(servers, LOAD) - 4 * deviation < mean < LOAD / (1 - LOAD) + 4 * deviation
