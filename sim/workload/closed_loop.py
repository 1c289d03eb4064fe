"""A closed loop: users that send a request after the answer to the one before.

A session is a chain of requests, its turns. A request without a session is a session of one turn. A user takes the
next session in the order of the workload, and keeps it until its last turn is answered:

    user 0   |- turn 1 -|  thinks  |- turn 2 -|  thinks  |- turn 1 of the next session -| ...

    a first turn is sent   at its arrival, or as soon as a user is ready; the user that has been ready longest sends it
    a later turn is sent   after the answer to the turn before and the user's think time; its own arrival is ignored

Sessions of sub-agents form trees: an answer starts them, and the next turn of its session comes after the last of them is over:

    agent        |- turn 1 -|                                   thinks  |- turn 2 -|
    sub-agent               |- turn 1 -|  thinks  |- turn 2 -|
    sub-agent               |--- turn 1 ---|

Requests of one instant are sent in the order of the workload. A refused request is skipped and takes no time. The next
send time is known only up to the next finish, so leaps end at finishes and the source is notified at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

import numpy as np

from ..types.errors import SimulationFault
from ..types.sequence import Sequence
from .content import turns_before
from .groups import Grouping
from .source import NEVER
from .workload import Workload

_NOTHING = (NEVER, -1)
#: From an answer to the first requests of the sub-agents that it starts: as users of a fleet, these think for a tick.
_START_TICKS = 1


class Maker:
    """Makes the sequences of a request when it is sent.

    Args:
        workload: The requests.
        max_model_len: As for ``OpenLoop``.
        grouping: Makes a group of the sequences, of which only the leader arrives; None: each sequence arrives.
    """

    def __init__(self, workload: Workload, max_model_len: int, grouping: Grouping | None = None) -> None:
        limits = max_model_len - workload.prompt_tokens if workload.max_tokens is None else workload.max_tokens
        self._lengths = [column.tolist() for column in (workload.prompt_tokens, workload.output_tokens, limits)]
        self._priorities = None if workload.priority is None else workload.priority.tolist()
        self._ignores_eos = None if workload.ignore_eos is None else workload.ignore_eos.tolist()
        self._counts, self._first = workload.num_sequences.tolist(), workload.first_sequences.tolist()
        self._grouping = grouping
        # After a single token a group is done before its siblings begin.
        alone = np.zeros(len(workload), dtype=bool) if grouping is None else workload.output_tokens == 1
        #: Sequences of each request that end with an answer.
        self.answering = np.where(alone, 1, workload.num_sequences).tolist()

    def sequences(self, request: int, order: int) -> tuple[Sequence, ...]:
        """All of a request's, ``order`` being the place of the first among all that were ever sent."""
        lengths, first = [column[request] for column in self._lengths], self._first[request]
        made = tuple(Sequence(first + place, *lengths) for place in range(self._counts[request]))
        for place, sequence in enumerate(made, order):
            sequence.order = place
            if self._ignores_eos is not None:
                sequence.ignores_eos = bool(self._ignores_eos[request])
            sequence.urgency = 0 if self._priorities is None else self._priorities[request], place
        return made

    def arriving(self, request: int, made: tuple[Sequence, ...]) -> Iterable[Sequence]:
        """Those that wait in the queue."""
        return made if self._grouping is None else (self._grouping.leader(request, made),)


class ClosedLoop:
    """A source that is notified of answers.

    Args:
        workload: The requests, with ``users``.
        refused: bool [n], requests that no schedule can serve; they are not delivered.
        maker: Makes their sequences.

    Attributes:
        next_ticks: When the next request is sent, or ``NEVER`` while all users wait.
        delivered: Requests that have been sent so far.
    """

    hears_of_finishes = True

    def __init__(self, workload: Workload, refused: np.ndarray, maker: Maker) -> None:
        users = workload.users
        if users is None:
            raise SimulationFault("a closed loop without users")
        self._maker, self._served = maker, np.flatnonzero(~refused)
        self._left = list(maker.answering)
        self._request_of = np.repeat(np.arange(len(workload)), workload.num_sequences).tolist()
        self._think_ticks = users.think_ticks.tolist()
        #: When each user without a session is ready, a heap; None where no request waits for a user.
        self._ready = None if users.max_concurrency is None else [0] * min(users.max_concurrency, len(workload))
        #: Turns with a known time, and that time; a heap.
        self._due: list[tuple[int, int]] = []
        #: First requests of the sessions that each request starts, and the request that the last one of such a session leads back to.
        self._spawned: dict[int, list[int]] = {}
        self._back: dict[int, int] = {}
        self._turn_after, self._beginning = self._chained(workload, users.session_id, users.spawner)
        #: Sessions that the answer to a request has started, or will, and that are not over; and itself.
        self._open = {request: 1 + len(begun) for request, begun in self._spawned.items()}
        self._first_turn = next(self._beginning, _NOTHING)
        self._sent_ticks = workload.arrival_ticks.copy()
        self._order = self.delivered = 0
        self._look()

    def _chained(
        self, workload: Workload, session_id: np.ndarray | None, spawner: np.ndarray | None
    ) -> tuple[dict[int, int], Iterator[tuple[int, int]]]:
        """The turn after each that has one, and arrivals and rows of the first turns that no answer starts; of those that are served."""
        rows = self._served
        before = np.full(len(rows), -1) if session_id is None else turns_before(session_id[rows])
        later, first = before >= 0, rows[before < 0]
        after = dict(zip(rows[before[later]].tolist(), rows[later].tolist(), strict=True))
        if spawner is not None:
            started = (spawner[first] >= 0) & np.isin(spawner[first], rows)
            for request, of in zip(first[started].tolist(), spawner[first[started]].tolist(), strict=True):
                self._spawned.setdefault(of, []).append(request)
                while request in after:
                    request = after[request]
                self._back[request] = of
            first = first[~started]
        return after, zip(workload.arrival_ticks[first].tolist(), first.tolist(), strict=True)

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """Append to ``waiting`` the requests that have been sent by ``now``."""
        while self.next_ticks <= now:
            request = self.send()
            made = self._maker.sequences(request, self._order)
            self._order += len(made)
            waiting.extend(self._maker.arriving(request, made))

    def send(self) -> int:
        """Send the next request, at ``next_ticks``; its row."""
        request = self._request
        if self._due and self._due[0][1] == request:
            heappop(self._due)
        else:
            self._first_turn = next(self._beginning, _NOTHING)
            if self._ready is not None:
                heappop(self._ready)
        self._sent_ticks[request] = self.next_ticks
        self.delivered += 1
        self._look()
        return request

    def finish(self, leaving: Iterable[Sequence], now: int) -> None:
        """Notify of finished sequences; the user of an answered request starts to think."""
        self.answer((self._request_of[sequence.index] for sequence in leaving), now)

    def answer(self, requests: Iterable[int], now: int) -> None:
        """As ``finish``, by the row of the request of each sequence."""
        for request in requests:
            self._left[request] -= 1
            if self._left[request]:
                continue
            for begun in self._spawned.get(request, ()):
                heappush(self._due, (now + _START_TICKS, begun))
            self._close(request, now)
        self._look()

    def _close(self, request: int, now: int) -> None:
        """Note that a request is answered, or that a session it started has ended. When none is left open, its user starts to think."""
        left = self._open[request] = self._open.get(request, 1) - 1
        if left:
            return
        ready = now + self._think_ticks[request]
        if request in self._turn_after:
            heappush(self._due, (ready, self._turn_after[request]))
        elif request in self._back:
            self._close(self._back[request], now)
        elif self._ready is not None:
            heappush(self._ready, ready)

    def _look(self) -> None:
        """Update the next request and its send time."""
        arrival, request = self._first_turn
        if self._ready is not None:
            arrival = max(arrival, self._ready[0]) if self._ready else NEVER
        turn = self._due[0] if self._due else _NOTHING
        self.next_ticks, self._request = min((arrival, request), turn)

    def sent(self) -> np.ndarray:
        """Send time of each request, int64 [n]; a refused request has that of the request before it."""
        served = np.zeros(len(self._sent_ticks), dtype=np.int64)
        served[self._served] = self._served
        last = np.maximum.accumulate(served)
        return self._sent_ticks[last]
