"""Laws of queues: Little's, exact in every run; and the means of M/M/1 and M/D/1, which a batch of one is."""

from __future__ import annotations

from functools import partial
from math import ceil, sqrt
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import serve, settings_of
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.ledger import Leap
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.types.sequence import StepPlan
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool
from queueing import MEAN_TOKENS, TOKEN_TICKS
from ramp_cost import RampCost
from strategies import Case, crowded_cases, long_cases, small_cases


class Spans(Observer):
    """Every span that the engine lets pass, with how many sequences its queues hold in it; none in idle ones."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, int]] = []

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        self.state = engine.state

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        state = self.state
        queues = state.waiting, state.swapped, state.prefilling, state.stalled
        self.spans.append((now, ticks, sum(map(len, queues)) + state.batch_size))

    def idle_started(self, now: int, ticks: int) -> None:
        self.spans.append((now, ticks, 0))

    def integral(self, arrivals: np.ndarray) -> int:
        """Request-ticks in the system: requests in the queues count for the span, arrivals within it from then on."""
        starts, ticks, held = np.array(self.spans, dtype=np.int64).reshape(-1, 3).T
        stayed, ends = int((ticks * held).sum()), starts + ticks
        # The first span that ends at or after an arrival; a request that comes as it ends is in the next one's queues.
        within = np.searchsorted(ends, arrivals, side="left")
        inside = arrivals > starts[within]
        return stayed + int((ends[within[inside]] - arrivals[inside]).sum())


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=12)
@given(case=st.one_of(small_cases(), crowded_cases(), long_cases()), leap=st.booleans())
def test_littles_law(policy, case: Case, leap: bool):
    """The time-integral of the number in the system, from the engine's queues, is the sum of the times that requests
    spend in it, from the ledger's residencies: to the tick."""
    spans = Spans()
    with mock.patch("engine_runs.simulate", partial(simulate, observers=[spans])):
        run = serve(policy, case, leap=leap)
    times = request_times(run)
    sojourns = int((times.finish_ticks - times.arrival_ticks).sum())
    assert spans.integral(times.arrival_ticks) == sojourns


#: Asymptotic variance of the mean wait, n times that of n waits in a row, in services, at a load of 1/2: of M/M/1
#: rho * (2 + 5 rho - 4 rho^2 + rho^3) / (1 - rho)^4 (Daley, 1968), which bounds that of M/D/1.
LOAD, ASYMPTOTIC_VARIANCE = 0.5, 29.0


def mean_wait(n: int, exponential: bool) -> float:
    """Mean wait, in mean services, of one server at half load and requests that cost the same for each token."""
    rng = np.random.default_rng(5)
    outputs = np.full(n, MEAN_TOKENS)
    if exponential:
        outputs = np.ceil(rng.exponential(MEAN_TOKENS, size=n)).astype(np.int64)
    service = outputs.mean() * TOKEN_TICKS
    arrivals = np.cumsum(np.rint(rng.exponential(service / LOAD, size=n)).astype(np.int64))
    longest = int(outputs.max()) + 16
    settings = settings_of("vllm-sosp23", Pool(ceil(longest / 16) + 9, 16), Limits(longest, max_num_seqs=1))
    work = Workload("one server", arrivals, np.ones(n, dtype=np.int64), outputs)
    times = request_times(simulate(settings, work, RampCost(base_ticks=TOKEN_TICKS)))
    return float((times.first_scheduled_ticks - times.arrival_ticks).mean()) / service


#: Pollaczek and Khinchine: rho / (1 - rho) and half of it.
FORMULAS = {"M/M/1": (True, 1.0), "M/D/1": (False, 0.5)}


@pytest.mark.parametrize(("exponential", "expected"), FORMULAS.values(), ids=FORMULAS)
def test_one_server_waits_as_the_formula_says(exponential, expected):
    """Within four standard deviations of a mean over so few."""
    n = 20_000
    assert abs(mean_wait(n, exponential) - expected) < 4 * sqrt(ASYMPTOTIC_VARIANCE / n)


@pytest.mark.slow
@pytest.mark.parametrize(("exponential", "expected"), FORMULAS.values(), ids=FORMULAS)
def test_one_server_waits_as_the_formula_says_within_two_percent(exponential, expected):
    """A million requests: a standard deviation is 0.5 % at most."""
    assert mean_wait(1_000_000, exponential) == pytest.approx(expected, rel=0.02)
