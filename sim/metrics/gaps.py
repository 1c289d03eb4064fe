"""Inter-token latency: all gaps between the tokens of a sequence, pooled, without a list of them.

While a sequence runs, the gap before a token is the duration of the step that computes it. The gaps are therefore the
step durations, each counted once per decoding sequence. A row of the run log stands for an arithmetic progression of
durations. Order statistics are found by bisection on the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import floor, prod, sqrt

import numpy as np

from ..output import frames as pd
from ..runs.run_log import RunLog
from ..types.columns import column_of, columns_of, slices
from ..types.once import once
from ..types.sequence import SWAPPED_IN
from ..types.sums import dot, total
from .requests import resumed_gap_ticks

#: Rows that are read at a time, to bound what intermediate columns take; and those that are Python ints, which take more.
_CHUNK_ROWS, _CHUNK_OBJECTS = 1 << 17, 1 << 14
_INT64 = 1 << 63
#: Rows that are sorted at a time, and the sample of values that divides them.
_SORTED_ROWS, _SAMPLE = 1 << 20, 1 << 16
_COLUMNS = ("first_ticks", "slope_ticks", "count", "weight")


@dataclass(frozen=True, eq=False)
class Gaps:
    """Progressions ``first, first + slope, ...`` of ``count`` values, each ``weight`` times; int64 [rows]."""

    first: np.ndarray
    slope: np.ndarray
    count: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, run_log: RunLog) -> Gaps:
        """All gaps of a run."""
        return _gaps_of(run_log)

    @classmethod
    def _of(cls, run_log: RunLog) -> Gaps:
        parts = chain(
            _first_steps(run_log),
            _later_steps(run_log),
            _singles(resumed_gap_ticks(run_log)),
            _singles(_gaps_after_pauses(run_log)),
        )
        found = columns_of([np.int64] * len(_COLUMNS), (cls._of_columns(columns)._columns for columns in parts))
        return cls(*columns_of([np.int64] * len(_COLUMNS), (part._columns for part in cls(*found)._merged_parts())))

    @classmethod
    def _of_columns(cls, columns: tuple[np.ndarray, ...]) -> Gaps:
        """The gaps of some rows; a row may stand for none."""
        first, slope, count, weight = columns
        some = (count > 0) & (weight > 0)
        return cls(first[some], slope[some], count[some], weight[some]).merged()

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.first, self.slope, self.count, self.weight

    def _merged_parts(self) -> Iterator[Gaps]:
        """``merged`` in parts: of values in one range after the other, none of which has many rows."""
        if len(self.first) <= _SORTED_ROWS:
            yield self.merged()
            return
        sample = np.sort(self.first[:: max(1, len(self.first) // _SAMPLE)])
        bounds = np.unique(sample[_sorted_places(len(sample), -(-len(self.first) // _SORTED_ROWS))])
        for low, high in pairwise([np.iinfo(np.int64).min, *bounds.tolist(), None]):
            rows = column_of(
                part.start + np.flatnonzero(_between(self.first[part], low, high)) for part in slices(len(self.first))
            )
            yield Gaps(*(column[rows] for column in self._columns)).merged()

    @classmethod
    def single(cls, ticks: np.ndarray) -> Gaps:
        """Gaps that occur once each, int64."""
        return cls(*_single(ticks))

    @classmethod
    def pooled(cls, parts: Sequence[Gaps]) -> Gaps:
        """The gaps of all of them."""
        names = ("first", "slope", "count", "weight")
        none = np.zeros(0, dtype=np.int64)
        return cls(*(np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in names))

    @classmethod
    def of_table(cls, table: pd.DataFrame) -> Gaps:
        """The gaps of a run, from the table of ``as_table``."""
        return cls(*(table[name].to_numpy() for name in _COLUMNS))

    def as_table(self, part: slice | None = None) -> pd.DataFrame:
        """A row per progression, ascending, equal ones merged: columns first_ticks, slope_ticks, count and weight.

        Args:
            part: Rows of the table, of gaps that are merged.
        """
        found = self.merged() if part is None else Gaps(*(column[part] for column in self._columns))
        return pd.DataFrame(dict(zip(_COLUMNS, found._columns, strict=True)), copy=False)

    def merged(self) -> Gaps:
        """The same gaps, ascending, with equal progressions as one: most steps of a run take as long as others."""
        order = _order(self.first, self.slope, self.count)
        first, slope, count = self.first[order], self.slope[order], self.count[order]
        others = [np.diff(column, prepend=-1) != 0 for column in (first, slope, count)]
        starts = np.flatnonzero(np.logical_or.reduce(others))
        weight = np.add.reduceat(self.weight[order], starts) if len(starts) else self.weight
        return Gaps(first[starts], slope[starts], count[starts], weight)

    @cached_property
    def number(self) -> int:
        """Number of gaps."""
        return sum(total(self.count[part] * self.weight[part]) for part in slices(len(self.count)))

    def mean_ms(self) -> float:
        """Mean gap; 0 without gaps."""
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

    def percentiles_ms(self, percents: np.ndarray) -> np.ndarray:
        """Many percentiles at once, each as ``percentile_ms`` has it; float64, as long as ``percents``.

        Lists a value for each step, but not one for each token. There must be gaps.
        """
        row = np.repeat(np.arange(len(self.count)), self.count)
        place = np.arange(len(row)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        values = self.first[row] + self.slope[row] * place
        order = np.argsort(values, kind="stable")
        values, numbers = values[order], np.cumsum(self.weight[row][order])
        rank = (self.number - 1) * percents / 100
        below = np.floor(rank).astype(np.int64)
        above = np.minimum(below + 1, self.number - 1)
        low, high = (values[np.searchsorted(numbers, ranks, side="right")] for ranks in (below, above))
        return (low + (high - low) * (rank - below)) / 1e9

    def _sum(self) -> int:
        values, numbers = self._distinct
        found = dot(values, numbers)
        for first, slope, count, weight in self._rising_parts():
            steps = count * (count - 1) // 2
            found += dot(weight * count, first) + dot(weight * steps, slope)
        return found

    def _sum_of_squares(self) -> int:
        parts = slices(len(self.first), _CHUNK_OBJECTS)
        return sum(_sum_of_squares(tuple(column[part] for column in self._columns)) for part in parts)

    @cached_property
    def _distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """Values that do not rise, each once, and how many gaps have it."""
        values, numbers = self._level
        last = np.flatnonzero(np.diff(values, append=-1))
        return values[last], np.diff(numbers[last], prepend=0)

    @cached_property
    def _level(self) -> tuple[np.ndarray, np.ndarray]:
        """Values that do not rise, ascending, and how many gaps there are up to each."""
        first, numbers = self._some(lambda slope: slope == 0, lambda part: (part.first, part.count * part.weight))
        if (np.diff(first) < 0).any():
            order = np.argsort(first, kind="stable")
            first, numbers = first[order], numbers[order]
        return first, np.cumsum(numbers)

    @cached_property
    def _rising(self) -> tuple[np.ndarray, ...]:
        return self._some(lambda slope: slope > 0, lambda part: part._columns)

    def _some(
        self, chosen: Callable[[np.ndarray], np.ndarray], of: Callable[[Gaps], tuple[np.ndarray, ...]]
    ) -> tuple[np.ndarray, ...]:
        """Columns of the progressions with chosen slopes."""
        picked = (tuple(column[part] for column in self._columns) for part in slices(len(self.first)))
        parts = (Gaps(*(column[chosen(columns[1])] for column in columns)) for columns in picked)
        return tuple(columns_of([np.int64] * len(of(self.single(np.zeros(0, dtype=np.int64)))), map(of, parts)))

    def _rising_parts(self) -> Iterator[tuple[np.ndarray, ...]]:
        for part in slices(len(self._rising[0])):
            yield tuple(column[part] for column in self._rising)

    def _order_statistic(self, rank: int) -> int:
        """The value with ``rank`` gaps below it in ascending order."""
        values, numbers = self._level
        if not len(self._rising[0]):
            return int(values[np.searchsorted(numbers, rank, side="right")])
        low, high = self._ends
        # Where the search for another rank has been.
        for ticks, number in self._numbers_up_to.items():
            low, high = (low, min(high, ticks)) if number > rank else (max(low, ticks + 1), high)
        below, rising = 0, [*self._rising_parts()]
        while low < high:
            if len(rising) == 1:
                ended, rising = _spanning(rising[0], low, high)
                below += ended
            middle = (low + high) // 2
            self._numbers_up_to[middle] = number = below + self._number_up_to(middle, rising)
            if number > rank:
                high = middle
            else:
                low = middle + 1
        return low

    @cached_property
    def _numbers_up_to(self) -> dict[int, int]:
        """The number of gaps up to each value for which it is known."""
        return {}

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """The least and the greatest value."""
        parts = [Gaps(*(column[part] for column in self._columns)) for part in slices(len(self.first))]
        return min(int(part.first.min()) for part in parts), max(
            int((part.first + part.slope * (part.count - 1)).max()) for part in parts
        )

    def _number_up_to(self, ticks: int, rising: Iterable[tuple[np.ndarray, ...]]) -> int:
        """Gaps up to a value: those that do not rise, and those of parts of the ones that rise."""
        values, numbers = self._level
        place = int(np.searchsorted(values, ticks, side="right"))
        some = sum(
            total(np.clip((ticks - first) // slope + 1, 0, count) * weight) for first, slope, count, weight in rising
        )
        return some + (int(numbers[place - 1]) if place else 0)


def _spanning(rising: tuple[np.ndarray, ...], low: int, high: int) -> tuple[int, list[tuple[np.ndarray, ...]]]:
    """The gaps of progressions that end before ``low``, and the progressions with values from ``low`` to ``high``."""
    first, slope, count, weight = rising
    ended = first + slope * (count - 1) < low
    left = ~ended & (first <= high)
    return total(count[ended] * weight[ended]), [tuple(column[left] for column in rising)]


def _order(*columns: np.ndarray) -> np.ndarray:
    """The order by the first of some columns of non-negative numbers, then by the next one, and so on.

    By a single key, unless it would leave int64: that takes a fifth of the time. Equal rows are then in any order.
    """
    bounds = [1 + int(column.max(initial=0)) for column in columns]
    if prod(bounds) >= _INT64:
        return np.lexsort(columns[::-1])
    key = columns[0]
    for column, bound in zip(columns[1:], bounds[1:], strict=True):
        key = key * bound + column
    return np.argsort(key)


def _sorted_places(length: int, parts: int) -> np.ndarray:
    """Places that divide a sorted column into so many parts of equal length."""
    return np.arange(1, parts) * length // parts


def _between(values: np.ndarray, low: int, high: int | None) -> np.ndarray:
    """Which values are from ``low`` to before ``high``."""
    return values >= low if high is None else (values >= low) & (values < high)


def _sum_of_squares(columns: tuple[np.ndarray, ...]) -> int:
    """Exact sum of the squares of the values of progressions."""
    first, slope, count, weight = (int(column.max()) for column in columns)
    if weight * count * max(first, count * slope, count**2 * max(slope, 1)) < _INT64:
        return sum(dot(left, right) for left, right in _squares(*columns))
    # As Python ints.
    return sum(int((left * right).sum()) for left, right in _squares(*(column.astype(object) for column in columns)))


def _squares(
    first: np.ndarray, slope: np.ndarray, count: np.ndarray, weight: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of columns; their products add up to the sum of the squares."""
    linear = count * (count - 1) // 2
    square = linear * (2 * count - 1) // 3
    yield first, weight * count * first
    yield first, 2 * weight * linear * slope
    yield slope, weight * square * slope


@once
def _gaps_of(run_log: RunLog) -> Gaps:
    return Gaps._of(run_log)


def _single(gaps: np.ndarray) -> tuple[np.ndarray, ...]:
    """Gaps that occur once, as progressions."""
    return gaps, np.zeros_like(gaps), np.ones_like(gaps), np.ones_like(gaps)


def _singles(gaps: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    for part in slices(len(gaps), _CHUNK_ROWS):
        yield _single(gaps[part])


def _later_steps(run_log: RunLog) -> Iterator[tuple[np.ndarray, ...]]:
    """The gaps that end with a row's second step and those after it, of some rows at a time."""
    for part in slices(len(run_log.row_step), _CHUNK_ROWS):
        rows = {name: run_log.rows[name][part] for name in ("next_ticks", "slope_ticks", "steps", "growing")}
        yield rows["next_ticks"], rows["slope_ticks"], np.maximum(rows["steps"] - 1, 0), rows["growing"]


def _first_steps(run_log: RunLog) -> Iterator[tuple[np.ndarray, ...]]:
    """The gaps that end with a row's first step, of sequences that decoded in the row before, of some rows at a time."""
    swapped_in = column_of(
        run_log.residency_row[part][run_log.residencies["kind"][part] >= SWAPPED_IN]
        for part in slices(len(run_log.residencies["kind"]))
    )
    newcomers = np.sort(np.concatenate([swapped_in, _next_decode_row(run_log, _residencies_from_pauses(run_log))]))
    pauses_so_far = pauses_before = 0
    for part in slices(len(run_log.row_step), _CHUNK_ROWS):
        rows = {name: column[part] for name, column in run_log.rows.items()}
        in_batch = np.where(rows["prefill_tokens"] > 0, 0, rows["growing"])
        decodes = in_batch if run_log.together else rows["decodes"]
        low, high = np.searchsorted(newcomers, [part.start, part.stop])
        decodes = decodes - np.bincount(newcomers[low:high] - part.start, minlength=len(decodes))
        # The gap spans the pauses since the last row with steps.
        so_far = pauses_so_far + np.cumsum(np.where(rows["steps"] == 0, rows["ticks"], 0))
        at_step = np.maximum.accumulate(np.where(rows["steps"] > 0, so_far, pauses_before))
        gap = rows["first_ticks"] + so_far - np.concatenate([[pauses_before], at_step[:-1]])
        slope, count = np.broadcast_to(np.int64(0), len(gap)), np.broadcast_to(np.int64(1), len(gap))
        yield gap, slope, count, np.where(rows["steps"] > 0, decodes, 0)
        pauses_so_far, pauses_before = int(so_far[-1]), int(at_step[-1])


def _gaps_after_pauses(run_log: RunLog) -> np.ndarray:
    """The gaps between the first two tokens of residencies that start while the others pause, int64 [such residencies]."""
    paused = _residencies_from_pauses(run_log)
    row = _next_decode_row(run_log, paused)
    return (run_log.rows["start_ticks"] + run_log.rows["first_ticks"])[row] - run_log.first_token_ticks[paused]


def _residencies_from_pauses(run_log: RunLog) -> np.ndarray:
    """Residencies that start in a step without decodes, and decode later."""
    starts, steps = run_log.residencies["start_step"], run_log.rows["steps"]

    def found(part: slice) -> np.ndarray:
        starts_in_pause = steps[run_log.residency_row[part]] == 0
        return part.start + np.flatnonzero(starts_in_pause & (run_log.residency_end[part] > starts[part] + 1))

    return column_of(found(part) for part in slices(len(starts)))


def _next_decode_row(run_log: RunLog, residencies: np.ndarray) -> np.ndarray:
    """The row in which residencies that start in a pause decode first."""
    return np.searchsorted(run_log.row_step, run_log.residencies["start_step"][residencies] + 1, side="right") - 1
