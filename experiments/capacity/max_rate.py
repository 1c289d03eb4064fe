"""The highest request rate at which a replica meets a goal, by seed.

A seed fixes the requests and unit gaps, and rates are powers of 1.02. Whether a seed meets the goal is therefore a
function of an integer. Doubling or halving steps and then bisection find the highest rate, on common random numbers.

The highest rate differs between seeds by some percent, and the recommended rate must hold for other seeds. The
recommended rate is one that 90 % of all seeds take, with 95 % confidence (``confidence.lower_limit``).

The first seed runs before the others, in four parts. Its requests are served one by one: a request that misses the
goal alone misses it at any rate. Its requests are served all at once: the recommended rate never exceeds that
throughput. An eighth of its requests is served at rates a factor of two apart, so that the search of every seed starts
near its result. At the end its requests in flight are counted at its own rate.

If the requests of a seed meet the goal even when they all arrive at once, the seed has an infinite highest rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log
from statistics import stdev
from typing import NamedTuple

from ...sim import Settings, simulate
from ...sim.cost import StepCost
from ...sim.metrics.requests import request_times
from ...sim.types import ticks
from ...sim.types.optional import not_none
from ..runs.slo_check import Goal, SloCheck, check_run, check_slo, compiled_cost, saturated_rate
from .confidence import capped
from .load import Drawn, Load

#: Ratio of neighbouring rates.
STEP = 1.02
#: Exponents of the lowest rate, at which every request is alone, and of a rate above that of any replica.
ALONE, MOST = -350, 700
#: First stride of the search: a factor of two for the partial run of the first seed, and the stride after it.
_SCOUT_STRIDE, _STRIDE = 35, 4
#: Share of the requests in the partial run, and its least number of requests.
_SCOUT_PART, _SCOUT_LEAST = 8, 100
DEFAULT_SEEDS = 12


def rate(power: int) -> float:
    """Rate in requests/s of an exponent."""
    return STEP**power


class Bounds(NamedTuple):
    """What bounds the rate of a replica; its fields are those of ``Ahead``."""

    alone: SloCheck
    saturated: float | None


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
    """

    power: int | None

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
        seed_rates: The highest rate of each seed to begin with, requests/s.
        rate: The rate that other seeds take (``lower_limit``), requests/s; infinite if every rate meets the goal. With one seed
            it is that seed's rate, without confidence.
    """

    alone: SloCheck
    saturated: float | None
    seed_rates: tuple[float, ...]
    rate: float

    @classmethod
    def of(cls, ahead: Ahead, seed_rates: tuple[float, ...] | None = None, rate: float | None = None) -> MaxRate:
        """The rates of the seeds to begin with and that of others; by default those of the first seed."""
        first = ahead.found.rate
        return cls(ahead.alone, ahead.saturated, seed_rates or (first,), first if rate is None else rate)

    @property
    def spread(self) -> float:
        """Standard deviation of the seeds' rates, relative to their mean; 0 for one seed."""
        if len(self.seed_rates) == 1 or not 0 < min(self.seed_rates) < inf:
            return 0.0
        return stdev(map(log, capped(self.seed_rates)))


def bounds(settings: Settings, load: Load, goal: Goal, seed: int, step_cost: StepCost | None = None) -> Bounds:
    """What bounds the rate of the first seed; ``saturated`` is None if its requests alone miss the goal."""
    drawn, step_cost = load.draw(seed), step_cost or compiled_cost(settings)
    alone = check_run(simulate(settings, drawn.at(rate(ALONE)), step_cost, logs_contents=False), goal)
    return Bounds(alone, saturated_rate(settings, drawn.at(inf), step_cost) if alone.meets else None)


def go_ahead(settings: Settings, load: Load, goal: Goal, seed: int, step_cost: StepCost | None = None) -> Ahead:
    """Run the first seed: its requests alone, all at once, a part of them, then all."""
    step_cost = step_cost or compiled_cost(settings)
    alone, saturated = bounds(settings, load, goal, seed, step_cost)
    if not alone.meets:
        return Ahead(alone, None, SeedRate(None))
    drawn = load.draw(seed)
    part = drawn.first(min(len(drawn.gaps), max(len(drawn.gaps) // _SCOUT_PART, _SCOUT_LEAST)))
    near = _search(settings, part, goal, saturated, 0, _SCOUT_STRIDE, step_cost)
    found = _search(settings, drawn, goal, saturated, near.power or 0, _STRIDE, step_cost)
    if found.power in (None, MOST):
        return Ahead(alone, saturated, found)
    times = request_times(simulate(settings, drawn.at(found.rate), step_cost))
    in_flight = float((times.finish_ticks - times.arrival_ticks).mean()) * found.rate / ticks.PER_SECOND
    return Ahead(alone, saturated, found, in_flight)


def follow(
    settings: Settings, load: Load, goal: Goal, seed: int, ahead: Ahead, step_cost: StepCost | None = None
) -> float:
    """The highest rate of another seed, requests/s, sought from the result of the first."""
    start = not_none(ahead.found.power)
    return _search(settings, load.draw(seed), goal, ahead.saturated, start, _STRIDE, step_cost).rate


def _search(
    settings: Settings,
    drawn: Drawn,
    goal: Goal,
    most: float | None,
    start: int,
    stride: int,
    step_cost: StepCost | None,
) -> SeedRate:
    def meets(power: int) -> bool:
        if most is not None and rate(power) > most:
            return False
        return check_slo(settings, drawn.at(rate(power)), goal, step_cost).meets

    return SeedRate(highest(meets, start, stride))


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
