"""Where every sequence was over time: its stays on the device, how each of them ended, and who was preempted."""

from __future__ import annotations

import numpy as np

from ..engine.run import Run
from ..memory.accounting.book import Book
from ..memory.accounting.ledger import STALLED
from ..output import frames as pd
from .requests import preemptions

#: How a stay ended, by what the ledger's cuts say, and after them that the output was complete.
ENDS = ("preempted", "swapped", "stalled", "finished")
#: How a stay began, by the ledger's kinds.
BEGINS = ("prefilled", "recomputed", "resumed", "forked")
#: What a preemption does with a request's KV, as the summary calls it.
KINDS = ("recompute", "swap")


def stays_table(run: Run) -> pd.DataFrame:
    """A row a stay, in order of time; times in ticks.

    Columns: ``request`` and ``sequence`` (rows of the workload and of its ``sequences``), ``start_ticks`` (when the
    step began that computes the first tokens of its prompt, or that decodes again), ``first_token_ticks``,
    ``end_ticks``; ``begun``, one of ``BEGINS``: who resumes comes back from the host, or stood still; and ``ended``,
    one of ``ENDS``: what was preempted is computed again, what was swapped comes back from the host, what stalled kept
    its blocks, at least at first.
    """
    book, stays = run.book, run.book.stays
    request = np.repeat(np.arange(len(run.workload)), run.workload.num_sequences)
    ended = np.full(len(stays["index"]), len(ENDS) - 1)
    known = book.cuts["stay"] >= 0
    ended[book.cuts["stay"][known]] = book.cuts["swapped"][known]
    return pd.DataFrame(
        {
            "request": request[stays["index"]],
            "sequence": stays["index"],
            "start_ticks": _begins(book),
            "first_token_ticks": book.first_token_ticks,
            "end_ticks": book.leave_ticks,
            "begun": pd.Categorical.from_codes(stays["kind"], BEGINS),
            "ended": pd.Categorical.from_codes(ended, ENDS),
        }
    )


def preemptions_table(run: Run) -> pd.DataFrame:
    """A row a preemption, in order of time: ``request``, ``ticks``, and ``kind``, one of ``KINDS``."""
    found = preemptions(run)
    kind = pd.Categorical.from_codes(found.swapped, KINDS)
    return pd.DataFrame({"request": found.request, "ticks": found.ticks, "kind": kind})


def _begins(book: Book) -> np.ndarray:
    """When each stay began to compute: with the first chunk of its prompt that was not lost since."""
    begin = book.stays["start_ticks"].copy()
    if not len(book.chunks["index"]):
        return begin
    stays = pd.DataFrame({"index": book.stays["index"], "ticks": begin, "stay": np.arange(len(begin))})
    cuts = pd.DataFrame({"index": book.cuts["index"], "ticks": book.cuts["ticks"], "cut": book.cuts["ticks"]})
    lost = cuts[book.cuts["swapped"] != STALLED].sort_values("ticks", kind="stable")
    chunks = pd.DataFrame({"index": book.chunks["index"], "ticks": book.chunks["start_ticks"]})
    # The prefill that a chunk is part of ends in the next stay of its sequence, unless a cut comes before.
    found = pd.merge_asof(chunks, stays, on="ticks", by="index", direction="forward")
    cut = pd.merge_asof(chunks, lost, on="ticks", by="index", direction="forward", allow_exact_matches=False)["cut"]
    found["cut"] = cut
    found = found[found["stay"].notna()]
    stay = found["stay"].to_numpy(dtype=np.int64)
    kept = ~(found["cut"].to_numpy() <= begin[stay])
    np.minimum.at(begin, stay[kept], found["ticks"].to_numpy()[kept])
    return begin
