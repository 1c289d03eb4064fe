"""What was cached in a run, and what a prefix cache did, for the run log and the summary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...types.columns import columns_of, slices
from .ledger import CACHE_CHANGE, Table
from .moments import after_row, at_row

if TYPE_CHECKING:
    from ..prefix.contents_log import SettledContentsLog
    from ..prefix.residency import BlockResidency

#: Columns of a look-up that led to an admission, in tokens; and its moment.
LOOK_UP = ("index", "known_tokens", "hit_tokens", "moment")


class CacheLog:
    """What is cached, and records of a prefix cache.

    Args:
        unit_slots: Slots of what is counted.
        residency: Of a block pool, which may log evictions itself; or None.

    Attributes:
        row: Rows that the ledger has so far.
        changes: When the cached slots became more or fewer, by ``moments``; without the evictions that ``residency`` logs.
        look_ups: What each admission asked for and found.
        residency: Lives of blocks, or None where they are not observed.
        contents: What changed the level since it was settled, or None.
    """

    contents: SettledContentsLog | None = None

    def __init__(self, unit_slots: int, residency: BlockResidency | None = None) -> None:
        self.row = 0
        self.changes, self.look_ups = Table(CACHE_CHANGE), Table(LOOK_UP)
        self.residency = residency
        self._unit_slots = unit_slots
        self._cached = 0

    def change(self, more: int, moment: int) -> None:
        """So many more are cached from ``moment`` on, or fewer."""
        if more:
            self.changes.append((moment, more * self._unit_slots))

    def settle(self, cached: int, moment: int) -> None:
        """So many are cached from ``moment`` on."""
        if self.contents is not None:
            self.contents.settle(moment)
        self.change(cached - self._cached, moment)
        self._cached = cached

    def enter_row(self, cached: int) -> None:
        """Note how many units of ``unit_slots`` are cached from the start of the ledger's next row."""
        self.settle(cached, at_row(self.row))
        self.row += 1

    def end_row(self, cached: int) -> None:
        """Note how many are cached from the end of the last row until the next one, while nothing runs."""
        self.settle(cached, after_row(self.row - 1))

    def look_up(self, index: int, known_tokens: int, hit_tokens: int) -> None:
        """A sequence enters in the ledger's next row, after a look-up."""
        self.look_ups.append((index, known_tokens, hit_tokens, at_row(self.row)))

    def look_up_columns(self) -> dict[str, np.ndarray]:
        """``LOOK_UP`` of every admission but for its moment, as int64 columns."""
        columns = self.look_ups.columns()
        del columns["moment"]
        return columns

    def look_up_moments(self) -> np.ndarray:
        """When each of them was, int64."""
        return self.look_ups.columns()["moment"]

    def change_columns(self) -> dict[str, np.ndarray]:
        """All changes as int64 columns by ``CACHE_CHANGE``."""
        changes = self.changes.columns()
        if self.residency is None:
            return changes
        self.residency.seal()
        evictions = self.residency.evictions.columns()
        if not len(evictions["moment"]):
            # They are among the changes: so the compiled core and KV groups have them.
            return changes

        def parts() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for part in slices(len(changes["moment"])):
                yield changes["moment"][part], changes["slots"][part]
            for part in slices(len(evictions["moment"])):
                yield evictions["moment"][part], -self._unit_slots * evictions["blocks"][part]

        return dict(zip(CACHE_CHANGE, columns_of([np.int64] * 2, parts()), strict=True))
