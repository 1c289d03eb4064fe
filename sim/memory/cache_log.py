"""What a prefix cache did in a run, for the book and the summary."""

from __future__ import annotations

from .ledger import CACHE_CHANGE, Table
from .prefix import BlockHistory

#: Columns of a look-up that led to an admission, in tokens.
LOOK_UP = ("index", "known_tokens", "hit_tokens")


class CacheLog:
    """Records of a prefix cache; when things happened is told in ``moments``.

    Args:
        unit_slots: Slots of what is counted.
        history: Records how long blocks are kept, or None.

    Attributes:
        row: Rows that the ledger has so far.
        changes: When the cached slots became more or fewer.
        look_ups: What each admission asked for and found.
    """

    def __init__(self, unit_slots: int, history: BlockHistory | None = None) -> None:
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
