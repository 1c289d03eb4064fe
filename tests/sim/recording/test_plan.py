"""Recorded plans: the tables hold what the sequences do (invariant 8), and nothing else changes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import evictions_of, residencies_of, settings_of, steps_of, times_of, workload_of
from family_runs import group_cases, settings_for, tree_cases
from family_runs import workload_of as family_workload
from fragmeter.sim import Settings, Workload, simulate, summary
from fragmeter.sim.metrics.result import requests_table, steps_table
from fragmeter.sim.metrics.work import work
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.recording.plans import Plan, load, record
from fragmeter.sim.runs.run import Run
from plan_cases import caching_case, caching_plan, copying_plan, swapping_case, swapping_plan
from plan_replay import replay
from radix_cases import shared_cases as radix_cases
from shared_prefixes import caching_settings, shared_cases
from strategies import Case, crowded_cases, medium_cases, small_cases

SERVERS = ("tgi", "trtllm-no-evict", "trtllm-max-util", "fastgen", "lightllm", "vattention", "llama-cpp")
PAGED = ("vllm-sosp23", "vllm-v0", "vllm-v1", "sarathi", *SERVERS)
cases = st.one_of(crowded_cases(), medium_cases(), small_cases())


def results_text(run: Run) -> str:
    """All that a run says of itself."""
    tables = (requests_table(run), steps_table(run))
    return json.dumps(summary(run)) + "".join(table.to_csv() for table in tables)


def recorded(settings, workload, cost=None, **window) -> tuple[Run, Plan]:
    """A run and its plan, which are held to what ``simulate`` says."""
    run, plan = record(settings, workload, step_cost=cost, **window)
    plain = simulate(settings, workload, cost)
    # Tables of pandas would take twice the time of the runs.
    assert json.dumps(summary(run)) == json.dumps(summary(plain))
    assert run.refused.tolist() == plain.refused.tolist()
    for log_of in (times_of, steps_of, residencies_of, evictions_of):
        assert log_of(run) == log_of(plain)
    return run, plan


def check(run: Run, plan: Plan) -> None:
    """The plan can be replayed, and has the steps and the tokens of the ledger."""
    replay(plan)
    rows, tokens = run.log.rows, work(run.log).tokens
    assert plan.start_ticks.tolist() == rows["start_ticks"].tolist()
    assert plan.ticks.tolist() == rows["ticks"].tolist()
    assert int(plan.query_tokens.sum()) == tokens["useful"] + tokens["recomputed"]
    assert int(plan.padding_tokens.sum()) == tokens["padding"]
    assert int(plan.copied_slots.sum()) == int(run.log.copies["slots"].sum())
    assert (plan.prefill_tokens + plan.decodes).sum() == plan.query_tokens.sum()


@pytest.mark.slow
@pytest.mark.parametrize("policy", PAGED)
@hypothesis_settings(max_examples=15)
@given(case=cases, shuffle=st.booleans())
def test_tables_hold_what_sequences_do(policy, case: Case, shuffle):
    """Invariant 8, on plain lists."""
    settings = settings_of(policy, case.pool, case.limits)
    workload = workload_of(case.requests, case.limits.max_model_len)
    check(*recorded(settings, workload, case.cost, shuffle_ids=shuffle))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v0"])
@hypothesis_settings(max_examples=25)
@given(data=st.data(), shuffle=st.booleans())
def test_tables_of_families_hold_what_their_members_do(policy, data, shuffle):
    """Samples and beams, a pinned prefix, swaps; and trees of requests."""
    case = data.draw(st.one_of(group_cases(policy), tree_cases(policy)))
    check(*recorded(settings_for(case), family_workload(case.requests), case.cost, shuffle_ids=shuffle))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static", "fastertransformer", "orca", "orca-max", "orca-pow2", "orca-oracle"])
@hypothesis_settings(max_examples=15)
@given(case=cases, arena=st.sampled_from(["buddy", "first-fit", "best-fit"]))
def test_pieces_hold_what_sequences_do(policy, case: Case, arena):
    """Contiguous memory; that of orca and of static batches gets addresses."""
    switches = {"arena": arena} if policy.startswith("orca-") else {}
    settings = settings_of(policy, case.pool, case.limits, **switches)
    check(*recorded(settings, workload_of(case.requests, case.limits.max_model_len), case.cost))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["orca", "orca-max", "orca-oracle"])
@hypothesis_settings(max_examples=25)
@given(data=st.data())
def test_pieces_of_families_hold_what_their_members_do(policy, data):
    """Copies of prompts, of beams and of parents."""
    kinds = [tree_cases(policy)] + [group_cases(policy)] * (policy != "orca-oracle")
    case = data.draw(st.one_of(kinds))
    check(*recorded(settings_for(case), family_workload(case.requests), case.cost))


@pytest.mark.slow
@hypothesis_settings(max_examples=35)
@given(case=shared_cases(), shuffle=st.booleans())
def test_tables_with_cached_prefixes_hold_what_sequences_do(case, shuffle):
    """vLLM's prefix cache, under vllm-v1."""
    check(*recorded(caching_settings(case), case.workload, case.cost, shuffle_ids=shuffle))


@pytest.mark.slow
@hypothesis_settings(max_examples=35)
@given(case=st.one_of(cases, radix_cases()), shuffle=st.booleans(), caching=st.booleans())
def test_slots_of_a_radix_tree_hold_what_sequences_do(case, shuffle, caching):
    """SGLang's tree."""
    settings = settings_of("sglang", case.pool, case.limits, enable_prefix_caching=caching)
    workload = workload_of(case.requests, case.limits.max_model_len, case.content)
    run, plan = recorded(settings, workload, case.cost, shuffle_ids=shuffle)
    check(run, plan)
    memory = run.replica.memory
    # All that is taken is in the tree.
    assert not memory.tables.tables and memory.free == memory.tables.pool.num_free
    assert memory.free + sum(map(len, memory.tree.slots.values())) == memory.num_blocks


@pytest.mark.parametrize(("case", "plan"), [(swapping_case, swapping_plan), (caching_case, caching_plan)])
def test_the_cases_are_sound(case, plan):
    run, found = recorded(*case(), shuffle_ids=True)
    check(run, found)
    assert found.meta == plan().meta


def same_from(plan: Plan, whole: Plan, first: int) -> None:
    """A plan of a window is the part of the whole one from its first step on."""
    for step in range(plan.num_steps):
        mine, theirs = plan.step(step), whole.step(first + step)
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
        for row in range(len(mine.sequence)):
            assert plan.logical_tokens(step, row).tolist() == whole.logical_tokens(first + step, row).tolist()
            assert plan.block_table(step, row).tolist() == whole.block_table(first + step, row).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=6)
@given(case=cases, first=st.integers(0, 12), steps=st.integers(1, 12))
def test_windows_change_nothing_and_can_be_replayed(policy, case: Case, first, steps):
    """When it is over the run leaps again, with block ids."""
    settings = settings_of(policy, case.pool, case.limits)
    workload = workload_of(case.requests, case.limits.max_model_len)
    _, plan = recorded(settings, workload, case.cost, first_step=first, num_steps=steps)
    replay(plan)
    assert plan.num_steps <= steps


@pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v1", "sglang", "orca", "static"])
def test_runs_leap_when_a_window_is_over(policy):
    """Two requests of fifty steps, of which three are recorded."""
    work = Workload("two", np.zeros(2, dtype=np.int64), np.array([5, 5]), np.array([50, 40]))
    settings = Settings(policy=policy, model="toy-opt", num_gpu_blocks_override=400, max_model_len=64, max_num_seqs=2)
    run, plan = recorded(settings, work, first_step=1, num_steps=2)
    assert plan.num_steps == 2 and len(run.log.rows["steps"]) < 10


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-v1", "sglang"])
@hypothesis_settings(max_examples=25)
@given(data=st.data(), shuffle=st.booleans())
def test_what_families_find_in_a_cache_is_theirs(policy, data, shuffle):
    """Samples and trees under policies that know neither, and find them by their contents."""
    case = data.draw(st.one_of(group_cases(policy), tree_cases(policy)))
    settings = settings_of(policy, case.pool, case.limits, enable_prefix_caching=True)
    check(*recorded(settings, family_workload(case.requests), case.cost, shuffle_ids=shuffle))


def test_no_request_is_served():
    """The pool holds none of them."""
    settings, workload = swapping_case()
    run, plan = recorded(replace(settings, num_gpu_blocks_override=3), workload)
    assert run.refused.all() and plan.num_steps == len(plan.sequence) == 0
    replay(plan)


@pytest.mark.parametrize("plan_of", [swapping_plan, caching_plan, copying_plan])
def test_a_window_begins_with_what_lies_in_the_slots(plan_of):
    whole = plan_of()
    for first in range(0, whole.num_steps, 3):
        window = plan_of(first_step=first, num_steps=9)
        assert window.num_steps == min(9, whole.num_steps - first)
        same_from(window, whole, first)
        replay(window)


def test_a_plan_is_read_as_it_was_written(tmp_path):
    plan = swapping_plan()
    for name in ("one.npz", "two.npz"):
        plan.save(tmp_path / name)
    found = load(tmp_path / "one.npz")
    assert found.meta == plan.meta
    for name, array in vars(plan).items():
        if name != "meta" and not name.startswith("_"):
            assert array.dtype == getattr(found, name).dtype and np.array_equal(array, getattr(found, name))
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
