"""A finished run's run log, as columns, and the times of its decode steps.

Rows are leaps, residencies are sequences on the device (``ledger``). Steps are numbered through; the
functions of time say when a step starts and ends, exactly, from the row it lies in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...types.sequence import NOT_DECODING, SWAPPED_IN
from .kv_groups import PageGroups
from .ledger import CACHE_CHANGE, DERIVED, LEAP, METER, Ledger, Table

if TYPE_CHECKING:
    from .cache_log import CacheLog


@dataclass(frozen=True, eq=False)
class RunLog:
    """Everything that one replica did.

    Attributes:
        rows, residencies, evictions, chunks, copies, host: int64 columns by the names in ``ledger``.
        prompt_tokens, output_tokens: int64 [sequences], of the workload's sequences.
        leader: int64 [sequences], the sequence that prefills for each: itself, where it has no siblings.
        capacity_slots, block_size: Size of the pool.
        paged: Whether memory is paged; else contiguous.
        residue: Bucket of the slots held past what was asked for.
        together: Whether sequences leave with their batch.
        pinned_slots: Slots that are live whether a sequence runs or not.
        end_ticks: When the run was over.
        groups: KV groups that share the pool.
        drafts: Columns of ``DRAFT``; None where no step verifies drafts. Then every row is a step, and its memory has counted all
            ``block_tail``.
        cached_level: When slots in no table came to keep their contents or their mapping, or ceased to; None where none do.
    """

    rows: dict[str, np.ndarray]
    residencies: dict[str, np.ndarray]
    evictions: dict[str, np.ndarray]
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
    cached_level: CacheLog | None = None
    drafts: dict[str, np.ndarray] | None = None

    @classmethod
    def of(cls, ledger: Ledger, **facts: Any) -> RunLog:
        """The run log of a ledger that is written to no more."""
        rows, residencies = ledger.rows.columns(), ledger.residencies.columns()
        evictions = ledger.evictions.columns()
        evictions["residency"] = _evicted_residency(evictions, residencies)
        others = {name: getattr(ledger, name).columns() for name in ("chunks", "copies", "host")}
        return cls(rows=_complete(rows, residencies), residencies=residencies, evictions=evictions, **others, **facts)

    def forget(self) -> None:
        """Drop the columns that are quickly computed again: in a long run they take more room than the log."""
        for name, attribute in vars(type(self)).items():
            if isinstance(attribute, cached_property) and name != "cache_changes":
                vars(self).pop(name, None)

    @cached_property
    def cache_changes(self) -> dict[str, np.ndarray]:
        """Columns of ``cached_level``, of a run that goes on no more."""
        return Table(CACHE_CHANGE).columns() if self.cached_level is None else self.cached_level.change_columns()

    @cached_property
    def row_step(self) -> np.ndarray:
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
    def residency_row(self) -> np.ndarray:
        """Row with the first step of each residency."""
        return self.row_at(self.residencies["start_ticks"])

    def row_at(self, start_ticks: np.ndarray) -> np.ndarray:
        """The row that starts then, and takes time."""
        return np.searchsorted(self.rows["start_ticks"], start_ticks, side="right") - 1

    @cached_property
    def residency_end(self) -> np.ndarray:
        """Decode step after the last step in which each residency computes a token."""
        residencies = self.residencies
        end = residencies["start_step"] + self.output_tokens[residencies["index"]] - residencies["generated_tokens"]
        if self.drafts is not None:
            end = end - self._kept_drafts(self.drafts)
        return self._with_evictions(end, self.evictions["decode_step"])

    def _kept_drafts(self, drafts: dict[str, np.ndarray]) -> np.ndarray:
        """Tokens that each residency gained beside those that its steps computed, int64 [residencies]."""
        index, start = self.residencies["index"], self.residencies["start_step"]
        steps = self.num_steps + 1
        order = np.argsort(index * steps + start, kind="stable")
        places = index[order] * steps + start[order]
        found = np.searchsorted(places, drafts["index"] * steps + drafts["decode_step"], side="right") - 1
        kept = np.zeros(len(index), dtype=np.int64)
        np.add.at(kept, order[found], drafts["kept"])
        return kept

    def _with_evictions(self, ends: np.ndarray, evicted: np.ndarray) -> np.ndarray:
        """One value a residency: ``evicted`` where an eviction ended it."""
        residency, result = self.evictions["residency"], ends.copy()
        result[residency[residency >= 0]] = evicted[residency >= 0]
        return result

    @cached_property
    def residency_release(self) -> np.ndarray:
        """Decode step after the last step in which each residency holds its slots: with its batch, where that is so."""
        if not self.together:
            return self.residency_end
        _, batch = np.unique(self.residencies["start_step"], return_inverse=True)
        last = np.zeros(batch.max(initial=-1) + 1, dtype=np.int64)
        np.maximum.at(last, batch, self.residency_end)
        return last[batch]

    @cached_property
    def residency_lag(self) -> np.ndarray:
        """Tokens held in a step less the step's number, constant over each residency."""
        return self.residencies["tokens"] - self.residencies["start_step"]

    @cached_property
    def first_token_ticks(self) -> np.ndarray:
        """When each residency's first step is over."""
        return (self.rows["start_ticks"] + self.rows["first_ticks"])[self.residency_row]

    @cached_property
    def last_token_ticks(self) -> np.ndarray:
        """When each residency's last token is out."""
        return np.where(self._decodes, self.end_of(self.residency_end), self.first_token_ticks)

    @cached_property
    def release_ticks(self) -> np.ndarray:
        """When each residency releases its slots."""
        finish = self.end_of(self.residency_release) if self.together else self.last_token_ticks
        return self._with_evictions(finish, self.evictions["ticks"])

    @cached_property
    def release_iteration(self) -> np.ndarray:
        """Number of the first iteration in which each residency no longer holds its slots (not in static batches)."""
        last = np.where(
            self._decodes, self.iteration_of(self.residency_end - 1), self.row_iteration[self.residency_row]
        )
        return self._with_evictions(last + 1, self.first_iteration_from(self.evictions["ticks"]))

    @cached_property
    def _decodes(self) -> np.ndarray:
        """Whether each residency computes a token after its first step."""
        return self.residency_end > self.residencies["start_step"] + 1

    def first_iteration_from(self, ticks: np.ndarray | int) -> np.ndarray:
        """Number of the first iteration that starts at or after ``ticks``, which no leap may span."""
        row = np.searchsorted(self.rows["start_ticks"], ticks, side="left")
        return np.append(self.row_iteration, self.num_steps)[row]

    def iteration_of(self, decode_step: np.ndarray) -> np.ndarray:
        """Number that ``decode_step`` has among the iterations."""
        row = np.searchsorted(self.row_step, decode_step, side="right") - 1
        return self.row_iteration[row] + decode_step - self.row_step[row]

    def start_of(self, decode_step: np.ndarray) -> np.ndarray:
        """Ticks at which ``decode_step`` starts."""
        row = np.searchsorted(self.row_step, decode_step, side="right") - 1
        return self.rows["start_ticks"][row] + self._into(row, decode_step - self.row_step[row])

    def end_of(self, decode_step: np.ndarray) -> np.ndarray:
        """Ticks at which ``decode_step - 1`` ends."""
        row = np.searchsorted(self.row_step, decode_step - 1, side="right") - 1
        return self.rows["start_ticks"][row] + self._into(row, decode_step - self.row_step[row])

    def _into(self, row: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Ticks from a row's start to the end of its first ``steps`` steps."""
        later = np.maximum(steps - 1, 0)
        rows = self.rows
        ticks = rows["first_ticks"][row] + rows["next_ticks"][row] * later
        ticks += rows["slope_ticks"][row] * (later * (later - 1) // 2)
        return np.where(steps > 0, ticks, 0)

    @cached_property
    def tails(self) -> Tails:
        """The residencies that enter a last block which their sequence will not fill."""
        if not self.paged or self.drafts is not None:
            nothing = np.zeros(0, dtype=np.int64)
            return Tails(nothing, nothing, nothing, nothing, nothing)
        residencies, size = self.residencies, self.block_size
        target = (self.prompt_tokens + self.output_tokens)[residencies["index"]]
        slots, last_block = -target % size, (target - 1) // size * size
        entry = last_block + 1 - self.residency_lag
        pick = np.flatnonzero((slots > 0) & (np.maximum(entry, residencies["start_step"]) < self.residency_end))
        at_once, entry = entry[pick] <= residencies["start_step"][pick], entry[pick]
        return Tails(
            slots=slots[pick],
            start_iteration=np.where(at_once, self.row_iteration[self.residency_row[pick]], self.iteration_of(entry)),
            start_ticks=np.where(at_once, residencies["start_ticks"][pick], self.start_of(entry)),
            release_iteration=self.release_iteration[pick],
            release_ticks=self.release_ticks[pick],
        )


class Tails(NamedTuple):
    """block_tail of every residency that has one: int64 columns.

    Attributes:
        slots: Slots of the last block that no token will ever fill.
        start_iteration, start_ticks: When the residency enters its last block.
        release_iteration, release_ticks: When the residency releases it.
    """

    slots: np.ndarray
    start_iteration: np.ndarray
    start_ticks: np.ndarray
    release_iteration: np.ndarray
    release_ticks: np.ndarray


def _before(counts: np.ndarray) -> np.ndarray:
    """Sum of the counts before each."""
    return np.cumsum(counts) - counts


def _complete(rows: dict[str, np.ndarray], residencies: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows with what follows from other columns, and with what the memory had no need to tell."""
    steps, later = rows["steps"], np.maximum(rows["steps"] - 1, 0)
    ticks = rows["first_ticks"] + rows["next_ticks"] * later + rows["slope_ticks"] * (later * (later - 1) // 2)
    # Prefills end in the first step of a row.
    row = (
        np.searchsorted(rows["start_ticks"], residencies["start_ticks"][residencies["kind"] < SWAPPED_IN], side="right")
        - 1
    )
    known = rows | {
        "ticks": ticks,
        "decodes": np.where(steps > 0, rows["batch_size"] - np.bincount(row, minlength=len(steps)), 0),
        "iterations": np.where(steps > 0, steps, rows["prefill_tokens"] > 0),
        "growing": rows.get("growing", rows["batch_size"]),
    }
    return {name: known.get(name, np.broadcast_to(0, len(steps))) for name in LEAP + DERIVED + METER}


def _evicted_residency(evictions: dict[str, np.ndarray], residencies: dict[str, np.ndarray]) -> np.ndarray:
    """The residency that each eviction ends; -1 where a prefill was evicted."""
    ended = evictions["start_step"] != NOT_DECODING
    evicted = np.zeros(residencies["index"].max(initial=-1) + 1, dtype=bool)
    evicted[evictions["index"][ended]] = True
    some = np.flatnonzero(evicted[residencies["index"]])
    order = some[np.argsort(residencies["index"][some], kind="stable")]
    # Every residency of a request but its last ends in an eviction, in order.
    index = evictions["index"][ended]
    nth = np.zeros(len(index), dtype=np.int64)
    by_request = np.argsort(index, kind="stable")
    nth[by_request] = np.arange(len(index)) - np.searchsorted(index[by_request], index[by_request])
    residency = np.full(len(ended), -1)
    residency[ended] = order[np.searchsorted(residencies["index"][order], index) + nth]
    return residency
