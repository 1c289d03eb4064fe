"""What was cached in a run, and what a prefix cache did, for the run log and the summary."""

from __future__ import annotations

import numpy as np

from ..prefix import QueueHistory
from .ledger import CACHE_CHANGE, Table
from .moments import after_row, at_row

#: Columns of a look-up that led to an admission, in tokens.
LOOK_UP = ("index", "known_tokens", "hit_tokens")


class CachedLevel:
    """How many slots are cached; ``moments`` says when that changed.

    Args:
        unit_slots: Slots of what is counted.

    Attributes:
        row: Rows that the ledger has so far.
        changes: When the cached slots became more or fewer.
    """

    def __init__(self, unit_slots: int) -> None:
        self.row = 0
        self.changes = Table(CACHE_CHANGE)
        self._unit_slots = unit_slots
        self._cached = 0

    def settle(self, cached: int, moment: int) -> None:
        """So many are cached from ``moment`` on."""
        if cached != self._cached:
            self.changes.append((moment, (cached - self._cached) * self._unit_slots))
            self._cached = cached

    def change_columns(self) -> dict[str, np.ndarray]:
        """``changes`` as int64 columns."""
        return self.changes.columns()

    def enter_row(self, cached: int) -> None:
        """So many are cached in the row that is entered, from its start on."""
        self.settle(cached, at_row(self.row))
        self.row += 1

    def end_row(self, cached: int) -> None:
        """So many are cached when the last row is over, and as long as nothing runs."""
        self.settle(cached, after_row(self.row - 1))


class CacheLog(CachedLevel):
    """Records of a prefix cache.

    Args:
        unit_slots: See ``CachedLevel``.
        history: Of a free queue, which has logs of its own in place of ``changes``; or None.

    Attributes:
        look_ups: What each admission asked for and found, where no history has it.
    """

    def __init__(self, unit_slots: int, history: QueueHistory | None = None) -> None:
        super().__init__(unit_slots)
        self.look_ups = Table(LOOK_UP)
        self.history = history

    def look_up_columns(self) -> dict[str, np.ndarray]:
        """``LOOK_UP`` of every admission, as int64 columns."""
        return self.look_ups.columns() if self.history is None else self.history.look_ups()

    def change_columns(self) -> dict[str, np.ndarray]:
        """See ``CachedLevel``."""
        if self.history is None:
            return super().change_columns()
        changes = self.history.changes()
        return {"moment": changes["moment"], "slots": changes["blocks"] * self._unit_slots}
