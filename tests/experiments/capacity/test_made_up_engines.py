"""Searches beside brute force: replicas with a highest rate that is a known function of their number and of the seed."""

from __future__ import annotations

from math import ceil, inf, log
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity import fleet, max_rate
from fragmeter.experiments.capacity.confidence import NUM_SEEDS, Decision, by_count
from fragmeter.experiments.capacity.fleet import FINE, FleetSearch, RateSearch, highest_rate, known_rate
from fragmeter.experiments.capacity.max_rate import STEP, go_ahead
from fragmeter.experiments.capacity.tasks import Search
from fragmeter.experiments.runs.slo_check import Goal, SloCheck
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.types.optional import not_none
from trials import NAMED, Kind, Trial, ended

GOAL = Goal(Objectives(ttft=1000))
#: The first seed of all searches here.
FIRST = 7


def rate_of(size: int, need: int) -> float:
    """Requests/s of so many replicas of which ``need`` serve one; every rate where it is 0."""
    return size / need if need else inf


class Engine:
    """Replicas that need ``needs[seed]`` of them, or of their groups, for one request a second: the rate is proportional to their number.

    At the wanted rate the share that meets the objectives is exactly the goal where they are just enough.
    """

    def __init__(self, needs: list[int], engines: int = 1) -> None:
        self.needs, self.engines = needs, engines
        self.asked: list[Trial] = []

    def rate(self, replicas: int, seed: int) -> float:
        return rate_of(replicas // self.engines, self.needs[seed - FIRST])

    def result(self, trial: Trial) -> float:
        """A share, a rate, or whether the rate is taken."""
        assert trial.replicas % self.engines == 0 and trial not in self.asked
        self.asked.append(trial)
        rate = self.rate(trial.replicas, trial.seed)
        assert trial.near is not None if trial.kind is Kind.MEETS else trial.near is None or 0 < trial.near < inf
        if trial.kind is Kind.SHARE:
            return min(1.0, 0.9 * rate)
        return rate if trial.kind is Kind.RATE else float(rate >= not_none(trial.near))

    def drive(self, search: Search[Any]) -> Any:
        return ended(search, self.result)[0]


def misses(needs: list[int], size: int) -> int:
    return sum(need > size for need in needs)


NEEDS = st.integers(0, 30).flatmap(
    lambda low: st.lists(st.integers(low, low + 6), min_size=NUM_SEEDS, max_size=NUM_SEEDS)
)


class TestSmallestFleet:
    @pytest.mark.slow
    @given(NEEDS, st.integers(1, 40), st.integers(1, 40), st.sampled_from([4, 6, 12]), st.sampled_from([1, 2, 8]))
    def test_it_is_the_smallest_that_at_most_one_of_48_seeds_misses(self, needs, near, least, begun, engines):
        engine = Engine(needs, engines)
        seeds = range(FIRST, FIRST + begun)
        found = engine.drive(FleetSearch(NAMED, 1.0, near, least, 0.9, 10**6, seeds, engines).steps())
        least, near = ceil(least / engines), ceil(near / engines)
        smallest = max(least, sorted(needs)[-2])
        if smallest > 8 * max(near, least):
            assert (found.replicas, found.rates, found.sure_rate, found.misses) == (None, (), 0.0, 0)
            return
        assert (found.replicas, found.seeds, found.misses) == (engines * smallest, NUM_SEEDS, misses(needs, smallest))
        assert found.rates == tuple(rate_of(smallest, need) for need in needs[:begun])
        assert found.sure_rate == rate_of(smallest, sorted(needs)[-2])
        # Sizes that the seeds of the search call too few are below the range, and no others.
        seen = max(len(each.shares) for each in found.tried)
        not_too_few = next(
            size
            for size in range(least, smallest + 1)
            if by_count(misses(needs[:seen], size), seen) is not Decision.TOO_FEW
        )
        assert engines * not_too_few <= found.fewest <= found.replicas
        assert found.replicas in {each.replicas for each in found.tried}
        for each in found.tried:
            assert each.shares == tuple(
                min(1.0, 0.9 * rate_of(each.replicas // engines, need)) for need in needs[: len(each.shares)]
            )

    def test_the_largest_fleet_gets_more_seeds_as_long_as_it_may_be_enough(self):
        """Seven replicas are too few, and eight, the most that are tried from one on, miss with one of 48 seeds."""
        engine = Engine([9, *[8] * (NUM_SEEDS - 1)])
        found = engine.drive(FleetSearch(NAMED, 1.0, 1, 1, 0.9, 10**6, range(FIRST, FIRST + 4)).steps())
        assert (found.replicas, found.fewest, found.misses) == (8, 8, 1)

    def test_where_one_seed_never_meets_the_goal_more_are_asked(self):
        """Of the first four seeds one misses with any fleet: they leave all sizes open, and 48 do not."""
        engine = Engine([1, 999, *[1] * (NUM_SEEDS - 2)])
        found = engine.drive(FleetSearch(NAMED, 1.0, 2, 1, 0.9, 10**6, range(FIRST, FIRST + 4)).steps())
        assert (found.replicas, found.fewest, found.misses) == (1, 1, 1)

    def test_none_is_enough_where_all_are_too_few_for_the_first_seeds(self):
        engine = Engine([999] * NUM_SEEDS)
        found = engine.drive(FleetSearch(NAMED, 1.0, 3, 2, 0.9, 10**6, range(FIRST, FIRST + 4)).steps())
        assert (found.replicas, found.fewest, found.seeds) == (None, 24, 4)
        assert {trial.seed for trial in engine.asked} == {7, 8, 9, 10}

    def test_sizes_grow_by_doubled_strides_and_are_halved(self):
        """From 100, of which a stride of two is a fiftieth, to 137; and from 100 down to 71."""
        for need, sizes in (
            (137, [100, 102, 106, 114, 130, 162, 146, 138, 134, 136, 137]),
            (71, [100, 98, 94, 86, 70, 78, 74, 72, 71]),
        ):
            engine = Engine([need])
            found = engine.drive(FleetSearch(NAMED, 1.0, 100, 1, 0.9, 10**6, [FIRST]).steps())
            assert found.replicas == found.fewest == need
            shares = [trial.replicas for trial in engine.asked if trial.kind is Kind.SHARE]
            assert shares[: len(sizes)] == sizes

    @pytest.mark.parametrize(("size", "seeds"), [(40, 4), (39, 8)])
    def test_a_range_of_a_fortieth_of_the_size_is_narrow_enough(self, size, seeds):
        """Of one replica fewer every second seed says that it is too few: four leave it open, and eight do not."""

        def result(trial: Trial) -> float:
            fewer = size - trial.replicas
            if trial.kind is not Kind.SHARE:
                return 2.0
            return 0.95 if fewer <= 0 or (fewer == 1 and trial.seed % 2) else 0.5

        engine = Engine([])
        engine.result = result  # type: ignore[method-assign]
        found = engine.drive(FleetSearch(NAMED, 1.0, size, 1, 0.9, 10**6, range(FIRST, FIRST + 4)).steps())
        assert (found.replicas, found.fewest) == (size, size - (seeds == 4))
        assert max(len(each.shares) for each in found.tried) == seeds

    def test_larger_fleets_grow_by_a_fiftieth_until_they_are_confirmed(self):
        """Shares find 120 replicas enough; rates none before 126: 120, 122, 124, 126."""
        sizes = []

        def result(trial: Trial) -> float:
            if trial.kind is Kind.SHARE:
                return 0.95 if trial.replicas >= 120 else 0.5
            sizes.append(trial.replicas)
            return 1.0 if trial.replicas >= 125 else 0.5

        engine = Engine([])
        engine.result = result  # type: ignore[method-assign]
        found = engine.drive(FleetSearch(NAMED, 1.0, 120, 1, 0.9, 10**6, [FIRST]).steps())
        assert [*dict.fromkeys(sizes)] == [120, 122, 124, 126]
        assert (found.replicas, found.fewest) == (126, 125)

    @pytest.mark.parametrize(("engines", "near", "first", "most"), [(1, 2000, 1024, 1024), (100, 900, 900, 1000)])
    def test_no_fleet_is_larger_than_a_cluster(self, engines, near, first, most):
        engine = Engine([999_999], engines)
        found = engine.drive(FleetSearch(NAMED, 1.0, near, 1, 0.9, 10**6, [FIRST], engines).steps())
        sizes = [trial.replicas for trial in engine.asked]
        assert (sizes[0], max(sizes), found.fewest, found.replicas) == (first, most, most, None)


class TestOneSize:
    @pytest.mark.slow
    @given(NEEDS, st.integers(1, 20), st.sampled_from([1, 4, 60]), st.integers(0, 3))
    def test_rates_of_the_seeds_to_begin_with_and_of_others(self, needs, size, begun, known):
        needs = needs + needs[: max(0, begun - NUM_SEEDS)]
        rates = [rate_of(size, need) for need in needs]
        engine, known = Engine(needs), min(known, begun)
        found = engine.drive(RateSearch(NAMED, range(FIRST, FIRST + begun)).rates(size, rates[:known], 5.0))
        # One of 48 may be lower, and one of 60.
        assert found == (tuple(rates[:begun]), rates[0] if begun == 1 else sorted(rates)[1])
        assert {trial.replicas for trial in engine.asked} <= {size}
        begun_with = [trial for trial in engine.asked if trial.kind is Kind.RATE and trial.seed < FIRST + begun]
        assert [trial.seed - FIRST for trial in begun_with] == [*range(known, begun)]
        # Near the given rate, and those of other seeds near that of the first, where it is a rate.
        near = rates[0] if 0 < rates[0] < inf else None
        assert all(trial.near == (5.0 if trial.seed == FIRST else near) for trial in begun_with)


class AnyLoad:
    """A load that is not served: at a rate it is the rate."""

    def draw(self, seed: int, replicas: int = 1) -> AnyLoad:
        return self

    def at(self, rate: float) -> float:
        return rate


def served(monkeypatch: pytest.MonkeyPatch, most: float) -> list[float]:
    """Fleets meet the goal up to this rate; the rates at which they are served."""
    tried: list[float] = []

    def check(chosen, rate, cluster, goal):
        tried.append(rate)
        return SloCheck(rate <= most, 10, 10, {})

    monkeypatch.setattr(fleet, "check_fleet", check)
    return tried


def powers(tried: list[float], wanted: float, base: float = FINE) -> list[int]:
    """Exponents of the rates that are tried, relative to the wanted one."""
    found = [round(log(rate / wanted, base)) for rate in tried]
    assert tried == pytest.approx([wanted * base**power for power in found])
    return found


class TestHighestRate:
    def found(self, most: float | None = None, near: float | None = None) -> float:
        return highest_rate(settings(), AnyLoad(), GOAL, 0, Cluster(num_replicas=2), 10.0, most, near)

    def test_it_is_sought_from_the_wanted_rate_by_doubled_strides(self, monkeypatch):
        """33 steps of half a per cent above it."""
        tried = served(monkeypatch, 10.0 * FINE**33.5)
        assert self.found() == 10.0 * FINE**33
        assert powers(tried, 10.0) == [0, 8, 24, 56, 40, 32, 36, 34, 33]

    def test_that_of_another_seed_is_sought_by_small_ones(self, monkeypatch):
        tried = served(monkeypatch, 10.0 * FINE**33.5)
        assert self.found(near=10.0 * FINE**36) == 10.0 * FINE**33
        assert powers(tried, 10.0) == [36, 34, 30, 32, 33]

    def test_no_rate_above_the_saturated_one_is_served(self, monkeypatch):
        tried = served(monkeypatch, 99.0)
        found = self.found(most=10.0 * FINE**4)
        assert found == 10.0 * FINE**4 == max(tried)

    def test_from_a_sixth_of_the_wanted_rate_to_33_times_it(self, monkeypatch):
        tried = served(monkeypatch, inf)
        assert self.found() == inf and max(tried) == pytest.approx(328.2, rel=1e-3)
        tried = served(monkeypatch, 0.0)
        assert self.found() == 0 and min(tried) == pytest.approx(1.7452, rel=1e-3)
        for most in (328.0, 1.76):
            served(monkeypatch, most)
            assert most / FINE < self.found() <= most


class Times:
    """Of requests that are in the system for so long."""

    def __init__(self, seconds: float) -> None:
        self.arrival_ticks = np.zeros(4)
        self.finish_ticks = np.full(4, seconds)
        self.times = self


class Arrivals:
    """Four arrivals of this span in s."""

    def __init__(self, span: float) -> None:
        self.arrival_ticks = np.array([5.0, 6.0, 7.0, 5 + span])
        self.span = span


class FewRequests(AnyLoad):
    """They arrive over 120 s at one request a second."""

    def at(self, rate: float) -> Arrivals:  # type: ignore[override]
        return Arrivals(120 / rate)


class TestKnownRate:
    def known(self, monkeypatch: pytest.MonkeyPatch, highest: float, in_system_s: float) -> tuple[float, list[float]]:
        """Where requests are in the system for so long at any rate; wanted are ten a second."""
        tried: list[float] = []

        def serve(chosen, work, cluster):
            tried.append(120 / work.span)
            return Times(in_system_s)

        monkeypatch.setattr(fleet, "serve", serve)
        return known_rate(settings(), FewRequests(), GOAL, 0, Cluster(num_replicas=2), 10.0, highest), tried

    def test_up_to_ten_times_in_the_system(self, monkeypatch):
        """In the system for 1 s: up to 12 requests/s, where they arrive over 10 s, 37 steps of half a per cent above 10 are
        less, and 36 are no more than 12."""
        found, tried = self.known(monkeypatch, inf, 1.0)
        assert found == 10.0 * FINE**36 <= 12 < found * FINE
        # All at once are a burst. The wanted rate comes first.
        assert powers(tried, 10.0) == [0, 8, 24, 56, 40, 32, 36, 38, 37]

    @pytest.mark.parametrize(("highest", "runs"), [(11.0, 1), (12.0, 1), (0.0, 0)])
    def test_a_highest_rate_of_which_the_run_is_a_load_is_known(self, highest, runs, monkeypatch):
        found, tried = self.known(monkeypatch, highest, 1.0)
        assert found == highest and len(tried) == runs

    def test_no_rate_above_the_highest_is_served(self, monkeypatch):
        found, tried = self.known(monkeypatch, 12.5, 1.0)
        assert found == 10.0 * FINE**36 and max(tried) == 12.5 == tried[0]

    def test_below_a_sixth_of_the_wanted_rate_nothing_is_known(self, monkeypatch):
        """In the system for 6 s: two requests/s; for 9 s less than the lowest rate that is tried."""
        assert self.known(monkeypatch, inf, 6.0)[0] == pytest.approx(2, rel=0.005)
        assert self.known(monkeypatch, inf, 9.0)[0] == 0


class OneReplica:
    """A replica that meets the goal up to a power of 1.02, and its first requests up to another one."""

    def __init__(self, n: int, most: int, of_part: int) -> None:
        self.gaps, self.most, self.of_part = [1.0] * n, most, of_part

    def draw(self, seed: int) -> OneReplica:
        return self

    def first(self, requests: int) -> OneReplica:
        return OneReplica(requests, self.of_part, self.of_part)

    def at(self, rate: float) -> tuple[OneReplica, float]:
        return self, rate


class TestAhead:
    @pytest.fixture
    def tried(self, monkeypatch) -> list[tuple[int, float]]:
        """Number of requests and rates that are tried."""
        tried: list[tuple[int, float]] = []

        def check(chosen, work, goal, step_cost):
            replica, rate = work
            tried.append((len(replica.gaps), rate))
            return SloCheck(rate <= 1.000001 * STEP**replica.most, 8, 8, {})

        met = SloCheck(True, 8, 8, {})
        times = Times(2.0)
        times.finish_ticks = times.finish_ticks * max_rate.ticks.PER_SECOND
        monkeypatch.setattr(max_rate, "check_slo", check)
        monkeypatch.setattr(max_rate, "compiled_cost", lambda _: "cost")
        monkeypatch.setattr(max_rate, "simulate", lambda chosen, work, cost, **_: work)
        monkeypatch.setattr(max_rate, "check_run", lambda run, goal: met)
        monkeypatch.setattr(max_rate, "saturated_rate", lambda chosen, work, cost: None)
        monkeypatch.setattr(max_rate, "request_times", lambda run: times)
        return tried

    def test_a_part_is_served_at_rates_a_factor_of_two_apart_and_all_near_its_result(self, tried):
        """The eighth of 1,600 requests takes 1.02^50, and all 1.02^46."""
        found = go_ahead(settings(), OneReplica(1600, 46, 50), GOAL, 0)
        assert found.found.power == 46
        # Requests are in the system for 2 s.
        assert found.in_flight == pytest.approx(2 * STEP**46)
        parts, whole = ([rate for count, rate in tried if count == each] for each in (200, 1600))
        assert powers(parts, 1.0, STEP) == [0, 35, 105, 70, 52, 43, 47, 49, 50, 51]
        assert powers(whole, 1.0, STEP) == [50, 46, 48, 47]

    def test_where_the_part_takes_no_rate_the_search_begins_at_one_request_a_second(self, tried):
        go_ahead(settings(), OneReplica(100, 3, -400), GOAL, 0)
        whole = [rate for count, rate in tried if count == 100]
        # Both search among a hundred requests: the part from 1 down to the lowest rate, then all from 1 up.
        assert powers(whole, 1.0, STEP)[-4:] == [0, 4, 2, 3]
