"""Quantiles and probabilities of Student's t distribution."""

from __future__ import annotations

from functools import cache
from math import atan, cos, pi, sin, sqrt, tan

#: Halvings of an interval, after which float64 has no more digits.
_HALVINGS = 60


@cache
def student_t(confidence: float, degrees: int) -> float:
    """The t for which Student's t with this many degrees of freedom lies in [-t, t] with that probability."""
    low, high = 0.0, pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return sqrt(degrees) * tan(low)


def below(value: float, degrees: int) -> float:
    """The probability that Student's t with this many degrees of freedom is below a value."""
    within = _within(atan(abs(value) / sqrt(degrees)), degrees)
    return (1 + within) / 2 if value >= 0 else (1 - within) / 2


def _within(angle: float, degrees: int) -> float:
    """P(|T| <= sqrt(degrees) * tan(angle)): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    odd = degrees % 2
    term = cos(angle) if odd else 1.0
    series = 0.0
    for place in range(2 + odd, degrees + 1, 2):
        series += term
        term *= cos(angle) ** 2 * (place - 1) / place
    return 2 / pi * (angle + sin(angle) * series) if odd else sin(angle) * series
