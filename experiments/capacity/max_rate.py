"""The highest request rate at which a replica meets a goal, with a tolerance limit for seeds outside the sample.

A seed fixes the requests and unit gaps, and rates are powers of 1.02. Whether a seed meets the goal is therefore a
function of an integer. Doubling or halving steps and then bisection find the highest rate, on common random numbers.

The highest rate differs between seeds by some percent, and the recommended rate must hold for other seeds. The
recommended rate is a lower tolerance limit: with 95 % confidence, at most 10 % of all seeds have a highest rate below
it. The logarithms of the rates are taken to be normal. The limit is then mean - k * standard deviation, with k of the
noncentral t distribution (Natrella, NBS Handbook 91, 2-5; NIST/SEMATECH e-Handbook 7.2.6.3). More seeds reduce k; more
requests per run reduce the deviation.

The first seed runs before the others, in four parts. Its requests are served one by one: a request that misses the
goal alone misses it at any rate. Its requests are served all at once: the recommended rate never exceeds that
throughput. An eighth of its requests is served at rates a factor of two apart, so that the search of every seed starts
near its result. At the end its requests in flight are counted at its own rate.

If the requests of a seed meet the goal even when they all arrive at once, the seed has an infinite highest rate. Among seeds with
finite rates it counts as the highest of those, which makes the recommended rate a conservative one.
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
from ...sim.metrics.requests import request_times
from ...sim.types import ticks
from ...sim.types.optional import not_none
from ..runs.parallel import Workers, as_they_finish
from ..runs.slo_check import Goal, SloCheck, check_run, check_slo, compiled_cost, saturated_rate
from .load import Drawn, Load

#: Ratio of neighbouring rates.
STEP = 1.02
#: Exponents of the lowest rate, at which every request is alone, and of a rate above that of any replica.
ALONE, MOST = -350, 700
#: First stride of the search: a factor of two for the partial run of the first seed, and the stride after it.
_SCOUT_STRIDE, _STRIDE = 35, 4
#: Share of the requests in the partial run, and its least number of requests.
_SCOUT_PART, _SCOUT_LEAST = 8, 100
#: Share of the seeds that meet the goal at the recommended rate, and the confidence.
CONTENT, CONFIDENCE = 0.9, 0.95
DEFAULT_SEEDS = 12


def rate(power: int) -> float:
    """Rate in requests/s of an exponent."""
    return STEP**power


@dataclass(frozen=True)
class Ahead:
    """Results of the first seed.

    Attributes:
        alone: The SLO check of its requests served one by one.
        saturated: Requests/s of a replica that always has requests waiting (``saturated_rate``).
        found: Its highest rate.
        in_flight: Mean number of its requests in the system at that rate; 0 if no rate or every rate meets the goal.
    """

    alone: SloCheck
    saturated: float | None
    found: SeedRate
    in_flight: float = 0.0


@dataclass(frozen=True)
class SeedRate:
    """The highest rate of a seed.

    Attributes:
        power: Exponent of ``STEP``; None if requests served alone miss the goal, ``MOST`` if every rate meets it.
        runs: Number of simulations.
    """

    power: int | None
    runs: int

    @property
    def rate(self) -> float:
        """Requests/s, rounded down by at most 2 %; 0 if no rate meets the goal, infinite if every rate does."""
        if self.power == MOST:
            return inf
        return 0.0 if self.power is None else rate(self.power)


@dataclass(frozen=True)
class MaxRate:
    """The highest rate over several seeds.

    Attributes:
        alone, saturated: Of the first seed, see ``Ahead``.
        seed_rates: The highest rate of each seed, requests/s.
        runs: Number of simulations.
    """

    alone: SloCheck
    saturated: float | None
    seed_rates: tuple[float, ...]
    runs: int

    @classmethod
    def of(cls, ahead: Ahead, others: Sequence[SeedRate]) -> MaxRate:
        """Combine the first seed with the others."""
        found = [ahead.found, *others]
        return cls(ahead.alone, ahead.saturated, tuple(each.rate for each in found), sum(each.runs for each in found))

    @property
    def rate(self) -> float:
        """The recommended rate, requests/s: the tolerance limit. With one seed it is that seed's rate, without confidence.

        Infinite if every rate meets the goal.
        """
        if min(self.seed_rates) <= 0 or min(self.seed_rates) == inf or len(self.seed_rates) == 1:
            return min(self.seed_rates)
        logs = self._logs()
        # Rates are known to one step, and so is their deviation.
        spread = max(stdev(logs), log(STEP) / sqrt(12))
        found = exp(fmean(logs) - tolerance_factor(len(logs)) * spread)
        # No lower rate was tried.
        return found if found >= rate(ALONE) else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation of the seeds' rates, relative to their mean; 0 for one seed."""
        return stdev(self._logs()) if len(self.seed_rates) > 1 and 0 < min(self.seed_rates) < inf else 0.0

    def _logs(self) -> list[float]:
        """Logarithms of the rates, at least one of them finite; an infinite rate counts as the highest finite one."""
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
        step_cost: Step cost in place of the settings' own.

    Raises:
        UserError, SimulationFault: As ``simulate``.
    """
    first, *others = seeds
    ahead = go_ahead(settings, load, goal, first, step_cost)
    jobs = [(settings, load, goal, seed, ahead, step_cost) for seed in others] if ahead.found.rate else []
    searched = dict(as_they_finish(_numbered, jobs, len(jobs), workers)) if jobs else {}
    return MaxRate.of(ahead, [searched[seed] for seed in others if seed in searched])


def _numbered(settings: Settings, load: Load, goal: Goal, seed: int, *more: Any) -> tuple[int, SeedRate]:
    """The highest rate of a seed with its seed, because results come in any order."""
    return seed, follow(settings, load, goal, seed, *more)


def go_ahead(settings: Settings, load: Load, goal: Goal, seed: int, step_cost: StepCost | None = None) -> Ahead:
    """Run the first seed: its requests alone, all at once, a part of them, then all."""
    drawn = load.draw(seed)
    step_cost = step_cost or compiled_cost(settings)
    alone = check_run(simulate(settings, drawn.at(rate(ALONE)), step_cost), goal)
    if not alone.meets:
        return Ahead(alone, None, SeedRate(None, 1))
    saturated = saturated_rate(settings, drawn.at(inf), step_cost)
    part = drawn.first(min(len(drawn.gaps), max(len(drawn.gaps) // _SCOUT_PART, _SCOUT_LEAST)))
    near = _search(settings, part, goal, saturated, 0, _SCOUT_STRIDE, step_cost)
    found = _search(settings, drawn, goal, saturated, near.power or 0, _STRIDE, step_cost)
    runs = 2 + near.runs + found.runs
    if found.power in (None, MOST):
        return Ahead(alone, saturated, SeedRate(found.power, runs))
    times = request_times(simulate(settings, drawn.at(found.rate), step_cost))
    in_flight = float((times.finish_ticks - times.arrival_ticks).mean()) * found.rate / ticks.PER_SECOND
    return Ahead(alone, saturated, SeedRate(found.power, runs + 1), in_flight)


def follow(
    settings: Settings, load: Load, goal: Goal, seed: int, ahead: Ahead, step_cost: StepCost | None = None
) -> SeedRate:
    """Run another seed, starting at the result of the first."""
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
    """The highest integer from ``ALONE`` to ``MOST`` that meets the goal; ``meets`` is true up to some number and false above.

    Args:
        start: First number to try.
        stride: First step; it doubles until it encloses the answer.

    Returns:
        None if even ``ALONE`` does not meet the goal.
    """
    # The highest number known to meet, and the lowest known to miss.
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
    """k for ``n`` normal values: a share ``content`` of all values exceeds mean - k * deviation with ``confidence``.

    The value is exact: for a given chi of the deviation the mean is normal, and Simpson's rule integrates over chi.
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
