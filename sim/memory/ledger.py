"""The ledger's book: one row a leap, one a stay, written once and integrated afterwards.

A leap is a span of steps over which nobody comes or goes. Within it every bucket is a polynomial
in the step, or jumps in steps that the row tells, so a row of integers is all that has to be kept
while the simulation runs; ``integrals`` turns rows into exact sums over steps and over time.
"""

from __future__ import annotations

from struct import Struct

import numpy as np

from ..sequence import Plan
from ..state import State

#: Columns of a row, all int64.
ROW = (
    "start_ticks",  # when its first step starts
    "steps",  # how many steps
    "ticks",  # how long they take together
    "first_ticks",  # duration of the first step, which may prefill and swap
    "next_ticks",  # duration of the second step: one that only decodes
    "slope_ticks",  # by how much each later step is longer than the one before
    "width",  # sequences that a step computes, ended ones of a static batch included
    "decodes",  # those that decode in the first step; in later ones all do
    "prefill_tokens",  # tokens prefilled in the first step, padding included
    "swap_ticks",  # part of the first step that moves blocks to or from the host
    "waiting",  # requests in the queue after the step's admissions
    "growing",  # sequences that gain a token a step
    "live",  # slots with tokens, in the first step
    "held",  # slots held, in the first step
    "target",  # contiguous: sum of F over the sequences that grow
    "asked",  # contiguous: sum of R over them
    "finished_hold",  # contiguous: padding, and all that ended sequences hold
    "stranded",  # contiguous: free slots in pieces too small for the head
    "largest_free",  # contiguous: slots of the longest run of free blocks
)
#: Columns of a stay: a sequence on the device from an admission (or swap-in) on.
STAY = ("index", "start_clock", "tokens", "generated_tokens", "kind")
#: Columns of a cut: a stay that ended before its sequence did.
CUT = ("stay", "clock", "swapped")

#: A span of steps over which nobody comes or goes: the columns of ``ROW`` up to ``waiting``. A bare
#: tuple, as one is made for every event.
Leap = tuple[int, ...]
#: What a memory says of the leap: the other columns.
Meter = tuple[int, ...]
#: Bytes after which a table's records are turned into columns.
_SEAL_BYTES = 1 << 22


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
        if len(self._records) >= _SEAL_BYTES:
            self._seal()

    def _seal(self) -> None:
        records = np.frombuffer(self._records, dtype="<i8").reshape(-1, len(self.fields))
        self._sealed.append(np.ascontiguousarray(records.T))
        self._records = bytearray()

    def columns(self) -> dict[str, np.ndarray]:
        """All records as an int64 column a field."""
        self._seal()
        return {
            name: np.concatenate([part[place] for part in self._sealed]) for place, name in enumerate(self.fields)
        }


class Ledger:
    """Append-only book of one replica's run: its rows, stays and cuts."""

    def __init__(self) -> None:
        self.rows, self.stays, self.cuts = Table(ROW), Table(STAY), Table(CUT)
        #: Enter a leap that is over: its columns, and those that the memory's meter says.
        self.close = self.rows.append
        self._num_stays = 0

    def open(self, plan: Plan, state: State) -> None:
        """Enter the comings and goings of a plan that the state has begun."""
        admitted, _, preempted, swapped_out, swapped_in, _, _, _, _ = plan
        for sequence in swapped_in + admitted:
            self.stays.append(
                (sequence.index, sequence.start_clock, sequence.start_tokens, sequence.generated_tokens, sequence.kind)
            )
            sequence.stay = self._num_stays
            self._num_stays += 1
        for sequence in preempted:
            self.cuts.append((sequence.stay, state.clock, 0))
        for sequence in swapped_out:
            self.cuts.append((sequence.stay, state.clock, 1))
