"""Where an engine's requests come from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import Protocol

import numpy as np

from .sequence import Sequence
from .workload import Workload

#: No request is to come.
NEVER = 1 << 100
#: Requests that are made into Python numbers at a time.
_CHUNK = 65_536
_NOBODY = (NEVER, None)


class Source(Protocol):
    """What an engine asks of whoever sends it requests."""

    next_ticks: int

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """Append to ``waiting`` what has arrived by ``now``."""


class OpenLoop:
    """Requests at times known beforehand, whatever the server does.

    Args:
        workload: The requests.
        refused: bool [n], those that no schedule can ever serve: they are not delivered.
        max_model_len: What stands for ``max_tokens`` where the client names none: the room that the
            model leaves after the prompt.

    Attributes:
        next_ticks: When the next request arrives, or ``NEVER``.
    """

    def __init__(self, workload: Workload, refused: np.ndarray, max_model_len: int) -> None:
        self._workload = workload
        self._rows = np.flatnonzero(~refused)
        self._max_model_len = max_model_len
        self._coming = self._arrivals()
        self.next_ticks, self._next = next(self._coming, _NOBODY)

    def _arrivals(self) -> Iterator[tuple[int, Sequence]]:
        """All that are served, and their times of arrival."""
        rows = self._rows
        return chain.from_iterable(
            map(self._load, (rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)))
        )

    def _load(self, rows: np.ndarray) -> Iterator[tuple[int, Sequence]]:
        """Some requests and their times of arrival, from columns of Python ints, which are faster one by one."""
        work = self._workload
        prompts = work.prompt_tokens[rows]
        limits = self._max_model_len - prompts if work.max_tokens is None else work.max_tokens[rows]
        columns = (rows, prompts, work.output_tokens[rows], limits)
        return zip(
            work.arrival_ticks[rows].tolist(), map(Sequence, *(column.tolist() for column in columns)), strict=True
        )

    @property
    def delivered(self) -> int:
        """Requests that have arrived so far."""
        return self._next.index if self._next else len(self._workload)

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """Append to ``waiting`` what has arrived by ``now``."""
        ticks = self.next_ticks
        while ticks <= now:
            waiting.append(self._next)
            ticks, self._next = next(self._coming, _NOBODY)
        self.next_ticks = ticks


class ClosedLoop(OpenLoop):
    """Requests of users who wait for their answers.

    When the next one is sent is known up to the next finish, and leaps end there: a finish is told at once.

    Args:
        workload: The requests, with ``users``.
        refused, max_model_len: As for ``OpenLoop``. A refused request costs its user no time.

    Attributes:
        next_ticks: When the next request is sent, or ``NEVER`` while all users wait.
    """

    def __init__(self, workload: Workload, refused: np.ndarray, max_model_len: int) -> None:
        super().__init__(workload, refused, max_model_len)
        self._think_ticks = workload.users.think_ticks.tolist()
        #: When each user who has no request under way can send one; a heap.
        self._ready = [0] * min(workload.users.max_concurrency, len(workload))
        self._sent_ticks = workload.arrival_ticks.copy()
        self._earliest = self.next_ticks
        self._look()

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """Append to ``waiting`` what has been sent by ``now``."""
        while self.next_ticks <= now:
            heappop(self._ready)
            self._sent_ticks[self._next.index] = self.next_ticks
            waiting.append(self._next)
            self._earliest, self._next = next(self._coming, _NOBODY)
            self._look()

    def finish(self, leaving: list[Sequence], now: int) -> None:
        """Requests have been answered: their users think."""
        for sequence in leaving:
            heappush(self._ready, now + self._think_ticks[sequence.index])
        self._look()

    def _look(self) -> None:
        """See when the next request is sent."""
        self.next_ticks = max(self._ready[0], self._earliest) if self._ready else NEVER

    def sent(self) -> np.ndarray:
        """When each request was sent, int64 [n], not decreasing; one that was refused, with the one before."""
        return np.maximum.accumulate(self._sent_ticks)
