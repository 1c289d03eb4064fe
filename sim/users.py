"""Who sends requests and waits for the answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import SettingError


@dataclass(frozen=True, slots=True, eq=False)
class Users:
    """So many users, each of whom has at most one request under way.

    A request is sent by the user who is ready first, in the order of the workload, and not before its arrival.

    Attributes:
        max_concurrency: How many; vLLM's name.
        think_ticks: int64 [n], how long the user who got the answer to each request waits before the next one.
    """

    max_concurrency: int
    think_ticks: np.ndarray

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise SettingError("max_concurrency", self.max_concurrency, "must be 1 or more")
        column = np.ascontiguousarray(self.think_ticks, dtype=np.int64)
        column.setflags(write=False)
        object.__setattr__(self, "think_ticks", column)
        if len(column) and column.min() < 0:
            raise SettingError("think_time", int(column.min()), "must be 0 or more")

    def columns(self) -> list[str]:
        """Names of the columns."""
        return ["max_concurrency", "think_ticks"]
