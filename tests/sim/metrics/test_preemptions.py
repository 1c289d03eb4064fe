"""Preemptions: those of the plans, request by request, are those of every table, count and metric."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from core_loads import POLICIES, Load
from engine_runs import cached_if_known, settings_of, workload_of
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.cluster.result import cluster_table_of
from fragmeter.sim.cluster.summary import cluster_summary
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.ledger import COMPLETE
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.residencies import preemptions_table, residencies_table
from fragmeter.sim.metrics.result import requests_table
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.sequence import StepPlan, leads
from strategies import Case, LineCost, crowded_cases

#: Every policy that preempts.
PREEMPTING = ("vllm-sosp23", "vllm-v0", "vllm-v1", "sarathi", "fastgen", "trtllm-max-util", "vattention", "sglang")


class Planned(Observer):
    """Notes (time, sequence, whether it goes to the host) of each sequence that a plan preempts."""

    every_step = False

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bool]] = []
        #: Those that had finished in the step before.
        self.complete = 0

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        self._state = engine.state

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        self.seen += [(now, each.index, False) for each in plan.preempted if leads(each)]
        self.seen += [(now, each.index, True) for each in plan.swapped_out if leads(each)]
        self.complete += sum(each in self._state.finished or each in self._state.overrunning for each in plan.preempted)


class Copying(LineCost):
    """Copies take time."""

    def copy_ticks(self, slots: int) -> int:
        return 3 * slots


def require_counts(run: Run, planned: Planned) -> None:
    """What the run says of its preemptions is what its plans said, in all and of each request."""
    events = [
        (now, int(run.workload.request_of(np.array([index]))[0]), swapped) for now, index, swapped in planned.seen
    ]
    table = preemptions_table(run)
    assert sorted(zip(table["ticks"], table["request"], table["kind"] == "swap")) == sorted(events)
    counts = Counter(swapped for *_, swapped in events)
    assert summary(run)["preemptions"] == {"recompute": counts[False], "swap": counts[True]}
    by_request, times = Counter((request, swapped) for _, request, swapped in events), request_times(run)
    for column, swapped in (("recomputed", False), ("swapped", True)):
        of_request = dict(zip(times.index.tolist(), getattr(times, column).tolist()))
        assert of_request == {request: by_request[request, swapped] for request in of_request}
        assert requests_table(run)[column].sum() == counts[swapped]
    require_ends(run)


def require_ends(run: Run) -> None:
    """Each request that was served has one residency, its last, that ended with its output."""
    last = residencies_table(run).groupby("sequence")["ended"].agg(list)
    assert all(ended[-1] == "finished" and ended.count("finished") == 1 for ended in last)


@pytest.mark.slow
@hypothesis_settings(max_examples=100)
@given(seed=st.integers(0, 1 << 40), policy=st.sampled_from(POLICIES), asynchronous=st.booleans())
def test_every_planned_preemption_is_counted_once(seed, policy, asynchronous):
    """By the core, in Python, and step by step; with and without asynchronous scheduling."""
    load = Load(seed, policy)
    if policy == "vllm-v1":
        load.chosen["async_scheduling"] = asynchronous
    planned = Planned()
    require_counts(simulate(settings(**load.chosen), load.work, load.cost, observers=[planned]), planned)
    for switches in ({}, {"core": False}, {"leap": False}):
        require_counts(load.run(**switches), planned)


@pytest.mark.slow
@pytest.mark.parametrize("policy", PREEMPTING)
@hypothesis_settings(max_examples=15)
@given(case=crowded_cases(), asynchronous=st.booleans())
def test_it_is_so_under_every_policy_that_preempts(policy, case: Case, asynchronous):
    switches = cached_if_known(policy, case)
    if policy == "vllm-v1":
        switches["async_scheduling"] = asynchronous
    chosen, work = settings_of(policy, case.pool, case.limits, **switches), workload_of(case.requests, 24)
    planned = Planned()
    require_counts(simulate(chosen, work, case.cost, observers=[planned]), planned)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v0"])
@hypothesis_settings(max_examples=15)
@given(case=crowded_cases(), samples=st.integers(2, 3))
def test_the_preemption_of_a_group_counts_once(policy, case: Case, samples):
    work = workload_of(case.requests, 24)
    work = replace(work, n=np.full(len(work), samples))
    chosen, planned = settings_of(policy, case.pool, case.limits, work=work), Planned()
    require_counts(simulate(chosen, work, Copying(), observers=[planned]), planned)


@pytest.mark.slow
@hypothesis_settings(max_examples=40)
@given(seed=st.integers(0, 1 << 40), replicas=st.integers(1, 3))
def test_each_replica_of_a_cluster_counts_its_own(seed, replicas):
    load = Load(seed, "vllm-v1")
    run = simulate_cluster(settings(**load.chosen), load.work, cluster(num_replicas=replicas), load.cost)
    rows = [row["preemptions"] for row in cluster_summary(run)["replicas"]]
    table = cluster_table_of(run, "preemptions")
    assert rows == [(table["replica"] == number).sum() for number in range(replicas)]
    assert sum(rows) == sum(cluster_summary(run)["preemptions"].values())


@pytest.mark.slow
def test_loads_preempt_sequences_that_are_complete():
    """The properties would say little if none did."""
    seen = []
    for seed in range(60):
        load, planned = Load(seed, "vllm-v1"), Planned()
        run = simulate(settings(**load.chosen), load.work, load.cost, observers=[planned])
        assert (run.log.evictions["swapped"] == COMPLETE).sum() == planned.complete
        seen.append(planned.complete)
    assert sum(count > 0 for count in seen) > 2
