"""How many blocks the running sequences took (or gave back) in each step of a leap, from the stays alone.

A stay takes a block every ``block_size`` steps. So the blocks taken in step n are those taken in
step n - block_size, plus the stays that took their first one since, less those that left: with the
steps laid out ``block_size`` to a line, a running sum down the columns. A window gives blocks back
in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .book import Book

#: Steps that are laid out at a time.
_CHUNK_STEPS = 1 << 18


class Growth:
    """Blocks that stays take, or give back, in any span of steps, asked for in ascending order.

    Args:
        first: int64 [stays], the first step in which each takes one; then it takes one every block size.
    """

    def __init__(self, book: Book, first: np.ndarray) -> None:
        self._size = size = book.block_size
        stop = first + np.maximum(0, -(-(book.stay_end - first) // size)) * size
        self._first, self._stop = np.sort(first), np.sort(stop)
        self._tail = np.zeros(size, dtype=np.int64)
        self._clock = 0

    def until(self, clock: int) -> np.ndarray:
        """Blocks taken in each step from the last ``until`` to ``clock``, int64."""
        size, start = self._size, self._clock
        lines = -(-(clock - start) // size)
        taken = self._marks(self._first, start, lines * size) - self._marks(self._stop, start, lines * size)
        if lines:
            taken[:size] += self._tail
            taken = taken.reshape(lines, size).cumsum(axis=0).ravel()
        taken = taken[: clock - start]
        self._tail = np.concatenate([self._tail, taken])[-size:]
        self._clock = clock
        return taken

    @staticmethod
    def _marks(clocks: np.ndarray, start: int, steps: int) -> np.ndarray:
        low, high = np.searchsorted(clocks, [start, start + steps])
        return np.bincount(clocks[low:high] - start, minlength=steps)[:steps]


Moments = tuple[np.ndarray, np.ndarray, np.ndarray]


def growth_moments(book: Book) -> Moments:
    """Per row: blocks taken after its first step, and their sums weighted with the number (1, 2, ...)
    of the step within the row, and with its square. int64 [rows] each."""
    # The first step after the admission that finds the blocks full.
    return _row_moments(book, book.stays["start_clock"] + 1 + (-book.stays["tokens"]) % book.block_size)


def skip_moments(book: Book) -> Moments:
    """As ``growth_moments``, for the blocks that a sliding group gives back.

    What a prompt needed is given back in the step after its prefill, the first of a row; what decoding
    lets go of after it is told here.
    """
    size = book.block_size
    turn = book.groups.window_tokens + size - book.stay_lag
    late = np.maximum(0, book.stays["start_clock"] + 1 - turn)
    return _row_moments(book, turn + -(-late // size) * size)


def _row_moments(book: Book, first: np.ndarray) -> Moments:
    growth = Growth(book, first)
    parts = [_moments(growth, clocks, steps) for clocks, steps in _spans(book)]
    moments = np.concatenate([np.zeros((3, 0), dtype=np.int64), *parts], axis=1)
    return moments[0], moments[1], moments[2]


def _spans(book: Book) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Runs of rows of about a chunk of steps: their clocks and steps."""
    clocks, steps = book.row_clock, book.rows["steps"]
    edges = np.flatnonzero(np.diff((clocks + steps) // _CHUNK_STEPS)) + 1
    for rows in np.split(np.arange(len(steps)), edges):
        if len(rows):
            yield clocks[rows], steps[rows]


def _moments(growth: Growth, clocks: np.ndarray, steps: np.ndarray) -> np.ndarray:
    taken = growth.until(int(clocks[-1] + steps[-1]))
    number = np.arange(len(taken)) - np.repeat(clocks - clocks[0], steps)
    moments = np.zeros((3, len(steps)), dtype=np.int64)
    some = np.flatnonzero(steps)
    if len(some):
        places = (clocks - clocks[0])[some]
        taken[places] = 0
        weighted = taken * number
        for power, values in enumerate((taken, weighted, weighted * number)):
            moments[power, some] = np.add.reduceat(values, places)
    return moments
