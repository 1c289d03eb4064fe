"""What the ledger says: exact sums of every bucket over steps and over time.

Every slot of the pool is in exactly one bucket (semantics: first match wins)

    live            holds a computed token, or the one computed in this step
    reserved        empty, and will be filled
    over_estimate   reserved for an output that never comes
    block_tail      past the end of the sequence in its last block
    round_up        slots past those requested of a contiguous allocator
    finished_hold   padding, and slots of ended sequences in a static batch that goes on
    stranded        free, in a chunk too small for the queue's head that memory blocks
    cached          reclaimable with its contents kept
    free            free

and, where steps verify drafts,

    rejected        written in this step for a draft that the output does not keep; written again in the next one

A row of the run log says where the buckets stand in its first step; in step j of it

    live(j) = live + growing * j                    held(j) = held + block_size * (blocks taken in 1..j)
    d(0) = first     d(j) = next + slope * (j - 1)  D(j) = d(0) + ... + d(j - 1)

and the sums of live(j), held(j), live(j)*d(j), held(j)*d(j) over the row have closed forms.

Where the blocks of groups have several sizes, each class of groups has a ledger of its own, in tokens of these groups
(``RunLog.of_class``). A slot of the pool is the smallest share of a block that a token has; ``free`` is what all classes leave.

Where layers with a window or a state have a pool of their own (``RunLog.pools``), each pool has a ledger, and slots are added up by their bytes.

Where layers are KV groups, live and held are those of a group that keeps every token, and skipped(j) grows
as held(j) does. A sliding group has live - skipped and held - skipped, and the pool has what its groups have.

How many slots are cached over time, from a log of every change.

A cached slot is in no table and keeps its contents. Blocks are taken by growth in the middle of a
leap, and cached ones among them cease to be so: a change that no row tells. So each is an event, and

    sum over a span = sum of change * (what is left of the span when it happens)

which holds also where no sequence runs, and the cache lies idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum
from operator import mul
from typing import TypeVar

import numpy as np

from ..memory.accounting.buckets import DECLARED
from ..memory.accounting.kv_groups import SLIDING, STATE, PageGroups
from ..types.columns import column_by_slices, column_of, slices
from ..types.errors import SimulationFault
from ..types.sums import dot, total
from ..types.ticks import PER_SECOND
from .growth import Moments, growth_moments, skip_moments
from .moments import first_row_of, iteration_of, ticks_of
from .run_log import RunLog, Tails

#: A bucket summed over a window, or its column.
Sums = TypeVar("Sums", int, np.ndarray)


class CachedSlots:
    """The integrals of the ``cached`` bucket over the log of a run log, or of a part of it.

    Args:
        changes: Columns ``CACHE_CHANGE`` of the part; None for the whole bucket.
    """

    def __init__(self, run_log: RunLog, changes: Mapping[str, np.ndarray] | None = None) -> None:
        self._run_log, changes = run_log, run_log.cache_changes if changes is None else changes
        self._slots, self._moment = changes["slots"], changes["moment"]

    def _parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Slots and moments of some changes at a time: when they were takes several columns."""
        for part in slices(len(self._moment), _CHUNK_CHANGES):
            yield self._slots[part], self._moment[part]

    def over_steps(self, first: int, stop: int) -> int:
        """Cached slots, summed over the iterations from ``first`` to before ``stop``."""
        run_log = self._run_log
        return sum(total(slots * _left(iteration_of(run_log, when), first, stop)) for slots, when in self._parts())

    def over_time(self, start_ticks: int, end_ticks: int) -> int:
        """Cached slots, integrated over a span of time."""
        over = 0
        for slots, moment in self._parts():
            left = _left(ticks_of(self._run_log, moment), start_ticks, end_ticks)
            over += dot(np.maximum(slots, 0), left) - dot(np.maximum(-slots, 0), left)
        return over

    def at_rows(self) -> np.ndarray:
        """Cached slots in the first step of every row, int64 [rows]."""
        rows = len(self._run_log.row_step)
        changes = np.zeros(rows + 1, dtype=np.int64)
        for slots, moment in self._parts():
            np.add.at(changes, np.minimum(first_row_of(self._run_log, moment), rows), slots)
        np.cumsum(changes, out=changes)
        return column_of([changes[:rows]])


def _left(at: np.ndarray, start: int, end: int) -> np.ndarray:
    """What is left of a span from each time on."""
    return np.maximum(end - np.maximum(at, start), 0)


#: Columns of a row that stay as they are through it, but for the growth of the first two.
_LEVELS = (
    "live", "held", "target", "requested", "finished_hold", "stranded", "prefill_tail", "skipped", "skipped_states", "states",
    "shared", "shared_in_windows", "shared_states", "rejected",
)  # fmt: skip
#: Rows that are integrated at a time, to bound what intermediate columns take.
_CHUNK_ROWS = 1 << 15
#: Changes of the cached slots that are dated at a time.
_CHUNK_CHANGES = 1 << 17


def _divided(
    sums: Mapping[str, Sums], tail: Sums, slots: Sums | int, groups: PageGroups, paged: bool, in_block: bool
) -> dict[str, Sums]:
    """Every bucket, from columns, or from what was summed over them.

    Args:
        tail, slots: ``block_tail`` of residencies, and the pool, summed alike.
        in_block: Whether slots past those asked for are ``block_tail``; else they are ``round_up``.
    """
    live, held, target, requested = sums["live"], sums["held"], sums["target"], sums["requested"]
    tail = tail + sums["prefill_tail"]
    # A page of each growing group, less what groups gave back, and what several tables name.
    # Of a state also one for each draft.
    fixed = groups.rings + (0 if groups.states_by_block else groups.states * (1 + groups.drafts))
    state = fixed * sums["states"]
    if groups.states_by_block:
        state = state + groups.states * (held - sums["skipped_states"])
    state = state - sums["shared_states"] * (groups.states > 0)
    number = groups.full + groups.sliding
    twice = groups.sliding * sums["skipped"]
    twice = twice + sums["shared"] * (groups.full > 0) + sums["shared_in_windows"] * (groups.sliding > 0)
    live, held, tail = number * live - twice, number * held - twice, number * tail
    if paged:
        # Nothing is asked for beyond what will be filled: ``reserved`` is what remains of the blocks.
        target = requested = held - tail
    rejected = number * sums["rejected"]
    past = held - tail - requested - sums["finished_hold"]
    return {
        "live": live,
        "reserved": target - live - rejected,
        "over_estimate": requested - target,
        "block_tail": tail + past * in_block,
        "round_up": past * (not in_block),
        "finished_hold": sums["finished_hold"],
        "stranded": sums["stranded"],
        "cached": sums["cached"],
        "free": slots - held - state - sums["stranded"] - sums["cached"],
        "state": state,
        "rejected": rejected,
    }


# A bucket that is declared and not summed would be absent from every result.
if (
    _summed := _divided(dict.fromkeys((*_LEVELS, "cached"), 0), 0, 0, PageGroups(), True, True)
).keys() != DECLARED.keys():
    raise TypeError(f"buckets declared or summed, but not both: {', '.join(sorted(_summed.keys() ^ DECLARED.keys()))}")


@dataclass(frozen=True)
class Window:
    """A span of simulated time, with what was in it.

    Attributes:
        start_ticks, end_ticks: The span.
        num_steps: Steps that start in it.
        batch_steps: Sequences that gain a token, summed over those steps.
        slot_steps: Slots of each bucket, summed over those steps.
        slot_ticks: Slots of each bucket, integrated over the span; in idle time all is free, or cached where the
            memory logs it.
    """

    start_ticks: int
    end_ticks: int
    num_steps: int
    batch_steps: int
    slot_steps: dict[str, int]
    slot_ticks: dict[str, int]

    def share_of_steps(self, bucket: str) -> float:
        """Mean over iterations of the bucket's share of the pool (the paper's mean)."""
        return self.slot_steps[bucket] / max(1, sum(self.slot_steps.values()))

    def share_of_time(self, bucket: str) -> float:
        """The bucket's slots over those of the pool, 0 to 1, each instant of the run counted alike."""
        return self.slot_ticks[bucket] / max(1, sum(self.slot_ticks.values()))

    @property
    def mean_batch(self) -> float:
        """Mean over iterations of the sequences in a step."""
        return self.batch_steps / max(1, self.num_steps)


class Accounts:
    """The integrals of a run log, over any window with edges that the run knew of.

    Args:
        groups: KV groups with slots to count, those of others as free; None counts all.
    """

    def __init__(self, run_log: RunLog, groups: PageGroups | None = None) -> None:
        self.log, self._groups = run_log, groups or run_log.groups
        self._cached = CachedSlots(run_log)
        #: Of each class of groups with blocks of a size of their own: slots of the pool that one of its slots is, and its ledger.
        self.classes = [
            (run_log.block_size // each.block_size, Accounts(run_log.of_class(place)))
            for place, each in enumerate(run_log.groups.classes(run_log.block_size) if run_log.groups.sizes else ())
        ]
        #: Of each of two pools: slots of the ledger that one of its slots is, and its own ledger.
        self.pools = [*zip(run_log.pool_weights, map(Accounts, run_log.pools() or ()), strict=False)]

    def _growth(self) -> dict[str, Moments]:
        """Growth of the columns of rows that grow by blocks, each as ``growth_moments``; most runs need it once."""
        run_log = self.log
        nothing = (np.broadcast_to(0, len(run_log.row_step)),) * 3
        growth = {"held": growth_moments(run_log) if run_log.paged else nothing}
        names = {SLIDING: "skipped", STATE: "skipped_states"}
        for kind, window_tokens in self._groups.windows().items():
            growth[names[kind]] = skip_moments(run_log, window_tokens, self._groups.ahead)
        return growth

    def window(self, start_ticks: int = 0, end_ticks: int | None = None) -> Window:
        """Sums over a span of time.

        Raises:
            SimulationFault: A leap passes an edge, so the run did not stop at this window; or a bucket is below 0.
        """
        run_log, end_ticks = self.log, self.log.end_ticks if end_ticks is None else end_ticks
        if self.classes:
            return self._window_of_classes(start_ticks, end_ticks)
        if self.pools:
            parts = [(weight, each.window(start_ticks, end_ticks)) for weight, each in self.pools]
            twice = run_log.shared_slots
            steps, ticks = (
                _added([(weight, getattr(each, name)) for weight, each in parts], twice * span)
                for name, span in (("slot_steps", parts[0][1].num_steps), ("slot_ticks", end_ticks - start_ticks))
            )
            return replace(parts[0][1], slot_steps=steps, slot_ticks=ticks)
        over_steps: Counter[str] = Counter()
        over_time: Counter[str] = Counter()
        growth = self._growth()
        for part in slices(len(run_log.row_step), _CHUNK_ROWS):
            rows = _Rows(run_log, growth, part, start_ticks, end_ticks)
            over_steps.update(rows.over_steps())
            over_time.update(rows.over_time())
        del growth
        # A step belongs to the window in which it starts.
        first, stop = (int(run_log.first_iteration_from(edge)) for edge in (start_ticks, end_ticks))
        over_steps["cached"] += self._cached.over_steps(first, stop)
        over_time["cached"] += self._cached.over_time(start_ticks, end_ticks)
        tail_steps, tail_ticks = self._tail(first, stop, start_ticks, end_ticks)
        capacity = run_log.capacity_slots
        slot_ticks = self._buckets(over_time, tail_ticks, capacity * over_time["ticks"])
        # Where no step runs all is free or cached, but for what is pinned.
        idle_ticks = end_ticks - start_ticks - over_time["ticks"]
        slot_ticks["free"] += (capacity - run_log.pinned_slots) * idle_ticks
        slot_ticks["live"] += run_log.pinned_slots * idle_ticks
        slot_steps = self._buckets(over_steps, tail_steps, capacity * over_steps["steps"])
        for name, slots in (*slot_steps.items(), *slot_ticks.items()):
            if slots < 0 and self._groups == run_log.groups:
                raise SimulationFault(f"the ledger does not add up: {name} = {slots}, summed over a window")
        return Window(
            start_ticks=start_ticks,
            end_ticks=end_ticks,
            num_steps=over_steps["steps"],
            batch_steps=over_steps["batch"],
            slot_steps=slot_steps,
            slot_ticks=slot_ticks,
        )

    def _window_of_classes(self, start_ticks: int, end_ticks: int) -> Window:
        """``window``, of the ledgers of all classes."""
        parts = [(slots, accounts.window(start_ticks, end_ticks)) for slots, accounts in self.classes]
        one, capacity = parts[0][1], self.log.capacity_slots
        first, stop = (int(self.log.first_iteration_from(edge)) for edge in (start_ticks, end_ticks))
        cached = self._cached.over_steps(first, stop), self._cached.over_time(start_ticks, end_ticks)
        spans = one.num_steps, end_ticks - start_ticks
        steps, ticks = (
            self._of_classes([(slots, getattr(each, name)) for slots, each in parts], kept, capacity * span)
            for name, kept, span in zip(("slot_steps", "slot_ticks"), cached, spans, strict=True)
        )
        for name, slots in (*steps.items(), *ticks.items()):
            if slots < 0:
                raise SimulationFault(f"the ledger does not add up: {name} = {slots}, summed over a window")
        return replace(one, slot_steps=steps, slot_ticks=ticks)

    @staticmethod
    def _of_classes(parts: Iterable[tuple[int, Mapping[str, Sums]]], cached: Sums, slots: int) -> dict[str, Sums]:
        """The buckets of the pool, as columns or sums, from those of each class in its own slots; ``slots`` is the pool."""
        pool: dict[str, Sums] = {}
        for ratio, buckets in parts:
            for name, own in buckets.items():
                if name not in ("cached", "free"):
                    pool[name] = pool[name] + ratio * own if name in pool else ratio * own
        return pool | {"cached": cached, "free": slots - sum(pool.values(), start=cached)}

    def _tail(self, first: int, stop: int, start_ticks: int, end_ticks: int) -> tuple[int, int]:
        """block_tail over the window's steps and time: it comes once a residency and goes with it."""
        over_steps = over_time = 0
        for part in slices(len(self.log.tails.slots)):
            tails = Tails(*(column[part] for column in self.log.tails))
            steps = np.minimum(tails.release_iteration, stop) - np.maximum(tails.start_iteration, first)
            ticks = np.minimum(tails.release_ticks, end_ticks) - np.maximum(tails.start_ticks, start_ticks)
            over_steps += total(tails.slots * np.maximum(steps, 0))
            over_time += dot(tails.slots, np.maximum(ticks, 0))
        return over_steps, over_time

    def _buckets(self, sums: Mapping[str, Sums], tail: Sums, slots: Sums | int) -> dict[str, Sums]:
        """The buckets of the run, as ``_divided``."""
        log, groups = self.log, self.log.groups
        found = _divided(sums, tail, slots, self._groups, log.paged, log.residue == "block_tail")
        absent = {"state": not groups.states and not groups.rings, "rejected": log.drafts is None}
        return {name: slots for name, slots in found.items() if not absent.get(name)}

    def require_conserved(self) -> None:
        """Check that every slot is in exactly one bucket in each row, so that the buckets add up to the pool.

        Where ``free`` is what the others leave, that is so if no bucket is below 0. ``block_tail`` counts as reserved here and
        ``cached`` as free: to tell them apart takes as long as the integrals, which check them where they are computed.

        Raises:
            SimulationFault: Names the first row that fails, and the bucket.
        """
        for _, accounts in (*self.classes, *self.pools):
            accounts.require_conserved()
        if self.pools:
            return
        if self.classes:
            for part in slices(len(self.log.row_step), _CHUNK_ROWS):
                self.at_rows(part)
            return
        run_log, end, nothing = self.log, 0, np.zeros((), dtype=np.int64)
        # A memory fills a few of the levels; the others are one number, broadcast.
        filled = [name for name in _LEVELS if run_log.rows[name].strides != (0,)]
        for part in slices(len(run_log.row_step), _CHUNK_ROWS):
            rows = {name: column[part] for name, column in run_log.rows.items()}
            start, ticks = rows["start_ticks"], rows["ticks"]
            gaps = start[1:] - start[:-1] - ticks[:-1]
            self._require({"steps": rows["steps"], "ticks": ticks, "start_ticks": start[:1] - end}, part.start)
            self._require({"start_ticks": gaps}, part.start + 1)
            end = start[-1] + ticks[-1]
            levels = dict.fromkeys(_LEVELS, nothing) | {name: rows[name] for name in filled}
            # Tails are left out, those of prefills too.
            buckets = self._buckets(levels | {"cached": nothing}, -levels["prefill_tail"], run_log.capacity_slots)
            if not run_log.paged:
                # Reservations stay as they are through a row, and the tokens in them grow.
                grown = rows["growing"] * np.maximum(rows["steps"] - 1, 0)
                buckets["reserved"] = buckets["reserved"] - grown
            self._require(buckets, part.start)

    def _require(self, columns: Mapping[str, np.ndarray | int], first_row: int) -> None:
        """Raise SimulationFault if a column of rows is below 0 anywhere."""
        for name, column in columns.items():
            found = np.atleast_1d(column)
            if found.min(initial=0) < 0:
                place = int(np.argmax(found < 0))
                row = first_row + place
                when = f"decode step {self.log.row_step[row]}, {self.log.rows['start_ticks'][row] / PER_SECOND:.6f} s"
                raise SimulationFault(f"the ledger does not add up: {name} = {found[place]} in {when}")

    def external_fragmentation(self, start_ticks: int = 0, end_ticks: int | None = None) -> tuple[float, float]:
        """The classical index, 1 - longest free run / all that is free, as a mean over the iterations
        and over the time of a window; 0 where nothing is free, and where any free block serves."""
        run_log, rows, end_ticks = self.log, self.log.rows, self.log.end_ticks if end_ticks is None else end_ticks
        if run_log.paged or end_ticks <= start_ticks:
            return 0.0, 0.0
        start, end = rows["start_ticks"], rows["start_ticks"] + rows["ticks"]
        steps = np.where((start >= start_ticks) & (start < end_ticks), rows["iterations"], 0)
        ticks = np.maximum(np.minimum(end, end_ticks) - np.maximum(start, start_ticks), 0)
        free = run_log.capacity_slots - rows["held"]
        # Summed once for each pair of runs, so that leaping and stepping agree in every bit.
        pairs, kind = np.unique(np.stack([rows["largest_free"], free]), axis=1, return_inverse=True)
        index = 1 - pairs[0] / np.maximum(pairs[1], 1)
        index[pairs[1] == 0] = 0
        sums = np.zeros((2, len(index)), dtype=np.int64)
        np.add.at(sums[0], kind.ravel(), steps)
        np.add.at(sums[1], kind.ravel(), ticks)
        over_steps, over_time = (fsum(map(mul, each.tolist(), index.tolist())) for each in sums)
        return over_steps / max(1, int(steps.sum())), over_time / (end_ticks - start_ticks)

    def at_rows(self, part: slice = slice(None)) -> dict[str, np.ndarray]:
        """Each bucket in the first step of every row, or of some rows, int64 [rows]: the ledger over time.

        Raises:
            SimulationFault: A bucket is below 0, so that the others exceed the pool.
        """
        run_log = self.log
        if self.pools:
            found = _added([(weight, each.at_rows(part)) for weight, each in self.pools], run_log.shared_slots)
            self._require(found, part.start or 0)
            return found
        if self.classes:
            parts = [(slots, accounts.at_rows(part)) for slots, accounts in self.classes]
            found = self._of_classes(parts, self._cached_at_rows[part], run_log.capacity_slots)
            self._require(found, part.start or 0)
            return found
        rows = {name: column[part] for name, column in run_log.rows.items()}
        tail = sum(
            sign * _level(changes, run_log.row_iteration[part]) for changes, sign in zip(self._tail_changes, (1, -1))
        )
        # A row that only swaps has the number of the one after it, but no sequence runs in it.
        levels = {**rows, "cached": self._cached_at_rows[part]}
        buckets = self._buckets(levels, np.where(rows["iterations"] == 0, 0, tail), run_log.capacity_slots)
        if self._groups == run_log.groups:
            self._require(buckets, part.start or 0)
        return buckets

    @cached_property
    def _cached_at_rows(self) -> np.ndarray:
        return self._cached.at_rows()

    @cached_property
    def _tail_changes(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """The iterations at which block_tail comes, and at which it goes, ascending, and the slots that came or went
        before each of them and after the last."""
        tails = self.log.tails
        return tuple(_changes(tails, at) for at in (tails.start_iteration, tails.release_iteration))


def _added(parts: Iterable[tuple[int, Mapping[str, Sums]]], twice: int) -> dict[str, Sums]:
    """The buckets of several pools together, from those of each and their weights; ``twice`` is what two of them count as free."""
    found: dict[str, Sums] = {}
    for weight, buckets in parts:
        for name, own in buckets.items():
            found[name] = found[name] + weight * own if name in found else weight * own
    return found | {"free": found["free"] - twice}


def _changes(tails: Tails, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Iterations, ascending, and the slots of the tails before each and of all: of those that come before they go."""
    come, go, every = tails.start_iteration, tails.release_iteration, slices(len(at))
    here = column_of(part.start + np.flatnonzero(come[part] < go[part]) for part in every)
    order = np.argsort(at[here], kind="stable")
    order = here[order]
    iterations = column_by_slices(len(order), lambda part: at[order[part]])
    so_far = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(tails.slots[order], out=so_far[1:])
    return iterations, column_of([so_far])


def _level(changes: tuple[np.ndarray, np.ndarray], iterations: np.ndarray) -> np.ndarray:
    """The slots of all changes up to each iteration."""
    at, so_far = changes
    return so_far[np.searchsorted(at, iterations, side="right")]


def _batch(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Sequences that gain a token in each row's first step."""
    return np.where(rows["steps"] > 0, rows["growing"], rows["batch_size"])


class _Rows:
    """Some rows of the run log as a window sees them: those inside it, and single steps across an edge."""

    def __init__(
        self, run_log: RunLog, growth: Mapping[str, Moments], rows: slice, start_ticks: int, end_ticks: int
    ) -> None:
        columns = {name: column[rows] for name, column in run_log.rows.items()}
        start, end = columns["start_ticks"], columns["start_ticks"] + columns["ticks"]
        inside = (start >= start_ticks) & (end <= end_ticks)
        across = ~inside & (end > start_ticks) & (start < end_ticks)
        if (columns["iterations"][across] > 1).any():
            raise SimulationFault("a leap passes the edge of a measurement window")
        self._size = run_log.block_size
        # A copy only where some rows are left out.
        chosen = slice(None) if inside.all() else inside
        self._inside = {name: column[chosen] for name, column in columns.items()}
        self._growth = {name: [moment[rows][chosen] for moment in moments] for name, moments in growth.items()}
        # A step across an edge counts where it starts, and its time on either side.
        self._starting = {name: column[across & (start >= start_ticks)] for name, column in columns.items()}
        self._across = {name: column[across] for name, column in columns.items()}
        self._overlap = (np.minimum(end, end_ticks) - np.maximum(start, start_ticks))[across]
        # A memory fills a few of the levels.
        self._levels = [name for name in _LEVELS if columns[name].any()]

    def over_steps(self) -> dict[str, int]:
        """Sums over the steps that start in the window."""
        inside, single = self._inside, self._starting
        steps, growing = inside["steps"], inside["growing"]
        sums = dict.fromkeys(_LEVELS, 0) | {
            name: total(inside[name] * inside["iterations"]) + total(single[name] * single["iterations"])
            for name in self._levels
        }
        sums["steps"] = total(inside["iterations"]) + total(single["iterations"])
        sums["batch"] = total(_batch(inside) * inside["iterations"]) + total(_batch(single) * single["iterations"])
        sums["live"] += total(growing * (steps * (steps - 1) // 2))
        for name, (taken, once, _) in self._growth.items():
            sums[name] += self._size * total(taken * steps - once)
        return sums

    def over_time(self) -> dict[str, int]:
        """Integrals over the time that steps take in the window."""
        inside, across = self._inside, self._across
        sums = dict.fromkeys(_LEVELS, 0) | {
            name: dot(inside[name], inside["ticks"]) + dot(across[name], self._overlap) for name in self._levels
        }
        sums["ticks"] = total(inside["ticks"]) + total(self._overlap)
        sums["live"] += self._live_growth()
        for name, moments in self._growth.items():
            sums[name] += self._size * self._block_growth(*moments)
        return sums

    def _live_growth(self) -> int:
        """Every sequence gains a slot a step: growing * sum of j * d(j)."""
        steps, growing = self._inside["steps"], self._inside["growing"]
        linear = growing * (steps * (steps - 1) // 2)
        square = growing * (steps * (steps - 1) * (steps - 2) // 3)
        return dot(linear, self._inside["next_ticks"]) + dot(square, self._inside["slope_ticks"])

    def _block_growth(self, taken: np.ndarray, once: np.ndarray, twice: np.ndarray) -> int:
        """A block taken (or given back) in step i is held (or is not) from D(i) to the end of the row."""
        inside = self._inside
        linear, square = once - taken, (twice - 3 * once + 2 * taken) // 2
        whole = dot(taken, inside["ticks"] - inside["first_ticks"])
        return whole - dot(linear, inside["next_ticks"]) - dot(square, inside["slope_ticks"])
