"""Inter-token latency: all gaps between tokens of a sequence, pooled, without listing them.

While a sequence runs, the gap before a token is the duration of the step that computes it. So the
gaps are the step durations, each as often as sequences decode in it, and a row of the book stands
for an arithmetic progression of them. Order statistics are found by bisection on the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import floor, sqrt

import numpy as np

from .memory.book import Book
from .memory.exact import dot, total
from .requests import resumed_gap_ticks
from .sequence import SWAPPED_IN


@dataclass(frozen=True, eq=False)
class Gaps:
    """Progressions ``first, first + slope, ...`` of ``count`` values, each ``weight`` times; int64 [rows]."""

    first: np.ndarray
    slope: np.ndarray
    count: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, book: Book) -> Gaps:
        """All gaps of a run."""
        rows, stays = book.rows, book.stays
        back = stays["start_clock"][stays["kind"] == SWAPPED_IN]
        returned = np.bincount(
            np.searchsorted(book.row_clock, back, side="right") - 1, minlength=len(book.row_clock)
        )
        in_batch = np.where(rows["prefill_tokens"] > 0, 0, rows["growing"])
        decodes = (in_batch if book.together else rows["decodes"]) - returned
        later = np.maximum(rows["steps"] - 1, 0)
        resumed = resumed_gap_ticks(book)
        ones, zeros = np.ones_like(decodes), np.zeros_like(decodes)
        parts = (
            (rows["first_ticks"], zeros, ones, decodes),
            (rows["next_ticks"], rows["slope_ticks"], later, rows["growing"]),
            (resumed, np.zeros_like(resumed), np.ones_like(resumed), np.ones_like(resumed)),
        )
        first, slope, count, weight = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        some = (count > 0) & (weight > 0)
        return cls(first[some], slope[some], count[some], weight[some])

    @property
    def number(self) -> int:
        """How many gaps there are."""
        return total(self.count * self.weight)

    def mean_ms(self) -> float:
        """Mean gap; 0 where there is none."""
        number = self.number
        return self._sum() / number / 1e9 if number else 0.0

    def std_ms(self) -> float:
        """Standard deviation of the gaps (divided by their number, as numpy does); 0 where there is none."""
        number = self.number
        if not number:
            return 0.0
        # Exact until the last division, so that leaping and stepping agree in every bit.
        variance = number * self._sum_of_squares() - self._sum() ** 2
        return sqrt(variance) / number / 1e9

    def percentile_ms(self, percent: float) -> float:
        """Percentile, linear between order statistics as numpy's; 0 where there is no gap."""
        number = self.number
        if not number:
            return 0.0
        rank = (number - 1) * percent / 100
        low = self._order_statistic(floor(rank))
        high = self._order_statistic(min(floor(rank) + 1, number - 1))
        return (low + (high - low) * (rank - floor(rank))) / 1e9

    def _sum(self) -> int:
        values, numbers = self._distinct
        first, slope, count, weight = self._rising
        steps = count * (count - 1) // 2
        return dot(values, numbers) + dot(weight * count, first) + dot(weight * steps, slope)

    def _sum_of_squares(self) -> int:
        level = sum(number * value * value for value, number in zip(*(x.tolist() for x in self._distinct), strict=True))
        # Squares of ticks leave int64, and these rows are too many kinds to be counted: Python ints.
        first, slope, count, weight = (column.astype(object) for column in self._rising)
        linear = count * (count - 1) // 2
        square = linear * (2 * count - 1) // 3
        return level + int((weight * (count * first**2 + 2 * linear * first * slope + square * slope**2)).sum())

    @cached_property
    def _distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """Values that do not rise, each once, and how many gaps have it."""
        values, numbers = self._level
        last = np.flatnonzero(np.diff(values, append=-1))
        return values[last], np.diff(numbers[last], prepend=0)

    @cached_property
    def _level(self) -> tuple[np.ndarray, np.ndarray]:
        """Values that do not rise, ascending, and how many gaps there are up to each."""
        level = self.slope == 0
        order = np.argsort(self.first[level], kind="stable")
        return self.first[level][order], np.cumsum((self.count * self.weight)[level][order])

    @cached_property
    def _rising(self) -> tuple[np.ndarray, ...]:
        rising = self.slope > 0
        return self.first[rising], self.slope[rising], self.count[rising], self.weight[rising]

    def _order_statistic(self, rank: int) -> int:
        """The value with ``rank`` gaps below it in ascending order."""
        values, numbers = self._level
        if not len(self._rising[0]):
            return int(values[np.searchsorted(numbers, rank, side="right")])
        low, high = int(self.first.min()), int((self.first + self.slope * (self.count - 1)).max())
        while low < high:
            middle = (low + high) // 2
            if self._number_up_to(middle) > rank:
                high = middle
            else:
                low = middle + 1
        return low

    def _number_up_to(self, ticks: int) -> int:
        values, numbers = self._level
        place = int(np.searchsorted(values, ticks, side="right"))
        first, slope, count, weight = self._rising
        rising = total(np.clip((ticks - first) // slope + 1, 0, count) * weight)
        return rising + (int(numbers[place - 1]) if place else 0)
