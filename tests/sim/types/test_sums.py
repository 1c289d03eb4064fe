"""Exact sums of int64 columns, beside those of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.sim.types.sums import dot, total

#: Short columns and long ones are summed in different ways.
LENGTHS = st.integers(0, 80)


def columns(low: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    value = st.integers(low, 2**62)
    return LENGTHS.flatmap(lambda length: st.lists(st.tuples(value, value), min_size=length, max_size=length))


@pytest.mark.slow
@given(columns(-(2**62)))
def test_a_total_is_exact(pairs):
    column = [first for first, _ in pairs]
    assert total(np.array(column, dtype=np.int64)) == sum(column)


@pytest.mark.slow
@given(columns(0))
def test_a_dot_product_is_exact(pairs):
    left, right = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    assert dot(left, right) == sum(first * second for first, second in pairs)
