"""Where an engine's requests come from."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from .sequence import Sequence
from .workload import Workload

#: No request is to come.
NEVER = 1 << 100
#: Requests that are made into Python numbers at a time.
_CHUNK = 65_536


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
        self._served = np.flatnonzero(~refused)
        self._max_model_len = max_model_len
        self._chunk_start = 0
        self.next_ticks = NEVER
        self._load()

    def _load(self) -> None:
        """Make the next chunk of requests, from columns of Python ints, which are faster one by one."""
        rows = self._served[self._chunk_start : self._chunk_start + _CHUNK]
        self._chunk_start += len(rows)
        work = self._workload
        prompts = work.prompt_tokens[rows]
        limits = self._max_model_len - prompts if work.max_tokens is None else work.max_tokens[rows]
        self._ticks = work.arrival_ticks[rows].tolist()
        columns = (rows, prompts, work.output_tokens[rows], limits)
        self._sequences = list(map(Sequence, *(column.tolist() for column in columns)))
        self._place = 0
        self.next_ticks = self._ticks[0] if self._ticks else NEVER

    @property
    def delivered(self) -> int:
        """Requests that have arrived so far."""
        return self._chunk_start - len(self._ticks) + self._place

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """Append to ``waiting`` what has arrived by ``now``."""
        while self.next_ticks <= now:
            waiting.append(self._sequences[self._place])
            self._place += 1
            if self._place == len(self._ticks):
                self._load()
            else:
                self.next_ticks = self._ticks[self._place]
