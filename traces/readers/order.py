"""Rows of a file in order of time: a log that is written when requests end is not in the order in which they arrive."""

from __future__ import annotations

import numpy as np

from ...sim.types.ticks import PER_SECOND
from ...sim.workload.content import NO_SESSION
from ..parsing.checks import Arrays
from ..parsing.form import SESSION

#: Maximum time between two requests of a file that is sorted, in seconds: above it a time is likely mistyped.
MOST_APART_S = 7 * 86_400
#: Columns with several values per row, as many as ``pieces`` has.
_PIECES = ("ids", "tokens")


def moved_rows(columns: Arrays) -> np.ndarray:
    """bool [n]: rows that arrive before a row above them."""
    if "arrival_ticks" not in columns:
        return np.zeros(len(columns["prompt_tokens"]), dtype=bool)
    arrivals = columns["arrival_ticks"]
    return arrivals < np.maximum.accumulate(arrivals)


def widest_gap_s(arrivals: np.ndarray) -> float:
    """The longest time between two consecutive arrivals, in seconds."""
    return float(np.diff(np.sort(arrivals)).max(initial=0)) / PER_SECOND


def reordered(columns: Arrays, order: np.ndarray) -> Arrays:
    """The columns with their rows in ``order`` (int64 [n]), as if the file had them so: arrivals begin at 0."""
    found = {field: column[order] for field, column in columns.items() if field not in _PIECES}
    found["arrival_ticks"] = found["arrival_ticks"] - found["arrival_ticks"][0]
    if SESSION in found:
        found[SESSION] = _numbered(found[SESSION])
    if "pieces" in found:
        places = _places(columns["pieces"], order)
        found |= {field: columns[field][places] for field in _PIECES}
    return found


def _places(pieces: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Indices of the values of all rows, concatenated in ``order``."""
    starts, counts = (np.cumsum(pieces) - pieces)[order], pieces[order]
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])


def _numbered(sessions: np.ndarray) -> np.ndarray:
    """Sessions numbered from 1 in order of their first row."""
    named = sessions != NO_SESSION
    numbers = np.full(len(sessions), NO_SESSION)
    found, first, place = np.unique(sessions[named], return_index=True, return_inverse=True)
    rank = np.empty(len(found), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(1, len(found) + 1)
    numbers[named] = rank[place]
    return numbers
