"""Exact sums: over tokens and over steps in closed form, and of int64 columns that may overflow int64, as Python ints.

Slots times picoseconds exceed int64 within minutes of simulated time.
"""

from __future__ import annotations

from math import isqrt
from operator import mul

import numpy as np


def causal_pairs(tokens: int) -> int:
    """Pairs of query and key in causal attention over ``tokens`` tokens."""
    return tokens * (tokens + 1) // 2


def steps_until(ticks: int, first: int, second: int, growth: int) -> int:
    """Steps of a leap up to the first step boundary at or after ``ticks``; at least one.

    The first step takes ``first`` ticks, the next ones ``second``, ``second + growth``, and so on.
    """
    ahead = ticks - first - 1
    return 1 if ahead < 0 else 2 + whole_steps(ahead, second, growth)


def ticks_of(steps: int, first: int, second: int, growth: int) -> int:
    """Ticks of the first ``steps`` steps, at least one, of a leap as in ``steps_until``."""
    more = steps - 1
    return first + more * second + growth * (more * (more - 1) // 2)


def whole_steps(ticks: int, second: int, growth: int) -> int:
    """Decode steps that fit in ``ticks``: the largest j with ``j*second + growth*j*(j-1)/2 <= ticks``."""
    if not growth:
        return ticks // second
    # The root of the quadratic. Flooring the square root first is exact, as all other terms are integers.
    linear = 2 * second - growth
    return (isqrt(linear * linear + 8 * growth * ticks) - linear) // (2 * growth)


_LIMB_BITS = 24
_LIMB = (1 << _LIMB_BITS) - 1
_INT64 = 1 << 63
#: The sum of this number of products of two limbs fits in int64.
_LONGEST = 1 << 14
#: Columns up to this length are summed as Python ints, which takes less time than a few calls of numpy.
_SHORT = 32


def total(values: np.ndarray) -> int:
    """Exact sum of an int64 column; the high and low halves of the values are summed separately."""
    if len(values) <= _SHORT:
        return sum(values.tolist())
    values = np.asarray(values, dtype=np.int64)
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


def dot(left: np.ndarray, right: np.ndarray) -> int:
    """Exact sum of ``left * right``, int64 columns of non-negative numbers.

    If the sum could overflow int64, long columns are halved and the larger factor is split into limbs.
    """
    if len(left) <= _SHORT:
        return sum(map(mul, left.tolist(), right.tolist()))
    most_left, most_right = int(left.max()), int(right.max())
    if most_left * most_right * len(left) < _INT64:
        return int((left * right).sum())
    if len(left) > _LONGEST:
        half = len(left) // 2
        return dot(left[:half], right[:half]) + dot(left[half:], right[half:])
    if most_left > most_right:
        left, right = right, left
    return (dot(left, right >> _LIMB_BITS) << _LIMB_BITS) + dot(left, right & _LIMB)


def distinct(values: np.ndarray) -> np.ndarray:
    """The values, ascending, each once: as ``np.unique``, which hashes them first and takes ten times as long for int64."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
