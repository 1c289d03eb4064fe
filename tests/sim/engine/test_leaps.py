"""Invariant 6: leap and step give identical results, bit for bit; and so do runs with and without block ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from calibrations import calibration
from engine_runs import evictions_of, serve, steps_of, times_of
from fragmeter.sim.cost import CalibratedCost
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.types.ticks import PER_US
from oracle import Limits, Pool, Request
from same_runs import plain, same
from strategies import COSTS, Case, LineCost, crowded_cases, long_cases
from walk import Moment, Walk

PAGED = "vllm-sosp23"
BENT = {"axes": ["length"], "knots": [[4, 16, 64, 256]], "log_ratios": [0, 1, 1.2, 2]}
CURVED = CalibratedCost(
    calibration(decode_attention={"coefficients": {"t0_us": 10}, "residuals": BENT}),
    model("toy-llama"),
    gpu("a100-40gb"),
)
cases = st.one_of(crowded_cases(), long_cases())


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=30)
@given(case=cases, data=st.data())
def test_leap_and_step_are_the_same_bits(policy, case, data):
    """Invariant 6: leap and step give identical results."""
    end = serve(policy, case).log.end_ticks
    window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 1000), min_size=2, max_size=2, unique=True))))
    same(serve(policy, case, window, leap=True), serve(policy, case, window, leap=False))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=8)
@given(case=cases)
def test_leap_and_step_are_the_same_bits_over_the_knots_of_curves(policy, case):
    """Invariant 6, with arrivals as far apart as the steps of a model are long."""
    requests = [replace(request, arrival_ticks=request.arrival_ticks * PER_US) for request in case.requests]
    case = replace(case, requests=requests, cost=CURVED)
    same(serve(policy, case, leap=True), serve(policy, case, leap=False))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=1500)
@given(case=cases, data=st.data())
def test_leap_and_step_are_the_same_bits_at_length(policy, case, data):
    """Invariant 6: leap and step give identical results."""
    end = serve(policy, case).log.end_ticks
    window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 1000), min_size=2, max_size=2, unique=True))))
    same(serve(policy, case, window, leap=True), serve(policy, case, window, leap=False))


@pytest.mark.slow
@hypothesis_settings(max_examples=40)
@given(case=cases)
def test_leaps_hand_out_the_ids_that_steps_hand_out(case):
    """Invariant 6, for block tables: within a leap ids go out in order of step and sequence."""
    leaping, stepping = (Walk(PAGED, case, leap) for leap in (True, False))
    leapt, stepped = ({moment.decode_step: held(moment) for moment in walk.ids()} for walk in (leaping, stepping))
    assert leapt.items() <= stepped.items()
    assert (0 in leapt) == (0 in stepped) == (len(leaping.refused) < len(case.requests))
    # All is free now, in the order in which requests took and freed blocks.
    assert leaping.memory.tables.pool.free_ids == stepping.memory.tables.pool.free_ids


def held(moment: Moment) -> tuple[object, ...]:
    return moment.tables, moment.free_ids, moment.host_tables, moment.host_free_ids


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=30)
@given(case=cases, leap=st.booleans())
def test_decisions_and_ledger_are_the_same_with_and_without_ids(policy, case, leap):
    with_ids, without = (serve(policy, case, leap=leap, ids=ids) for ids in (True, False))
    for columns, others in ((with_ids.log.rows, without.log.rows), (with_ids.log.residencies, without.log.residencies)):
        assert {name: column.tolist() for name, column in columns.items()} == {
            name: column.tolist() for name, column in others.items()
        }
    assert evictions_of(with_ids) == evictions_of(without)
    assert plain(with_ids.window) == plain(without.window)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["orca", "orca-oracle"])
@hypothesis_settings(max_examples=60)
@given(case=long_cases(), sloped=st.booleans())
def test_leaps_are_as_long_as_they_can_be(policy, case, sloped):
    """Without knots and budgets a leap ends only when a sequence finishes, or in the step in which one arrives."""
    bounds = replace(case.limits, max_num_batched_tokens=1 << 20, max_num_seqs=64)
    cost = COSTS["sloped" if sloped else "flat"]
    run = serve(policy, replace(case, cost=cost, limits=bounds))
    steps, finishes = steps_of(run), {times[2] for times in times_of(run).values()}
    last_steps = run.log.row_step + run.log.rows["steps"] - 1
    for last in (steps[decode_step] for decode_step in last_steps.tolist()):
        end = last.start_ticks + last.ticks
        arrived = any(last.start_ticks < request.arrival_ticks <= end for request in case.requests)
        assert end in finishes or arrived


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_leaps_are_long_where_nothing_is_decided(cost):
    """A lone sequence of three hundred tokens: one leap, but for the knots of its cost."""
    case = Case([Request(0, 40, 300)], Pool(100, 4), Limits(1000), cost)
    run = serve(PAGED, case)
    rows = run.log.rows["steps"].tolist()
    assert sum(rows) == 300
    knots = {"flat": 0, "sloped": 0, "knee": 6}[cost.name]
    # A knot before the second step ends the first leap, and each other one begins the next.
    assert len(rows) <= 2 + knots
    same(run, serve(PAGED, case, leap=False))


def test_a_leap_stops_for_an_arrival_unless_a_request_is_blocked():
    """Fifty slots, 44 of them for request 0. 1 comes and is admitted at the next boundary; 2 comes and waits for 0; 3
    would fit, but it comes behind 2, and the leap passes over it. Decodes take 114 ticks alone, 127 as two."""
    requests = [Request(0, 4, 40, 40), Request(700, 3, 3, 3), Request(3000, 6, 10, 10), Request(3500, 1, 1, 1)]
    run = serve("orca", Case(requests, Pool(50, 1), Limits(50), LineCost()))
    rows = run.log.rows
    assert [*zip(rows["start_ticks"].tolist(), rows["steps"].tolist(), rows["waiting"].tolist())] == [
        (0, 7, 0),  # 129 + 6 * 114 = 813, the first boundary after 700
        (813, 3, 0),  # 135 + 2 * 127, until 1 is done
        (1202, 16, 0),  # alone again, to the first boundary after 3000
        (3026, 14, 1),  # until 0 is done
        (4622, 1, 0),  # 2 and 3 together
        (4772, 9, 0),
    ]
    assert [finish for _, _, finish, *_ in times_of(run).values()] == [4622, 1202, 5798, 4772]


@pytest.mark.slow
def test_a_run_longer_than_what_is_integrated_at_a_time_is_the_same_bits():
    """Three hundred thousand steps, which the accounts take in pieces; leaps cross the pieces' edges."""
    rng = np.random.default_rng(5)
    outputs = rng.integers(2_000, 9_000, size=80)
    requests = [Request(i * 25_000_000, 7, int(output)) for i, output in enumerate(outputs)]
    case = Case(requests, Pool(2_000, 7), Limits(14_000, watermark_fraction=0.0), LineCost("sloped", 1, 1))
    leapt, stepped = serve(PAGED, case, leap=True), serve(PAGED, case, leap=False)
    assert stepped.log.num_steps == leapt.log.num_steps > 1 << 18
    assert len(leapt.log.rows["steps"]) < 1_000
    assert plain(leapt.accounts.window()) == plain(stepped.accounts.window())
    assert times_of(leapt) == times_of(stepped)
