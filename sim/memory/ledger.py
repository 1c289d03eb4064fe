"""The ledger's book: one row a leap, one a stay, written once and integrated afterwards.

A leap is a span of steps over which nobody comes or goes. Within it every bucket is a polynomial
in the step, or jumps in steps that the row tells, so a row of integers is all that has to be kept
while the simulation runs; ``integrals`` turns rows into exact sums over steps and over time.
"""

from __future__ import annotations

from struct import Struct

import numpy as np

from ..sequence import Sequence

#: Columns of a row that the engine fills, all int64.
LEAP = (
    "start_ticks",  # when its first step starts
    "steps",  # how many steps
    "first_ticks",  # duration of the first step, which may prefill and swap
    "next_ticks",  # duration of the second step: one that only decodes
    "slope_ticks",  # by how much each later step is longer than the one before
    "width",  # sequences that a step computes, ended ones of a static batch included
    "prefill_tokens",  # tokens prefilled in the first step, padding included
    "swap_ticks",  # part of the first step that moves blocks to or from the host
    "waiting",  # requests in the queue after the step's admissions
)
#: Columns that a memory fills: paged memory the first two, contiguous memory all.
METER = (
    "live",  # slots with tokens, in the first step
    "held",  # slots held, in the first step
    "growing",  # sequences that gain a token a step
    "target",  # sum of F over the sequences that grow
    "asked",  # sum of R over them
    "finished_hold",  # padding, and all that ended sequences hold
    "stranded",  # free slots in pieces too small for the head
    "largest_free",  # slots of the longest run of free blocks
)
#: Columns that follow from the others.
DERIVED = (
    "ticks",  # how long the steps take together
    "decodes",  # sequences that decode in the first step; in later ones all do
)
#: Columns of a stay: a sequence on the device from an admission (or swap-in) on.
STAY = ("index", "start_clock", "tokens", "generated_tokens", "kind")
#: Columns of a cut: a stay that ended before its sequence did.
CUT = ("index", "start_clock", "clock", "swapped")

#: A span of steps over which nobody comes or goes: the columns of ``LEAP``. A bare tuple, as one is
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
        self._sealed: list[np.ndarray] = []

    def append(self, record: tuple[int, ...]) -> None:
        """Add a record of all fields."""
        self._records += self._pack(*record)

    def seal(self) -> None:
        """Turn what has gathered into columns, which take less room than a buffer that grows."""
        records = np.frombuffer(self._records, dtype="<i8").reshape(-1, len(self.fields))
        self._sealed.append(np.ascontiguousarray(records.T))
        self._records = bytearray()

    def columns(self) -> dict[str, np.ndarray]:
        """All records as an int64 column a field."""
        self.seal()
        return {
            name: np.concatenate([part[place] for part in self._sealed]) for place, name in enumerate(self.fields)
        }


class Ledger:
    """Append-only book of one replica's run: its rows, stays and cuts.

    Args:
        meter: Columns that the memory fills, of ``METER``.
    """

    def __init__(self, meter: tuple[str, ...]) -> None:
        self.rows, self.stays, self.cuts = Table(LEAP + meter), Table(STAY), Table(CUT)
        #: Enter a leap that is over: the engine's columns and the memory's.
        self.enter = self.rows.append

    def open(self, sequence: Sequence, clock: int) -> None:
        """A sequence is on the device from step ``clock`` on."""
        self.stays.append(
            (sequence.index, clock, sequence.start_tokens, sequence.generated_tokens, sequence.kind)
        )

        if not sequence.index % _SEAL_REQUESTS:
            self.rows.seal()
            self.stays.seal()

    def cut(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], clock: int) -> None:
        """Sequences leave the device before step ``clock`` and have to come back."""
        for sequence in preempted:
            self.cuts.append((sequence.index, sequence.start_clock, clock, 0))
        for sequence in swapped_out:
            self.cuts.append((sequence.index, sequence.start_clock, clock, 1))
