"""A finished run's run log, as columns, and the times of its decode steps.

Rows are leaps, residencies are sequences on the device (``ledger``). Steps are numbered through; the
functions of time say when a step starts and ends, exactly, from the row it lies in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import gcd
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..memory.accounting.kv_groups import FULL, SLIDING, STATE, PageGroups
from ..memory.accounting.ledger import (
    CACHE_CHANGE,
    COMPLETE,
    DERIVED,
    FLIGHT,
    LEAP,
    METER,
    SECOND_METER,
    Ledger,
    SecondPool,
    Table,
    of_class,
)
from ..types.columns import column_by_slices, column_of, columns_of, slices
from ..types.sequence import NOT_DECODING, SWAPPED_IN

if TYPE_CHECKING:
    from ..memory.accounting.cache_log import CacheLog

#: Steps up to which a table finds the rows of steps, of a run (64 MiB) and of each row, which makes the table smaller than the log. A
#: search takes several times as long.
_MOST_TABLE_STEPS, _MOST_STEPS_A_ROW = 1 << 24, 16


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
        compiled: As of the ledger.
        second_pool: See ``Memory``; all other columns are of the first one.
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
    second_pool: SecondPool | None = None
    drafts: dict[str, np.ndarray] | None = None
    compiled: ModuleType | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: modules have neither, and numpy computes the same."""
        return {**vars(self), "compiled": None}

    @classmethod
    def of(cls, ledger: Ledger, **facts: Any) -> RunLog:
        """The run log of a ledger that is written to no more."""
        rows, residencies = ledger.rows.columns(), ledger.residencies.columns()
        evictions = ledger.evictions.columns()
        evictions["residency"] = _evicted_residency(evictions, residencies)
        others = {name: getattr(ledger, name).columns() for name in ("chunks", "copies", "host")}
        log = {"rows": _complete(rows, residencies), "residencies": residencies, "evictions": evictions, **others}
        return cls(**log, compiled=ledger.compiled, **facts)

    def of_class(self, place: int) -> RunLog:
        """The log of one class of KV groups with blocks of a size of their own, as if they had the pool to themselves: its slots are
        tokens of theirs, and nothing is cached."""
        each, rows = self.groups.classes(self.block_size)[place], self.rows
        shared = "shared" if each.kind == FULL else "shared_in_windows"
        columns = {"held": "held", "prefill_tail": "prefill_tail", "skipped": "skipped", "shared": shared}
        own = {
            name: rows[of_class(column, place)] for column, name in columns.items() if of_class(column, place) in rows
        }
        return replace(
            self,
            rows=rows | own,
            capacity_slots=self.capacity_slots // self.block_size * each.block_size,
            block_size=each.block_size,
            groups=PageGroups((each.kind,) * each.number, each.window_tokens, ahead=self.groups.ahead),
            cached_level=None,
        )

    def pools(self) -> tuple[RunLog, RunLog] | None:
        """The log of each of two pools, as if it were the only one; None where there is one."""
        second = self.second_pool
        if second is None:
            return None
        first = replace(self, second_pool=None)
        other = replace(
            first,
            capacity_slots=second.capacity_slots,
            cached_level=None if self.cached_level is None else second.cached_level,
        )
        if second.kind == STATE:
            return first, replace(other, block_size=1, groups=PageGroups((STATE,)))
        columns = zip(("live", "held"), SECOND_METER[SLIDING], strict=True)
        return first, replace(other, rows=self.rows | {name: self.rows[column] for name, column in columns})

    @property
    def pool_weights(self) -> tuple[int, int]:
        """Slots of the ledger of all pools that a slot of each is, so that shares of slots are shares of bytes."""
        if self.second_pool is None:
            return 1, 0
        divisor = gcd(*self.second_pool.slot_bytes)
        first, second = (size // divisor for size in self.second_pool.slot_bytes)
        return first, second

    @property
    def ledger_slots(self) -> int:
        """Slots of all pools, as the ledger adds them up."""
        return self._slots_of_both - self.shared_slots

    @property
    def _slots_of_both(self) -> int:
        first, second = self.pool_weights
        return first * self.capacity_slots + (second * self.second_pool.capacity_slots if self.second_pool else 0)

    @property
    def shared_slots(self) -> int:
        """Of these, slots that the two pools count both, as they share a buffer."""
        second = self.second_pool
        if second is None or not second.shared_bytes:
            return 0
        return self._slots_of_both - second.shared_bytes // gcd(*second.slot_bytes)

    def forget(self) -> None:
        """Drop the columns that are quickly computed again: in a long run they take more room than the log."""
        kept = {each.name for each in fields(self)} | {"cache_changes"}
        for name, value in [*vars(self).items()]:
            derived = isinstance(vars(type(self)).get(name), cached_property) or isinstance(value, np.ndarray)
            if derived and name not in kept:
                del vars(self)[name]

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
        return sum(int(self.rows["iterations"][part].sum()) for part in slices(len(self.row_step)))

    @cached_property
    def residency_row(self) -> np.ndarray:
        """Row with the first step of each residency."""
        return self._by_residency(lambda part: self.row_at(self.residencies["start_ticks"][part]))

    def _by_residency(self, compute: Callable[[slice], np.ndarray]) -> np.ndarray:
        """A column of residencies, some at a time."""
        return column_by_slices(len(self.residencies["index"]), compute)

    def row_at(self, start_ticks: np.ndarray) -> np.ndarray:
        """The row that starts then, and takes time."""
        return np.searchsorted(self.rows["start_ticks"], start_ticks, side="right") - 1

    @cached_property
    def residency_end(self) -> np.ndarray:
        """Decode step after the last step in which each residency computes a token."""
        residencies = self.residencies
        drafts = None if self.drafts is None else self._kept_drafts(self.drafts)

        def ends(part: slice) -> np.ndarray:
            end = residencies["start_step"][part] + self.output_tokens[residencies["index"][part]]
            end -= residencies["generated_tokens"][part]
            if drafts is not None:
                end -= drafts[part]
            return self._with_evictions(part, end, lambda some: self.evictions["decode_step"][some])

        return self._by_residency(ends)

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

    @cached_property
    def _evicted(self) -> tuple[np.ndarray, np.ndarray]:
        """Residencies that an eviction ended, ascending, and their evictions."""
        residency = self.evictions["residency"]
        order = np.argsort(residency, kind="stable")
        order = order[np.count_nonzero(residency < 0) :]
        return residency[order], order

    def _with_evictions(self, part: slice, ends: np.ndarray, evicted: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """One value for each of some residencies: that of ``evicted`` for the eviction that ended it, where one did."""
        residency, evictions = self._evicted
        low, high = np.searchsorted(residency, [part.start, part.stop])
        ends[residency[low:high] - part.start] = evicted(evictions[low:high])
        return ends

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
        residencies = self.residencies
        return self._by_residency(lambda part: residencies["tokens"][part] - residencies["start_step"][part])

    @cached_property
    def first_token_ticks(self) -> np.ndarray:
        """When each residency's first step is over."""

        def first(part: slice) -> np.ndarray:
            row = self.residency_row[part]
            return self.rows["start_ticks"][row] + self.rows["first_ticks"][row] + self._flight(row)

        return self._by_residency(first)

    @cached_property
    def last_token_ticks(self) -> np.ndarray:
        """When each residency's last token is out."""

        def last(part: slice) -> np.ndarray:
            end = self.residency_end[part]
            decoded = self.end_of(end) + self._flight(self._row_of(end - 1))
            return np.where(self._decodes(part), decoded, self.first_token_ticks[part])

        return self._by_residency(last)

    def _flight(self, row: np.ndarray) -> np.ndarray | int:
        """Ticks from the end of each row until its tokens are out: what is left of its batch, with batches in flight."""
        flight = self.rows.get(FLIGHT)
        return 0 if flight is None else flight[row]

    @cached_property
    def release_ticks(self) -> np.ndarray:
        """When each residency releases its slots."""

        def release(part: slice) -> np.ndarray:
            finish = self.end_of(self.residency_release[part]) if self.together else self.last_token_ticks[part].copy()
            return self._with_evictions(part, finish, lambda some: self.evictions["ticks"][some])

        return self._by_residency(release)

    @cached_property
    def release_iteration(self) -> np.ndarray:
        """Number of the first iteration in which each residency no longer holds its slots (not in static batches)."""

        def release(part: slice) -> np.ndarray:
            last = np.where(
                self._decodes(part),
                self.iteration_of(self.residency_end[part] - 1),
                self.row_iteration[self.residency_row[part]],
            )
            evicted = self.evictions["ticks"]
            return self._with_evictions(part, last + 1, lambda some: self.first_iteration_from(evicted[some]))

        return self._by_residency(release)

    def _decodes(self, part: slice) -> np.ndarray:
        """Whether each of some residencies computes a token after its first step."""
        return self.residency_end[part] > self.residencies["start_step"][part] + 1

    def first_iteration_from(self, ticks: np.ndarray | int) -> np.ndarray:
        """Number of the first iteration that starts at or after ``ticks``, which no leap may span."""
        return self.iteration_at(np.searchsorted(self.rows["start_ticks"], ticks, side="left"))

    def iteration_at(self, row: np.ndarray) -> np.ndarray:
        """Number of the first iteration of each row, or of all iterations for the row after the last."""
        return _or_after(self.row_iteration, row, self.num_steps)

    def start_ticks_at(self, row: np.ndarray) -> np.ndarray:
        """Start of each row, or the end of the run for the row after the last."""
        return _or_after(self.rows["start_ticks"], row, self.end_ticks)

    def _row_of(self, decode_step: np.ndarray) -> np.ndarray:
        """The last row that begins with ``decode_step`` or before, and -1 before the first."""
        table = self._row_table
        if table is None:
            return np.searchsorted(self.row_step, decode_step, side="right") - 1
        return table.take(decode_step + 1, mode="clip").astype(np.intp)

    @cached_property
    def _row_table(self) -> np.ndarray | None:
        """``_row_of`` of step -1 and of all others up to the end, int32; None where it would be too large."""
        steps = self.rows["steps"]
        most = min(_MOST_TABLE_STEPS, _MOST_STEPS_A_ROW * len(steps))
        if not len(steps) or self.row_step[-1] + steps[-1] > most:
            return None
        repeats = np.concatenate([[1], steps])
        # The step after the last one, too.
        repeats[-1] += 1
        return np.repeat(np.arange(-1, len(steps), dtype=np.int32), repeats)

    def iteration_of(self, decode_step: np.ndarray) -> np.ndarray:
        """Number that ``decode_step`` has among the iterations."""
        row = self._row_of(decode_step)
        return self.row_iteration[row] + decode_step - self.row_step[row]

    def start_of(self, decode_step: np.ndarray) -> np.ndarray:
        """Ticks at which ``decode_step`` starts."""
        row = self._row_of(decode_step)
        return self.rows["start_ticks"][row] + self._into(row, decode_step - self.row_step[row])

    def end_of(self, decode_step: np.ndarray) -> np.ndarray:
        """Ticks at which ``decode_step - 1`` ends."""
        row = self._row_of(decode_step - 1)
        return self.rows["start_ticks"][row] + self._into(row, decode_step - self.row_step[row])

    def _into(self, row: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Ticks that the first ``steps`` steps of a row take, int64; a row is a leap over steps whose times grow by ``slope_ticks``."""
        later = np.maximum(steps - 1, 0)
        rows = self.rows
        ticks = rows["first_ticks"][row] + rows["next_ticks"][row] * later
        ticks += rows["slope_ticks"][row] * (later * (later - 1) >> 1)
        return np.where(steps > 0, ticks, 0)

    @cached_property
    def tails(self) -> Tails:
        """The residencies that enter a last block which their sequence will not fill."""
        if not self.paged or self.drafts is not None or FLIGHT in self.rows:
            # Where sequences do not grow in lockstep ``prefill_tail`` has all of them.
            nothing = np.zeros(0, dtype=np.int64)
            return Tails(nothing, nothing, nothing, nothing, nothing)
        parts = (self._tails(part) for part in slices(len(self.residencies["index"])))
        return Tails(*columns_of([np.int64] * len(Tails._fields), parts))

    def _tails(self, part: slice) -> Tails:
        """``tails`` of some residencies."""
        size, end, lag = self.block_size, self.residency_end[part], self.residency_lag[part]
        index, start, ticks = (self.residencies[name][part] for name in ("index", "start_step", "start_ticks"))
        target = self.prompt_tokens[index] + self.output_tokens[index]
        slots, last_block = -target % size, (target - 1) // size * size
        entry = last_block + 1 - lag
        pick = np.flatnonzero((slots > 0) & (np.maximum(entry, start) < end))
        at_once, entry = entry[pick] <= start[pick], entry[pick]
        row_iteration = self.row_iteration[self.residency_row[part][pick]]
        return Tails(
            slots=slots[pick],
            start_iteration=np.where(at_once, row_iteration, self.iteration_of(entry)),
            start_ticks=np.where(at_once, ticks[pick], self.start_of(entry)),
            release_iteration=self.release_iteration[part][pick],
            release_ticks=self.release_ticks[part][pick],
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


def _or_after(column: np.ndarray, row: np.ndarray, after: int) -> np.ndarray:
    """The values of a column in some rows, and ``after`` for the row after the last."""
    if not len(column):
        return np.full_like(row, after)
    return np.where(row < len(column), column[np.minimum(row, len(column) - 1)], after)


def _before(counts: np.ndarray) -> np.ndarray:
    """Sum of the counts before each."""
    so_far = 0

    def before(part: slice) -> np.ndarray:
        nonlocal so_far
        sums = so_far + np.cumsum(counts[part])
        so_far = int(sums[-1])
        return sums - counts[part]

    return column_by_slices(len(counts), before)


def _complete(rows: dict[str, np.ndarray], residencies: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows with what follows from other columns, and with what the memory had no need to tell."""
    newcomers = _prefills(rows["start_ticks"], residencies)

    def derived(part: slice) -> tuple[np.ndarray, ...]:
        steps, later = rows["steps"][part], np.maximum(rows["steps"][part] - 1, 0)
        ticks = rows["first_ticks"][part] + rows["next_ticks"][part] * later
        ticks += rows["slope_ticks"][part] * (later * (later - 1) // 2)
        decodes = np.where(steps > 0, rows["batch_size"][part] - newcomers[part], 0)
        return ticks, decodes, np.where(steps > 0, steps, rows["prefill_tokens"][part] > 0)

    number = len(rows["steps"])
    found = columns_of([np.int64] * len(DERIVED), (derived(part) for part in slices(number)))
    known = rows | dict(zip(DERIVED, found, strict=True)) | {"growing": rows.get("growing", rows["batch_size"])}
    nothing = np.broadcast_to(0, number)
    return {name: known.get(name, nothing) for name in dict.fromkeys((*LEAP, *DERIVED, *METER, *rows))}


def _prefills(start_ticks: np.ndarray, residencies: dict[str, np.ndarray]) -> np.ndarray:
    """Prefills that end in each row, all in its first step; int32 [rows]."""
    found = np.zeros(len(start_ticks), dtype=np.int32)
    for part in slices(len(residencies["kind"])):
        begun = residencies["start_ticks"][part][residencies["kind"][part] < SWAPPED_IN]
        np.add.at(found, np.searchsorted(start_ticks, begun, side="right") - 1, np.int32(1))
    return found


def _evicted_residency(evictions: dict[str, np.ndarray], residencies: dict[str, np.ndarray]) -> np.ndarray:
    """The residency that each eviction ends; -1 where it evicted a prefill, or a sequence with a complete output."""
    ended = (evictions["start_step"] != NOT_DECODING) & (evictions["swapped"] != COMPLETE)
    every = slices(len(residencies["index"]))
    evicted = np.zeros(1 + max((int(residencies["index"][part].max()) for part in every), default=-1), dtype=bool)
    evicted[evictions["index"][ended]] = True
    every = slices(len(residencies["index"]))
    some = column_of(part.start + np.flatnonzero(evicted[residencies["index"][part]]) for part in every)
    order = some[np.argsort(residencies["index"][some], kind="stable")]
    # Every residency of a request but its last ends in an eviction, in order.
    index = evictions["index"][ended]
    nth = np.zeros(len(index), dtype=np.int64)
    by_request = np.argsort(index, kind="stable")
    nth[by_request] = np.arange(len(index)) - np.searchsorted(index[by_request], index[by_request])
    residency = np.full(len(ended), -1)
    residency[ended] = order[np.searchsorted(residencies["index"][order], index) + nth]
    return residency
