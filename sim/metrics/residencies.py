"""Residencies of sequences on the device, how each one ended, and preemptions."""

from __future__ import annotations

import numpy as np

from ..engine.run import Run
from ..memory.accounting.ledger import STALLED
from ..memory.accounting.run_log import RunLog
from ..output import frames as pd
from ..types.once import once
from .requests import Preemptions, preemptions

#: How a residency ended, by what the ledger's evictions say, and after them that the output was complete.
ENDS = ("preempted", "swapped", "stalled", "finished")
#: How a residency began, by the ledger's kinds.
BEGINS = ("prefilled", "recomputed", "resumed", "forked")
#: What a preemption does with a request's KV, as the summary calls it.
KINDS = ("recompute", "swap")


def residencies_table(run: Run, part: slice = slice(None)) -> pd.DataFrame:
    """A row per residency, in order of time, or for some of them; times in ticks.

    Columns: ``request`` and ``sequence`` (rows of the workload and of its ``sequences``); ``start_ticks`` (start of the
    step that computes the first tokens of its prompt, or that decodes again), ``first_token_ticks``, ``end_ticks``;
    ``begun``, one of ``BEGINS`` (resumed: returned from the host, or was stalled); and ``ended``, one of ``ENDS``
    (preempted: is recomputed; swapped: returns from the host; stalled: kept its blocks, at least at first).
    """
    run_log, residencies = run.log, run.log.residencies
    sequence = residencies["index"][part]
    return pd.DataFrame(
        {
            "request": run.workload.request_of(sequence),
            "sequence": sequence,
            "start_ticks": _begins(run_log)[part],
            "first_token_ticks": run_log.first_token_ticks[part],
            "end_ticks": run_log.release_ticks[part],
            "begun": pd.Categorical.from_codes(residencies["kind"][part], BEGINS),
            "ended": pd.Categorical.from_codes(_ended(run_log)[part], ENDS),
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
    found = Preemptions(*(column[part] for column in preemptions(run)))
    kind = pd.Categorical.from_codes(found.swapped, KINDS)
    return pd.DataFrame({"request": found.request, "ticks": found.ticks, "kind": kind})


@once
def _begins(run_log: RunLog) -> np.ndarray:
    """Start of each residency: its first chunk of the prompt that was not lost to a preemption."""
    if not len(run_log.chunks["index"]):
        return run_log.residencies["start_ticks"]
    begin = run_log.residencies["start_ticks"].copy()
    in_chunks = np.zeros(len(run_log.output_tokens), dtype=bool)
    in_chunks[run_log.chunks["index"]] = True
    number = np.flatnonzero(in_chunks[run_log.residencies["index"]])
    residencies = pd.DataFrame(
        {"index": run_log.residencies["index"][number], "ticks": begin[number], "residency": number}
    )
    evictions = pd.DataFrame(
        {
            "index": run_log.evictions["index"],
            "ticks": run_log.evictions["ticks"],
            "evicted": run_log.evictions["ticks"],
        }
    )
    lost = evictions[run_log.evictions["swapped"] != STALLED].sort_values("ticks", kind="stable")
    chunks = pd.DataFrame({"index": run_log.chunks["index"], "ticks": run_log.chunks["start_ticks"]})
    # The prefill that a chunk is part of ends in the next residency of its sequence, unless an eviction comes before.
    found = pd.merge_asof(chunks, residencies, on="ticks", by="index", direction="forward")
    evicted = pd.merge_asof(chunks, lost, on="ticks", by="index", direction="forward", allow_exact_matches=False)[
        "evicted"
    ]
    found["evicted"] = evicted
    found = found[found["residency"].notna()]
    residency = found["residency"].to_numpy(dtype=np.int64)
    kept = ~(found["evicted"].to_numpy() <= begin[residency])
    np.minimum.at(begin, residency[kept], found["ticks"].to_numpy()[kept])
    return begin
