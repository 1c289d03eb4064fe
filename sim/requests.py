"""What every request went through, from the book of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .memory.book import Book
from .run import Run
from .sequence import RECOMPUTED, SWAPPED_IN

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """Times of the requests that were served, in ticks; all arrays are int64 [served].

    Attributes:
        index: Rows of the workload.
        arrival_ticks, first_scheduled_ticks, first_token_ticks, finish_ticks: Absolute times. In a
            static batch all finish when the batch does.
        output_tokens: Tokens generated.
        recomputed, swapped: How often it was preempted, by what became of its blocks.
    """

    index: np.ndarray
    arrival_ticks: np.ndarray
    first_scheduled_ticks: np.ndarray
    first_token_ticks: np.ndarray
    finish_ticks: np.ndarray
    output_tokens: np.ndarray
    recomputed: np.ndarray
    swapped: np.ndarray

    @property
    def ttft_ms(self) -> np.ndarray:
        """Time to first token, float64."""
        return (self.first_token_ticks - self.arrival_ticks) / 1e9

    @property
    def e2el_ms(self) -> np.ndarray:
        """End-to-end latency, float64."""
        return (self.finish_ticks - self.arrival_ticks) / 1e9

    @property
    def tpot_ms(self) -> np.ndarray:
        """Time per output token after the first, float64; outputs of one token are left out."""
        some = self.output_tokens > 1
        return (self.finish_ticks - self.first_token_ticks)[some] / (self.output_tokens[some] - 1) / 1e9

    @property
    def normalized_latency_s(self) -> np.ndarray:
        """End-to-end latency over output length, float64 seconds a token."""
        return self.e2el_ms / 1e3 / self.output_tokens


def request_times(run: Run) -> RequestTimes:
    """Times of every request that was served."""
    book, stays = run.book, run.book.stays
    index, first = np.unique(stays["index"], return_index=True)
    last = np.zeros(len(run.workload), dtype=np.int64)
    # Stays are in order of time, so the last one written stands.
    last[stays["index"]] = np.arange(len(stays["index"]))
    cut_index, swapped = book.cuts["index"], book.cuts["swapped"]
    scheduled = np.full(len(run.workload), _NEVER)
    for table in (stays, book.chunks):
        np.minimum.at(scheduled, table["index"], table["start_ticks"])
    return RequestTimes(
        index=index,
        arrival_ticks=run.workload.arrival_ticks[index],
        first_scheduled_ticks=scheduled[index],
        first_token_ticks=book.first_token_ticks[first],
        finish_ticks=book.leave_ticks[last[index]],
        output_tokens=run.workload.output_tokens[index],
        recomputed=np.bincount(cut_index[swapped == 0], minlength=len(run.workload))[index],
        swapped=np.bincount(cut_index[swapped == 1], minlength=len(run.workload))[index],
    )


def resumed_gap_ticks(book: Book) -> np.ndarray:
    """Gaps between the last token before a preemption and the first one after it, int64 [resumed stays]."""
    stays = book.stays
    order = np.argsort(stays["index"], kind="stable")
    later = np.flatnonzero(np.isin(stays["kind"][order], (RECOMPUTED, SWAPPED_IN)))
    before, after = order[later - 1], order[later]
    return book.first_token_ticks[after] - book.last_token_ticks[before]
