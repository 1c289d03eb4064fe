"""Users of a closed loop: their number, think times and sessions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..types.errors import SettingError


@dataclass(frozen=True, slots=True, eq=False)
class Users:
    """Users, each with at most one request in flight; ``closed_loop`` decides which user sends which request, and when.

    Attributes:
        max_concurrency: Number of users (vLLM's name); None is the number of sessions.
        think_ticks: int64 [n], time between the answer to each request and the user's next request.
        session_id: int64 [n], or None. Requests with the same number are turns of one session, sent by one user;
            ``NO_SESSION`` is a session of one request. None: all sessions have one request.
        spawner: int64 [n], or None. For the first request of a sub-agent's session the request of another session whose answer
            starts it, else -1. The next turn of that session waits for the end of all sessions that its last answer started.
    """

    max_concurrency: int | None
    think_ticks: np.ndarray
    session_id: np.ndarray | None = None
    spawner: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.max_concurrency is None:
            if self.session_id is None:
                raise SettingError("max_concurrency", None, "must be given where there are no sessions")
        elif self.max_concurrency < 1:
            raise SettingError("max_concurrency", self.max_concurrency, "must be 1 or more")
        for field in self._arrays():
            column = np.ascontiguousarray(getattr(self, field), dtype=np.int64)
            column.setflags(write=False)
            object.__setattr__(self, field, column)
        if len(self.think_ticks) and self.think_ticks.min() < 0:
            raise SettingError("think_time", int(self.think_ticks.min()), "must be 0 or more")

    def check(self, requests: int) -> None:
        """Check the length of the columns.

        Raises:
            SettingError: One is not.
        """
        for field in self._arrays():
            if len(getattr(self, field)) != requests:
                raise SettingError(field, len(getattr(self, field)), f"must be of {requests} requests")

    def repeated(self, counts: np.ndarray) -> Users:
        """The columns by sequence, with ``counts`` sequences for each request."""
        arrays = {field: np.repeat(getattr(self, field), counts) for field in self._arrays()}
        return Users(self.max_concurrency, **arrays)

    def columns(self) -> list[str]:
        """Names of the columns."""
        return [*([] if self.max_concurrency is None else ["max_concurrency"]), *self._arrays()]

    def _arrays(self) -> list[str]:
        others = ("session_id", "spawner")
        return ["think_ticks", *(name for name in others if getattr(self, name) is not None)]
