"""What some seeds say of all others: 90 % of them meet the goal, with 95 % confidence.

No distribution of the values is assumed. If more than a tenth of all seeds missed a goal, at most one of 48 would miss it with a
probability below 5 % (binomial). So a goal that at most one of 48 seeds misses is confirmed, and the second lowest of the highest
rates of 48 seeds is a rate that 90 % of other seeds take (an order statistic as a tolerance limit: Wilks 1941). That rate
takes few searches:

    known     the highest rates of the seeds to begin with
    limit     the second lowest rate that is known; seeds that are not yet tested run once at it, as many as are tested
        meets    a seed's highest rate is not lower: it is not needed
        misses   its highest rate is found, and may lower the limit
    end       when all 48 are tested; or, where a rate is wanted, when the limit is below it

A seed is taken to meet the goal at every rate below its highest one, as the search of that rate is.

Fewer seeds cannot confirm a goal, but their values show how near it is: a tolerance limit of normal values, mean - k x deviation, guides
the search for a fleet to the size that is then confirmed, or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from math import comb, exp, fsum, inf, log, sqrt
from operator import mul
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from .tasks import Search, Task, results

#: Share of the seeds that meet the goal, and the confidence.
CONTENT, CONFIDENCE = 0.9, 0.95
#: Probability below which so many misses say that too many seeds miss. It is half of that of a single test, because the misses are looked
#: at each time that seeds are added: of 4, 8, 16, 32 and 48 seeds together with 3.8 %.
_TOO_MANY = 0.025
#: Seeds that confirm a goal, unless the plan begins with more.
NUM_SEEDS = 48


class Decision(StrEnum):
    """What the seeds say of a fleet."""

    ENOUGH = "enough"
    OPEN = "open"
    TOO_FEW = "too few"


class Limit(NamedTuple):
    """A rate that other seeds take.

    Attributes:
        rate: The rate, requests/s.
        num_seeds: Seeds that were tested.
        misses: Those with a highest rate below the wanted one; a lower bound if the search went on below it.
    """

    rate: float
    num_seeds: int
    misses: int

    @property
    def decision(self) -> Decision:
        """What the seeds say of the wanted rate."""
        return by_count(self.misses, self.num_seeds)


@lru_cache
def allowed_misses(num_seeds: int) -> int:
    """The most seeds that may miss a goal that is confirmed; -1 if there are too few seeds to confirm it."""
    share, misses = 0.0, -1
    while True:
        more = share + _probability(misses + 1, num_seeds)
        if more > 1 - CONFIDENCE:
            return misses
        share, misses = more, misses + 1


def by_count(misses: int, num_seeds: int) -> Decision:
    """What the number of seeds that miss a goal says; one seed decides alone."""
    if num_seeds == 1:
        return Decision.TOO_FEW if misses else Decision.ENOUGH
    if misses <= allowed_misses(num_seeds):
        return Decision.ENOUGH
    fewer = fsum(_probability(count, num_seeds) for count in range(misses))
    return Decision.TOO_FEW if 1 - fewer <= _TOO_MANY else Decision.OPEN


def _probability(misses: int, num_seeds: int) -> float:
    """Of so many misses, if a tenth of all seeds misses."""
    return comb(num_seeds, misses) * (1 - CONTENT) ** misses * CONTENT ** (num_seeds - misses)


def lower_limit(
    known: Sequence[float],
    wanted: float,
    takes: Callable[[int, float], Task[bool]],
    rate: Callable[[int, float], Task[float]],
    *,
    to_end: bool = False,
) -> Search[Limit]:
    """Find the rate that other seeds take, from the highest rates of the first seeds.

    Args:
        known: The rates, requests/s. One is the limit itself.
        wanted: A wanted rate, requests/s: the search ends where the limit is lower.
        takes, rate: Tasks of a seed, by its place after the first: whether it meets the goal at a rate, and its highest rate, near
            a rate that it misses.
        to_end: Whether the search goes on below the wanted rate.
    """
    if len(known) == 1:
        return Limit(known[0], 1, int(known[0] < wanted))
    num_seeds = max(NUM_SEEDS, len(known))
    rates, tested = [*known], len(known)
    while True:
        limit = sorted(rates)[allowed_misses(num_seeds)]
        if not limit or (limit < wanted and not to_end) or tested == num_seeds:
            return Limit(limit, tested, sum(each < wanted for each in rates))
        seeds = range(tested, min(2 * tested, num_seeds))
        meets = yield from results(takes(seed, limit) for seed in seeds)
        rates += yield from results(rate(seed, limit) for seed, does in zip(seeds, meets, strict=True) if not does)
        tested = seeds.stop


def decide(values: Sequence[float], wanted: float, known_to: float) -> Decision:
    """What the values of some seeds say of a wanted value, for the search: as ``by_count``, and where the count leaves it open, they
    are taken to be enough if they were so as normal values.

    Args:
        known_to: Width of the interval to which a value is known.
    """
    counted = by_count(sum(each < wanted for each in values), len(values))
    if counted is not Decision.OPEN or len(values) >= NUM_SEEDS:
        return counted
    deviation = max(stdev(values), known_to / sqrt(12))
    limit = fmean(values) - tolerance_factor(len(values)) * deviation
    return Decision.ENOUGH if limit >= wanted else Decision.OPEN


@lru_cache
def tolerance_factor(n: int) -> float:
    """k for ``n`` normal values: with a confidence of 95 % nine tenths of all values exceed mean - k * deviation.

    It is of the noncentral t distribution (Natrella, NBS Handbook 91, 2-5; NIST/SEMATECH e-Handbook 7.2.6.3), and exact: for a
    given chi of the deviation the mean is normal, and its probability is averaged over the density of chi. The sum is over roots
    of chi up to 4, beyond all that 48 values have: at both ends the terms vanish, and it has nine digits.
    """
    normal, degrees = NormalDist(), n - 1
    wanted = normal.inv_cdf(CONTENT) * sqrt(n)
    chis = [(place / 100) ** 2 for place in range(400)]
    density = [chi ** (degrees - 0.5) * exp(-chi * chi / 2) for chi in chis]
    low, high, sure = 0.0, 1000.0, CONFIDENCE * fsum(density)
    while low < (k := (low + high) / 2) < high:
        exceed = (normal.cdf(k * sqrt(n) * chi / sqrt(degrees) - wanted) for chi in chis)
        low, high = (low, k) if fsum(map(mul, density, exceed)) > sure else (k, high)
    return low


def capped(rates: Sequence[float]) -> list[float]:
    """The rates, with the highest finite one in place of infinite ones, if there is a finite one."""
    highest = max((each for each in rates if each < inf), default=inf)
    return [min(each, highest) for each in rates]


def mean_rate(rates: Sequence[float]) -> float:
    """Geometric mean; 0 counts as nothing met, an infinite rate as the highest finite one, and all of them are infinity."""
    if min(rates) <= 0:
        return 0.0
    return exp(fmean(map(log, capped(rates)))) if min(rates) < inf else inf
