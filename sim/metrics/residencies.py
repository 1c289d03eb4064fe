"""Residencies of sequences on the device, how each one ended, and preemptions."""

from __future__ import annotations

import numpy as np

from ..memory.accounting.ledger import STALLED
from ..output import frames as pd
from ..runs.run import Run
from ..runs.run_log import RunLog
from ..types.once import once
from .requests import preemptions

#: How a residency ended, by what the ledger's evictions say, and after them that the output was complete.
ENDS = ("preempted", "swapped", "stalled", "finished")
#: How a residency began, by the ledger's kinds.
BEGINS = ("prefilled", "recomputed", "resumed", "forked")
#: What a preemption does with a request's KV, as the summary calls it.
KINDS = ("recompute", "swap")
#: The names that a column of a table has, by the column.
NAMES = {"begun": BEGINS, "ended": ENDS, "kind": KINDS}
_NEVER = np.iinfo(np.int64).max


def residencies_table(run: Run, part: slice = slice(None)) -> pd.DataFrame:
    """A row per residency, in order of time, or for some of them; times in ticks.

    Columns: ``request`` and ``sequence`` (rows of the workload and of its ``sequences``); ``start_ticks`` (start of the
    step that computes the first tokens of its prompt, or that decodes again), ``first_token_ticks``, ``end_ticks``;
    ``begun``, one of ``BEGINS`` (resumed: returned from the host, or was stalled); and ``ended``, one of ``ENDS``
    (preempted: is recomputed; swapped: returns from the host; stalled: kept its blocks, at least at first).
    """
    return with_names(residencies_columns(run, part))


def residencies_columns(run: Run, part: slice = slice(None)) -> dict[str, np.ndarray]:
    """The columns of ``residencies_table``, with the places of names in ``NAMES``."""
    run_log, residencies = run.log, run.log.residencies
    sequence = residencies["index"][part]
    return {
        "request": run.workload.request_of(sequence),
        "sequence": sequence,
        "start_ticks": _begins(run_log)[part],
        "first_token_ticks": run_log.first_token_ticks[part],
        "end_ticks": run_log.release_ticks[part],
        "begun": residencies["kind"][part],
        "ended": _ended(run_log)[part],
    }


def with_names(columns: dict[str, np.ndarray]) -> pd.DataFrame:
    """A table of columns, those of ``NAMES`` as categories."""
    return pd.DataFrame(
        {
            name: pd.Categorical.from_codes(column, NAMES[name]) if name in NAMES else column
            for name, column in columns.items()
        }
    )


@once
def _ended(run_log: RunLog) -> np.ndarray:
    """How each residency ended, as an index into ``ENDS``; int8."""
    ended = np.full(len(run_log.residencies["index"]), len(ENDS) - 1, dtype=np.int8)
    known = run_log.evictions["residency"] >= 0
    ended[run_log.evictions["residency"][known]] = run_log.evictions["swapped"][known]
    return ended


def preemptions_table(run: Run, part: slice = slice(None)) -> pd.DataFrame:
    """A row per preemption, or for some of them, in order of time: ``request``, ``ticks``, and ``kind``, one of ``KINDS``."""
    return with_names(preemptions_columns(run, part))


def preemptions_columns(run: Run, part: slice = slice(None)) -> dict[str, np.ndarray]:
    """The columns of ``preemptions_table``, with the places of names in ``NAMES``."""
    found = preemptions(run)
    return {"request": found.request[part], "ticks": found.ticks[part], "kind": found.swapped[part]}


@once
def _begins(run_log: RunLog) -> np.ndarray:
    """Start of each residency: its first chunk of the prompt that was not lost to a preemption."""
    if not len(run_log.chunks["index"]):
        return run_log.residencies["start_ticks"]
    begin = run_log.residencies["start_ticks"].copy()
    in_chunks = np.zeros(len(run_log.output_tokens), dtype=bool)
    in_chunks[run_log.chunks["index"]] = True
    some = np.flatnonzero(in_chunks[run_log.residencies["index"]])
    lost = run_log.evictions["swapped"] != STALLED
    chunks = run_log.chunks["index"], run_log.chunks["start_ticks"]
    begun = run_log.residencies["index"][some], begin[some]
    evicted = run_log.evictions["index"][lost], run_log.evictions["ticks"][lost]
    # The prefill that a chunk is part of ends in the next residency of its sequence, unless an eviction comes before.
    place = _next_of(begun, *chunks)
    begun_ticks = np.append(begun[1], _NEVER)[place]
    kept = np.append(evicted[1], _NEVER)[_next_of(evicted, chunks[0], chunks[1] + 1)] > begun_ticks
    np.minimum.at(begin, some[place[kept]], chunks[1][kept])
    return begin


def _next_of(events: tuple[np.ndarray, np.ndarray], sequence: np.ndarray, ticks: np.ndarray) -> np.ndarray:
    """The first event of each sequence at or after the ticks beside it, or the number of events where there is none, int64.

    Args:
        events: Their sequences and their ticks.
    """
    times = np.sort(events[1])
    # Sequences, and within each the events in order of time, by one number.
    keys, wanted = (of * (len(times) + 1) + np.searchsorted(times, at) for of, at in (events, (sequence, ticks)))
    order = np.argsort(keys, kind="stable")
    place = np.append(order, len(order))[np.searchsorted(keys[order], wanted)]
    return np.where(np.append(events[0], -1)[place] == sequence, place, len(order))
