"""How many blocks running sequences take, or give back, in each decode step.

A residency takes a block every ``block_size`` steps. So the blocks taken in step n are those taken in
step n - block_size, plus the residencies that took their first one since, less those that left: with the
steps laid out ``block_size`` to a line, a running sum down the columns. A window gives blocks back
in the same way.
"""

from __future__ import annotations

import numpy as np


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
