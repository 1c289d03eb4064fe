"""Times in ticks from functions in microseconds: curves over one count, surfaces over two.

Fitted times are curved, and floats. They are converted once: between two knots the time changes by a whole number of
ticks per unit of the axis. Sums over many steps are therefore exact, and a leap gives the same bits as its steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

import numpy as np

from .envelope import Segment

#: Most that a straight line may be off between two knots.
TOLERANCE = 1e-3
#: Samples of a curve in each doubling.
SAMPLES = 16
#: Times are rounded to whole nanoseconds first: machines with floats that differ in the last bit give the same ticks.
TICKS_PER_NS = 1_000

#: Nodes of a surface that are computed with one of them: so many patches below it and above it.
_BELOW, _ABOVE = 2, 5

Microseconds = Callable[[np.ndarray], np.ndarray]


def ticks_of(us: np.ndarray) -> int:
    """Ticks of a time in microseconds."""
    return round(float(us) * 1e3) * TICKS_PER_NS


class Curve:
    """A time in ticks over x = 0, 1, 2, ... It follows a function that falls: some kernels take longer for one row than for
    four.

    Attributes:
        segments: In the form of ``upper_envelope``.
    """

    _rises = False

    def __init__(self, us: Microseconds, end: int, bends: Iterable[int] = ()) -> None:
        """
        Args:
            us: Microseconds at integers, as floats.
            end: End of the sampled range; the last line continues from there.
            bends: Corners of the curve, which are always knots.
        """
        grid = _grid(end, bends)
        times = self._sampled(np.rint(us(grid) * 1e3).astype(np.int64) * TICKS_PER_NS)
        keep = _knots(grid, times.astype(float))
        self.segments = _segments(grid[keep].tolist(), times[keep].tolist(), self._rises)
        self._ends = [until for *_, until in self.segments if until is not None]

    def _sampled(self, times: np.ndarray) -> np.ndarray:
        return times

    def segment(self, x: int) -> Segment:
        """The line at ``x``."""
        return self.segments[bisect_right(self._ends, x)]

    def __call__(self, x: int) -> int:
        base, slope, _ = self.segments[bisect_right(self._ends, x)]
        return base + slope * x


class RisingCurve(Curve):
    """A curve that never falls, as leaps over a growing context need; over a dip of the function it stays where it was."""

    _rises = True

    def _sampled(self, times: np.ndarray) -> np.ndarray:
        return np.maximum.accumulate(times)


def _grid(end: int, bends: Iterable[int]) -> np.ndarray:
    spread = np.exp2(np.arange(0, np.log2(max(end, 2)) + 1 / SAMPLES, 1 / SAMPLES))
    return np.unique(np.concatenate([[0], np.rint(spread).astype(np.int64), np.asarray(list(bends), np.int64)]))


def _knots(grid: np.ndarray, times: np.ndarray) -> list[int]:
    """Indices of the fewest samples that keep all others within the tolerance: each line as long as possible."""
    kept = [0]
    while kept[-1] < len(grid) - 1:
        start = kept[-1]
        run, rise = grid[start + 1 :] - grid[start], times[start + 1 :] - times[start]
        slack = TOLERANCE * times[start + 1 :]
        # A line from the knot that passes every sample so far within its slack has a slope between these two.
        least = np.maximum.accumulate((rise - slack) / run)
        most = np.minimum.accumulate((rise + slack) / run)
        slopes = rise / run
        fits = np.flatnonzero((slopes[1:] >= least[:-1]) & (slopes[1:] <= most[:-1]))
        kept.append(start + 1 + (int(fits[-1]) + 1 if len(fits) else 0))
    return kept


def _segments(knots: list[int], times: list[int], rises: bool) -> list[Segment]:
    """Connected lines with whole slopes: each starts at the end of the one before and aims at the next knot."""
    segments: list[Segment] = []
    at = times[0]
    for start, end, time in zip(knots, knots[1:], times[1:]):
        slope = round((time - at) / (end - start))
        if rises:
            slope = max(0, slope)
        segments.append((at - slope * start, slope, end))
        at += slope * (end - start)
    base, slope, _ = segments[-1]
    return [*segments[:-1], (base, slope, None)]


class Surface:
    """A time in ticks over two counts, by patches with edges of a sixteenth to an eighth of the counts.

    Nodes are computed on first use; within a patch the time is linear in either count.
    """

    def __init__(self, us: Callable[[int, np.ndarray], np.ndarray]) -> None:
        """
        Args:
            us: Microseconds at two counts: one of the first, and several of the second (int64).
        """
        self._us = us
        self._nodes: dict[tuple[int, int], int] = {}

    def __call__(self, x: int, y: int) -> int:
        width, height = _patch(x), _patch(y)
        left, low = x // width * width, y // height * height
        along, up = x - left, y - low
        time = self.node(left, low) * (width - along) * (height - up)
        if along:
            time += self.node(left + width, low) * along * (height - up)
        if up:
            time += self.node(left, low + height) * (width - along) * up
            if along:
                time += self.node(left + width, low + height) * along * up
        return time // (width * height)

    def node(self, x: int, y: int) -> int:
        """Ticks at a corner of a patch."""
        ticks = self._nodes.get((x, y))
        if ticks is None:
            # With the ones around it, which are likely to be needed: numpy takes as long for a few as for one.
            height = _patch(y)
            around = np.arange(max(y % height, y - _BELOW * height), y + (_ABOVE + 1) * height, height)
            times = np.rint(self._us(x, around) * 1e3).astype(np.int64) * TICKS_PER_NS
            self._nodes.update(zip(((x, low) for low in around.tolist()), times.tolist(), strict=True))
            ticks = self._nodes[x, y]
        return ticks


def _patch(count: int) -> int:
    """Edge of the patch of a count."""
    return 1 << max(0, count.bit_length() - 4)
