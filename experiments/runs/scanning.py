"""How a parameter is fitted to one published value: by a scan, as responses wiggle at the finest scale.

A tick more or less reorders admissions, so bisection could be led astray. First come coarse steps, then fine
ones where the published value is first crossed, and of these the nearest is taken, the smaller parameter on a
tie: the same on every machine. A value that is never crossed takes the nearest of the coarse scan.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise


def scan(
    measure: Callable[[range], dict[int, float]], published: float, coarse: range, fine_step: int
) -> tuple[int, dict[int, float]]:
    """The parameter, in thousandths, with the value nearest to the published one, and all measured values.

    Args:
        measure: The values at parameters in thousandths.
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
