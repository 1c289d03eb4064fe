"""What was cached in a run, and what a prefix cache did, for the run log and the summary."""

from __future__ import annotations

import numpy as np

from ...types.columns import column_by_slices
from ..prefix import QueueHistory
from .ledger import CACHE_CHANGE, Table
from .moments import after_row, at_row

#: Columns of a look-up that led to an admission, in tokens.
LOOK_UP = ("index", "known_tokens", "hit_tokens")


class CacheLog:
    """What is cached, and records of a prefix cache.

    Args:
        unit_slots: Slots of what is counted.
        history: Of a free queue, which has logs of its own in place of ``changes``; or None.

    Attributes:
        row: Rows that the ledger has so far.
        changes: When the cached slots became more or fewer, by ``moments``.
        look_ups: What each admission asked for and found, where no history has it.
    """

    def __init__(self, unit_slots: int, history: QueueHistory | None = None) -> None:
        self.row = 0
        self.changes, self.look_ups = Table(CACHE_CHANGE), Table(LOOK_UP)
        self.history = history
        self._unit_slots = unit_slots
        self._cached = 0

    def settle(self, cached: int, moment: int) -> None:
        """So many are cached from ``moment`` on."""
        if cached != self._cached:
            self.changes.append((moment, (cached - self._cached) * self._unit_slots))
            self._cached = cached

    def enter_row(self, cached: int) -> None:
        """So many are cached in the row that is entered, from its start on."""
        self.settle(cached, at_row(self.row))
        self.row += 1

    def end_row(self, cached: int) -> None:
        """So many are cached when the last row is over, and as long as nothing runs."""
        self.settle(cached, after_row(self.row - 1))

    def look_up_columns(self) -> dict[str, np.ndarray]:
        """``LOOK_UP`` of every admission, as int64 columns."""
        return self.look_ups.columns() if self.history is None else self.history.look_ups()

    def change_columns(self) -> dict[str, np.ndarray]:
        """``changes`` as int64 columns."""
        if self.history is None:
            return self.changes.columns()
        changes = self.history.changes()
        moment, blocks = changes["moment"], changes["blocks"]
        return {"moment": moment, "slots": column_by_slices(len(blocks), lambda part: blocks[part] * self._unit_slots)}
