"""A finished run's book, as columns, and the clock that it keeps.

Rows are leaps, stays are sequences on the device (``ledger``). Steps are numbered through; the
clock functions say when a step starts and ends, exactly, from the row it lies in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...types.sequence import NOT_DECODING, SWAPPED_IN
from .kv_groups import PageGroups
from .ledger import CACHE_CHANGE, DERIVED, LEAP, METER, Ledger, Table


@dataclass(frozen=True, eq=False)
class Book:
    """Everything that one replica did.

    Attributes:
        rows, stays, cuts, chunks, copies, host: int64 columns by the names in ``ledger``.
        prompt_tokens, output_tokens: int64 [sequences], of the workload's sequences.
        leader: int64 [sequences], who prefills for each: itself, where it has no siblings.
        capacity_slots, block_size: Size of the pool.
        paged: Whether memory is paged; else contiguous.
        residue: Bucket of the slots held past what was asked for.
        together: Whether sequences leave with their batch.
        pinned_slots: Slots that are live whether anybody runs or not.
        end_ticks: When the run was over.
        groups: KV groups that share the pool.
        cache_changes: int64 columns, how many slots in no table keep their contents or their mapping.
    """

    rows: dict[str, np.ndarray]
    stays: dict[str, np.ndarray]
    cuts: dict[str, np.ndarray]
    chunks: dict[str, np.ndarray]
    copies: dict[str, np.ndarray]
    host: dict[str, np.ndarray]
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    leader: np.ndarray
    capacity_slots: int
    block_size: int
    paged: bool
    residue: str
    together: bool
    pinned_slots: int
    end_ticks: int
    groups: PageGroups = PageGroups()
    cache_changes: dict[str, np.ndarray] = field(default_factory=lambda: Table(CACHE_CHANGE).columns())

    @classmethod
    def of(cls, ledger: Ledger, **facts: Any) -> Book:
        """The book of a ledger that is written to no more."""
        rows, stays = ledger.rows.columns(), ledger.stays.columns()
        cuts = ledger.cuts.columns()
        cuts["stay"] = _cut_stay(cuts, stays)
        others = {name: getattr(ledger, name).columns() for name in ("chunks", "copies", "host")}
        return cls(rows=_complete(rows, stays), stays=stays, cuts=cuts, **others, **facts)

    @cached_property
    def row_clock(self) -> np.ndarray:
        """Number of each row's first step."""
        return _before(self.rows["steps"])

    @cached_property
    def row_iteration(self) -> np.ndarray:
        """Number of each row's first iteration: steps, and pauses of the running sequences for a prefill."""
        return _before(self.rows["iterations"])

    @cached_property
    def num_steps(self) -> int:
        """Iterations in all."""
        return int(self.rows["iterations"].sum())

    @cached_property
    def stay_row(self) -> np.ndarray:
        """Row with whose first step each stay starts."""
        return self.row_at(self.stays["start_ticks"])

    def row_at(self, start_ticks: np.ndarray) -> np.ndarray:
        """The row that starts then, and takes time."""
        return np.searchsorted(self.rows["start_ticks"], start_ticks, side="right") - 1

    @cached_property
    def stay_end(self) -> np.ndarray:
        """Clock after the last step in which each stay computes a token."""
        stays = self.stays
        end = stays["start_clock"] + self.output_tokens[stays["index"]] - stays["generated_tokens"]
        return self._with_cuts(end, self.cuts["clock"])

    def _with_cuts(self, uncut: np.ndarray, cut: np.ndarray) -> np.ndarray:
        """One value a stay: ``cut`` of those that a cut ended."""
        stay, result = self.cuts["stay"], uncut.copy()
        result[stay[stay >= 0]] = cut[stay >= 0]
        return result

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

    @cached_property
    def first_token_ticks(self) -> np.ndarray:
        """When each stay's first step is over."""
        return (self.rows["start_ticks"] + self.rows["first_ticks"])[self.stay_row]

    @cached_property
    def last_token_ticks(self) -> np.ndarray:
        """When each stay's last token is out."""
        return np.where(self._decodes, self.end_of(self.stay_end), self.first_token_ticks)

    @cached_property
    def leave_ticks(self) -> np.ndarray:
        """When each stay gives up its slots."""
        finish = self.end_of(self.stay_leave) if self.together else self.last_token_ticks
        return self._with_cuts(finish, self.cuts["ticks"])

    @cached_property
    def leave_iteration(self) -> np.ndarray:
        """Number of the first iteration in which each stay no longer holds its slots (not in static batches)."""
        last = np.where(self._decodes, self.iteration_of(self.stay_end - 1), self.row_iteration[self.stay_row])
        return self._with_cuts(last + 1, self.first_iteration_from(self.cuts["ticks"]))

    @cached_property
    def _decodes(self) -> np.ndarray:
        """Whether each stay computes a token after its first step."""
        return self.stay_end > self.stays["start_clock"] + 1

    def first_iteration_from(self, ticks: np.ndarray | int) -> np.ndarray:
        """Number of the first iteration that starts at or after ``ticks``, which no leap may span."""
        row = np.searchsorted(self.rows["start_ticks"], ticks, side="left")
        return np.append(self.row_iteration, self.num_steps)[row]

    def iteration_of(self, clock: np.ndarray) -> np.ndarray:
        """Number that step ``clock`` has among the iterations."""
        row = np.searchsorted(self.row_clock, clock, side="right") - 1
        return self.row_iteration[row] + clock - self.row_clock[row]

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
    def tails(self) -> Tails:
        """The stays that enter a last block which their sequence will not fill."""
        if not self.paged:
            nothing = np.zeros(0, dtype=np.int64)
            return Tails(nothing, nothing, nothing, nothing, nothing)
        stays, size = self.stays, self.block_size
        target = (self.prompt_tokens + self.output_tokens)[stays["index"]]
        slots, last_block = -target % size, (target - 1) // size * size
        entry = last_block + 1 - self.stay_lag
        pick = np.flatnonzero((slots > 0) & (np.maximum(entry, stays["start_clock"]) < self.stay_end))
        at_once, entry = entry[pick] <= stays["start_clock"][pick], entry[pick]
        return Tails(
            slots=slots[pick],
            come_iteration=np.where(at_once, self.row_iteration[self.stay_row[pick]], self.iteration_of(entry)),
            come_ticks=np.where(at_once, stays["start_ticks"][pick], self.start_of(entry)),
            leave_iteration=self.leave_iteration[pick],
            leave_ticks=self.leave_ticks[pick],
        )


class Tails(NamedTuple):
    """block_tail of every stay that has one: int64 columns.

    Attributes:
        slots: Slots of the last block that no token will ever fill.
        come_iteration, come_ticks: When the stay enters its last block.
        leave_iteration, leave_ticks: When it gives it up.
    """

    slots: np.ndarray
    come_iteration: np.ndarray
    come_ticks: np.ndarray
    leave_iteration: np.ndarray
    leave_ticks: np.ndarray


def _before(counts: np.ndarray) -> np.ndarray:
    """Sum of the counts before each."""
    return np.cumsum(counts) - counts


def _complete(rows: dict[str, np.ndarray], stays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows with what follows from other columns, and with what the memory had no need to tell."""
    steps, later = rows["steps"], np.maximum(rows["steps"] - 1, 0)
    ticks = rows["first_ticks"] + rows["next_ticks"] * later + rows["slope_ticks"] * (later * (later - 1) // 2)
    # Prefills end in the first step of a row.
    row = np.searchsorted(rows["start_ticks"], stays["start_ticks"][stays["kind"] < SWAPPED_IN], side="right") - 1
    known = rows | {
        "ticks": ticks,
        "decodes": np.where(steps > 0, rows["width"] - np.bincount(row, minlength=len(steps)), 0),
        "iterations": np.where(steps > 0, steps, rows["prefill_tokens"] > 0),
        "growing": rows.get("growing", rows["width"]),
    }
    return {name: known.get(name, np.broadcast_to(0, len(steps))) for name in LEAP + DERIVED + METER}


def _cut_stay(cuts: dict[str, np.ndarray], stays: dict[str, np.ndarray]) -> np.ndarray:
    """Which stay each cut ends; -1 where a prefill was cut short."""
    ended = cuts["start_clock"] != NOT_DECODING
    order = np.argsort(stays["index"], kind="stable")
    # Every stay of a request but its last is cut, in order.
    index = cuts["index"][ended]
    nth = np.zeros(len(index), dtype=np.int64)
    by_request = np.argsort(index, kind="stable")
    nth[by_request] = np.arange(len(index)) - np.searchsorted(index[by_request], index[by_request])
    stay = np.full(len(ended), -1)
    stay[ended] = order[np.searchsorted(stays["index"][order], index) + nth]
    return stay
