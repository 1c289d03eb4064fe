"""What the ledger says: exact sums of every bucket over steps and over time.

Every slot of the pool is in exactly one bucket (semantics: first match wins)

    live            holds a computed token, or the one computed in this step
    reserved        empty, and will be filled
    over_estimate   reserved for an output that never comes
    block_tail      past the end of the sequence in its last block
    round_up        past what was asked of a contiguous allocator
    finished_hold   padding, and slots of ended sequences whose static batch goes on
    stranded        free, in a chunk too small for the queue's head that memory blocks
    cached          reclaimable with its contents kept
    free            free

A row of the book says where the buckets stand in its first step; in step j of it

    live(j) = live + growing * j                    held(j) = held + block_size * (blocks taken in 1..j)
    d(0) = first     d(j) = next + slope * (j - 1)  D(j) = d(0) + ... + d(j - 1)

and the sums of live(j), held(j), live(j)*d(j), held(j)*d(j) over the row have closed forms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import SimulationFault
from .book import Book
from .exact import by_limbs, total
from .growth import growth_moments

BUCKETS = (
    "live", "reserved", "over_estimate", "block_tail", "round_up", "finished_hold", "stranded", "cached", "free",
)  # fmt: skip


@dataclass(frozen=True)
class Window:
    """A span of simulated time, with what was in it.

    Attributes:
        start_ticks, end_ticks: The span.
        num_steps: Steps that start in it.
        batch_steps: Sequences that gain a token, summed over those steps.
        slot_steps: Slots of each bucket, summed over those steps.
        slot_ticks: Slots of each bucket, integrated over the span; idle time counts as free.
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
        """Mean over time of the bucket's share of the pool."""
        return self.slot_ticks[bucket] / max(1, sum(self.slot_ticks.values()))

    @property
    def mean_batch(self) -> float:
        """Mean over iterations of the sequences in a step."""
        return self.batch_steps / max(1, self.num_steps)


class Accounts:
    """The integrals of a book, over any window whose edges the run knew of."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._taken, self._once, self._twice = growth_moments(book) if book.paged else _zeros(len(book.row_clock))

    def window(self, start_ticks: int = 0, end_ticks: int | None = None) -> Window:
        """Sums over a span of time.

        Raises:
            SimulationFault: A leap passes an edge, so the run was not told of this window.
        """
        book, end_ticks = self.book, self.book.end_ticks if end_ticks is None else end_ticks
        start, end = book.rows["start_ticks"], book.rows["start_ticks"] + book.rows["ticks"]
        inside = (start >= start_ticks) & (end <= end_ticks)
        across = ~inside & (end > start_ticks) & (start < end_ticks)
        if (book.rows["steps"][across] > 1).any():
            raise SimulationFault("a leap passes the edge of a measurement window")
        counted = inside | (across & (start >= start_ticks))
        overlap = np.minimum(end, end_ticks) - np.maximum(start, start_ticks)
        tail_steps, tail_ticks = self._tail(start_ticks, end_ticks, counted)
        slot_ticks = self._over_time(inside, across, overlap[across], tail_ticks)
        capacity_ticks = book.capacity_slots * (end_ticks - start_ticks)
        # Where no step runs all is free.
        slot_ticks["free"] += capacity_ticks - sum(slot_ticks.values())
        return Window(
            start_ticks=start_ticks,
            end_ticks=end_ticks,
            num_steps=total(book.rows["steps"][counted]),
            batch_steps=total((book.rows["growing"] * book.rows["steps"])[counted]),
            slot_steps=self._over_steps(counted, tail_steps),
            slot_ticks=slot_ticks,
        )

    def _over_steps(self, rows: np.ndarray, tail: int) -> dict[str, int]:
        """Each bucket summed over the steps of ``rows``."""
        pick = {name: column[rows] for name, column in self.book.rows.items()}
        steps = pick["steps"]
        live = total(pick["live"] * steps + pick["growing"] * (steps * (steps - 1) // 2))
        late = self._taken[rows] * steps - self._once[rows]
        held = total(pick["held"] * steps) + self.book.block_size * total(late)
        sums = {name: total(pick[name] * steps) for name in ("target", "asked", "finished_hold", "stranded")}
        return self._buckets(live, held, tail, self.book.capacity_slots * total(steps), sums)

    def _over_time(self, rows: np.ndarray, across: np.ndarray, overlap: np.ndarray, tail: int) -> dict[str, int]:
        """Each bucket integrated over ``rows``, and over the part of those that cross an edge."""
        pick = {name: column[rows] for name, column in self.book.rows.items()}
        part = {name: column[across] for name, column in self.book.rows.items()}
        constant = ("target", "asked", "finished_hold", "stranded")
        live = self._live_ticks(pick) + by_limbs(lambda d: part["live"] * d, overlap)
        held = self._held_ticks(pick, rows) + by_limbs(lambda d: part["held"] * d, overlap)
        sums = {
            name: by_limbs(lambda d, name=name: pick[name] * d, pick["ticks"])
            + by_limbs(lambda d, name=name: part[name] * d, overlap)
            for name in constant
        }
        ticks = total(pick["ticks"]) + total(overlap)
        return self._buckets(live, held, tail, self.book.capacity_slots * ticks, sums)

    @staticmethod
    def _live_ticks(pick: dict[str, np.ndarray]) -> int:
        steps, growing, live = pick["steps"], pick["growing"], pick["live"]
        linear = growing * (steps * (steps - 1) // 2)
        square = growing * (steps * (steps - 1) * (steps - 2) // 3)
        return by_limbs(
            lambda ticks, second, slope: live * ticks + second * linear + slope * square,
            pick["ticks"], pick["next_ticks"], pick["slope_ticks"],
        )  # fmt: skip

    def _held_ticks(self, pick: dict[str, np.ndarray], rows: np.ndarray) -> int:
        """A block taken in step i is held from D(i) to the end of the row."""
        taken, once, twice = self._taken[rows], self._once[rows], self._twice[rows]
        held, size = pick["held"], self.book.block_size
        linear, square = once - taken, (twice - 3 * once + 2 * taken) // 2
        return by_limbs(lambda ticks: held * ticks, pick["ticks"]) + size * by_limbs(
            lambda ticks, first, second, slope: taken * (ticks - first) - second * linear - slope * square,
            pick["ticks"], pick["first_ticks"], pick["next_ticks"], pick["slope_ticks"],
        )  # fmt: skip

    def _tail(self, start_ticks: int, end_ticks: int, counted: np.ndarray) -> tuple[int, int]:
        """block_tail over the window's steps and time: it comes once a stay and goes with it."""
        book = self.book
        there = np.flatnonzero((book.tail_slots > 0) & (book.tail_clock < book.stay_end))
        if not len(there) or not counted.any():
            return 0, 0
        slots, come, go = book.tail_slots[there], book.tail_clock[there], book.stay_end[there]
        rows = np.flatnonzero(counted)
        low = book.row_clock[rows[0]]
        high = book.row_clock[rows[-1]] + book.rows["steps"][rows[-1]]
        steps = np.maximum(np.minimum(go, high) - np.maximum(come, low), 0)
        since = np.maximum(book.start_of(come), start_ticks)
        ticks = np.maximum(np.minimum(book.end_of(go), end_ticks) - since, 0)
        return total(slots * steps), by_limbs(lambda d: slots * d, ticks)

    def _buckets(self, live: int, held: int, tail: int, capacity: int, sums: dict[str, int]) -> dict[str, int]:
        """The nine buckets from what was summed; ``reserved`` is what remains of a paged pool's blocks."""
        if self.book.paged:
            sums = {"target": held - tail, "asked": held - tail, "finished_hold": 0, "stranded": 0}
        return {
            "live": live,
            "reserved": sums["target"] - live,
            "over_estimate": sums["asked"] - sums["target"],
            "block_tail": tail,
            "round_up": held - tail - sums["asked"] - sums["finished_hold"],
            "finished_hold": sums["finished_hold"],
            "stranded": sums["stranded"],
            "cached": 0,
            "free": capacity - held - sums["stranded"],
        }

    def at_rows(self) -> dict[str, np.ndarray]:
        """Each bucket in the first step of every row, int64 [rows]: the ledger over time."""
        book, rows = self.book, self.book.rows
        tail = _level(book.row_clock, book.tail_clock, book.stay_end, book.tail_slots)
        # A row without steps has the clock of the one after it, but nobody runs in it.
        tail[rows["steps"] == 0] = 0
        if book.paged:
            target = asked = rows["held"] - tail
        else:
            target, asked = rows["target"], rows["asked"]
        return {
            "live": rows["live"],
            "reserved": target - rows["live"],
            "over_estimate": asked - target,
            "block_tail": tail,
            "round_up": rows["held"] - tail - asked - rows["finished_hold"],
            "finished_hold": rows["finished_hold"],
            "stranded": rows["stranded"],
            "cached": np.zeros_like(tail),
            "free": book.capacity_slots - rows["held"] - rows["stranded"],
        }


def _level(clocks: np.ndarray, come: np.ndarray, go: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Sum of the amounts that have come and not gone by each clock."""
    here = come < go
    level = np.zeros(len(clocks), dtype=np.int64)
    for at, sign in ((come, 1), (go, -1)):
        order = np.argsort(at[here], kind="stable")
        running = np.concatenate([[0], np.cumsum(amount[here][order])])
        level += sign * running[np.searchsorted(at[here][order], clocks, side="right")]
    return level


def _zeros(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    nothing = np.zeros(rows, dtype=np.int64)
    return nothing, nothing, nothing
