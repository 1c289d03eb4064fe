"""Paired comparison of two settings over the same seeds: the difference of each metric, with a confidence interval.

Runs with one seed serve the same requests, so variation between seeds cancels in their difference (common random
numbers). For normal differences the mean difference follows Student's t distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from ..runs.student_t import student_t


@dataclass(frozen=True)
class Difference:
    """The difference of a metric between a base and another setting.

    Attributes:
        base, other: Means over the runs.
        difference: ``other`` minus ``base``.
        interval: Confidence interval of the difference; None for a single pair.
    """

    metric: str
    base: float
    other: float
    difference: float
    interval: tuple[float, float] | None

    @property
    def percent(self) -> float | None:
        """The difference in percent of the base; None if the base is 0."""
        return 100 * self.difference / self.base if self.base else None

    @property
    def is_sure(self) -> bool | None:
        """Whether the interval excludes 0; None without an interval."""
        return None if self.interval is None else not self.interval[0] <= 0 <= self.interval[1]

    def describe(self) -> dict[str, Any]:
        """As data."""
        return {
            "metric": self.metric,
            "base": self.base,
            "other": self.other,
            "difference": self.difference,
            "percent": self.percent,
            "interval": self.interval,
        }


def differences(
    base: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]], confidence: float
) -> list[Difference]:
    """The difference of every metric that all runs have; run i of one side is paired with run i of the other."""
    names = [name for name in base[0] if all(name in run for run in (*base, *other))]
    columns = ((name, [run[name] for run in base], [run[name] for run in other]) for name in names)
    return [_difference(*column, confidence) for column in columns]


def _difference(name: str, base: Sequence[float], other: Sequence[float], confidence: float) -> Difference:
    moved = [there - here for here, there in zip(base, other, strict=True)]
    mean, interval = fmean(moved), None
    if len(moved) > 1:
        half = student_t(confidence, len(moved) - 1) * stdev(moved) / sqrt(len(moved))
        interval = mean - half, mean + half
    return Difference(name, fmean(base), fmean(other), mean, interval)
