"""A distribution of latencies reduced to a limited number of points.

The points are percentiles by numpy's definition (linear between order statistics), as in a run's summary. Up to
``MOST_POINTS`` values each value is a point, and the line is exact. For more values there is a point every 0.25 %, and
every 0.025 % from 99 % on. Between two neighbouring points the line and all values lie in the same box, so the error of
a share read off the line is at most the step between them plus one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...sim.metrics.gaps import Gaps

_PERCENTS = np.unique(np.concatenate([np.arange(401) / 4, 99 + np.arange(41) / 40]))
MOST_POINTS = len(_PERCENTS)
#: Percentiles in the table under a figure.
LISTED = (50, 90, 95, 99, 100)


@dataclass(frozen=True, eq=False)
class Distribution:
    """Values in ms, by their percentiles.

    Attributes:
        number: Number of values, at least one.
        mean_ms: Their mean.
        percents, values_ms: The points of the line, float64 [points], both ascending.
        listed_ms: The percentiles of ``LISTED``.
    """

    number: int
    mean_ms: float
    percents: np.ndarray
    values_ms: np.ndarray
    listed_ms: Mapping[int, float]

    @property
    def error_pct(self) -> float:
        """Largest error of a share read off the line, in percent of the values."""
        step = float(np.diff(self.percents).max(initial=0)) if self.number > MOST_POINTS else 0.0
        return step + 100 / self.number


def of_values(values_ms: np.ndarray) -> Distribution | None:
    """The distribution of values in ms; None without values."""
    if not len(values_ms):
        return None
    percents = _percents(len(values_ms))
    listed = np.percentile(values_ms, LISTED)
    return Distribution(
        number=len(values_ms),
        mean_ms=float(values_ms.mean()),
        percents=percents,
        values_ms=np.percentile(values_ms, percents),
        listed_ms=dict(zip(LISTED, listed.tolist(), strict=True)),
    )


def of_gaps(gaps: Gaps) -> Distribution | None:
    """The pooled distribution of inter-token latencies; None without values."""
    if not gaps.number:
        return None
    percents = _percents(gaps.number)
    values_ms = gaps.percentiles_ms(np.concatenate([percents, LISTED]))
    return Distribution(
        number=gaps.number,
        mean_ms=gaps.mean_ms(),
        percents=percents,
        values_ms=values_ms[: len(percents)],
        listed_ms=dict(zip(LISTED, values_ms[len(percents) :].tolist(), strict=True)),
    )


def _percents(number: int) -> np.ndarray:
    return _PERCENTS if number > MOST_POINTS else np.linspace(0, 100, number)
