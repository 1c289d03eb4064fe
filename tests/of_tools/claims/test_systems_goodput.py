"""FastGen's effective throughput: gaps between tokens, their moving average, both limits, and the fitted slowness."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fragmeter.experiments.runs.slo_check import compiled_cost
from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.cost import ScaledCost
from fragmeter.sim.metrics.gaps import Gaps
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.users import Users
from tools.claims.runs import Trial
from tools.claims.systems_goodput import Served, best, gap_seconds, lateness, served, slowness

N = 12
CARDS = {"model": "llama-3.1-8b", "gpu": "a100-80gb", "max_model_len": 8192}
SYSTEMS = [("vllm-v0", 8192), ("fastgen", 768)]


def work() -> Workload:
    random, no_wait = np.random.default_rng(0), np.zeros(N, dtype=np.int64)
    return Workload("few", no_wait, random.integers(100, 4000, N), random.integers(1, 40, N), users=Users(4, no_wait))


@pytest.fixture(scope="module", params=SYSTEMS, ids=[name for name, _ in SYSTEMS])
def run(request):
    policy, budget = request.param
    return simulate(settings(policy=policy, max_num_batched_tokens=budget, **CARDS), work())


def test_gaps_add_up_to_the_time_from_the_first_token_to_the_last(run):
    gaps, times = gap_seconds(run), request_times(run)
    for index in range(N):
        mine = gaps["gap_s"][gaps["index"] == index]
        assert len(mine) == run.workload.output_tokens[index] - 1
        assert mine.sum() == pytest.approx((times.finish_ticks - times.first_token_ticks)[index] / PER_SECOND)


def test_gaps_are_those_that_the_run_pools_and_leaps_change_none(run):
    gaps, pooled = gap_seconds(run), Gaps.of(run.log)
    assert len(gaps) == pooled.number
    for percent in (1, 50, 90, 100):
        percentile = np.percentile(gaps["gap_s"], percent) * 1e3
        assert percentile == pytest.approx(pooled.percentile_ms(percent), rel=1e-9)
    stepped = gap_seconds(simulate(replace(run.settings, leap=False), work()))
    assert np.array_equal(gaps, stepped)


def test_lateness_is_the_worst_moving_average_or_the_first_token_s(run):
    gaps, found, times = gap_seconds(run), lateness(run), request_times(run)
    alpha = 2 / 17
    for index in range(N):
        mine = gaps["gap_s"][gaps["index"] == index].to_numpy()
        averages = [0.0]
        for last in range(1, len(mine) + 1):
            weights = (1 - alpha) ** np.arange(last)[::-1]
            averages.append((weights * mine[:last]).sum() / weights.sum())
        first = times.ttft_ms[index] / 1e3 / (run.workload.prompt_tokens[index] / 512)
        assert found[index] == pytest.approx(max(first, 4 * max(averages)), rel=1e-9)


def test_steps_that_take_half_as_long_again_are_a_stretch_of_one_and_a_half(run):
    cost = ScaledCost(compiled_cost(run.settings), 1.5)
    longer = simulate(run.settings, work(), cost)
    assert lateness(longer) == pytest.approx(1.5 * lateness(run), rel=1e-6)
    assert longer.log.end_ticks == pytest.approx(1.5 * run.log.end_ticks, rel=1e-6)


def test_effective_throughput_counts_the_successful_and_its_best_number_of_clients():
    few = Served(2, np.array([0.2, 0.4, 0.6, 0.8]), 1.0)
    many = Served(8, np.array([0.5, 0.8, 1.0, 2.0]), 1.9)
    # A limit that is just reached is missed.
    assert (few.effective(), many.share(), many.effective()) == (1.0, 0.5, 0.95)
    assert best([few, many]) is few
    # At 1.4 times the time, three of four and one of four.
    assert (few.effective(1.4), many.effective(1.4)) == (pytest.approx(0.75 / 1.4), pytest.approx(0.25 * 1.9 / 1.4))


def test_the_slowness_is_where_the_effective_throughput_is_the_published_one():
    numbers = [Served(2, np.full(10, 0.1), 3.0), Served(4, np.full(10, 0.3), 2.0)]
    assert slowness(numbers, 1.5) == pytest.approx(2.0, rel=1e-6)


def test_stalls_fail_more_of_vllm_s_requests_than_of_fastgen_s():
    runs = {name: served(Trial(), name, budget, 8) for name, budget in (("vllm-v0", 4096), ("fastgen", 768))}
    assert runs["vllm-v0"].share() < 0.95 < runs["fastgen"].share()
