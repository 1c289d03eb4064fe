"""Sums over tokens and over steps, in closed form."""

from __future__ import annotations

from math import isqrt


def causal_pairs(tokens: int) -> int:
    """Pairs of query and key in the causal attention of so many tokens."""
    return tokens * (tokens + 1) // 2


def whole_steps(ticks: int, second: int, growth: int) -> int:
    """Decode steps that fit in ``ticks``: the largest j with ``j*second + growth*j*(j-1)/2 <= ticks``."""
    if not growth:
        return ticks // second
    # The root of the quadratic; flooring the square root first changes nothing, as the rest are integers.
    linear = 2 * second - growth
    return (isqrt(linear * linear + 8 * growth * ticks) - linear) // (2 * growth)
