"""Sums over tokens and over steps, in closed form."""

from __future__ import annotations

from math import isqrt


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
