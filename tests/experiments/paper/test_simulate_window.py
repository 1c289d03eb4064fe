"""Runs that end with their window: its ledger is that of runs to the last request, to the slot and the tick."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from fragmeter.experiments.paper import bench
from fragmeter.experiments.paper.bench import Bench, Case
from fragmeter.experiments.paper.paper import FIG2, Source
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate, simulate_window
from fragmeter.sim.workload.workload import Workload

SHORT = replace(FIG2, duration_s=120, window_s=(30, 120))
POLICIES = ["static", "fastertransformer", "orca-max", "orca-pow2", "orca-oracle", "vllm-sosp23", "vllm-v1", "tgi"]


@pytest.fixture(scope="module")
def work() -> Workload:
    return Source((0,)).workload(SHORT, 0)


@pytest.mark.parametrize("window", [(30, 120), (0.5, 0.7), (0, 61.25)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_window_is_that_of_the_whole_run(work, policy, window):
    chosen = settings(policy=policy, window=window)
    assert simulate_window(chosen, work).window == simulate(chosen, work).window


@pytest.mark.parametrize("window", [(30, 120), (0.5, 0.7), (0, 61.25)], ids=str)
def test_a_run_may_end_where_a_step_is_decided_and_has_not_run(work, window):
    """What a look-up needs to know of that step is known ahead of the ledger."""
    chosen = settings(policy="vllm-v1", window=window, enable_prefix_caching=True)
    assert simulate_window(chosen, work).window == simulate(chosen, work).window


@pytest.mark.parametrize("more", [{"leap": False}, {"preemption_mode": "swap", "swap_space": 4.0}], ids=str)
def test_step_by_step_and_with_swaps_too(work, more):
    chosen = settings(policy="vllm-sosp23", window=(10, 40), num_gpu_blocks_override=200, **more)
    assert simulate_window(chosen, work).window == simulate(chosen, work).window


@pytest.mark.parametrize("window", [(100, 200), (150, 10_000), (9000, 10_000)], ids=str)
def test_windows_in_which_or_before_which_all_is_over(work, window):
    chosen = settings(policy="vllm-sosp23", window=window)
    assert simulate_window(chosen, work).window == simulate(chosen, work).window


def test_what_comes_after_is_not_simulated(work):
    chosen = settings(policy="orca-max", window=(10, 30))
    whole, part = simulate(chosen, work), simulate_window(chosen, work)
    assert part.log.num_steps < whole.log.num_steps / 4


def test_a_bench_s_means_are_those_of_the_whole_run(work):
    case = Case(FIG2, 0, "orca-max", 1.125)
    part, whole = (bench.measure(work, replace(case, to_the_end=to_the_end)) for to_the_end in (False, True))
    assert part.over_time == whole.over_time
    assert whole.values.items() - part.values.items() == {
        (name, whole.values[name]) for name in ("requests_per_s", "output_tokens_per_s")
    }


def test_a_bench_s_timeline_is_that_of_the_whole_run():
    """A row more or less would change the page."""
    case = Case(SHORT, 0, "orca-pow2", 1.125)
    part, whole = (Bench(Source((0,))).timeline(replace(case, to_the_end=to_the_end)) for to_the_end in (False, True))
    pd.testing.assert_frame_equal(part, whole)
    assert part["start_s"].max() > 119
