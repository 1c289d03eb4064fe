"""Estimates of a size: what is likely, and an interval."""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple


class Estimate(NamedTuple):
    """A size in bytes. The interval is meant to hold eight of ten sizes that servers log."""

    low: int
    likely: int
    high: int


def exactly(size: int) -> Estimate:
    """A size that is known."""
    return Estimate(size, size, size)


def within(size: int, share: float) -> Estimate:
    """A size that may be off by that share of it."""
    return Estimate(round(size * (1 - share)), size, round(size * (1 + share)))


#: What two starts of one server differ by although nothing is known to have changed.
_UNEXPLAINED = 1 << 28


def rest(whole: int, parts: list[Estimate]) -> Estimate:
    """What the parts leave of the whole; their errors are taken as independent, so that their squares add up.

    Where a part is no more than an estimate, what is not explained by any part comes on top.
    """
    likely = whole - sum(part.likely for part in parts)
    unexplained = _UNEXPLAINED**2 if any(part.low < part.high for part in parts) else 0
    below = isqrt(sum((part.high - part.likely) ** 2 for part in parts) + unexplained)
    above = isqrt(sum((part.likely - part.low) ** 2 for part in parts) + unexplained)
    return Estimate(likely - below, likely, likely + above)
