"""Users of a closed loop in front of a router: a finish on any replica is an answer, after which a user sends a request to the router.

    replica    |--- step ---|--- step ---|   the request finishes at the end of the step
    user                                 |-- thinks --|
    router                                            |  chooses a replica for the user's next request

A user thinks for at least one tick, a picosecond. Several replicas may end steps at the tick of an answer; a request that comes
after it is seen by none of these steps, whatever the order of the replicas, and with and without leaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import simpy
from simpy.events import URGENT

from ..engine.engine import Alarm
from ..types.sequence import Sequence
from ..workload.closed_loop import ClosedLoop
from ..workload.source import NEVER
from ..workload.workload import Workload
from .routed import Mailbox


def thinking(workload: Workload) -> Workload:
    """A workload of users that think for at least a tick; the same workload without users."""
    if workload.users is None:
        return workload
    think_ticks = np.maximum(workload.users.think_ticks, 1)
    return replace(workload, users=replace(workload.users, think_ticks=think_ticks))


class AnsweredMailbox(Mailbox):
    """A ``Mailbox`` that passes finishes on.

    Args:
        answered: Called with the numbers of the finished sequences on this replica, and the time.
    """

    hears_of_finishes = True

    def __init__(self, answered: Callable[[list[int], int], None]) -> None:
        super().__init__()
        self._answered = answered

    def finish(self, leaving: Iterable[Sequence], now: int) -> None:
        """See ``Source``."""
        self._answered([sequence.index for sequence in leaving], now)


class UserRequests:
    """Sends the requests of users, each at its time and before all other events of that tick.

    Args:
        loop: Decides which request comes next, and when.
        total: Number of requests that are served.
        send: Called with the row of a request and the time.
        close: Called with the time after the last one.
    """

    def __init__(
        self,
        env: simpy.Environment,
        loop: ClosedLoop,
        total: int,
        send: Callable[[int, int], None],
        close: Callable[[int], None],
    ) -> None:
        self._env, self._loop, self._total, self._send, self._close = env, loop, total, send, close
        # When the next alarm rings; alarms that an answer has overtaken ring later.
        self._due = NEVER
        self._look()
        if not total:
            close(int(env.now))

    def answer(self, requests: Iterable[int], now: int) -> None:
        """A sequence of each request has finished."""
        self._loop.answer(requests, now)
        self._look()

    def sent(self) -> np.ndarray:
        """See ``ClosedLoop``."""
        return self._loop.sent()

    def _look(self) -> None:
        until = self._loop.next_ticks
        if until < self._due:
            self._due = until
            alarm = Alarm(self._env)
            alarm.callbacks = [self._ring]
            self._env.schedule(alarm, URGENT, until - int(self._env.now))

    def _ring(self, _: simpy.Event) -> None:
        now = int(self._env.now)
        if now < self._due:
            return
        while self._loop.next_ticks <= now:
            self._send(self._loop.send(), now)
        self._due = NEVER
        self._look()
        if self._loop.delivered == self._total:
            self._close(now)
