"""Overloaded runs that end early: outcomes and crossings equal those of runs to the last request."""

from __future__ import annotations

from math import inf, isinf

import numpy as np
import pytest

from fragmeter.experiments.paper.figures import fig12
from fragmeter.experiments.paper.paper import Source
from fragmeter.experiments.paper.rate_sweep import rate_sweep
from fragmeter.experiments.paper.rate_sweep.costs import Steps
from fragmeter.experiments.paper.rate_sweep.rate_sweep import (
    TARGET_S,
    Load,
    Search,
    System,
    find_rate,
    fit_scale,
    latency_s,
    mean_latency_s,
)
from fragmeter.sim.config.settings import settings
from fragmeter.sim.cost import PaperCost
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.workload import Workload

POLICIES = ["vllm-sosp23", "orca-max", "orca-oracle", "fastertransformer"]


@pytest.fixture(scope="module")
def load() -> Load:
    return fig12.load(Source((0,)), 4.0, 150, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_said_to_be_above_is(load, policy):
    """Whatever the limit: infinity of a mean that is above it, and the mean itself of one that is not."""
    chosen, work = settings(policy=policy), load.workload
    mean = mean_latency_s(chosen, work, PaperCost())
    for share in (0.02, 0.1, 0.5, 0.999, 1.001):
        found = mean_latency_s(chosen, work, PaperCost(), share * mean)
        assert found == mean or (isinf(found) and share < 1)
    assert mean_latency_s(chosen, work, PaperCost(), 0.001 * mean) == inf


@pytest.mark.slow
def test_groups_are_bounded_by_their_first_sequence(load):
    system = System(settings(), Steps(), 3)
    mean = latency_s(system, load, 4.0)
    assert latency_s(system, load, 4.0, most_s=mean) == mean
    assert latency_s(system, load, 4.0, most_s=0.01 * mean) == inf


def test_the_scale_is_that_of_the_limit_too(load):
    system = System(settings(), Steps())
    mean = latency_s(system, load, 4.0, 1.3)
    assert latency_s(system, load, 4.0, 1.3, most_s=mean) == mean
    assert latency_s(system, load, 4.0, 1.3, most_s=0.01 * mean) == inf


def test_it_ends_early():
    """Requests far apart that all wait for a first one: a run is over before the later ones start."""
    count = 400
    arrivals = np.arange(count) * 10**9
    work = Workload("flood", arrivals, np.full(count, 1000), np.full(count, 1000))
    started = []

    class Counted(PaperCost):
        def step_ticks(self, *parts: int) -> int:
            started.append(parts)
            return super().step_ticks(*parts)

    mean_latency_s(settings(policy="orca-max"), work, Counted())
    whole = len(started)
    started.clear()
    assert mean_latency_s(settings(policy="orca-max"), work, Counted(), 1e-6) == inf
    assert len(started) < whole / 4


@pytest.mark.slow
def test_crossings_and_scales_are_those_of_whole_runs(monkeypatch):
    """Seven sequences at once, each at 1.7 requests/s; the first rate is twice what the server takes."""
    count = 800
    arrivals = np.arange(count) * (PER_SECOND // 24)
    load = Load(Workload("busy", arrivals, np.full(count, 64), np.full(count, 20)), 24.0)
    system = System(settings(policy="orca-max"), Steps())
    search = Search(("busy",), system, load, 1.0)
    monkeypatch.setattr(rate_sweep, "_FAR_ABOVE", 1.1)
    found, scale = find_rate(search)[1], fit_scale(system, load)
    monkeypatch.setattr(rate_sweep, "_FAR_ABOVE", inf)
    expected, whole_scale = find_rate(search)[1], fit_scale(system, load)
    assert (found.at, found.exponent) == (expected.at, expected.exponent)
    assert (scale.at, scale.exponent) == (whole_scale.at, whole_scale.exponent)
    assert set(found.points) < set(expected.points) and set(scale.points) < set(whole_scale.points)
    assert all(latency > TARGET_S for _, latency in set(expected.points) - set(found.points))


def test_the_bound_is_never_above_the_mean(load, monkeypatch):
    """At every look, with every look taken."""
    bounds = []
    monkeypatch.setattr(rate_sweep, "_LOOKS_EVERY", 1)
    least_s = rate_sweep._Watch.least_s
    monkeypatch.setattr(
        rate_sweep._Watch, "least_s", lambda watch, ledger: bounds.append(least_s(watch, ledger)) or 0.0
    )
    mean = mean_latency_s(settings(), load.workload, PaperCost(1.3), 100.0)
    assert len(bounds) > 100 and max(bounds) < mean and bounds == sorted(bounds) and bounds[-1] > 0.5 * mean
