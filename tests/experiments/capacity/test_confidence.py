"""What seeds say of others: counts beside the binomial distribution, and the limit of rates beside sorting all of them."""

from __future__ import annotations

from math import comb, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity.confidence import (
    CONTENT,
    NUM_SEEDS,
    Decision,
    Limit,
    allowed_misses,
    by_count,
    decide,
    lower_limit,
    tolerance_factor,
)
from trials import Kind, ended


def search(rates, begun: int, wanted: float = 0.0, *, to_end: bool = False) -> tuple[Limit, list[int], list[int]]:
    """The limit of seeds with known highest rates, and the seeds that were run once and searched for."""
    once: list[int] = []
    searched: list[int] = []

    def value(asked: tuple[Kind, int, float]) -> float:
        kind, seed, rate = asked
        (once if kind is Kind.MEETS else searched).append(seed)
        assert kind is Kind.MEETS or rates[seed] < rate
        return rates[seed] >= rate if kind is Kind.MEETS else rates[seed]

    takes, highest = (lambda *asked, kind=kind: (kind, *asked) for kind in (Kind.MEETS, Kind.RATE))
    found, _ = ended(lower_limit(rates[:begun], wanted, takes, highest, to_end=to_end), value)
    return found, once, searched


RATES = st.lists(st.integers(0, 60).map(float) | st.just(inf), min_size=NUM_SEEDS, max_size=60)


@pytest.mark.slow
@given(RATES, st.sampled_from([2, 4, 12, NUM_SEEDS]))
def test_the_limit_is_the_second_lowest_of_48_rates_and_each_seed_is_asked_once(rates, begun):
    found, once, searched = search(rates, begun)
    ordered = sorted(rates[:NUM_SEEDS])
    assert found.rate == ordered[1]
    assert len(set(once)) == len(once) and set(searched) <= set(once)
    if ordered[1]:
        assert (found.num_seeds, once) == (NUM_SEEDS, [*range(begun, NUM_SEEDS)])


@pytest.mark.slow
@given(RATES, st.integers(1, 60), st.booleans())
def test_a_wanted_rate_is_confirmed_where_at_most_one_of_48_misses_it(rates, wanted, to_end):
    found, once, _ = search(rates, 4, wanted, to_end=to_end)
    misses = [rate < wanted for rate in rates[:NUM_SEEDS]]
    assert (found.decision is Decision.ENOUGH) == (sum(misses) <= 1)
    if found.decision is Decision.ENOUGH:
        assert (found.misses, found.num_seeds) == (sum(misses), NUM_SEEDS)
    elif not to_end:
        # It ends in the round of the second miss.
        assert found.misses == sum(misses[: found.num_seeds]) >= 2 and sum(misses[: found.num_seeds // 2]) <= 1 + (
            found.num_seeds == 4
        )


def test_few_seeds_are_searched_for():
    """Of 44 further seeds in random order about two a round are below the second lowest: four rounds, eight searches."""
    searches = [len(search(np.random.default_rng(chosen).permutation(NUM_SEEDS) + 1.0, 4)[2]) for chosen in range(200)]
    assert np.mean(searches) < 9


def test_one_seed_decides_alone():
    assert [(limit.rate, limit.decision) for limit in (search([3.0], 1, 3.0)[0], search([3.0], 1, 3.1)[0])] == [
        (3.0, Decision.ENOUGH),
        (3.0, Decision.TOO_FEW),
    ]


class TestCounts:
    def test_seeds_that_may_miss(self):
        """The smallest samples that confirm 90 % with 95 % (attribute sampling): 29, 46, 61, 76 and 89."""
        first = {misses: next(n for n in range(1, 200) if allowed_misses(n) == misses) for misses in range(5)}
        assert first == {0: 29, 1: 46, 2: 61, 3: 76, 4: 89}
        assert allowed_misses(28) == -1 and allowed_misses(NUM_SEEDS) == 1

    def test_they_are_those_of_the_binomial_distribution(self):
        stats = pytest.importorskip("scipy.stats")
        for n in (2, 4, 12, 29, 46, 48, 96):
            for misses in range(n + 1):
                enough = stats.binom.cdf(misses, n, 1 - CONTENT) <= 0.05
                too_few = stats.binom.sf(misses - 1, n, 1 - CONTENT) <= 0.025
                expected = Decision.ENOUGH if enough else Decision.TOO_FEW if too_few else Decision.OPEN
                assert by_count(misses, n) is expected

    @pytest.mark.parametrize("begun", range(4, NUM_SEEDS))
    def test_a_fleet_that_nine_tenths_meet_is_rarely_called_too_few_in_all_looks_together(self, begun):
        """Exact: the misses are looked at each time the seeds are doubled. 5 % at each look would be up to 9 % together."""
        alive, seen, lost, count = {0: 1.0}, 0, 0.0, begun
        while seen < NUM_SEEDS:
            more, looked = count - seen, dict.fromkeys(range(count + 1), 0.0)
            for misses, share in alive.items():
                for further in range(more + 1):
                    chance = comb(more, further) * 0.1**further * 0.9 ** (more - further)
                    looked[misses + further] += share * chance
            lost += sum(share for misses, share in looked.items() if by_count(misses, count) is Decision.TOO_FEW)
            alive = {
                misses: share for misses, share in looked.items() if by_count(misses, count) is not Decision.TOO_FEW
            }
            seen, count = count, min(2 * count, NUM_SEEDS)
        assert 0.005 < lost <= 0.05

    @pytest.mark.slow
    @pytest.mark.parametrize("values", ["normal", "rare and low", "two kinds"])
    def test_a_goal_that_too_many_seeds_miss_is_rarely_confirmed_whatever_the_distribution(self, values):
        """A tenth of the seeds misses: at most 5 % of the plans confirm it. A limit of normal values confirms up to nine tenths."""
        random = np.random.default_rng(7)
        confirmed = taken_for_normal = 0
        for _ in range(2000):
            if values == "normal":
                rates = 10 + random.normal(1.2816, 1, NUM_SEEDS)
            else:
                low = random.random(NUM_SEEDS) < 0.1
                above = random.normal(20, 0.1, NUM_SEEDS) if values == "rare and low" else 10 + random.random(NUM_SEEDS)
                rates = np.where(low, 9.0, above)
            confirmed += search([*map(float, rates)], 4, 10.0)[0].decision is Decision.ENOUGH
            taken_for_normal += decide([*map(float, rates[:4])], 10.0, 1e-9) is Decision.ENOUGH
        assert confirmed <= 100 + 4 * (2000 * 0.05 * 0.95) ** 0.5
        assert values != "rare and low" or taken_for_normal > 1000


def test_a_value_is_known_to_an_interval_and_one_seed_decides_alone():
    assert decide([0.905] * 4, 0.9, 0.01) is Decision.OPEN
    assert decide([0.92] * 4, 0.9, 0.01) is Decision.ENOUGH
    assert decide([0.8] * 3 + [0.99], 0.9, 0.01) is Decision.TOO_FEW
    assert decide([0.8] * 2 + [0.99] * 2, 0.9, 0.01) is Decision.OPEN
    assert (decide([0.9], 0.9, 0.01), decide([0.89], 0.9, 0.01)) == (Decision.ENOUGH, Decision.TOO_FEW)


def test_many_values_are_counted_and_not_taken_for_normal():
    """One far below all others: as normal values more than a tenth were below 0.9, and one of 48 is."""
    values = [0.1] + [0.95] * (NUM_SEEDS - 1)
    assert decide(values, 0.9, 0.01) is Decision.ENOUGH
    assert decide(values[:40], 0.9, 0.01) is not Decision.ENOUGH
    assert decide([0.1] * 2 + values[2:], 0.9, 0.01) is Decision.OPEN


class TestToleranceFactor:
    def test_it_is_that_of_the_noncentral_t(self):
        stats = pytest.importorskip("scipy.stats")
        for n in (3, 4, 8, 12, 24, 47):
            expected = stats.nct.ppf(0.95, n - 1, stats.norm.ppf(0.9) * n**0.5) / n**0.5
            assert tolerance_factor(n) == pytest.approx(expected, rel=1e-8)

    def test_by_table(self):
        """NBS Handbook 91, table A-7."""
        assert tolerance_factor(3) == pytest.approx(6.155, abs=1e-3)
