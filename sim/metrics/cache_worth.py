"""The cached slots of a run, divided by what they were worth.

Each stay of a block in the free queue with its contents belongs as a whole to the first worth that fits:

    hit_later    a hit ends it
    too_late     an eviction ends it, and a later look-up asks for the contents
    never        an eviction ends it, and none does
    undecided    the run ends first

A look-up asks for all full blocks of its prompt but the last token, found or not; only look-ups that lead to an admission count.
Contents that no other request shares are ``never``: they are what the ledger has beyond the stays that are logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..memory.accounting.worths import WORTH_COLUMNS, WORTHS
from ..runs.integrals import CachedSlots
from ..runs.run import Run
from ..types.errors import SimulationFault
from ..types.once import once
from .cached_names import CachedNames


@dataclass(frozen=True)
class CacheWorth:
    """The ``cached`` bucket of a run by worth.

    Attributes:
        run: The run.
        names: Its look-ups by name.
        changes: Of each worth but ``never``, when slots came and went, as ``ledger.CACHE_CHANGE``.
        evicted_in_vain: The same, of logged stays that are ``never``.
    """

    run: Run
    names: CachedNames
    changes: Mapping[str, Mapping[str, np.ndarray]]
    evicted_in_vain: Mapping[str, np.ndarray]

    @cached_property
    def _levels(self) -> dict[str, CachedSlots]:
        return {name: CachedSlots(self.run.log, columns) for name, columns in self.changes.items()}

    @cached_property
    def at_rows(self) -> dict[str, np.ndarray]:
        """Slots of each worth in the first step of every row, int64 [rows]; they add up to the bucket.

        Raises:
            SimulationFault: The logged stays have more slots than the bucket, or fewer where all contents are shared.
        """
        found = {name: level.at_rows() for name, level in self._levels.items()}
        never = CachedSlots(self.run.log).at_rows() - sum(found.values())
        unlogged = never - CachedSlots(self.run.log, self.evicted_in_vain).at_rows()
        if unlogged.min(initial=0) < 0 or (self.all_shared and unlogged.any()):
            raise SimulationFault("the worth of cached slots does not add up to the cached bucket")
        return {name: found.get(name, never) for name in WORTHS}

    def slot_ticks(self) -> dict[str, int]:
        """Slots of each worth, integrated over the settings' window; they add up to the bucket."""
        window = self.run.window
        found = {name: level.over_time(window.start_ticks, window.end_ticks) for name, level in self._levels.items()}
        never = window.slot_ticks["cached"] - sum(found.values())
        return {name: found.get(name, never) for name in WORTHS}

    @property
    def all_shared(self) -> bool:
        """Whether the log has every stay."""
        kept = self.run.replica.memory.contents_kept
        return kept is not None and not any(kept.unshared)


@once
def cache_worth(run: Run) -> CacheWorth | None:
    """The worth of the cached slots; None where no log has the contents, or no two requests share any."""
    contents = run.replica.memory.contents_kept
    if contents is None or all(contents.unshared):
        return None
    names = CachedNames(contents)
    stays, kept, size = names.stays, names.kept, contents.block_size
    hits = stays["hit"] > 0
    late = np.zeros(len(hits), dtype=np.int64)
    late[~hits] = asked_again(names, {name: column[~hits] for name, column in stays.items()})
    vain = np.where(hits, 0, stays["blocks"] - late)
    since, until = stays["since"], stays["until"]
    return CacheWorth(
        run,
        names,
        {
            "hit_later": _changes(since, until, size * stays["blocks"] * hits),
            "too_late": _changes(since, until, size * late),
            "undecided": {"moment": kept["since"], "slots": size * kept["blocks"]},
        },
        _changes(since, until, size * vain),
    )


def asked_again(names: CachedNames, stays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Blocks of each of some stays that a look-up asks for after the stay, int64.

    Stays have one block each, or look-ups ask for each chain from its first block on: those that are asked for again then come first.
    """
    first, look_ups = names.place_of(stays["name"]), stays["look_ups"]
    low, high = np.zeros_like(first), stays["blocks"].copy()
    some = np.arange(len(first))
    while len(some):
        middle = (low[some] + high[some]) >> 1
        again = names.last[first[some] + middle] >= look_ups[some]
        low[some[again]] = middle[again] + 1
        high[some[~again]] = middle[~again]
        some = some[low[some] < high[some]]
    return low


def _changes(since: np.ndarray, until: np.ndarray, slots: np.ndarray) -> dict[str, np.ndarray]:
    some = np.flatnonzero(slots)
    return {
        "moment": np.concatenate([since[some], until[some]]),
        "slots": np.concatenate([slots[some], -slots[some]]),
    }


def worth_at_rows(run: Run, part: slice = slice(None)) -> dict[str, np.ndarray]:
    """Slots of each worth in the first step of every row, or of some, int64 [rows], as ``cached.worth``; none as ``cache_worth``."""
    worth = cache_worth(run)
    return {} if worth is None else {WORTH_COLUMNS[name]: column[part] for name, column in worth.at_rows.items()}
