"""Where a rising curve crosses a target, by bisection, with all that was asked of it on the way.

The curve is asked at the start, then at rates a little further away each time until the target lies between two
of them, then in the geometric middle until these are 2 % apart. Between the two the curve is taken as a power
law, a straight line on logarithmic axes. Its exponent gives the shift of the crossing when the target or the
curve moves. Where the curve only says that it is far above the target, by infinity, its number is asked for at the one
point next to the crossing alone. No more is asked of the curve than that it is below the target somewhere and above it
further on: of a curve that wiggles, one of its crossings is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, isfinite, isinf, log, sqrt

from ...sim.types.errors import UserError

#: First step away from the start; each further one is the square of the one before, up to the widest.
_FIRST_STEP, _WIDEST_STEP = 1.1, 2.0
_APART = 1.02
_MOST_STEPS = 30


@dataclass(frozen=True, slots=True)
class Crossing:
    """A crossing.

    Attributes:
        at: Where.
        exponent: d log(at) / d log(target); 0 where the curve is a wall.
        points: (x, y) of all that was asked and is known, by x.
    """

    at: float
    exponent: float
    points: tuple[tuple[float, float], ...]


def crossing(
    curve: Callable[[float], float], target: float, start: float, whole: Callable[[float], float] | None = None
) -> Crossing:
    """Where ``curve`` crosses ``target``; both, and ``start``, are positive.

    Args:
        whole: The same curve with its numbers where ``curve`` is infinite; None where it truly is.

    Raises:
        UserError: The curve stays on one side, up to some 2**30 times the start or down to as small a part of it.
    """
    points = {start: curve(start)}

    def below(x: float) -> bool:
        if x not in points:
            points[x] = curve(x)
        return points[x] < target

    low, high = _bracket(below, start)
    while high / low > _APART:
        middle = sqrt(low * high)
        low, high = (middle, high) if below(middle) else (low, middle)
    if whole is not None and isinf(points[high]):
        points[high] = whole(high)
    exponent = log(high / low) / log(points[high] / points[low])
    return Crossing(low * exp(exponent * log(target / points[low])), exponent, _known(points))


def _known(points: Mapping[float, float]) -> tuple[tuple[float, float], ...]:
    return tuple((x, y) for x, y in sorted(points.items()) if isfinite(y))


def _bracket(below: Callable[[float], bool], start: float) -> tuple[float, float]:
    """Two points, the curve below the target at the first and not at the second."""
    rising = below(start)
    here, step = start, _FIRST_STEP
    for _ in range(_MOST_STEPS):
        there = here * step if rising else here / step
        if below(there) != rising:
            return (here, there) if rising else (there, here)
        here, step = there, min(step * step, _WIDEST_STEP)
    side = "below" if rising else "above"
    remedy = "start nearer, or change the target"
    raise UserError(f"the curve stays {side} its target from {start:g} to {here:g}; {remedy}")
