"""A source of requests that also wakes the engine when a copy between GPU and host ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..memory.prefix.host_copies import HostCopies
from ..types.sequence import Sequence
from ..types.state import State
from ..workload.source import NEVER, Source


class TransferSource:
    """Delivers the requests of another source, and the ends of copies.

    The engine knows of the end of a copy when it knows of an arrival at the same time: with asynchronous scheduling a step
    later.

    Args:
        source: The requests.
        tier: The copies.
        state: Of the engine.
    """

    def __init__(self, source: Source, tier: HostCopies, state: State) -> None:
        self._source, self._tier, self._state = source, tier, state
        self.hears_of_finishes = source.hears_of_finishes

    @property
    def next_ticks(self) -> int:
        """When the next request arrives or the next copy ends; ``NEVER`` if none does or all requests are served."""
        arrival, state = self._source.next_ticks, self._state
        served = arrival < NEVER or state.waiting or state.running or state.prefilling or state.stalled
        return min(arrival, self._tier.next_ticks) if served else NEVER

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """See ``Source``."""
        self._tier.complete(now)
        if self._source.next_ticks <= now:
            self._source.deliver(now, waiting)

    def finish(self, leaving: Iterable[Sequence], now: int) -> None:
        """See ``Source``."""
        self._source.finish(leaving, now)
