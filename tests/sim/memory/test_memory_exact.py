"""Sums beyond int64, against Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.sim.types.sums import dot, total

MOST = (1 << 63) - 1
any_int64 = st.integers(-(1 << 63), MOST)
magnitudes = st.sampled_from([1, 1 << 20, (1 << 24) - 1, 1 << 24, 1 << 40, MOST])


@pytest.mark.slow
@given(st.lists(any_int64, max_size=200))
def test_total_is_exact(values):
    assert total(np.array(values, dtype=np.int64)) == sum(values)


def test_total_of_what_wraps_around():
    values = np.full(1000, MOST, dtype=np.int64)
    assert values.sum() == -1000
    assert total(values) == 1000 * MOST
    assert total(-values) == -1000 * MOST
    assert type(total(values)) is int


@pytest.mark.slow
@given(magnitudes, magnitudes, st.data())
def test_dot_is_exact(most_left, most_right, data):
    pairs = data.draw(st.lists(st.tuples(st.integers(0, most_left), st.integers(0, most_right)), max_size=50))
    left, right = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    value = dot(left, right)
    assert value == sum(a * b for a, b in pairs)
    assert type(value) is int


@pytest.mark.parametrize("values", [(1 << 24) - 1, 1 << 24, (1 << 48) - 1, MOST])
@pytest.mark.parametrize("length", [1 << 15, (1 << 15) + 1, 100_000])
def test_dot_of_long_columns(values, length):
    """As many rows as there are leaps in a long run."""
    column = np.full(length, values, dtype=np.int64)
    assert dot(column, column) == length * values * values
    assert dot(column, np.arange(length)) == values * (length * (length - 1) // 2)
