"""Times and counts of each request, from the run log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..memory.accounting.ledger import STALLED, SWAP
from ..runs.api_server import Steps
from ..runs.run import Run
from ..runs.run_log import RunLog
from ..types.columns import column_by_slices, column_of, slices
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
    """Times of every served request; of several sequences, the first token of any and the finish of the last.

    Tokens are out at the end of their step, or when the event loop of the API server has sent them, where that takes time.
    """
    run_log, work = run.log, run.workload
    finish = _finishes(run)
    index = column_of(part.start + np.flatnonzero(finish[part] >= 0) for part in slices(len(work)))
    preempted = preemptions(run)
    answered = _answered(run, index)

    def of_served(requests: np.ndarray) -> np.ndarray:
        return column_by_slices(len(index), lambda part: requests[index[part]])

    def counted(swapped: int) -> np.ndarray:
        return np.bincount(preempted.request[preempted.swapped == swapped], minlength=len(work))

    return RequestTimes(
        index=index,
        arrival_ticks=of_served(work.arrival_ticks),
        first_scheduled_ticks=of_served(_first_times(run, run_log.residencies, run_log.chunks)),
        first_token_ticks=answered(of_served(_first_tokens(run))),
        finish_ticks=answered(of_served(finish)),
        output_tokens=of_served(work.output_tokens),
        recomputed=of_served(counted(0)),
        swapped=of_served(counted(1)),
    )


def end_of_answers(run: Run) -> int:
    """When the run is over and all answers are with their clients."""
    if run.replica.api_server is None:
        return run.log.end_ticks
    return max(run.log.end_ticks, int(request_times(run).finish_ticks.max(initial=0)))


def _answered(run: Run, index: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """When clients get a token of each served request, from the end of its step."""
    server, work = run.replica.api_server, run.workload
    if server is None:
        return lambda at: at
    requests = work.arrival_ticks + run.replica.outside_ticks, work.prompt_tokens
    steps = Steps.of(run.log)
    return lambda at: server.answered(steps, *requests, index, at)


def _finishes(run: Run) -> np.ndarray:
    """When the last sequence of each request releases its slots for the last time, int64 [n]; -1 of one that was not served."""
    index, ticks, work = run.log.residencies["index"], run.log.release_ticks, run.workload
    released = np.full(len(run.log.output_tokens), -1)
    # Residencies are in order of time, so the last one written stands.
    for part in slices(len(index)):
        released[index[part]] = ticks[part]
    if not work.shares:
        return released
    finish = np.full(len(work), -1)
    np.maximum.at(finish, work.request_of(np.arange(len(released))), released)
    return finish


def _first_tokens(run: Run) -> np.ndarray:
    """The first token of any of a request's sequences, int64 [n]; of each it is that of its first residency."""
    index, ticks, work = run.log.residencies["index"], run.log.first_token_ticks, run.workload
    first = np.full(len(run.log.output_tokens), _NEVER)
    for part in slices(len(index)):
        # The first one of a part is written last.
        of = index[part][::-1]
        first[of] = np.where(first[of] == _NEVER, ticks[part][::-1], first[of])
    if not work.shares:
        return first
    tokens = np.full(len(work), _NEVER)
    np.minimum.at(tokens, work.request_of(np.arange(len(first))), first)
    return tokens


def _first_times(run: Run, *tables: dict[str, np.ndarray]) -> np.ndarray:
    """The first ``start_ticks`` of each request in tables of sequences, int64 [n]."""
    first = np.full(len(run.workload), _NEVER)
    for table in tables:
        for part in slices(len(table["index"])):
            np.minimum.at(first, run.workload.request_of(table["index"][part]), table["start_ticks"][part])
    return first


class Preemptions(NamedTuple):
    """Preemptions of requests in order of time; int64 [preemptions].

    Attributes:
        request: Rows of the workload.
        ticks: Time of the preemption.
        swapped: 1 if its blocks were swapped to the host, 0 if they were given up.
    """

    request: np.ndarray
    ticks: np.ndarray
    swapped: np.ndarray


def preemptions(run: Run) -> Preemptions:
    """The preemptions of a run, counted as vLLM counts them; the preemption of a group of sequences counts once.

    With asynchronous scheduling a sequence may be preempted while the running step computes its last token. That is a
    preemption, too, although nothing is recomputed.
    """
    evictions, leader = run.log.evictions, run.log.leader
    counted = (leader[evictions["index"]] == evictions["index"]) & (evictions["swapped"] != STALLED)
    request = run.workload.request_of(evictions["index"][counted])
    return Preemptions(request, evictions["ticks"][counted], (evictions["swapped"][counted] == SWAP).astype(np.int64))


def resumed_gap_ticks(run_log: RunLog) -> np.ndarray:
    """Gaps between the last token before a preemption and the first token after it, and between the first two tokens
    of siblings, int64 [resumed residencies and siblings]."""
    residencies, leader = run_log.residencies, run_log.leader[run_log.residencies["index"]]
    resumes, is_sibling = np.isin(residencies["kind"], (RECOMPUTED, SWAPPED_IN)), leader != residencies["index"]
    if not (resumes.any() or is_sibling.any()):
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(residencies["index"], kind="stable")
    place = np.argsort(order)
    firsts = np.flatnonzero(np.diff(residencies["index"][order], prepend=-1))
    begins = np.zeros(len(order), dtype=bool)
    begins[order[firsts]] = True
    later = np.flatnonzero(~begins & resumes)
    gaps = run_log.first_token_ticks[later] - run_log.last_token_ticks[order[place[later] - 1]]
    # A sibling's first token came with the leader's.
    forked = np.flatnonzero(begins & is_sibling)
    led = order[firsts[np.searchsorted(residencies["index"][order][firsts], leader[forked])]]
    return np.concatenate([gaps, run_log.first_token_ticks[forked] - run_log.first_token_ticks[led]])
