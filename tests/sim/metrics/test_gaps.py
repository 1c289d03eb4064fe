"""Statistics of gaps that are kept as progressions, beside a list of all values."""

from __future__ import annotations

from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragmeter.sim.metrics.gaps import Gaps

#: A gap of up to two hours in ticks, and small ones, so that values occur twice.
FIRST = st.integers(0, 40) | st.integers(0, 7_200 * 10**12)
SLOPE = st.sampled_from([0, 0, 1, 3, 10**6])
PROGRESSIONS = st.lists(st.tuples(FIRST, SLOPE, st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=30)


def gaps_of(rows: list[tuple[int, int, int, int]]) -> Gaps:
    return Gaps(*(np.array(column, dtype=np.int64) for column in zip(*rows))).merged()


def listed(rows: list[tuple[int, int, int, int]]) -> list[int]:
    return sorted(
        first + slope * step for first, slope, count, weight in rows for step in range(count) for _ in range(weight)
    )


def std_ms(values: list[int]) -> float:
    squares, whole = sum(value * value for value in values), sum(values)
    return sqrt(len(values) * squares - whole**2) / len(values) / 1e9


@pytest.mark.slow
@given(PROGRESSIONS)
@settings(max_examples=200, deadline=None)
def test_statistics_are_those_of_the_list(rows):
    found, values = gaps_of(rows), listed(rows)
    assert found.number == len(values)
    assert Fraction(found._sum()) == sum(values)
    assert found.std_ms() == std_ms(values)
    # Two orders of asking: a search starts where those before it have been.
    for percents in ([50, 90, 0, 99, 100, 37.5], [100, 12.5, 50]):
        again = gaps_of(rows)
        for percent in percents:
            rank = (len(values) - 1) * percent / 100
            low, high = values[int(rank)], values[min(int(rank) + 1, len(values) - 1)]
            assert again.percentile_ms(percent) == (low + (high - low) * (rank - int(rank))) / 1e9


@pytest.mark.parametrize(
    "rows",
    [
        # Products of three columns leave int64: by the first value, by the slope, and by the number of steps.
        [(9 * 10**17, 0, 3, 4), (5, 7, 11, 2)],
        [(1, 10**15, 900, 40), (5, 7, 11, 2)],
        [(3, 0, 2_500_000, 1), (3, 1, 2_500_000, 1)],
    ],
)
def test_squares_beyond_int64_are_exact(rows):
    found = gaps_of(rows)
    of_one = [
        weight
        * (
            count * first**2
            + first * slope * count * (count - 1)
            + slope**2 * (count - 1) * count * (2 * count - 1) // 6
        )
        for first, slope, count, weight in rows
    ]
    assert found._sum_of_squares() == sum(of_one)


def test_equal_progressions_are_one_whatever_their_size():
    rows = [(5, 10**13, 10**6, 1), (5, 10**13, 10**6, 2), (5, 0, 10**6, 3), (5, 10**13, 9, 4), (5, 1, 2, 5)]
    for some in (rows, rows[2:3] * 2 + rows[4:]):
        found = gaps_of(some)
        columns = [column.tolist() for column in found._columns]
        merged = sorted({row[:3] for row in some})
        weights = [sum(row[3] for row in some if row[:3] == each) for each in merged]
        assert list(zip(*columns)) == [(*each, weight) for each, weight in zip(merged, weights)]
