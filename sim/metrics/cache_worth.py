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
from ..runs.moments import ticks_of
from ..runs.run import Run
from ..types.errors import SimulationFault
from ..types.once import once
from ..types.sums import dot
from .cached_names import CachedNames


@dataclass(frozen=True)
class CacheWorth:
    """The ``cached`` bucket of a run by worth.

    Attributes:
        run: The run.
        names: Its look-ups by name.
        late: Blocks of each logged stay that an eviction ends and a later look-up asks for, int64.
    """

    run: Run
    names: CachedNames
    late: np.ndarray

    @cached_property
    def hits(self) -> np.ndarray:
        """Blocks of each logged stay that a hit ends, int64."""
        return np.where(self.names.stays["hit"] > 0, self.names.stays["blocks"], 0)

    @cached_property
    def stay_ticks(self) -> tuple[np.ndarray, np.ndarray]:
        """Ticks at which each logged stay begins, and ends, int64."""
        since, until = (ticks_of(self.run.log, self.names.stays[edge]) for edge in ("since", "until"))
        return since, until

    @cached_property
    def at_rows(self) -> dict[str, np.ndarray]:
        """Slots of each worth in the first step of every row, int64 [rows]; they add up to the bucket.

        Raises:
            SimulationFault: The logged stays have more slots than the bucket, or fewer where all contents are shared.
        """
        log, size, kept = self.run.log, self.run.replica.block_size, self.names.kept
        vain = self.names.stays["blocks"] - self.hits - self.late
        hits, late, in_vain = (self._changes(size * blocks) for blocks in (self.hits, self.late, vain))
        undecided = {"moment": kept["since"], "slots": size * kept["blocks"]}
        changes = {"hit_later": hits, "too_late": late, "undecided": undecided}
        found = {name: CachedSlots(log, columns).at_rows() for name, columns in changes.items()}
        never = CachedSlots(log).at_rows() - sum(found.values())
        unlogged = never - CachedSlots(log, in_vain).at_rows()
        if unlogged.min(initial=0) < 0 or (self.all_shared and unlogged.any()):
            raise SimulationFault("the worth of cached slots does not add up to the cached bucket")
        return {name: found.get(name, never) for name in WORTHS}

    def _changes(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """When slots of the logged stays came and went, as ``ledger.CACHE_CHANGE``."""
        some, stays = np.flatnonzero(slots), self.names.stays
        moments = np.concatenate([stays["since"][some], stays["until"][some]])
        return {"moment": moments, "slots": np.concatenate([slots[some], -slots[some]])}

    def slot_ticks(self) -> dict[str, int]:
        """Slots of each worth, integrated over the settings' window; they add up to the bucket."""
        window, kept = self.run.window, self.names.kept
        since, until = (np.clip(each, window.start_ticks, window.end_ticks) for each in self.stay_ticks)
        left = window.end_ticks - np.clip(ticks_of(self.run.log, kept["since"]), window.start_ticks, window.end_ticks)
        blocks = {"hit_later": dot(self.hits, until - since), "too_late": dot(self.late, until - since)}
        blocks["undecided"] = dot(kept["blocks"], left)
        found = {name: self.run.replica.block_size * each for name, each in blocks.items()}
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
    evicted = np.flatnonzero(names.stays["hit"] == 0)
    late = np.zeros(len(names.stays["hit"]), dtype=np.int64)
    late[evicted] = asked_again(names, {name: column[evicted] for name, column in names.stays.items()})
    return CacheWorth(run, names, late)


def asked_again(names: CachedNames, stays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Blocks of each of some stays that a look-up asks for after the stay, int64.

    Stays have one block each, or look-ups ask for each chain from its first block on: those that are asked for again then come first.
    """
    first, look_ups = names.place_of(stays["name"]), stays["look_ups"]
    low, high = np.zeros_like(first), stays["blocks"].copy()
    some = np.arange(len(first))
    while len(some):
        middle = (low[some] + high[some]) >> 1
        again = names.last(first[some] + middle) >= look_ups[some]
        low[some[again]] = middle[again] + 1
        high[some[~again]] = middle[~again]
        some = some[low[some] < high[some]]
    return low


def worth_at_rows(run: Run, part: slice = slice(None)) -> dict[str, np.ndarray]:
    """Slots of each worth in the first step of every row, or of some, int64 [rows], as ``cached.worth``; none as ``cache_worth``."""
    worth = cache_worth(run)
    return {} if worth is None else {WORTH_COLUMNS[name]: column[part] for name, column in worth.at_rows.items()}
