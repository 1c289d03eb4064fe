"""The highest rate that meets a goal: against a queue's formula, and what must hold of any search."""

from __future__ import annotations

from math import exp, factorial, floor, inf, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_runs import settings_of
from fragmeter.experiments.capacity.load import Drawn, Load
from fragmeter.experiments.capacity.max_rate import (
    ALONE,
    MOST,
    STEP,
    Ahead,
    MaxRate,
    SeedRate,
    follow,
    go_ahead,
    highest,
)
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.slo_check import Goal, SloCheck
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import SettingError
from fragmeter.traces import Pacing, Trace
from oracle import Limits, Pool
from ramp_cost import RampCost

MET = SloCheck(True, 8, 8, {})
SERVICE_S = 0.1


class EvenLoad:
    """Requests of one token each, with Poisson gaps."""

    def __init__(self, n: int) -> None:
        self.n = n

    def draw(self, seed: int) -> Drawn:
        ones = np.ones(self.n, dtype=np.int64)
        return Drawn(Trace("even", ones, ones), np.random.default_rng(seed).exponential(size=self.n), None, None)


def one_server():
    return settings_of("vllm-sosp23", Pool(64, 16), Limits(64, max_num_seqs=1)), RampCost(
        base_ticks=ticks.from_seconds(SERVICE_S)
    )


def seed_rates(settings, load, goal, num_seeds: int, cost) -> MaxRate:
    """The highest rates of the first seeds."""
    ahead = go_ahead(settings, load, goal, 0, cost)
    others = range(1, num_seeds) if ahead.found.rate else ()
    return MaxRate.of(ahead, (ahead.found.rate, *(follow(settings, load, goal, seed, ahead, cost) for seed in others)))


def wait_within(rate: float, wait_s: float) -> float:
    """P(wait <= wait_s) of M/D/1: Erlang 1909, in the form of Tijms, A First Course in Stochastic Models, 9.2."""
    terms = (
        (rate * (k * SERVICE_S - wait_s)) ** k / factorial(k) * exp(-rate * (k * SERVICE_S - wait_s))
        for k in range(floor(wait_s / SERVICE_S) + 1)
    )
    return (1 - rate * SERVICE_S) * sum(terms)


@pytest.mark.slow
@pytest.mark.parametrize(("ttft_s", "share"), [(0.35, 0.9), pytest.param(0.5, 0.95, marks=pytest.mark.slow)])
def test_one_server_bears_what_the_formula_says(ttft_s, share):
    """Services of 0.1 s one after the other: TTFT is the wait and a service. Within four standard errors."""
    low, high = 0.0, 1 / SERVICE_S
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if wait_within(middle, ttft_s - SERVICE_S) >= share else (low, middle)
    chosen, cost = one_server()
    found = seed_rates(chosen, EvenLoad(8000), Goal(Objectives(ttft=1000 * ttft_s), share), 6, cost)
    # A seed's rate is rounded down to a step.
    mean = np.exp(np.log(found.seed_rates).mean()) * STEP**0.5
    assert abs(log(mean / low)) < 4 * found.spread / 6**0.5
    assert 0.01 < found.spread < 0.04


@pytest.mark.slow
def test_requests_in_flight_at_the_highest_rate_are_those_of_the_queue():
    """M/D/1 has u + u^2 / (2 (1 - u)) requests in the system at utilisation u (Pollaczek 1930)."""
    chosen, cost = one_server()
    ahead = go_ahead(chosen, EvenLoad(8000), Goal(Objectives(ttft=350)), 0, cost)
    used = ahead.found.rate * SERVICE_S
    assert ahead.in_flight == pytest.approx(used + used**2 / (2 * (1 - used)), rel=0.15)
    assert go_ahead(chosen, EvenLoad(200), Goal(Objectives(ttft=99)), 0, cost).in_flight == 0


def test_runs_of_fleets_fill_their_replicas():
    """They last for ten times the time in the system, and never have fewer than 1,000 requests a replica."""
    load = Load(Inputs(requests=Requests(dataset="sharegpt"), pacing=Pacing(request_rate=9.0)))
    sizes = 1, 5, 20
    assert [load.filling(470.0).num_prompts(size) for size in sizes] == [5000, 23_500, 94_000]
    assert [load.filling(30.0).num_prompts(size) for size in sizes] == [5000, 5000, 20_000]
    fixed = Load(Inputs(requests=Requests(dataset="sharegpt", num_prompts=6000), pacing=Pacing(request_rate=9.0)))
    assert [fixed.filling(470.0).num_prompts(size) for size in sizes] == [6000] * 3
    assert [fixed.filling(470.0).is_short(size) for size in sizes] == [False, True, True]


@pytest.mark.slow
def test_lenient_objectives_are_bounded_by_what_the_server_delivers():
    """With a day to wait every rate would do for a while; what is delivered is 10 requests/s."""
    chosen, cost = one_server()
    found = seed_rates(chosen, EvenLoad(500), Goal(Objectives(ttft=86_400_000)), 3, cost)
    assert found.saturated == pytest.approx(10)
    assert all(10 / STEP < each <= 10 for each in found.seed_rates)


def test_every_rate_meets_where_all_requests_at_once_do():
    """max_num_seqs 200 and a limit of a day: with a hundred requests all rates give the same result."""
    chosen = settings_of("vllm-sosp23", Pool(4096, 16), Limits(64, max_num_seqs=200))
    found = seed_rates(chosen, EvenLoad(100), Goal(Objectives(ttft=86_400_000)), 3, one_server()[1])
    assert (found.seed_rates, found.spread, found.saturated) == ((inf,) * 3, 0.0, None)


def test_a_miss_when_served_alone_leaves_no_rate():
    chosen, cost = one_server()
    found = seed_rates(chosen, EvenLoad(200), Goal(Objectives(ttft=99)), 3, cost)
    assert (found.rate, found.seed_rates) == (0.0, (0.0,))
    assert found.alone == SloCheck(False, 160, 0, {"ttft": 160})


@pytest.mark.slow
def test_more_objectives_never_raise_the_rate():
    chosen, cost = one_server()
    work = EvenLoad(250)
    rates = [
        seed_rates(chosen, work, Goal(Objectives(*limits), share), 3, cost).seed_rates
        for limits, share in (((400,), 0.8), ((400,), 0.95), ((400, None, 300), 0.95), ((250, None, 300), 0.95))
    ]
    for weaker, stronger in zip(rates, rates[1:]):
        assert all(high >= low for high, low in zip(weaker, stronger))
    assert rates[0] > rates[-1]


@given(answer=st.integers(ALONE - 1, MOST), start=st.integers(ALONE, MOST), stride=st.sampled_from([1, 4, 35]))
def test_the_search_finds_where_it_ends(answer, start, stride):
    tried = []

    def meets(power: int) -> bool:
        assert ALONE <= power <= MOST
        tried.append(power)
        return power <= answer

    assert highest(meets, start, stride) == (None if answer < ALONE else answer)
    assert len(set(tried)) == len(tried)
    # Strides double on the way there, and halve on the way back.
    assert len(tried) <= 3 + 2 * log(1 + abs(answer - start) / stride, 2) + log(2 * stride, 2)


class TestMaxRate:
    def test_one_seed_says_its_own(self):
        assert MaxRate.of(Ahead(MET, None, SeedRate(0))) == MaxRate(MET, None, (1.0,), 1.0)

    def test_the_spread_is_that_of_the_logarithms(self):
        assert MaxRate(MET, None, tuple(map(exp, (2, 3, 4))), 9).spread == pytest.approx(1)
        assert MaxRate(MET, None, (3.0, inf, 4.0), 3.0).spread == MaxRate(MET, None, (3.0, 4.0, 4.0), 3.0).spread


@pytest.fixture
def trace(tmp_path):
    """A request a second for 50 s, then two hundred a second."""
    times = [*range(50), *(50 + place / 200 for place in range(50))]
    path = tmp_path / "knee.csv"
    rows = "".join(f"{time},{100 + place},{1 + place}\n" for place, time in enumerate(times))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    return path


def load_of(trace, num_prompts: int = 640, **pacing) -> Load:
    requests = Requests(trace=trace, num_prompts=num_prompts)
    return Load(Inputs(requests=requests, pacing=Pacing(**pacing)))


class TestLoad:
    def test_a_seed_serves_the_same_requests_at_every_rate(self, trace):
        drawn = load_of(trace).draw(3)
        slow, fast = drawn.at(1), drawn.at(4)
        assert (slow.prompt_tokens == fast.prompt_tokens).all() and (slow.output_tokens == fast.output_tokens).all()
        assert np.allclose(slow.arrival_ticks / 4, fast.arrival_ticks, atol=ticks.PER_US)
        assert drawn.at(1).sha256() == load_of(trace).draw(3).at(1).sha256() != load_of(trace).draw(4).at(1).sha256()

    def test_requests_are_drawn_from_the_trace(self, trace):
        drawn = load_of(trace, 4000).draw(0)
        # Prompt and output of a row stay together.
        assert (drawn.trace.prompt_tokens == drawn.trace.output_tokens + 99).all()
        assert len(set(drawn.trace.prompt_tokens.tolist())) == 100
        assert drawn.trace.prompt_tokens.mean() == pytest.approx(149.5, rel=0.02)
        assert drawn.gaps.mean() == pytest.approx(1, rel=0.06) and drawn.gaps.std() == pytest.approx(1, rel=0.1)

    def test_burstiness_is_vllms(self, trace):
        gaps = load_of(trace, 4000, request_rate=1, burstiness=0.25).draw(0).gaps
        assert gaps.mean() == pytest.approx(1, rel=0.15) and gaps.std() == pytest.approx(2, rel=0.15)

    def test_as_traced_gaps_come_in_blocks_with_their_requests(self, trace):
        load = load_of(trace, rate_scale=2)
        assert load.trace_rate == pytest.approx(99 / 50.245)
        drawn = load.draw(0)
        rows = (drawn.trace.output_tokens - 1).reshape(10, 64)
        assert ((np.diff(rows, axis=1) % 100) == 1).all()
        mean_s = 50.245 / 99
        own = np.select([rows == 0, rows <= 50], [mean_s, 1.0], 1 / 200)
        assert np.allclose(drawn.gaps.reshape(10, 64) * mean_s, own)

    def test_prompts_that_share_keep_their_order(self, tmp_path):
        path = tmp_path / "sessions.csv"
        rows = "".join(f"{place},{10 + place},5,{place % 7}\n" for place in range(200))
        path.write_text("arrival_s,prompt_tokens,output_tokens,session_id\n" + rows)
        load = load_of(path, 150)
        one, other = load.draw(0), load.draw(1)
        assert load.keeps_order and one.trace.content is not None
        assert one.trace.prompt_tokens.tolist() == other.trace.prompt_tokens.tolist() == list(range(10, 160))
        assert one.gaps.tolist() != other.gaps.tolist()

    def test_a_data_set_is_drawn_anew(self):
        load = Load(Inputs(requests=Requests(num_prompts=300)))
        one, other = load.draw(0), load.draw(1)
        assert load.trace_rate is None
        assert len(one.gaps) == 300 and one.trace.prompt_tokens.tolist() != other.trace.prompt_tokens.tolist()

    @pytest.mark.parametrize(
        ("pacing", "prompts", "message"),
        [
            ({"max_concurrency": 4}, 640, "max_concurrency = '4': makes arrivals wait .*; give --request-rate"),
            ({"rate_curve": "day.csv"}, 640, "rate_curve = 'day.csv': has several rates.*; give the highest"),
            ({}, 99, "num_prompts = 99: must be 100 or more"),
        ],
    )
    def test_what_has_no_rate(self, trace, pacing, prompts, message):
        with pytest.raises(SettingError, match=message):
            load_of(trace, prompts, **pacing)

    def test_a_data_set_has_no_arrivals_to_scale(self):
        with pytest.raises(SettingError, match="rate_scale = 2.0: .* has no arrivals"):
            Load(Inputs(requests=Requests(num_prompts=300), pacing=Pacing(rate_scale=2)))
