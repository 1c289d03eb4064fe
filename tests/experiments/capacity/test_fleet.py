"""The smallest fleet for a rate: the search on shares that are known, and fleets against the recursion of a queue."""

from __future__ import annotations

from math import inf, log
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_runs import settings_of
from fragmeter.experiments.capacity import fleet
from fragmeter.experiments.capacity.confidence import NUM_SEEDS, Decision
from fragmeter.experiments.capacity.fleet import (
    FINE,
    Fleet,
    FleetSearch,
    check_fleet,
    first_fleet,
    highest_rate,
    known_rate,
    serve,
    takes_rate,
)
from fragmeter.experiments.capacity.load import Drawn
from fragmeter.experiments.runs.slo_check import Goal, counted
from fragmeter.sim import simulate
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.cluster.sent import part_of
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.types import ticks
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import Trace
from oracle import Limits, Pool
from ramp_cost import RampCost
from trials import NAMED, Kind, Trial, ended

OF = 10**6


def search(near: int = 1, least: int = 1, seeds: int = 4, engines: int = 1) -> FleetSearch:
    """For one request a second, and 90 % of the requests."""
    return FleetSearch(NAMED, 1.0, near, least, 0.9, OF, range(seeds), engines)


def run(searching: FleetSearch, share_of, rate_of=None) -> tuple[Fleet, list[Trial]]:
    """The result of a search on known shares and rates, by replicas and seed, and its trials. Without rates those that meet the
    goal at the wanted rate do so at every rate."""

    def rate(replicas: int, seed: int) -> float:
        return inf if share_of(replicas, seed) >= 0.9 else 0.9

    rate_of = rate_of or rate
    of_kind = {
        Kind.SHARE: lambda trial: share_of(trial.replicas, trial.seed),
        Kind.RATE: lambda trial: rate_of(trial.replicas, trial.seed),
        Kind.MEETS: lambda trial: rate_of(trial.replicas, trial.seed) >= trial.near,
    }
    found, rounds = ended(searching.steps(), lambda trial: of_kind[trial.kind](trial))
    return found, [trial for trials in rounds for trial in trials]


@given(size=st.integers(1, 900), near=st.integers(1, 900), least=st.integers(1, 900), seeds=st.sampled_from([1, 4, 12]))
def test_the_search_finds_the_smallest_fleet_and_asks_for_each_trial_once(size, near, least, seeds):
    least = min(least, size)
    found, asked = run(search(near, least, seeds), lambda replicas, _: 0.95 if replicas >= size else 0.5)
    if size > 8 * max(near, least):
        assert found.replicas is None
        return
    assert found.replicas == found.fewest == size
    assert len(set(asked)) == len(asked)
    assert min(trial.replicas for trial in asked) >= least
    assert len({trial.replicas for trial in asked}) <= 6 + 4 * log(1 + abs(size - near) + near / 50, 2)


def test_no_fleet_is_enough_where_alone_requests_miss():
    found, _ = run(search(3), lambda *_: 0.7)
    assert (found.replicas, found.fewest) == (None, 24)
    assert {each.decision for each in found.tried} == {Decision.TOO_FEW}


class TestNoise:
    """Shares grow by a point with each replica and deviate by half a point between seeds."""

    def share_of(self, chosen: int):
        def share(replicas: int, seed: int) -> float:
            noise = np.random.default_rng((chosen, replicas, seed)).normal(0, 0.005)
            return 0.9 + 0.01 * (replicas - 40) + noise

        return share

    def meets(self, replicas: int) -> float:
        """Share of all seeds that meet the goal."""
        return NormalDist().cdf(0.01 * (replicas - 40) / 0.005)

    @pytest.mark.slow
    def test_it_is_enough_with_the_stated_confidence_and_not_larger_than_it_must_be(self):
        """40 replicas meet in half of the seeds, 41 in 97.7 %."""
        found = [run(search(40), self.share_of(chosen))[0] for chosen in range(200)]
        enough = sum(self.meets(each.replicas) >= 0.9 for each in found)
        assert enough >= 190 - 4 * (200 * 0.95 * 0.05) ** 0.5
        assert sum(each.replicas for each in found) / 200 < 42
        assert all(each.fewest <= 41 for each in found)

    def test_where_the_seeds_do_not_decide_both_ends_are_named(self):
        """Exactly 90 % of the seeds meet the goal with two replicas."""

        def share(replicas: int, seed: int) -> float:
            place = NormalDist().inv_cdf((29 * seed % NUM_SEEDS + 0.5) / NUM_SEEDS)
            return 0.9 + (0.05 * (replicas - 2)) + 0.01 * (1.2816 + place)

        found, asked = run(search(2), share)
        assert (found.replicas, found.fewest, found.seeds, found.misses) == (3, 2, NUM_SEEDS, 0)
        assert max(trial.seed for trial in asked) == NUM_SEEDS - 1


class TestRareLowSeeds:
    """With one replica a share of the seeds has one tenth of the others' rate: their prompts are long. With two all meet."""

    def confirmed(self, chosen: int, share: float) -> tuple[Fleet, int]:
        """The fleet, and the number of low seeds."""
        random = np.random.default_rng(chosen)
        low = random.random(NUM_SEEDS) < share
        rates = np.where(low, 0.3, 3.0) * np.exp(random.normal(0, 0.02, NUM_SEEDS))
        found, _ = run(
            search(1),
            lambda replicas, seed: 0.99 if replicas > 1 or rates[seed] >= 1 else 0.7,
            lambda replicas, seed: float(rates[seed]) + 10 * (replicas > 1),
        )
        return found, int(low.sum())

    @pytest.mark.slow
    def test_a_few_seeds_that_are_alike_do_not_confirm_a_fleet(self):
        """15 % of the seeds miss. Half of the plans see none of them in their first four seeds; 0.4 % see one of 48 at most."""
        found = [self.confirmed(chosen, 0.15)[0].replicas for chosen in range(300)]
        assert set(found) <= {1, 2} and found.count(1) <= 5

    @pytest.mark.parametrize("share", [0.01, 0.04])
    def test_one_replica_is_bought_where_at_most_one_of_48_seeds_misses(self, share):
        for chosen in range(100):
            found, low = self.confirmed(chosen, share)
            assert (found.replicas == 1) == (low <= 1)
            if low <= 1:
                assert (found.seeds, found.misses) == (NUM_SEEDS, low)


class TestCliff:
    """All requests meet up to a rate, and none beyond it: it deviates by 4 % between seeds, and shares are 1 or 0."""

    def rate_of(self, chosen: int, of_one: float):
        def rate(replicas: int, seed: int) -> float:
            return replicas * of_one * float(np.exp(np.random.default_rng((chosen, seed)).normal(0, 0.04)))

        return rate

    @pytest.mark.slow
    def test_rates_see_what_the_shares_of_a_few_seeds_do_not(self):
        """With 40 replicas 84 % of the seeds meet, with 41 95 %."""
        of_one = 1.04 / 40
        enough = 0
        for chosen in range(200):
            rate = self.rate_of(chosen, of_one)
            found, _ = run(search(40), lambda *trial, rate=rate: float(rate(*trial) >= 1), rate)
            assert len(found.rates) >= 4 and 38 <= found.replicas <= 48
            enough += NormalDist().cdf(np.log(found.replicas * of_one) / 0.04) >= 0.9
        assert enough >= 190 - 4 * (200 * 0.95 * 0.05) ** 0.5

    def test_the_rates_of_seeds_are_sought_near_that_of_the_first(self):
        rate = self.rate_of(0, 1.2 / 40)
        _, asked = run(search(40), lambda *trial: float(rate(*trial) >= 1), rate)
        begun = {
            (trial.replicas, trial.seed): trial.near for trial in asked if trial.kind is Kind.RATE and trial.seed < 4
        }
        assert len(begun) >= 4
        assert begun == {(size, seed): rate(size, 0) if seed else None for size, seed in begun}

    def test_the_rate_that_other_seeds_take_is_the_second_lowest_of_48(self):
        rate = self.rate_of(0, 1.2 / 40)
        found, asked = run(search(40), lambda *trial: float(rate(*trial) >= 1), rate)
        assert found.sure_rate == sorted(rate(found.replicas, seed) for seed in range(NUM_SEEDS))[1]
        assert found.rates == tuple(rate(found.replicas, seed) for seed in range(4))
        searched = [trial for trial in asked if trial.kind is Kind.RATE and trial.replicas == found.replicas]
        assert len(searched) < 16

    def test_a_fleet_that_two_seeds_miss_may_be_enough_and_is_not_recommended(self):
        """Two of the first eight; with four it would be too few."""

        def rate(replicas: int, seed: int) -> float:
            return 0.9 if replicas == 1 and seed in (5, 6) else 1.1 * replicas

        found, _ = run(search(1), lambda *_: 0.95, rate)
        assert (found.replicas, found.fewest, found.misses) == (2, 1, 0)
        found, _ = run(search(1), lambda *_: 0.95, lambda *trial: 0.9 if trial in ((1, 4), (1, 7)) else rate(*trial))
        assert (found.replicas, found.fewest) == (2, 2)


def test_a_rate_that_is_just_met_needs_no_further_replica():
    found = [first_fleet(wanted, of_one) for wanted, of_one in ((0.3, 0.1), (0.301, 0.1), (0.01, 3.0), (1e-12, 3.0))]
    assert found == [3, 4, 1, 1]


SERVICE_S = 0.1


def servers():
    """Replicas that serve one request at a time, each in 0.1 s."""
    return settings_of("vllm-sosp23", Pool(64, 16), Limits(64, max_num_seqs=1))


@pytest.fixture
def even_cost(monkeypatch):
    monkeypatch.setattr(fleet, "compiled_cost", lambda _: RampCost(base_ticks=ticks.from_seconds(SERVICE_S)))


class EvenLoad:
    """Requests of one token each, with Poisson gaps."""

    def draw(self, seed: int, replicas: int = 1) -> Drawn:
        ones = np.ones(3000, dtype=np.int64)
        return Drawn(Trace("even", ones, ones), np.random.default_rng(seed).exponential(size=3000), None, None)


def waits(arrival_ticks: np.ndarray, replicas: int) -> np.ndarray:
    """Waits of requests that are dealt in turn to single servers (Lindley 1952), in ticks."""
    service, free, found = ticks.from_seconds(SERVICE_S), [0] * replicas, []
    for number, arrival in enumerate(arrival_ticks.tolist()):
        begin = max(arrival, free[number % replicas])
        free[number % replicas] = begin + service
        found.append(begin - arrival)
    return np.array(found)


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_a_fleet_serves_as_queues_in_turn_do(replicas, even_cost):
    work = EvenLoad().draw(0).at(9.0 * replicas)
    within = waits(work.arrival_ticks, replicas)[counted(3000)] + ticks.from_seconds(SERVICE_S) <= ticks.from_seconds(
        0.25
    )
    found = check_fleet(servers(), work, Cluster(num_replicas=replicas), Goal(Objectives(ttft=250)))
    assert (found.met, found.counted) == (within.sum(), 2400)
    assert 0.1 < found.attained < 0.99


def test_the_highest_rate_of_a_fleet_lies_where_its_queues_say(even_cost):
    """For 90 % within 0.25 s; rates are 20 times powers of 1.005."""
    drawn, objectives = EvenLoad().draw(3), Objectives(ttft=250)
    limit = ticks.from_seconds(0.15)

    def attained(rate: float) -> float:
        return float((waits(drawn.at(rate).arrival_ticks, 3)[counted(3000)] <= limit).mean())

    found = highest_rate(servers(), EvenLoad(), Goal(objectives), 3, Cluster(num_replicas=3), 20.0, None)
    assert attained(found) >= 0.9 > attained(found * FINE)


@pytest.mark.slow
def test_the_rate_of_another_seed_is_where_the_search_begins_and_not_what_it_finds(even_cost, monkeypatch):
    tried = []

    def counting(settings, work, cluster, goal):
        tried.append(work)
        return check_fleet(settings, work, cluster, goal)

    monkeypatch.setattr(fleet, "check_fleet", counting)
    arguments = servers(), EvenLoad(), Goal(Objectives(ttft=250)), 3, Cluster(num_replicas=3), 20.0, None
    found = highest_rate(*arguments)
    of_a_far_one = len(tried)
    assert highest_rate(*arguments, 12.0) == found
    tried.clear()
    assert highest_rate(*arguments, found * FINE) == found
    assert len(tried) == 3 < of_a_far_one


@pytest.mark.slow
def test_a_seed_takes_its_highest_rate_and_none_above_it_nor_above_what_the_fleet_serves(even_cost):
    arguments = servers(), EvenLoad(), Goal(Objectives(ttft=250)), 3, Cluster(num_replicas=3)
    found = highest_rate(*arguments, 20.0, None)
    assert takes_rate(*arguments, None, found) and not takes_rate(*arguments, None, found * FINE)
    assert takes_rate(*arguments, found, found) and not takes_rate(*arguments, found - 0.01, found)


class FewRequests(EvenLoad):
    """The first 200 of them: at a high rate all arrive before the first has finished."""

    def draw(self, seed: int, replicas: int = 1) -> Drawn:
        return super().draw(seed).first(200)


class TestKnownRate:
    def known(self, wanted: float, highest: float) -> float:
        return known_rate(
            servers(), FewRequests(), Goal(Objectives(ttft=250)), 3, Cluster(num_replicas=2), wanted, highest
        )

    def is_load(self, rate: float) -> bool:
        """Whether requests arrive for ten times their mean time in the system, by the recursion of the queues."""
        arrivals = FewRequests().draw(3).at(rate).arrival_ticks
        return arrivals[-1] - arrivals[0] >= 10 * (waits(arrivals, 2).mean() + ticks.from_seconds(SERVICE_S))

    def test_it_is_where_requests_arrive_for_ten_times_their_time_in_the_system(self, even_cost):
        found = self.known(10.0, inf)
        assert found > 10 and self.is_load(found) and not self.is_load(found * FINE)
        assert self.known(10.0, 1000.0) == found

    def test_runs_that_are_loads_tell_the_highest_rate(self, even_cost):
        assert self.known(10.0, 12.0) == 12.0

    def test_nothing_is_known_where_the_wanted_rate_is_a_burst(self, even_cost):
        assert self.known(500.0, inf) == 0
        assert self.known(10.0, 0.0) == 0


@pytest.mark.parametrize("policy", ["vllm-v0", "vllm-v1"])
def test_requests_of_several_sequences_are_dealt_in_turn(policy, even_cost):
    """With sequences that share blocks, which a cluster does not take, and with others."""
    ones = np.ones(40, dtype=np.int64)
    work = Workload("pairs", np.arange(40) * ticks.PER_MS, 32 * ones, 3 * ones, n=2 * ones)
    chosen = settings_of(policy, Pool(64, 16), Limits(64))
    served = serve(chosen, work, Cluster(num_replicas=3))
    in_turn = [*range(0, 40, 3), *range(1, 40, 3), *range(2, 40, 3)]
    assert served.times.index.tolist() == (in_turn if policy == "vllm-v0" else [*range(40)])
    apart = [
        simulate(chosen, part_of(work, np.arange(first, 40, 3)), RampCost(base_ticks=ticks.from_seconds(SERVICE_S)))
        for first in range(3)
    ]
    finishes = np.concatenate([request_times(run).finish_ticks for run in apart])
    assert served.times.finish_ticks.tolist() == finishes[np.argsort(in_turn)][served.times.index].tolist()
    assert (served.times.arrival_ticks == work.arrival_ticks[served.times.index]).all()
    alone = serve(chosen, work, Cluster())
    assert served.times.ttft_ms.mean() < alone.times.ttft_ms.mean()


@pytest.mark.parametrize(("needed", "near", "found"), [(17, 3, 24), (16, 40, 16), (1, 1, 8)])
def test_engines_that_share_experts_come_together(needed, near, found):
    fleet, trials = run(search(near=near, engines=8), lambda size, _: float(size >= needed))
    assert (fleet.replicas, fleet.fewest) == (found, found)
    assert all(trial.replicas % 8 == 0 for trial in trials)
    assert {each.replicas for each in fleet.tried} == {trial.replicas for trial in trials}


def test_more_engines_than_half_of_the_largest_fleet_come_once():
    """600 engines share experts; twice as many are more than a fleet has."""
    fleet, _ = run(search(near=1, engines=600), lambda *_: 0.5)
    assert (fleet.replicas, [each.replicas for each in fleet.tried]) == (None, [600])


def test_more_seeds_to_begin_with_are_kept():
    """Of 60 seeds two miss with one replica, beyond the first 48: one may."""
    asked = []

    def share(replicas: int, seed: int) -> float:
        asked.append(seed)
        return 0.8 if replicas == 1 and seed in (50, 58) else 0.99

    found, _ = run(search(1, seeds=60), share)
    assert (found.replicas, found.fewest, found.seeds, max(asked)) == (2, 1, 60, 59)


def test_a_fleet_that_rates_raised_has_shares_too():
    """Shares find two replicas enough, and rates four: the shares of four are simulated for the report."""
    found, _ = run(search(2), lambda *_: 0.99, lambda replicas, _: 2.0 if replicas >= 4 else 0.5)
    decisions = {each.replicas: each.decision for each in found.tried}
    # What the answer rests on, not what the shares of the first seeds guessed.
    assert found.replicas == 4 and decisions[4] is Decision.ENOUGH and decisions[2] is Decision.TOO_FEW
