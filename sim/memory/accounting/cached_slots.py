"""How many slots are cached over time, from a log of every change.

A cached slot is in no table and keeps its contents. Blocks are taken by growth in the middle of a
leap, and cached ones among them cease to be so: a change that no row tells. So each is an event, and

    sum over a span = sum of change * (what is left of the span when it happens)

which holds also where no sequence runs, and the cache lies idle.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ...types.exact import dot, total
from .moments import first_row_of, iteration_of, ticks_of
from .run_log import RunLog


class CachedSlots:
    """The integrals of the ``cached`` bucket over the log of a run log."""

    def __init__(self, run_log: RunLog) -> None:
        self._run_log = run_log
        self._slots, self._moment = run_log.cache_changes["slots"], run_log.cache_changes["moment"]

    @cached_property
    def _ticks(self) -> np.ndarray:
        return ticks_of(self._run_log, self._moment)

    @cached_property
    def _iteration(self) -> np.ndarray:
        return iteration_of(self._run_log, self._moment)

    def over_steps(self, first: int, stop: int) -> int:
        """Cached slots, summed over the iterations from ``first`` to before ``stop``."""
        return total(self._slots * _left(self._iteration, first, stop))

    def over_time(self, start_ticks: int, end_ticks: int) -> int:
        """Cached slots, integrated over a span of time."""
        left, slots = _left(self._ticks, start_ticks, end_ticks), self._slots
        return dot(np.maximum(slots, 0), left) - dot(np.maximum(-slots, 0), left)

    def at_rows(self) -> np.ndarray:
        """Cached slots in the first step of every row, int64 [rows]."""
        rows = len(self._run_log.row_step)
        row = first_row_of(self._run_log, self._moment)
        changes = np.zeros(rows + 1, dtype=np.int64)
        np.add.at(changes, np.minimum(row, rows), self._slots)
        return np.cumsum(changes)[:rows]


def _left(at: np.ndarray, start: int, end: int) -> np.ndarray:
    """What is left of a span from each time on."""
    return np.maximum(end - np.maximum(at, start), 0)
