"""Fit of a parameter to one published value by a scan, because the response is not monotonic at the finest scale.

A change of one tick can reorder admissions, so bisection can miss the crossing. The scan takes coarse steps, then fine
steps where the published value is first crossed. It returns the parameter with the nearest value, the smaller one on a
tie, so the result is the same on every machine. If the value is never crossed, the scan returns the nearest coarse
step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise


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
