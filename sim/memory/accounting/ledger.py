"""The ledger's run log: one row a leap, one a residency, written once and integrated afterwards.

A leap is a span of steps without an admission, a preemption or a finish. Within it every bucket is a polynomial
in the step, or jumps in steps that the row tells, so a row of integers is all that has to be kept
while the simulation runs; ``integrals`` turns rows into exact sums over steps and over time.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...types.columns import Records
from ...types.sequence import Sequence
from .kv_groups import SLIDING, STATE

if TYPE_CHECKING:
    from .cache_log import CacheLog

#: Columns of a row that the engine fills, all int64.
LEAP = (
    "start_ticks",  # when its first step starts
    "steps",  # how many steps
    "first_ticks",  # duration of the first step, which may prefill and swap
    "next_ticks",  # duration of the second step: one that only decodes
    "slope_ticks",  # by how much each later step is longer than the one before
    "batch_size",  # sequences that a step computes, ended ones of a static batch included
    "prefill_tokens",  # tokens prefilled in the first step, padding included
    "swap_ticks",  # part of the first step that moves blocks: to the host, from it, or copies on the device
    "waiting",  # requests in the queue after the step's admissions
)
#: Columns that a memory fills: paged memory the first two, contiguous memory all.
METER = (
    "live",  # slots with tokens, in the first step
    "held",  # slots held, in the first step
    "growing",  # sequences that gain a token a step
    "target",  # sum of F over the sequences that grow
    "requested",  # sum of R over them
    "finished_hold",  # padding, and all that ended sequences hold
    "stranded",  # free slots in pieces too small for the head
    "largest_free",  # slots of the longest run of free blocks
    "prefill_tail",  # block_tail of sequences in a chunked prefill, less what residencies count of one block twice
    "skipped",  # slots of the blocks that each sliding group has given back
    "skipped_states",  # the same, of each state group that keeps states at ends of blocks
    "states",  # slots of the pages of each group, of states or a ring, that has one page a sequence
    "shared",  # slots of the full groups that tables name again, after a first table
    "shared_in_windows",  # the same, of the sliding groups
    "shared_states",  # the same, of the state groups
    "saved",  # slots that tables name again, after a first table or a pin
    "rejected",  # slots that a step writes for drafts that no output keeps
)
#: A column of runs with batches in flight: from the end of a row, when the next batch begins, until its tokens are out.
FLIGHT = "flight_ticks"


def of_class(name: str, place: int) -> str:
    """The name of a column of ``METER`` for one class of KV groups, in slots of its own blocks, where these have several sizes."""
    return f"{name}.{place}"


class SecondPool(NamedTuple):
    """A pool of some layers beside that of the others. What is held of it does not change within a row.

    Attributes:
        kind: What it has: windows (``SLIDING``), or states (``STATE``), one a slot.
        capacity_slots: Its slots.
        cached_level: Changes of its cached slots.
        slot_bytes: Bytes of a slot of the first pool, and of this one.
        shared_bytes: Bytes of one buffer that both share, each of which has the slots of all of it; 0 where each has its own.
    """

    kind: str
    capacity_slots: int
    cached_level: CacheLog
    slot_bytes: tuple[int, int]
    shared_bytes: int = 0


#: What a memory with a second pool fills of it, by its kind: of windows as of KV groups of class 1.
SECOND_METER = {SLIDING: (of_class("live", 1), of_class("held", 1)), STATE: ("states",)}
#: Columns that follow from the others.
DERIVED = (
    "ticks",  # how long the steps take together
    "decodes",  # sequences that decode in the first step; in later ones all do
    "iterations",  # as ``steps``, and one where the running ones pause for a prefill
)
#: Columns of a residency: a sequence on the device from an admission (or swap-in) on.
RESIDENCY = ("index", "start_step", "start_ticks", "tokens", "generated_tokens", "kind", "recomputed_tokens")
#: Columns of an eviction: a sequence that loses its place on the device before its output is known to be complete.
EVICTION = ("index", "start_step", "decode_step", "ticks", "swapped")
#: What ``swapped`` says of an eviction: the sequence is recomputed, comes back from the host, stands still, or does not come
#: back, as the step that ran when it was preempted computed its last token (asynchronous scheduling). All but ``STALLED``
#: are preemptions, as vLLM counts them.
RECOMPUTE, SWAP, STALLED, COMPLETE = range(4)
#: Columns of a chunk: part of a prefill that goes on after its step.
CHUNK = ("index", "start_ticks", "tokens", "recomputed_tokens")
#: Columns of the copies on the device that are made in one step.
COPY = ("start_ticks", "slots", "ticks")
#: Columns of a change of the swap space.
HOST = ("ticks", "held_blocks")
#: Columns of a change of the cached slots: when (``moments``), and how many came (went, below 0).
CACHE_CHANGE = ("moment", "slots")

#: Columns of the drafts of a sequence in a step: how many were accepted, and how many of these are tokens of its output.
DRAFT = ("index", "decode_step", "drafts", "accepted", "kept")

#: A span of steps with the same running sequences: the columns of ``LEAP``. A bare tuple, as one is
#: made for every event.
Leap = tuple[int, ...]
#: What a memory says of the leap: the first columns of ``METER``.
Meter = tuple[int, ...]
#: Requests between two times that records are turned into columns.
_SEAL_REQUESTS = 1 << 15


class Table:
    """Records of int64 fields, appended one by one and read as columns."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.fields = fields
        self._pack = Struct(f"<{len(fields)}q").pack
        self._records = bytearray()
        self._sealed = Records(len(fields))

    def append(self, record: tuple[int, ...]) -> None:
        """Add a record of all fields."""
        self._records += self._pack(*record)

    def seal(self) -> None:
        """Turn what has gathered into columns, which take less room than a buffer that grows."""
        if self._records:
            self._sealed.extend(np.frombuffer(self._records, dtype="<i8").reshape(-1, len(self.fields)))
            self._records = bytearray()

    def extend(self, records: np.ndarray) -> None:
        """Add copies of records, int64 [n, fields], after those added so far."""
        self.seal()
        self._sealed.extend(records)

    def columns(self) -> dict[str, np.ndarray]:
        """All records as an int64 column a field; to be read only."""
        self.seal()
        return dict(zip(self.fields, self._sealed.arrays(), strict=True))

    def parts(self) -> Iterator[dict[str, np.ndarray]]:
        """``columns`` in parts, without a copy of what is in memory."""
        self.seal()
        return (dict(zip(self.fields, part, strict=True)) for part in self._sealed.parts())

    def last(self, field: str) -> int | None:
        """The value of a field in the last record; None without records."""
        self.seal()
        return self._sealed.last(self.fields.index(field))


class Ledger:
    """Append-only run log of one replica's run: its rows, residencies and evictions.

    Args:
        meter: Columns that the memory fills, of ``METER``.
        compiled: The compiled core (``engine._core``) if it serves the run, and then computes what follows from the log; or None.
    """

    #: What keeps the records.
    table_of = Table

    def __init__(self, meter: tuple[str, ...], compiled: ModuleType | None = None) -> None:
        table, self.compiled = self.table_of, compiled
        self.rows, self.residencies, self.evictions = table(LEAP + meter), table(RESIDENCY), table(EVICTION)
        self.chunks, self.copies, self.host = table(CHUNK), table(COPY), table(HOST)
        #: Enter a leap that is over: the engine's columns and the memory's.
        self.enter = self.rows.append

    def open(self, sequence: Sequence, decode_step: int, now: int) -> None:
        """A sequence has its first (or next) token after the step that starts ``now``, ``decode_step``."""
        recomputed = sequence.lost_tokens and max(0, sequence.lost_tokens - sequence.computed_tokens)
        self.residencies.append(
            (
                sequence.index,
                decode_step,
                now,
                sequence.start_tokens,
                sequence.generated_tokens,
                sequence.kind,
                recomputed,
            )
        )
        if not sequence.index % _SEAL_REQUESTS:
            self.rows.seal()
            self.residencies.seal()

    def chunk(self, sequence: Sequence, tokens: int, now: int) -> None:
        """A prefill goes on after the step that starts ``now`` and computes ``tokens`` of it."""
        recomputed = min(max(0, sequence.lost_tokens - sequence.computed_tokens), tokens)
        self.chunks.append((sequence.index, now, tokens, recomputed))

    def copy(self, slots: int, ticks: int, now: int) -> None:
        """The step that starts ``now`` begins with copies of so many slots."""
        self.copies.append((now, slots, ticks))

    def swap(self, held_blocks: int, now: int) -> None:
        """So many blocks of the swap space are held from ``now`` on."""
        self.host.append((now, held_blocks))

    def stall(self, sequence: Sequence, decode_step: int, now: int) -> None:
        """A sequence computes nothing from ``decode_step`` on, and keeps its blocks."""
        self.evictions.append((sequence.index, sequence.start_step, decode_step, now, STALLED))

    def evict(self, sequence: Sequence, swapped: int, decode_step: int, now: int) -> None:
        """A sequence is preempted ``now``, before ``decode_step``.

        Args:
            swapped: ``RECOMPUTE``, ``SWAP`` or ``COMPLETE``.
        """
        self.evictions.append((sequence.index, sequence.start_step, decode_step, now, swapped))
