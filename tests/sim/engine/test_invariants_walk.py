"""The numbered invariants, each checked by a walk that looks every slot up where it lies."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import buckets_at_rows, serve
from oracle import POLICIES, simulate
from strategies import crowded_cases, medium_cases, small_cases
from walk import Walk

CHUNKED = ("orca-max", "orca-pow2", "orca-oracle")
leaps = st.booleans()
cases = st.one_of(crowded_cases(), medium_cases(), small_cases())


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=40)
@given(case=cases, leap=leaps)
def test_invariant_1_the_buckets_add_up_and_are_what_the_walk_finds(policy, case, leap):
    """Invariant 1: the ledger's buckets add up to the capacity at every tick, and none is negative."""
    walked = [(moment.now, moment.buckets) for moment in Walk(policy, case, leap).moments() if moment.running]
    run = serve(policy, case, leap=leap)
    rows = run.log.rows
    ledger = buckets_at_rows(run)
    assert all(sum(buckets.values()) == case.pool.slots and min(buckets.values()) >= 0 for buckets in ledger)
    starts, steps = rows["start_ticks"].tolist(), rows["steps"].tolist()
    assert [(start, buckets) for start, count, buckets in zip(starts, steps, ledger) if count] == walked
    all_free = [buckets for count, buckets in zip(steps, ledger) if not count]
    assert all(buckets["free"] == case.pool.slots for buckets in all_free)
    window = run.accounts.window()
    assert sum(window.slot_ticks.values()) == case.pool.slots * (window.end_ticks - window.start_ticks)
    assert sum(window.slot_steps.values()) == case.pool.slots * window.num_steps


@pytest.mark.slow
@hypothesis_settings(max_examples=75)
@given(case=cases, leap=leaps)
def test_invariants_2_and_3_references_are_the_table_entries_that_name_a_block(case, leap):
    """Invariant 2: a block's reference count is the number of table entries that name it, and free blocks have none;
    on the device and on the host. Invariant 3: nothing is shared here, so no two entries name one block."""
    walk = Walk("vllm-sosp23", case, leap)
    for moment in walk.moments():
        kept, pool = walk.memory.tables, case.pool
        sides = (
            (moment.tables, moment.free_ids, kept.pool, pool.num_blocks),
            (moment.host_tables, moment.host_free_ids, kept.host_pool, pool.host_blocks),
        )
        for tables, free_ids, block_pool, num_blocks in sides:
            named = Counter(block for table in tables.values() for block in table)
            assert block_pool.reference_counts == [named[block] for block in range(num_blocks)]
            assert sorted([*named.elements(), *free_ids]) == list(range(num_blocks))
        assert set(moment.tables) == set(moment.running)
        # The tables show the slots that the step appends; the count comes when the step is over.
        assert len(moment.free_ids) == walk.memory.free - walk.memory.phases.total(moment.decode_step, 1)
        assert len(moment.host_free_ids) == walk.memory.host_free
        size = case.pool.block_size
        assert all(len(table) == -(-moment.running[i] // size) for i, table in moment.tables.items())
        # What is out holds all but the token that it would have computed.
        assert all(len(table) == -(-(walk.computed(i) - 1) // size) for i, table in moment.host_tables.items())
    assert walk.memory.free == case.pool.num_blocks and walk.memory.host_free == case.pool.host_blocks


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=40)
@given(case=cases, leap=leaps)
def test_invariant_4_every_request_ends_once_with_all_its_tokens(policy, case, leap):
    """Invariant 4: every request ends exactly once, finished or refused with a reason; tokens produced = asked for."""
    walk = Walk(policy, case, leap)
    for moment in walk.moments():
        assert not walk.refused & {*moment.running, *moment.waiting}
    served = [i for i in range(len(case.requests)) if i not in walk.refused]
    assert sorted(walk.ended) == served
    assert walk.generated == {i: case.requests[i].output_tokens for i in served}
    run = serve(policy, case, leap=leap)
    assert set(run.refused.nonzero()[0].tolist()) == walk.refused
    # The reason: even the smallest pool that could serve it is larger than this one.
    reasons = run.smallest_pool_blocks > case.pool.num_blocks
    assert reasons.tolist() == [i in walk.refused for i in range(len(case.requests))]
    run_log = run.log
    uncut = sorted(set(range(len(run_log.residencies["index"]))) - set(run_log.evictions["residency"].tolist()))
    assert sorted(run_log.residencies["index"][uncut].tolist()) == served
    produced = Counter()
    for i, tokens in zip(
        run_log.residencies["index"].tolist(), (run_log.residency_end - run_log.residencies["start_step"]).tolist()
    ):
        produced[i] += tokens
    assert produced == {i: case.requests[i].output_tokens for i in served}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=40)
@given(case=cases, leap=leaps)
def test_invariant_5_time_runs_on_and_requests_start_in_order(policy, case, leap):
    """Invariant 5: time never runs back; these policies, all FCFS, start requests in arrival order, never early."""
    now, started = 0, []
    for moment in Walk(policy, case, leap).moments():
        assert moment.now >= now
        now = moment.now
        fresh = sorted(set(moment.running) - set(started))
        assert all(case.requests[i].arrival_ticks <= now for i in fresh)
        assert all(case.requests[i].arrival_ticks <= now for i in moment.waiting)
        assert moment.waiting == sorted(moment.waiting)
        started += fresh
    assert started == sorted(started)


@pytest.mark.slow
@pytest.mark.parametrize("policy", CHUNKED)
@hypothesis_settings(max_examples=60)
@given(case=cases, leap=leaps)
def test_invariant_7_chunks_are_aligned_disjoint_and_merge_back(policy, case, leap):
    """Invariant 7: buddy chunks are aligned, disjoint, and merge back to the initial carve when all is freed."""
    walk = Walk(policy, case, leap)
    # The walk's slot map refuses two chunks that overlap, and slots that are in none.
    carve = {size: dict(starts) for size, starts in walk.memory.arena.free_lists.items()}
    for moment in walk.moments():
        taken = [(s.grant.start, s.grant.slots // case.pool.block_size) for s in walk.engine.state.running]
        for start, blocks in (*moment.free_chunks, *taken):
            assert blocks & (blocks - 1) == 0 and start % blocks == 0 and start + blocks <= case.pool.num_blocks
        # Two free buddies would have merged.
        free = set(moment.free_chunks)
        largest = walk.memory.arena.max_chunk_blocks
        assert not any((start ^ blocks, blocks) in free for start, blocks in free if blocks < largest)
    # As sets: blocks freed last are taken first.
    assert walk.memory.arena.free_lists == carve


@pytest.mark.slow
@pytest.mark.parametrize("policy", CHUNKED)
@hypothesis_settings(max_examples=60)
@given(case=small_cases())
def test_chunks_lie_where_the_oracle_puts_them(policy, case):
    """Positions matter: the smallest fitting chunk, last in first out, the lower half of a split."""
    cost = case.cost
    outcome = simulate(
        policy, case.requests, case.pool, case.limits, cost.step_ticks, cost.swap_out_ticks, cost.swap_in_ticks
    )
    walked = [moment.free_chunks for moment in Walk(policy, case).moments() if moment.running]
    assert walked == [step.free_chunks for step in outcome.steps]
