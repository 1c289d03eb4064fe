"""From the seconds of a trace to ticks and back, without losing a nanosecond.

The rule: an arrival is rounded to a whole nanosecond, half to even. Whole seconds and the fraction
are converted apart, since ``seconds * 1e12`` in float64 has too few bits. A float64 below
``LATEST_S`` lies less than half a nanosecond from the decimal text that it was read from, so text of
up to nine decimals is met exactly, and every format gives the same ticks. Integers are exact.
"""

from __future__ import annotations

import numpy as np

from ..sim import ticks

LATEST_S = 2**23
"""Arrivals end before this second (97 days): above it float64 has no room for nanoseconds."""

TICKS_PER_NS = ticks.PER_US // 1000


def to_ticks(times: np.ndarray, unit_ticks: int) -> np.ndarray:
    """Ticks (int64 [n]) of ``times`` (int or float64 [n], finite), counted in units of ``unit_ticks``."""
    if times.dtype.kind == "i":
        return times * unit_ticks
    whole = np.floor(times)
    fraction_ns = np.rint((times - whole) * (unit_ticks // TICKS_PER_NS))
    return whole.astype(np.int64) * unit_ticks + fraction_ns.astype(np.int64) * TICKS_PER_NS


def to_seconds(arrival_ticks: np.ndarray) -> np.ndarray:
    """Seconds (float64 [n]) nearest to ``arrival_ticks``; ``to_ticks`` restores whole nanoseconds."""
    whole_s, rest_ticks = np.divmod(arrival_ticks, ticks.PER_SECOND)
    return whole_s + rest_ticks / ticks.PER_SECOND
