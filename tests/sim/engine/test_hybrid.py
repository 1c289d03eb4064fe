"""KV groups: the engine against the oracle, leaps against steps, and both with and without block ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import buckets_at_rows, times_of
from fragmeter.sim.metrics.result import memory_table
from fragmeter.sim.metrics.summary import summary
from hybrid_runs import HybridCase, crowded_hybrid_cases, group_buckets_at_rows, hybrid_cases, serve
from oracle.hybrid import simulate_hybrid
from same_runs import plain, same
from schedulers import log_of, same_requests
from strategies import long_costs
from walk_hybrid import HybridWalk

cases = st.one_of(hybrid_cases(), crowded_hybrid_cases())
long_cases = hybrid_cases(8, 300, long_costs)

NAMES = ["vllm-sosp23", "vllm-v0"]


def check(policy: str, hybrid: HybridCase) -> None:
    """Stepping gives the oracle's log, of the pool and of each group; leaping its requests."""
    hybrid = hybrid.fitted(policy)
    case = hybrid.case
    costs = case.cost.step_ticks, case.cost.swap_out_ticks, case.cost.swap_in_ticks
    outcome, in_groups = simulate_hybrid(policy, case.requests, case.pool, case.limits, hybrid.groups, *costs)
    stepped, leapt = serve(policy, hybrid, leap=False), serve(policy, hybrid, ids=True)
    assert log_of(stepped) == [(step.start_ticks, step.ticks, step.buckets) for step in outcome.steps]
    assert group_buckets_at_rows(stepped) == in_groups
    for run in (stepped, leapt):
        same_requests(run, outcome)


@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=50)
@given(hybrid=cases)
def test_every_step_and_slot_is_what_the_oracle_says(policy, hybrid):
    check(policy, hybrid)


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=5000)
@given(hybrid=cases)
def test_every_step_and_slot_is_what_the_oracle_says_at_length(policy, hybrid):
    check(policy, hybrid)


def check_leaps(policy: str, hybrid: HybridCase, data: st.DataObject) -> None:
    hybrid = hybrid.fitted(policy)
    end = serve(policy, hybrid).log.end_ticks
    window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 1000), min_size=2, max_size=2, unique=True))))
    leapt, stepped = serve(policy, hybrid, window), serve(policy, hybrid, window, leap=False)
    same(leapt, stepped)


@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=50)
@given(hybrid=st.one_of(cases, long_cases), data=st.data())
def test_leap_and_step_are_the_same_bits(policy, hybrid, data):
    """Invariant 6: leap and step give identical results."""
    check_leaps(policy, hybrid, data)


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=2000)
@given(hybrid=st.one_of(cases, long_cases), data=st.data())
def test_leap_and_step_are_the_same_bits_at_length(policy, hybrid, data):
    """Invariant 6: leap and step give identical results."""
    check_leaps(policy, hybrid, data)


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=30)
@given(hybrid=st.one_of(cases, long_cases), leap=st.booleans())
def test_decisions_and_ledger_are_the_same_with_and_without_ids(policy, hybrid, leap):
    hybrid = hybrid.fitted(policy)
    with_ids, without = (serve(policy, hybrid, leap=leap, ids=ids) for ids in (True, False))
    assert plain(with_ids.accounts.window()) == plain(without.accounts.window())
    assert buckets_at_rows(with_ids) == buckets_at_rows(without)


# A step of vllm-v0 that only prefills has no number of its own for the walk to go by.
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-sosp23"])
@hypothesis_settings(max_examples=50)
@given(hybrid=cases, leap=st.booleans())
def test_invariants_1_2_and_3_the_tables_hold_what_the_ledger_says(policy, hybrid, leap):
    """Invariant 1: the buckets add up to the pool, and are what the tables of all groups hold. Invariants 2 and 3: a
    page is named once, and free pages are not named."""
    hybrid = hybrid.fitted(policy)
    walk, walked = HybridWalk(policy, hybrid, leap), []
    for moment in walk.moments():
        named = Counter(page for tables in moment.tables.values() for table in tables for page in table)
        del named[None]
        pool = walk.memory.group_tables.pool
        assert pool.reference_counts == [named[page] for page in range(walk.memory.num_blocks)]
        assert sorted([*named.elements(), *moment.free_ids]) == list(range(walk.memory.num_blocks))
        assert sum(moment.buckets.values()) == walk.memory.capacity_slots
        if moment.running:
            walked.append((moment.now, moment.buckets))
    assert walk.memory.free == walk.memory.num_blocks
    run = serve(policy, hybrid, leap=leap)
    rows = zip(run.log.rows["start_ticks"].tolist(), run.log.rows["iterations"].tolist(), buckets_at_rows(run))
    # Rows in which every sequence was preempted take no time, and hold nothing.
    assert [(start, buckets) for start, iterations, buckets in rows if iterations or buckets["live"]] == walked


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=30)
@given(hybrid=cases)
def test_the_ledgers_of_the_groups_add_up_to_the_pool(policy, hybrid):
    """In every row, and as means: what groups hold and what is free. All slots have the same bytes."""
    run = serve(policy, hybrid.fitted(policy))
    table, content = memory_table(run), summary(run)
    columns = [name for name in table if "_attention" in name]
    assert len(columns) == 3 * (hybrid.groups.full + hybrid.groups.sliding) == 3 * len(content["kv_groups"])
    assert (table[columns].sum(axis=1) + table["free"] == run.replica.memory.capacity_slots).all()
    for mean in ("mean_over_iterations_pct", "mean_over_time_pct"):
        held = sum(sum(group[mean].values()) for group in content["kv_groups"])
        free = content["waste"][mean]["buckets"]["free"]
        assert held + free == pytest.approx(100 if run.log.end_ticks else 0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=50)
@given(hybrid=cases)
def test_every_request_is_finished_or_refused(policy, hybrid):
    hybrid = hybrid.fitted(policy)
    run = serve(policy, hybrid)
    assert set(times_of(run)) == set((~run.refused).nonzero()[0].tolist())
    assert (run.refused == (run.smallest_pool_blocks > run.replica.num_blocks)).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
@hypothesis_settings(max_examples=20)
@given(hybrid=hybrid_cases())
def test_without_the_manager_and_without_windows_it_is_the_same(policy, hybrid):
    """Where no sequence leaves its window, and where the manager is off, the pool serves all layers together."""
    hybrid = hybrid.fitted(policy)
    whole = replace(hybrid, groups=replace(hybrid.groups, window=hybrid.case.limits.max_model_len))
    off = serve(policy, hybrid, disable_hybrid_kv_cache_manager=True)
    same(serve(policy, whole), off)
    assert summary(off)["kv_groups"] == [] and off.replica.layout is None
