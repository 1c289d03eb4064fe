"""Evenly spaced times of a run of unknown length.

    stride 1   0 1 2 3 4 5 6 7        eight are the most that are kept: the grid is full
    stride 2   0   2   4   6          every second one is dropped, and the next is 8
    stride 2   0   2   4   6   8  ..  14
    stride 4   0       4       8  ..          and so on

Each time is a *column*: what is in force at it. A step that is longer than the stride fills several, which are the same
object. ``most`` may fall while the run goes on, and then columns are dropped in the same way. So what is kept depends on
the run alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Column = TypeVar("Column")


class Grid(Generic[Column]):
    """Times 0, stride, 2 * stride, ... and what is in force at each.

    Args:
        stride_ticks: The first stride, at least 1.
        most: Columns that are kept at most, at least 1.

    Attributes:
        columns: Those of the times so far; the next one is that of ``next_ticks``.
    """

    def __init__(self, stride_ticks: int, most: int) -> None:
        self.stride_ticks, self.most = stride_ticks, most
        self.columns: list[Column] = []

    @property
    def next_ticks(self) -> int:
        """The first time that has no column yet."""
        return len(self.columns) * self.stride_ticks

    def reach(self, end_ticks: int) -> None:
        """Take a stride with which all times before ``end_ticks`` have room."""
        while -(-end_ticks // self.stride_ticks) > self.most:
            del self.columns[1::2]
            self.stride_ticks *= 2

    def fill(self, column: Column, end_ticks: int) -> None:
        """The column is in force from the next time to before ``end_ticks``, which was reached."""
        missing = -(-end_ticks // self.stride_ticks) - len(self.columns)
        self.columns += [column] * missing

    def evenly(self, most: int) -> Iterator[tuple[int, Column]]:
        """At most so many of the times, evenly spaced, each about in the middle of those it stands for, and their columns."""
        every = -(-len(self.columns) // most)
        for place in range(every // 2, len(self.columns), every):
            yield place * self.stride_ticks, self.columns[place]
