"""Times and counts of each request, from the run log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..engine.run import Run
from ..memory.accounting.ledger import STALLED
from ..memory.accounting.run_log import RunLog
from ..types.once import once
from ..types.sequence import RECOMPUTED, SWAPPED_IN

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """Times of served requests in ticks; all arrays are int64 [served].

    Attributes:
        index: Rows of the workload.
        arrival_ticks, first_scheduled_ticks, first_token_ticks, finish_ticks: Absolute times. The requests of a
            static batch finish together.
        output_tokens: Generated tokens of each of a request's sequences.
        recomputed, swapped: Number of preemptions by recompute and by swap.
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


@once
def request_times(run: Run) -> RequestTimes:
    """Times of every served request; of several sequences, the first token of any and the finish of the last."""
    run_log, residencies, work = run.log, run.log.residencies, run.workload
    request = np.repeat(np.arange(len(work)), work.num_sequences)
    number = np.arange(len(residencies["index"]))
    first, last = np.full(len(request), -1), np.zeros(len(request), dtype=np.int64)
    # Residencies are in order of time, so the last one written stands.
    last[residencies["index"]] = number
    first[residencies["index"][::-1]] = number[::-1]
    sequences = np.flatnonzero(first >= 0)
    first = first[sequences]
    served = np.zeros(len(work), dtype=bool)
    served[request[sequences]] = True
    index = np.flatnonzero(served)
    finish = np.zeros(len(work), dtype=np.int64)
    np.maximum.at(finish, request[sequences], run_log.release_ticks[last[sequences]])
    scheduled, first_token = np.full(len(work), _NEVER), np.full(len(work), _NEVER)
    for table in (residencies, run_log.chunks):
        np.minimum.at(scheduled, request[table["index"]], table["start_ticks"])
    np.minimum.at(first_token, request[sequences], run_log.first_token_ticks[first])
    preempted = preemptions(run)
    recomputed, swaps = (
        np.bincount(preempted.request[preempted.swapped == kind], minlength=len(work)) for kind in (0, 1)
    )
    return RequestTimes(
        index=index,
        arrival_ticks=work.arrival_ticks[index],
        first_scheduled_ticks=scheduled[index],
        first_token_ticks=first_token[index],
        finish_ticks=finish[index],
        output_tokens=work.output_tokens[index],
        recomputed=recomputed[index],
        swapped=swaps[index],
    )


class Preemptions(NamedTuple):
    """Preemptions of requests in order of time; int64 [preemptions].

    Attributes:
        request: Rows of the workload.
        ticks: Time of the preemption.
        swapped: 1 if its blocks were swapped to the host, 0 if it is recomputed.
    """

    request: np.ndarray
    ticks: np.ndarray
    swapped: np.ndarray


def preemptions(run: Run) -> Preemptions:
    """The preemptions of a run; the preemption of a group of sequences counts once."""
    evictions, leader = run.log.evictions, run.log.leader
    request = np.repeat(np.arange(len(run.workload)), run.workload.num_sequences)
    counted = (leader[evictions["index"]] == evictions["index"]) & (evictions["swapped"] != STALLED)
    return Preemptions(request[evictions["index"][counted]], evictions["ticks"][counted], evictions["swapped"][counted])


def resumed_gap_ticks(run_log: RunLog) -> np.ndarray:
    """Gaps between the last token before a preemption and the first token after it, and between the first two tokens
    of siblings, int64 [resumed residencies and siblings]."""
    residencies, leader = run_log.residencies, run_log.leader[run_log.residencies["index"]]
    order = np.argsort(residencies["index"], kind="stable")
    place = np.argsort(order)
    firsts = np.flatnonzero(np.diff(residencies["index"][order], prepend=-1))
    begins = np.zeros(len(order), dtype=bool)
    begins[order[firsts]] = True
    later = np.flatnonzero(~begins & np.isin(residencies["kind"], (RECOMPUTED, SWAPPED_IN)))
    gaps = run_log.first_token_ticks[later] - run_log.last_token_ticks[order[place[later] - 1]]
    # A sibling's first token came with the leader's.
    forked = np.flatnonzero(begins & (leader != residencies["index"]))
    led = order[firsts[np.searchsorted(residencies["index"][order][firsts], leader[forked])]]
    return np.concatenate([gaps, run_log.first_token_ticks[forked] - run_log.first_token_ticks[led]])
