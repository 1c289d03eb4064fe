"""Fleets of a size that changes over time.

    ordered   the wanted size rises: a new replica begins to start, with an empty cache
    joins     it has started, and the router may send requests to it
    leaves    the wanted size falls: the newest replica drains; it is sent nothing more and finishes what it has

The newest replica leaves first, as Kubernetes deletes the youngest pods of a ReplicaSet first. A replica that has left
does not come back: the next one that joins is another one. A replica that has not started when the size falls again never
joins. The replicas of the first size have started when the run begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..types.errors import SettingError

#: Most replicas that may serve at one time, as of ``Cluster``, and in all.
_MOST, _MOST_IN_ALL = 1024, 16384


class Lifetime(NamedTuple):
    """The times of one replica, in ticks.

    Attributes:
        ordered: It begins to start.
        joins: The router may send requests to it from now on.
        leaves: It is sent nothing from now on; None if it stays to the end. It never joins if this is not after ``joins``.
    """

    ordered: int
    joins: int
    leaves: int | None

    def takes_requests(self, now: int) -> bool:
        """Whether the router may send a request to it."""
        return self.joins <= now and (self.leaves is None or now < self.leaves)


@dataclass(frozen=True)
class FleetSchedule:
    """The wanted size of a fleet over time.

    Attributes:
        from_ticks: When each size is wanted from, rising, the first 0.
        sizes: Wanted number of replicas, at least 1 each.
        startup_ticks: Time from the order of a replica until it takes requests.

    Raises:
        SettingError: A value cannot be; the text names it.
    """

    from_ticks: tuple[int, ...]
    sizes: tuple[int, ...]
    startup_ticks: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.sizes or len(self.sizes) != len(self.from_ticks):
            raise SettingError("sizes", len(self.sizes), f"needs one size for each of {len(self.from_ticks)} times")
        if self.from_ticks[0] or any(late <= early for early, late in zip(self.from_ticks, self.from_ticks[1:])):
            raise SettingError("from_ticks", list(self.from_ticks)[:8], "must rise, from 0")
        for size in self.sizes:
            if not 1 <= size <= _MOST:
                raise SettingError("sizes", size, f"must be from 1 to {_MOST}")
        if self.startup_ticks < 0:
            raise SettingError("startup_ticks", self.startup_ticks, "must be 0 or more")
        if len(self.lifetimes) > _MOST_IN_ALL:
            raise SettingError(
                "sizes", len(self.lifetimes), f"replicas in all, more than {_MOST_IN_ALL}; change less often"
            )

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """The replicas, in order of their start."""
        found = [Lifetime(0, 0, None) for _ in range(self.sizes[0])]
        present = list(range(self.sizes[0]))
        for now, size in zip(self.from_ticks[1:], self.sizes[1:]):
            while len(present) > size:
                newest = present.pop()
                found[newest] = found[newest]._replace(leaves=now)
            while len(present) < size:
                present.append(len(found))
                found.append(Lifetime(now, now + self.startup_ticks, None))
        return tuple(found)

    @cached_property
    def _changes(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Times at which the replicas that take requests change, and their numbers from then on."""
        lives = self.lifetimes
        times = sorted({tick for life in lives for tick in (life.joins, life.leaves) if tick is not None})
        return times, [tuple(n for n, life in enumerate(lives) if life.takes_requests(tick)) for tick in times]

    def taking_requests(self, now: int) -> Sequence[int]:
        """The numbers of the replicas that the router may send a request to, rising; never empty."""
        times, numbers = self._changes
        return numbers[bisect_right(times, now) - 1]

    def paid_spans(self, last_finish_ticks: Sequence[int], end_ticks: int) -> list[tuple[int, int]]:
        """Start and end of the time that is paid for, of each replica: from its order until it has left and finished its last
        request.

        Args:
            last_finish_ticks: Of each replica; 0 if it served nothing.
            end_ticks: The end, for replicas that stay.
        """
        spans = []
        for life, finish in zip(self.lifetimes, last_finish_ticks, strict=True):
            gone = end_ticks if life.leaves is None else min(max(life.leaves, finish), end_ticks)
            spans.append((life.ordered, max(life.ordered, gone)))
        return spans
