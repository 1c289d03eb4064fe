"""What slots hold, as the moves and writes of a plan leave it."""

from __future__ import annotations

import numpy as np

EMPTY = -1


class Contents:
    """Token ids and positions by slot, ``EMPTY`` where nothing was written, as far as anything ever was."""

    def __init__(self) -> None:
        self._token_ids = np.zeros(0, dtype=np.int64)
        self._positions = np.zeros(0, dtype=np.int64)

    def write(self, slots: np.ndarray, token_ids: np.ndarray, first_position: int) -> None:
        """Tokens that follow each other are computed."""
        self._reach(int(slots.max(initial=EMPTY)) + 1)
        self._token_ids[slots] = token_ids
        self._positions[slots] = np.arange(first_position, first_position + len(slots))

    def move(self, start: int, source: Contents, source_start: int, slots: int) -> None:
        """What lies in so many slots elsewhere lies here too."""
        source._reach(source_start + slots)
        self._reach(start + slots)
        self._token_ids[start : start + slots] = source._token_ids[source_start : source_start + slots]
        self._positions[start : start + slots] = source._positions[source_start : source_start + slots]

    def held(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots that hold something, and what: slots, token ids, positions."""
        slots = np.flatnonzero(self._token_ids != EMPTY)
        return slots, self._token_ids[slots], self._positions[slots]

    def _reach(self, num_slots: int) -> None:
        if num_slots > len(self._token_ids):
            # By half as much again, so that growing costs little.
            more = np.full(num_slots + num_slots // 2 - len(self._token_ids), EMPTY)
            self._token_ids = np.concatenate([self._token_ids, more])
            self._positions = np.concatenate([self._positions, more])
