"""The grid of a block map: between half of the most columns and the most, each with what is in force at its time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fragmeter.sim.recording.blocks.recording import Grid, evenly


def filled(grid: Grid[int], lengths: list[int]) -> int:
    """Fill a grid with spans one after the other, each by its number; when the last one ends."""
    end = 0
    for number, length in enumerate(lengths):
        end += length
        grid.reach(end)
        grid.fill(number, end)
    return end


def test_a_story_of_eight_columns():
    """Spans of one tick: the ninth doubles the stride, the seventeenth does so again."""
    grid: Grid[int] = Grid(1, 8)
    filled(grid, [1] * 8)
    assert grid.columns == [0, 1, 2, 3, 4, 5, 6, 7] and grid.next_ticks == 8
    grid.reach(9)
    assert grid.columns == [0, 2, 4, 6] and grid.stride_ticks == 2 and grid.next_ticks == 8
    grid = Grid(1, 8)
    filled(grid, [1] * 17)
    assert grid.columns == [0, 4, 8, 12, 16] and grid.stride_ticks == 4


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    most=st.integers(1, 20),
    stride=st.integers(1, 9),
)
def test_each_column_is_the_span_in_force_at_its_time(lengths: list[int], most: int, stride: int):
    grid: Grid[int] = Grid(stride, most)
    end = filled(grid, lengths)
    in_force = [number for number, length in enumerate(lengths) for _ in range(length)]
    assert grid.columns == in_force[:: grid.stride_ticks]
    assert len(grid.columns) <= most
    assert grid.stride_ticks == stride or 2 * len(grid.columns) >= most
    assert (grid.next_ticks >= end) and (grid.next_ticks - grid.stride_ticks < max(1, end))


@given(columns=st.integers(1, 60), most=st.integers(1, 70))
def test_of_many_columns_some_are_taken_evenly(columns: int, most: int):
    taken = range(columns)[evenly(columns, most)]
    assert 1 <= len(taken) <= most and (most < columns or len(taken) == columns)
    assert taken[0] <= taken.step // 2 and columns - taken[-1] <= taken.step


def test_fewer_columns_may_be_kept_from_some_time_on():
    grid: Grid[int] = Grid(1, 8)
    filled(grid, [1] * 8)
    grid.most = 3
    grid.reach(9)
    assert grid.columns == [0, 4] and grid.stride_ticks == 4 and grid.next_ticks == 8
