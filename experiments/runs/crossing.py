"""Where a curve crosses a target: by bisection, or by a scan.

The bisection of a rising curve (``crossing``) keeps every evaluated point. It evaluates the curve at the start, then
at points with growing steps until two of them enclose the target, then at the geometric mean until the two are 2 %
apart. Between the two the curve is taken as a power law, a straight line on logarithmic axes. Its exponent gives the
shift of the crossing when the target or the curve moves. The curve may return infinity far above the target; its exact
value is then computed only at the point next to the crossing. The curve must be below the target somewhere and above
it further on. If it is not monotonic, the search finds one of its crossings.

The scan (``scan``) fits a parameter to one published value. A change of one tick can reorder admissions, so the
response is not monotonic at the finest scale and bisection can miss the crossing. The scan takes coarse steps, then
fine steps where the published value is first crossed. It returns the parameter with the nearest value, the smaller one
on a tie, so the result is the same on every machine. If the value is never crossed, the scan returns the nearest
coarse step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import exp, isfinite, isinf, log, sqrt

from ...sim.types.errors import UserError

#: First step away from the start, as a factor; each further step is the square of the previous one, up to the widest.
_FIRST_STEP, _WIDEST_STEP = 1.1, 2.0
_APART = 1.02
_MOST_STEPS = 30


@dataclass(frozen=True, slots=True)
class Crossing:
    """A crossing.

    Attributes:
        at: Its position.
        exponent: d log(at) / d log(target); 0 if the curve jumps.
        points: (x, y) of every point with a known value, by x.
    """

    at: float
    exponent: float
    points: tuple[tuple[float, float], ...]


def crossing(
    curve: Callable[[float], float], target: float, start: float, whole: Callable[[float], float] | None = None
) -> Crossing:
    """The crossing of ``curve`` with ``target``; both, and ``start``, are positive.

    Args:
        whole: The same curve with finite values where ``curve`` is infinite; None where the true value is infinite.

    Raises:
        UserError: The curve does not cross the target between about 2**-30 and 2**30 times the start.
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
    """Two points: the curve is below the target at the first and not at the second."""
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


def scan(
    measure: Callable[[range], dict[int, float]], published: float, coarse: range, fine_step: int
) -> tuple[int, dict[int, float]]:
    """The parameter, in thousandths, with the value nearest to the published one, and all measured values.

    Args:
        measure: Returns the values at parameters in thousandths.
    """
    values = measure(coarse)
    candidates = coarse
    for low, high in pairwise(coarse):
        if (values[low] - published) * (values[high] - published) <= 0:
            candidates = range(low, high + 1, fine_step)
            values |= measure(candidates[1:-1])
            break
    best = min(candidates, key=lambda at: (abs(values[at] - published), at))
    return best, dict(sorted(values.items()))
