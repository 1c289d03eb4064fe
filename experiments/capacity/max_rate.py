"""The highest request rate at which a replica meets a goal, for seeds outside the sample.

A seed fixes requests and unit gaps, and rates are powers of 1.02. So to meet the goal is a function of a whole
number, and the highest rate of a seed is found by doubling or halving steps and bisection, on common random numbers.

From seed to seed the highest rate differs by some percent. What is recommended must hold for other seeds: it is a
lower tolerance limit, below which 95 % of all seeds' highest rates lie with 5 % at most, said with 95 % confidence.
Logarithms of the rates are taken to be normal; then the limit is mean - k * standard deviation, with k of the
noncentral t distribution (Natrella, NBS Handbook 91, 2-5; NIST/SEMATECH e-Handbook 7.2.6.3). More seeds bring k, more
requests a run bring the deviation down.

The first seed runs before the others. Its requests are served one by one: a request that misses the goal then misses it
at any rate. They are served all at once: the recommended rate never exceeds that throughput. An eighth of them is
served at rates a factor of two apart, so that the search of every seed begins near its result.

Where a seed's requests meet the goal however fast they come, all at once, its highest rate is infinite. Of some seeds
among others it counts as the highest of those others: what is recommended is then less than could be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, lgamma, log, sqrt
from statistics import NormalDist, fmean, stdev
from typing import Any

from ...sim.cost import StepCost
from ...sim.engine.run import simulate
from ...sim.engine.settings import Settings
from ...sim.types.optional import not_none
from ..runs.parallel import Workers, as_they_finish
from ..runs.slo_check import Goal, SloCheck, check_run, check_slo, compiled_cost, saturated_rate
from .load import Drawn, Load

#: Rates are powers of it.
STEP = 1.02
#: Requests/s at which every request is alone, and more than any replica serves; as powers.
ALONE, MOST = -350, 700
#: First steps of the search: a factor of two for the part of the first seed, and then.
_SCOUT_STRIDE, _STRIDE = 35, 4
#: That part, and how few requests it may have.
_SCOUT_PART, _SCOUT_LEAST = 8, 100
#: Share of the seeds for which the recommended rate is to hold, and how sure that is to be.
CONTENT, CONFIDENCE = 0.95, 0.95
DEFAULT_SEEDS = 12


def rate(power: int) -> float:
    """Requests/s of a whole number."""
    return STEP**power


@dataclass(frozen=True)
class Ahead:
    """What the first seed says.

    Attributes:
        alone: The SLO check of its requests served one by one.
        saturated: Requests/s that the replica delivers when it always has more to do (``saturated_rate``).
        found: Its highest rate.
    """

    alone: SloCheck
    saturated: float | None
    found: SeedRate


@dataclass(frozen=True)
class SeedRate:
    """The highest rate of a seed.

    Attributes:
        power: As a power of ``STEP``; None where even alone the goal is missed, ``MOST`` where it is always met.
        runs: Simulations that it took.
    """

    power: int | None
    runs: int

    @property
    def rate(self) -> float:
        """Requests/s, rounded down by at most 2 %; 0 where there is none, infinite where every rate meets."""
        if self.power == MOST:
            return inf
        return 0.0 if self.power is None else rate(self.power)


@dataclass(frozen=True)
class MaxRate:
    """The highest rate over some seeds.

    Attributes:
        alone, saturated: Of the first seed, see ``Ahead``.
        seed_rates: The highest rate of each seed, requests/s.
        runs: Simulations that it took.
    """

    alone: SloCheck
    saturated: float | None
    seed_rates: tuple[float, ...]
    runs: int

    @classmethod
    def of(cls, ahead: Ahead, others: Sequence[SeedRate]) -> MaxRate:
        """From the first seed, and the others."""
        found = [ahead.found, *others]
        return cls(ahead.alone, ahead.saturated, tuple(each.rate for each in found), sum(each.runs for each in found))

    @property
    def rate(self) -> float:
        """What is recommended, requests/s: the tolerance limit; of one seed its own rate, and nothing is sure.

        Infinite where every rate meets.
        """
        if min(self.seed_rates) <= 0 or min(self.seed_rates) == inf or len(self.seed_rates) == 1:
            return min(self.seed_rates)
        logs = self._logs()
        # Rates are known to a step, and so is how much they differ.
        spread = max(stdev(logs), log(STEP) / sqrt(12))
        found = exp(fmean(logs) - tolerance_factor(len(logs)) * spread)
        # Below it nothing was tried.
        return found if found >= rate(ALONE) else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation of the seeds' rates, as a share of them; 0 of one seed."""
        return stdev(self._logs()) if len(self.seed_rates) > 1 and 0 < min(self.seed_rates) < inf else 0.0

    def _logs(self) -> list[float]:
        """Logarithms of the rates, of which one is finite; an infinite one counts as the highest of the others."""
        highest = max(each for each in self.seed_rates if each < inf)
        return [log(min(each, highest)) for each in self.seed_rates]


def max_rate(
    settings: Settings,
    load: Load,
    goal: Goal,
    seeds: Sequence[int] = range(DEFAULT_SEEDS),
    workers: Workers = Workers(jobs=1),
    step_cost: StepCost | None = None,
) -> MaxRate:
    """The highest rate at which a replica of these settings meets the goal, over the seeds.

    Args:
        step_cost: Used in place of the settings' own.

    Raises:
        UserError, SimulationFault: As ``simulate``.
    """
    first, *others = seeds
    ahead = go_ahead(settings, load, goal, first, step_cost)
    jobs = [(settings, load, goal, seed, ahead, step_cost) for seed in others] if ahead.found.rate else []
    searched = dict(as_they_finish(_numbered, jobs, len(jobs), workers)) if jobs else {}
    return MaxRate.of(ahead, [searched[seed] for seed in others if seed in searched])


def _numbered(settings: Settings, load: Load, goal: Goal, seed: int, *more: Any) -> tuple[int, SeedRate]:
    """Results come in any order."""
    return seed, follow(settings, load, goal, seed, *more)


def go_ahead(settings: Settings, load: Load, goal: Goal, seed: int, step_cost: StepCost | None = None) -> Ahead:
    """The first seed: alone, all at once, a part of it, the whole."""
    drawn = load.draw(seed)
    step_cost = step_cost or compiled_cost(settings)
    alone = check_run(simulate(settings, drawn.at(rate(ALONE)), step_cost), goal)
    if not alone.meets:
        return Ahead(alone, None, SeedRate(None, 1))
    saturated = saturated_rate(settings, drawn.at(inf), step_cost)
    part = drawn.first(min(len(drawn.gaps), max(len(drawn.gaps) // _SCOUT_PART, _SCOUT_LEAST)))
    near = _search(settings, part, goal, saturated, 0, _SCOUT_STRIDE, step_cost)
    found = _search(settings, drawn, goal, saturated, near.power or 0, _STRIDE, step_cost)
    return Ahead(alone, saturated, SeedRate(found.power, 2 + near.runs + found.runs))


def follow(
    settings: Settings, load: Load, goal: Goal, seed: int, ahead: Ahead, step_cost: StepCost | None = None
) -> SeedRate:
    """Another seed, which begins where the first has ended."""
    return _search(settings, load.draw(seed), goal, ahead.saturated, not_none(ahead.found.power), _STRIDE, step_cost)


def _search(
    settings: Settings,
    drawn: Drawn,
    goal: Goal,
    most: float | None,
    start: int,
    stride: int,
    step_cost: StepCost | None,
) -> SeedRate:
    runs = 0

    def meets(power: int) -> bool:
        nonlocal runs
        if most is not None and rate(power) > most:
            return False
        runs += 1
        return check_slo(settings, drawn.at(rate(power)), goal, step_cost).meets

    return SeedRate(highest(meets, start, stride), runs)


def highest(meets: Callable[[int], bool], start: int, stride: int) -> int | None:
    """The highest whole number from ``ALONE`` to ``MOST`` that ``meets``, which does so up to some number.

    Args:
        start: Where to begin to look, between the two.
        stride: The first step; it doubles until the answer lies within.

    Returns:
        None where not even ``ALONE`` meets.
    """
    # The highest that is known to meet, and the lowest that is known not to.
    low, high, probe = ALONE - 1, MOST + 1, start
    while high - low > 1:
        low, high = (probe, high) if meets(probe) else (low, probe)
        if low < ALONE:
            probe = max(high - stride, ALONE)
        elif high > MOST:
            probe = min(low + stride, MOST)
        else:
            probe = (low + high) // 2
        stride *= 2
    return None if low < ALONE else low


@lru_cache
def tolerance_factor(n: int, content: float = CONTENT, confidence: float = CONFIDENCE) -> float:
    """k of ``n`` normal values: ``content`` of all lie above mean - k * deviation, with ``confidence``.

    The exact one: with the chi of the deviation given, the mean is normal; the rest is integrated by Simpson's rule.
    """
    normal, degrees, parts = NormalDist(), n - 1, 400
    wanted = normal.inv_cdf(content) * sqrt(n)
    most = sqrt(degrees) + 6
    width = most / parts
    norm = log(2) * (degrees / 2 - 1) + lgamma(degrees / 2)
    chis = [place * width for place in range(1, parts + 1)]
    weights = [
        (1 if place == parts - 1 else 4 - 2 * (place % 2)) * exp((degrees - 1) * log(chi) - chi * chi / 2 - norm)
        for place, chi in enumerate(chis)
    ]
    low, high = 0.0, 1000.0
    for _ in range(60):
        k = (low + high) / 2
        sure = sum(
            weight * normal.cdf(k * sqrt(n) * chi / sqrt(degrees) - wanted) for weight, chi in zip(weights, chis)
        )
        low, high = (low, k) if sure * width / 3 > confidence else (k, high)
    return low
