"""The ledger's book: one row a leap, one a stay, written once and integrated afterwards.

A leap is a span of steps over which nobody comes or goes. Within it every bucket is a polynomial
in the step, or jumps in steps that the row tells, so a row of integers is all that has to be kept
while the simulation runs; ``integrals`` turns rows into exact sums over steps and over time.
"""

from __future__ import annotations

from struct import Struct
from typing import Protocol

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
)
#: Columns of a stay: a sequence on the device from an admission (or swap-in) on.
STAY = ("index", "start_clock", "tokens", "generated_tokens", "kind")
#: Kinds of stay: a first prefill, one that computes again what was lost, a return from the host.
FRESH, RECOMPUTED, SWAPPED_IN = 0, 1, 2
#: Columns of a cut: a stay that ended before its sequence did.
CUT = ("stay", "clock", "swapped")

_pack_row = Struct(f"<{len(ROW)}q").pack
_pack_stay = Struct(f"<{len(STAY)}q").pack
_pack_cut = Struct(f"<{len(CUT)}q").pack


#: A span of steps over which nobody comes or goes: the columns of ``ROW`` from ``steps`` to
#: ``swap_ticks``. A bare tuple, as one is made for every event.
Leap = tuple[int, int, int, int, int, int, int, int, int]


class Meter(Protocol):
    """What the ledger reads off a memory at a row's end."""

    def pass_steps(self, state: State, steps: int) -> tuple[int, int, int, int, int, int, int]:
        """Sequences that grow, live slots, held slots, and the four columns of its kind."""


class Ledger:
    """Append-only book of one replica's run."""

    def __init__(self) -> None:
        self._rows, self._stays, self._cuts = bytearray(), bytearray(), bytearray()
        self._num_stays = 0

    def open(self, plan: Plan, state: State) -> None:
        """Enter the comings and goings of a plan that the state has begun."""
        for sequence in plan.admitted:
            kind = RECOMPUTED if sequence.generated_tokens else FRESH
            self._open_stay(sequence, sequence.prefill_tokens, kind)
        for sequence in plan.swapped_in:
            self._open_stay(sequence, sequence.prefill_tokens + 1, SWAPPED_IN)
        for sequence in plan.preempted:
            self._cuts += _pack_cut(sequence.stay, state.clock, 0)
        for sequence in plan.swapped_out:
            self._cuts += _pack_cut(sequence.stay, state.clock, 1)

    def _open_stay(self, sequence, tokens: int, kind: int) -> None:
        self._stays += _pack_stay(sequence.index, sequence.start_clock, tokens, sequence.generated_tokens, kind)
        sequence.stay = self._num_stays
        self._num_stays += 1

    def close(self, start_ticks: int, leap: Leap, waiting: int, meter: tuple[int, ...]) -> None:
        """Enter a leap that is over, with the length of the queue and what the memory's meter reads."""
        self._rows += _pack_row(start_ticks, *leap, waiting, *meter)

    def rows(self) -> np.ndarray:
        """The leaps as an int64 array [leaps, len(ROW)]."""
        return np.frombuffer(self._rows, dtype="<i8").reshape(-1, len(ROW))

    def stays(self) -> np.ndarray:
        """The stays as an int64 array [stays, len(STAY)]."""
        return np.frombuffer(self._stays, dtype="<i8").reshape(-1, len(STAY))

    def cuts(self) -> np.ndarray:
        """The stays cut short as an int64 array [cuts, len(CUT)]."""
        return np.frombuffer(self._cuts, dtype="<i8").reshape(-1, len(CUT))
