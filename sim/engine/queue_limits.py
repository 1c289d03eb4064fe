"""Limits of vLLM's API server on unfinished requests: what exceeds them is rejected with status 503.

A request is accepted or rejected at the tick of its arrival, by the answers that the server has by then:

    max_num_queued_reqs     rejected if the unfinished requests and its own sequences are more
    max_num_queued_tokens   rejected if the prompts of requests without a first token already have so many tokens; cached
                            prefixes and computed chunks count, too

A request that finishes at the end of the step in progress is unfinished, and one that finishes at the tick of the arrival is
not. A rejected request never reaches the scheduler, and it is not sent again.

Source: vLLM 0.33, ``AsyncLLM.check_admission`` (vllm/v1/engine/async_llm.py) and ``OutputProcessor``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from ..memory.accounting.ledger import LEAP, Leap
from ..types.sequence import Sequence, StepPlan
from ..workload.source import OpenLoop
from .observer import Observer

_FIRST = LEAP.index("first_ticks")


class LimitedLoop(Observer):
    """A source that rejects requests of an open loop.

    The engine knows of arrivals when it decides a step, perhaps long after them. Arrivals are therefore judged in their order
    as soon as all answers up to them are known, and wait here for their delivery.

    Args:
        loop: The requests; sequences of one request arrive one after the other.
        num_sequences: Sequences of each request, int64 [n].
        max_requests, max_tokens: The limits; None for none.

    Attributes:
        next_ticks: When the next request arrives that is not rejected by what is known so far, or ``NEVER``.
        rejected: bool [n], the rejected requests.
    """

    hears_of_finishes = True

    def __init__(
        self, loop: OpenLoop, num_sequences: np.ndarray, max_requests: int | None, max_tokens: int | None
    ) -> None:
        self._loop, self._max_requests, self._max_tokens = loop, max_requests, max_tokens
        self._request_of = np.repeat(np.arange(len(num_sequences)), num_sequences).tolist()
        self._counts = num_sequences.tolist()
        self.rejected = np.zeros(len(num_sequences), dtype=bool)
        # Accepted sequences that are not delivered, with their arrivals.
        self._accepted: deque[tuple[int, Sequence]] = deque()
        # Requests and prompt tokens at the last judged arrival, and when they become fewer, in order of time.
        self._unfinished = self._queued_tokens = 0
        self._finishes: deque[int] = deque()
        self._first_tokens: deque[tuple[int, int]] = deque()
        self._done: set[int] = set()
        self._begun: set[int] = set()
        self.next_ticks = loop.next_ticks

    @property
    def delivered(self) -> int:
        """Requests that have arrived so far."""
        return self._loop.delivered

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """Append to ``waiting`` the requests that have arrived by ``now`` and are not rejected."""
        self._judge(now)
        accepted = self._accepted
        while accepted and accepted[0][0] <= now:
            waiting.append(accepted.popleft()[1])
        self._look()

    def finish(self, leaving: Iterable[Sequence], now: int) -> None:
        """See ``Source``."""
        for sequence in leaving:
            if sequence.index not in self._done:
                self._done.add(sequence.index)
                self._finishes.append(now)

    def requests_finished(self, now: int, finished: Iterable[Sequence], overrunning: Iterable[Sequence]) -> None:
        """See ``Observer``: also those that the plan preempts. The run may be over, unless a request is still to come."""
        self.finish(finished, now)
        self._judge(now)
        self._look()

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """See ``Observer``: admitted sequences have their first token when the first step ends."""
        for sequence in plan.admitted:
            if sequence.index not in self._begun:
                self._begun.add(sequence.index)
                self._first_tokens.append((now + leap[_FIRST], sequence.prompt_tokens))

    def _judge(self, now: int) -> None:
        """Accept or reject the requests that have arrived by ``now``; all answers up to then are known."""
        arrived: deque[Sequence] = deque()
        while (arrival := self._loop.next_ticks) <= now:
            self._loop.deliver(arrival, arrived)
            self._pass_answers(arrival)
            accepts, last = False, -1
            for sequence in arrived:
                request = self._request_of[sequence.index]
                if request != last:
                    accepts = self._accepts(self._counts[request])
                    self.rejected[request] = not accepts
                    last = request
                if accepts:
                    self._unfinished += 1
                    self._queued_tokens += sequence.prompt_tokens
                    self._accepted.append((arrival, sequence))
            arrived.clear()

    def _accepts(self, sequences: int) -> bool:
        """Whether a request of so many sequences is accepted now."""
        if self._max_requests is not None and self._unfinished + sequences > self._max_requests:
            return False
        return self._max_tokens is None or self._queued_tokens < self._max_tokens

    def _pass_answers(self, now: int) -> None:
        """Take off what was answered by ``now``."""
        while self._finishes and self._finishes[0] <= now:
            self._finishes.popleft()
            self._unfinished -= 1
        while self._first_tokens and self._first_tokens[0][0] <= now:
            self._queued_tokens -= self._first_tokens.popleft()[1]

    def _look(self) -> None:
        """Update the next arrival."""
        self.next_ticks = self._accepted[0][0] if self._accepted else self._loop.next_ticks
