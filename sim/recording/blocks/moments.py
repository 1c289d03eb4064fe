"""The moments at which a pool is looked at: evenly spaced, each in the middle of a column of the map.

time      0 |-----|-----|-----|-----|-----| end        columns of equal width
looked at      ^     ^     ^     ^     ^
steps     [      ][  ][    ][  ]     [    ]            the step in force then; in a gap nobody runs
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...memory.accounting.book import Book
from ...types.sums import whole_steps


class Moment(NamedTuple):
    """A moment, and what is going on.

    Attributes:
        at_ticks: When.
        start_ticks: When the step in force began; ``at_ticks`` where the replica idles.
        decodes: Whether the running sequences compute in that step.
    """

    at_ticks: int
    start_ticks: int
    decodes: bool


def moments(book: Book, most: int) -> list[Moment]:
    """At most ``most`` moments of a run, no more than it has steps."""
    columns = min(most, book.num_steps)
    end, rows = book.end_ticks, _Rows(book)
    return [rows.at(end * (2 * column + 1) // (2 * columns)) for column in range(columns)]


class _Rows:
    """The rows of a book, as plain numbers."""

    def __init__(self, book: Book) -> None:
        self._starts = book.rows["start_ticks"]
        names = ("start_ticks", "ticks", "steps", "first_ticks", "next_ticks", "slope_ticks")
        self._columns = [book.rows[name] for name in names]

    def at(self, ticks: int) -> Moment:
        """What goes on at a time."""
        # Of rows that start together all but the last take no time.
        row = int(np.searchsorted(self._starts, ticks, side="right")) - 1
        if row < 0:
            return Moment(ticks, ticks, False)
        start, length, steps, first, later, slope = (int(column[row]) for column in self._columns)
        into = ticks - start
        if into >= length:
            return Moment(ticks, ticks, False)
        if into < first:
            return Moment(ticks, start, steps > 0)
        past = whole_steps(into - first, later, slope)
        return Moment(ticks, start + first + past * later + slope * (past * (past - 1) // 2), True)
