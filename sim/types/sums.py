"""Sums over tokens and over steps, in closed form."""

from __future__ import annotations

from math import isqrt


def causal_pairs(tokens: int) -> int:
    """Pairs of query and key in the causal attention of so many tokens."""
    return tokens * (tokens + 1) // 2


def steps_until(ticks: int, first: int, second: int, growth: int) -> int:
    """Steps of a leap up to the first boundary at or after ``ticks``: at least one, which takes ``first``; the next
    ones take ``second``, ``second + growth``, ..."""
    ahead = ticks - first - 1
    return 1 if ahead < 0 else 2 + whole_steps(ahead, second, growth)


def ticks_of(steps: int, first: int, second: int, growth: int) -> int:
    """How long the first ``steps`` steps of such a leap take, at least one."""
    more = steps - 1
    return first + more * second + growth * (more * (more - 1) // 2)


def whole_steps(ticks: int, second: int, growth: int) -> int:
    """Decode steps that fit in ``ticks``: the largest j with ``j*second + growth*j*(j-1)/2 <= ticks``."""
    if not growth:
        return ticks // second
    # The root of the quadratic; flooring the square root first changes nothing, as the rest are integers.
    linear = 2 * second - growth
    return (isqrt(linear * linear + 8 * growth * ticks) - linear) // (2 * growth)
