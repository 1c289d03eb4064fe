"""A finished run's book, as columns, and the clock that it keeps.

Rows are leaps, stays are sequences on the device (``ledger``). Steps are numbered through; the
clock functions say when a step starts and ends, exactly, from the row it lies in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..sequence import SWAPPED_IN
from .ledger import DERIVED, LEAP, METER, Ledger


@dataclass(frozen=True, eq=False)
class Book:
    """Everything that one replica did.

    Attributes:
        rows, stays, cuts: int64 columns by the names in ``ledger``.
        prompt_tokens, output_tokens: int64 [n], of the workload.
        capacity_slots, block_size: Size of the pool.
        paged: Whether memory is paged; else contiguous.
        together: Whether sequences leave with their batch.
        end_ticks: When the run was over.
    """

    rows: dict[str, np.ndarray]
    stays: dict[str, np.ndarray]
    cuts: dict[str, np.ndarray]
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    capacity_slots: int
    block_size: int
    paged: bool
    together: bool
    end_ticks: int

    @classmethod
    def of(cls, ledger: Ledger, **facts) -> Book:
        """The book of a ledger that is written to no more."""
        rows, stays = ledger.rows.columns(), ledger.stays.columns()
        cuts = ledger.cuts.columns()
        return cls(rows=_complete(rows, stays), stays=stays, cuts=cuts | {"stay": _cut_stay(cuts, stays)}, **facts)

    @cached_property
    def row_clock(self) -> np.ndarray:
        """Number of each row's first step."""
        steps = self.rows["steps"]
        return np.cumsum(steps) - steps

    @cached_property
    def num_steps(self) -> int:
        return int(self.rows["steps"].sum())

    @cached_property
    def stay_end(self) -> np.ndarray:
        """Clock after the last step in which each stay computes a token."""
        stays = self.stays
        end = stays["start_clock"] + self.output_tokens[stays["index"]] - stays["generated_tokens"]
        end[self.cuts["stay"]] = self.cuts["clock"]
        return np.minimum(end, self.num_steps)

    @cached_property
    def stay_leave(self) -> np.ndarray:
        """Clock after the last step in which each stay holds its slots: with its batch, where that is so."""
        if not self.together:
            return self.stay_end
        _, batch = np.unique(self.stays["start_clock"], return_inverse=True)
        last = np.zeros(batch.max(initial=-1) + 1, dtype=np.int64)
        np.maximum.at(last, batch, self.stay_end)
        return last[batch]

    @cached_property
    def stay_lag(self) -> np.ndarray:
        """Tokens held in a step less the step's number, constant over each stay."""
        return self.stays["tokens"] - self.stays["start_clock"]

    def first_clock_from(self, ticks: int) -> int:
        """Number of the first step that starts at or after ``ticks``, which no leap may span."""
        row = int(np.searchsorted(self.rows["start_ticks"], ticks, side="left"))
        return int(self.row_clock[row]) if row < len(self.row_clock) else self.num_steps

    def start_of(self, clock: np.ndarray) -> np.ndarray:
        """Ticks at which step ``clock`` starts."""
        row = np.searchsorted(self.row_clock, clock, side="right") - 1
        return self.rows["start_ticks"][row] + self._into(row, clock - self.row_clock[row])

    def end_of(self, clock: np.ndarray) -> np.ndarray:
        """Ticks at which step ``clock - 1`` ends, that is, when the clock comes to ``clock``."""
        row = np.searchsorted(self.row_clock, clock - 1, side="right") - 1
        return self.rows["start_ticks"][row] + self._into(row, clock - self.row_clock[row])

    def _into(self, row: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Ticks from a row's start to the end of its first ``steps`` steps."""
        later = np.maximum(steps - 1, 0)
        rows = self.rows
        ticks = rows["first_ticks"][row] + rows["next_ticks"][row] * later
        ticks += rows["slope_ticks"][row] * (later * (later - 1) // 2)
        return np.where(steps > 0, ticks, 0)

    @cached_property
    def tail_slots(self) -> np.ndarray:
        """Slots of each stay's last block that no token will ever fill (block_tail, once it is there)."""
        target = (self.prompt_tokens + self.output_tokens)[self.stays["index"]]
        return -target % self.block_size if self.paged else np.zeros_like(target)

    @cached_property
    def tail_clock(self) -> np.ndarray:
        """Step in which each stay enters its last block; its end where it never does."""
        target = (self.prompt_tokens + self.output_tokens)[self.stays["index"]]
        last_block = (target - 1) // self.block_size * self.block_size
        entry = np.maximum(self.stays["start_clock"], last_block + 1 - self.stay_lag)
        return np.minimum(entry, self.stay_end)


def _complete(rows: dict[str, np.ndarray], stays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows with what follows from other columns, and with what the memory had no need to tell."""
    steps, later = rows["steps"], np.maximum(rows["steps"] - 1, 0)
    ticks = rows["first_ticks"] + rows["next_ticks"] * later + rows["slope_ticks"] * (later * (later - 1) // 2)
    prefills = stays["start_clock"][stays["kind"] != SWAPPED_IN]
    # A row without steps has the clock of the one after it, in which the prefills run.
    row = np.searchsorted(np.cumsum(steps) - steps, prefills, side="right") - 1
    known = rows | {
        "ticks": ticks,
        "decodes": rows["width"] - np.bincount(row, minlength=len(steps)),
        "growing": rows.get("growing", rows["width"]),
    }
    return {name: known.get(name, np.broadcast_to(0, len(steps))) for name in LEAP + DERIVED + METER}


def _cut_stay(cuts: dict[str, np.ndarray], stays: dict[str, np.ndarray]) -> np.ndarray:
    """Which stay each cut ends: that of its request that began in that step."""
    by_clock, by_request = stays["start_clock"], stays["index"]
    order = np.lexsort((by_request, by_clock))
    most = int(by_request.max(initial=0)) + 1
    keys = by_clock[order] * most + by_request[order]
    return order[np.searchsorted(keys, cuts["start_clock"] * most + cuts["index"])]
