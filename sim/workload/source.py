"""The interface of request sources, and the source of an open-loop workload."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

import numpy as np

from ..types.sequence import Sequence
from .workload import Workload

#: Time of the next request when there is none.
NEVER = 1 << 100
#: Number of requests converted to Python numbers at a time.
_CHUNK = 65_536


class Source(Protocol):
    """Delivers requests to an engine."""

    #: Whether ``finish`` notifies it of finished requests.
    hears_of_finishes: bool

    @property
    def next_ticks(self) -> int:
        """When the next request arrives, as far as is known, or ``NEVER``."""

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """Append to ``waiting`` the requests that have arrived by ``now``."""

    def finish(self, leaving: Iterable[Sequence], now: int) -> None:
        """Notify of finished sequences; called only if ``hears_of_finishes``."""


class OpenLoop:
    """Requests at fixed times, independent of the server.

    Args:
        workload: The requests.
        refused: bool [n], requests that no schedule can serve; they are not delivered.
        max_model_len: Longest prompt + output; ``max_tokens`` defaults to what it leaves after the prompt.

    Attributes:
        next_ticks: When the next request arrives, or ``NEVER``.
    """

    hears_of_finishes = False

    def __init__(self, workload: Workload, refused: np.ndarray, max_model_len: int) -> None:
        self._workload = workload
        self._rows = np.flatnonzero(~refused)
        self._max_model_len = max_model_len
        self._coming = self._arrivals()
        #: After the last one, in the row beyond the workload.
        self._none = NEVER, Sequence(len(workload), 0, 0, 0)
        self.next_ticks, self._next = next(self._coming, self._none)

    def _arrivals(self) -> Iterator[tuple[int, Sequence]]:
        """All requests that are served, with their arrivals."""
        rows = self._rows
        return chain.from_iterable(
            map(self._load, (rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)))
        )

    def _load(self, rows: np.ndarray) -> Iterator[tuple[int, Sequence]]:
        """Requests and arrivals from columns of Python ints, which are faster to read one by one."""
        work = self._workload
        prompts = work.prompt_tokens[rows]
        limits = self._max_model_len - prompts if work.max_tokens is None else work.max_tokens[rows]
        columns = (rows, prompts, work.output_tokens[rows], limits)
        arrivals = work.arrival_ticks[rows].tolist()
        sequences: Iterable[Sequence] = map(Sequence, *(column.tolist() for column in columns))
        if work.priority is not None:
            sequences = map(_with_priority, sequences, work.priority[rows].tolist())
        if work.ignore_eos is not None:
            sequences = map(_ignoring_eos, sequences, work.ignore_eos[rows].tolist())
        return zip(arrivals, sequences, strict=True)

    @property
    def delivered(self) -> int:
        """Requests that have arrived so far."""
        return self._next.index

    def finish(self, leaving: Iterable[Sequence], now: int) -> None:
        """See ``Source``; arrivals do not depend on finishes."""

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """Append to ``waiting`` the requests that have arrived by ``now``."""
        ticks, none = self.next_ticks, self._none
        while ticks <= now:
            waiting.append(self._next)
            ticks, self._next = next(self._coming, none)
        self.next_ticks = ticks


def _ignoring_eos(sequence: Sequence, ignores: int) -> Sequence:
    sequence.ignores_eos = bool(ignores)
    return sequence


def _with_priority(sequence: Sequence, priority: int) -> Sequence:
    sequence.urgency = priority, sequence.index
    return sequence
