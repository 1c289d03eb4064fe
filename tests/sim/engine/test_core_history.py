"""Passes of the compiled core over logs: a story of each, parts of any length, and columns that it refuses.

``test_core.py`` compares them with numpy in random runs, where all other columns are compared, too.
"""

from __future__ import annotations

import numpy as np
import pytest

from core_loads import needs_core
from fragmeter.sim.engine import core

pytestmark = needs_core
NONE = np.zeros(0, np.int64)
ROW, STEP, AFTER, END = 0, 1, 2, 3


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int64)


def compiled():
    module = core.compiled()[0]
    assert module is not None
    return module


def test_blocks_of_rows_are_weighted_with_their_step():
    """Blocks in steps 1, 3 and 5 of rows of 1, 0 and 5 steps: those after a row's first step count, at steps 2 and 4 of the last."""
    found, state = zeros(3, 3), zeros(3 + 2)
    compiled().moments((ints(1), ints(7), ints(1, 0, 5)), 2, state, found)
    assert found.tolist() == [[0, 0, 2], [0, 0, 2 + 4], [0, 0, 4 + 16]]


def test_moments_are_dated_by_rows():
    """Two rows: one of a single step of 5 ticks, and from 7 on one of four: 3, 10, 11 and 12."""
    columns = ints(0, 7), ints(5, 36), ints(0, 1), ints(5, 3), ints(0, 10), ints(0, 1)
    asked = {
        (ROW, 0): 0, (ROW, 1): 7, (ROW, 2): 50, (END, 0): 5, (END, 1): 43, (STEP, 0): 0, (STEP, 1): 7, (STEP, 2): 10,
        (STEP, 4): 31, (AFTER, 1): 5, (AFTER, 2): 10, (AFTER, 5): 43,
    }  # fmt: skip
    found = np.zeros(len(asked), np.int64)
    compiled().date(columns, 50, ints(*(number * 4 + kind for kind, number in asked)), found)
    assert found.tolist() == [*asked.values()]


def test_steps_count_as_one_without_durations():
    found = zeros(3)
    columns = ints(0, 1), ints(1, 4), ints(0, 1), NONE, NONE, NONE
    compiled().date(columns, 5, ints(3 * 4 + STEP, 3 * 4 + AFTER, 2 * 4 + ROW), found)
    assert found.tolist() == [3, 3, 5]


def test_the_row_of_a_step_is_found_from_anywhere():
    """Rows of 0 to 3 steps; all steps in a random order, so that each guess is another one."""
    steps = np.random.default_rng(5).integers(0, 4, 300)
    starts, every = np.cumsum(steps) - steps, np.arange(steps.sum())
    asked, found = np.random.default_rng(6).permutation(every), np.zeros(len(every), np.int64)
    columns = ints(*range(0, 3000, 10)), ints(*steps), starts, NONE, NONE, NONE
    compiled().date(columns, 3000, asked * 4 + STEP, found)
    row = np.searchsorted(starts, asked, side="right") - 1
    assert found.tolist() == (10 * row + asked - starts[row]).tolist()


def test_values_are_counted_by_bound_and_width():
    counts, widths = zeros(3), zeros(4000)
    high, low = compiled().count(ints(0, 10, 11, 1 << 12), ints(1, 2, 3, 4), ints(10, 100), counts, widths)
    assert (high, low) == (0, 20 + 33 + (4 << 12))
    assert counts.tolist() == [3, 3, 4]
    assert widths[[0, 12 * 256 + 1]].tolist() == [1, 4]
    assert widths.sum() == 10


def test_a_sum_may_exceed_64_bits():
    widths = np.zeros((63 << 8) + 2, np.int64)
    high, low = compiled().count(ints((1 << 63) - 1, 1), ints(6, 2), ints(1), zeros(2), widths)
    assert (high << 64) + low == 6 * ((1 << 63) - 1) + 2


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("moments", lambda: ((NONE, NONE, ints(1)), 4, zeros(7), zeros(2, 1))),
        ("date", lambda: ((ints(0),) * 6, 9, ints(2 * 4 + ROW), ints(0))),
        ("date", lambda: ((ints(0),) * 6, 9, ints(1 * 4 + END), ints(0))),
        ("date", lambda: ((ints(5),) * 6, 9, ints(4 * 4 + STEP), ints(0))),
        ("date", lambda: ((ints(0),) * 6, 9, ints(-7), ints(0))),
        ("date", lambda: ((ints(0), ints(0), ints(0), *(ints(0, 0),) * 3), 9, ints(0), ints(0))),
        ("count", lambda: (ints(-1), ints(1), ints(1), ints(0, 0), zeros(99))),
        ("count", lambda: (ints(1 << 40), ints(1), ints(1), ints(0, 0), zeros(99))),
        ("count", lambda: (ints(1), ints(1), ints(1), ints(0), zeros(99))),
    ],
)
def test_columns_that_do_not_fit_are_refused(name, given):
    """No pass reads or writes past a column."""
    with pytest.raises(ValueError, match=r"needed|outside|negative"):
        getattr(compiled(), name)(*given())
