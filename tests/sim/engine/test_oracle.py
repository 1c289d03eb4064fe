"""The engine against the oracle: every step, every bucket, every request, over thousands of small cases."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import serve
from fragmeter.sim.memory import BUCKETS
from oracle import POLICIES
from oracle.story import random_case
from same_as_oracle import clipped, expected, same
from strategies import COSTS, Case, crowded_cases, small_cases


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=30)
@given(case=small_cases())
def test_the_engine_does_what_the_oracle_does(policy, case):
    same(policy, case)


@pytest.mark.slow
@hypothesis_settings(max_examples=50)
@given(case=crowded_cases())
def test_the_engine_does_what_the_oracle_does_when_crowded(case):
    """Victims by the dozen: recomputed, swapped out, swapped in while others are admitted."""
    same("vllm-sosp23", case)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=50)
@given(case=small_cases(), data=st.data())
def test_an_arrival_as_a_step_ends_is_seen_at_once(policy, case, data):
    """A last request comes at the end of some step, or a tick before or after it."""
    outcome, _ = expected(policy, case)
    last = case.requests[-1]
    ends = {step.start_ticks + step.ticks + more for step in outcome.steps for more in (-1, 0, 1)}
    late = [tick for tick in ends | {last.arrival_ticks} if tick >= last.arrival_ticks]
    another = replace(last, arrival_ticks=data.draw(st.sampled_from(sorted(late))))
    same(policy, replace(case, requests=[*case.requests, another]))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_engine_does_what_the_oracle_does_under_strain(policy):
    happened, costs = Counter(), [*COSTS.values()]
    for seed in range(15):
        outcome = same(policy, Case(*random_case(seed), costs[seed % 3]))
        happened.update(name for step in outcome.steps for name, slots in step.buckets.items() if slots)
        happened.update(preempted=sum(len(step.preempted) for step in outcome.steps))
    assert {"live", "reserved", "free"} <= set(happened)
    assert (happened["preempted"] > 0) == (policy == "vllm-sosp23")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=50)
@given(case=small_cases(), data=st.data())
def test_a_window_counts_the_steps_that_start_in_it_and_cuts_time_at_its_edges(policy, case, data):
    outcome, _ = expected(policy, case)
    bounds = {tick for step in outcome.steps for tick in (step.start_ticks, step.start_ticks + step.ticks)}
    ticks = {0, 1, *(tick + more for tick in bounds for more in (0, 1, 57))}
    start, end = sorted(data.draw(st.lists(st.sampled_from(sorted(ticks)), min_size=2, max_size=2, unique=True)))
    inside = [step for step in outcome.steps if step.running and start <= step.start_ticks < end]
    for leap in (False, True):
        run = serve(policy, case, (start, end), leap=leap)
        assert (run.window.start_ticks, run.window.end_ticks) == (start, end)
        assert run.window.num_steps == len(inside)
        assert run.window.slot_steps == {name: sum(step.buckets[name] for step in inside) for name in BUCKETS}
        assert run.window.slot_ticks == clipped(outcome, case.pool.slots, start, end)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=3000)
@given(case=small_cases())
def test_the_engine_does_what_the_oracle_does_at_length(policy, case):
    same(policy, case)


@pytest.mark.slow
@hypothesis_settings(max_examples=5000)
@given(case=crowded_cases())
def test_the_engine_does_what_the_oracle_does_when_crowded_at_length(case):
    same("vllm-sosp23", case)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_engine_does_what_the_oracle_does_under_long_strain(policy):
    costs = [*COSTS.values()]
    for seed in range(30, 1500):
        same(policy, Case(*random_case(seed), costs[seed % 3]))
