"""How many blocks the running sequences took, or gave back, after the first step of each row, from the residencies alone.

A residency takes a block every ``block_size`` steps. So the blocks taken in step n are those taken in step n - block_size, plus the
residencies that took their first one since, less those that left: with the steps laid out ``block_size`` to a line, a running sum
down the columns. A window gives blocks back in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ..types.columns import column_by_slices, column_of, columns_of, release, slices
from .run_log import RunLog

#: Steps that are laid out at a time.
_CHUNK_STEPS = 1 << 18
#: Fields of the core's state, beside one for each phase of a block.
_STATE_FIELDS = 3

Moments = tuple[np.ndarray, np.ndarray, np.ndarray]


def growth_moments(run_log: RunLog) -> Moments:
    """Per row: blocks taken after its first step, and their sums weighted with the number (1, 2, ...)
    of the step within the row, and with its square. int64 [rows] each."""
    # The first step after the admission that finds the blocks full.
    start, tokens = run_log.residencies["start_step"], run_log.residencies["tokens"]
    return _row_moments(
        run_log,
        column_by_slices(len(start), lambda part: start[part] + 1 + (-tokens[part]) % run_log.block_size),
    )


def skip_moments(run_log: RunLog, window_tokens: int, ahead: bool) -> Moments:
    """As ``growth_moments``, for the blocks that a group with a window gives back.

    What a prompt needed is given back in the step after its prefill, the first of a row; what decoding
    gives back after it is in these columns.

    Args:
        ahead: Whether steps are scheduled ahead: all is then given back one step later.
    """
    size = run_log.block_size
    turn = window_tokens + size - run_log.residency_lag + ahead
    # What a prompt needed ends a leap: up to two steps later all is given back in first steps, which no moment counts.
    late = np.maximum(0, run_log.residencies["start_step"] + 1 - turn)
    return _row_moments(run_log, turn + -(-late // size) * size)


def _row_moments(run_log: RunLog, first: np.ndarray) -> Moments:
    size, end = run_log.block_size, run_log.residency_end
    stop = column_by_slices(
        len(first), lambda part: first[part] + np.maximum(0, -(-(end[part] - first[part]) // size)) * size
    )
    parts = (_by_steps if run_log.compiled is None else _by_core)(run_log, first, stop)
    one, two, three = columns_of([np.int64] * 3, map(tuple, parts))
    return one, two, three


def _by_core(run_log: RunLog, first: np.ndarray, stop: np.ndarray) -> Iterator[np.ndarray]:
    """The moments of some rows after the other, by the compiled core."""
    first, stop, steps = np.sort(first), np.sort(stop), run_log.rows["steps"]
    state = np.zeros(_STATE_FIELDS + run_log.block_size, dtype=np.int64)
    for part in slices(len(steps)):
        moments = np.empty((3, part.stop - part.start), dtype=np.int64)
        assert run_log.compiled is not None
        run_log.compiled.moments((first, stop, steps[part]), run_log.block_size, state, moments)
        yield moments


def _by_steps(run_log: RunLog, first: np.ndarray, stop: np.ndarray) -> Iterator[np.ndarray]:
    """As ``_by_core``, from what is taken in each step."""
    growth = Growth(run_log.block_size, first, stop)
    return (_moments(growth, *span) for span in _spans(run_log))


def _spans(run_log: RunLog) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Runs of rows of about a chunk of steps: their first decode steps, and their steps."""
    starts, steps = run_log.row_step, run_log.rows["steps"]
    chunk = column_by_slices(len(steps), lambda part: (starts[part] + steps[part]) // _CHUNK_STEPS)
    edges = column_of(
        part.start + np.flatnonzero(np.diff(chunk[part.start : part.stop + 1])) for part in slices(len(chunk))
    )
    for first, stop in pairwise([0, *(edges + 1).tolist(), len(steps)]):
        if first < stop:
            release()
            yield starts[first:stop], steps[first:stop]


def _moments(growth: Growth, starts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    taken = growth.until(int(starts[-1] + steps[-1]))
    number = np.arange(len(taken)) - np.repeat(starts - starts[0], steps)
    moments = np.zeros((3, len(steps)), dtype=np.int64)
    some = np.flatnonzero(steps)
    if len(some):
        places = (starts - starts[0])[some]
        taken[places] = 0
        weighted = taken * number
        for power, values in enumerate((taken, weighted, weighted * number)):
            moments[power, some] = np.add.reduceat(values, places)
    return moments


class Growth:
    """Blocks that residencies take, or give back, in any span of steps, asked for in ascending order.

    Args:
        size: Steps from one block to the next.
        first: int64 [residencies], the first step in which each takes one.
        stop: int64 [residencies], the step in which each would take the first one that it does not take.
    """

    def __init__(self, size: int, first: np.ndarray, stop: np.ndarray) -> None:
        self._size = size
        self._first, self._stop = np.sort(first), np.sort(stop)
        self._tail = np.zeros(size, dtype=np.int64)
        self._until = 0

    @property
    def last(self) -> int:
        """The last step of all ``first`` and ``stop``; 0 without residencies."""
        return int(max(self._first[-1], self._stop[-1])) if len(self._first) else 0

    def until(self, decode_step: int) -> np.ndarray:
        """Blocks taken in each step from the last ``until`` to ``decode_step``, int64."""
        size, start = self._size, self._until
        lines = -(-(decode_step - start) // size)
        taken = self._marks(self._first, start, lines * size) - self._marks(self._stop, start, lines * size)
        if lines:
            taken[:size] += self._tail
            taken = taken.reshape(lines, size).cumsum(axis=0).ravel()
        taken = taken[: decode_step - start]
        self._tail = np.concatenate([self._tail, taken])[-size:]
        self._until = decode_step
        return taken

    @staticmethod
    def _marks(starts: np.ndarray, start: int, steps: int) -> np.ndarray:
        low, high = np.searchsorted(starts, [start, start + steps])
        return np.bincount(starts[low:high] - start, minlength=steps)[:steps]
