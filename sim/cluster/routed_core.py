"""Engines behind a router on the compiled core: the results, and what a router sees, are those of ``RoutedEngine``.

A router looks at all engines at an arrival, so only then need they be up to date:

    1. engines compute everything before it, if their leap ends before it         ``Boundaries.advance``
    2. the router reads the engines, and chooses one                              ``RoutedCoreEngine.num_requests`` and others
    3. that engine gets the request, and the end of its leap is computed anew     ``RoutedCoreEngine.send``

SimPy keeps the clock of the arrivals. An engine has one event of its own, its end, after the last arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush

import numpy as np
import simpy

from ..engine.core import FOREVER, RESTS, compiled, raise_fault, started
from ..memory.accounting.ledger import Ledger
from ..runs.replica import Replica
from ..types.sequence import Sequence
from ..workload.source import NEVER
from .routed import ignored


class Boundaries:
    """When the leap in progress of each engine ends."""

    def __init__(self) -> None:
        # A heap; an entry is old if its engine has another end by now.
        self._ends: list[tuple[int, int]] = []
        self._engines: list[RoutedCoreEngine] = []

    def add(self, engine: RoutedCoreEngine) -> int:
        """Number an engine."""
        self._engines.append(engine)
        return len(self._engines) - 1

    def put(self, ticks: int, number: int) -> None:
        """The leap of an engine ends then."""
        heappush(self._ends, (ticks, number))

    def advance(self, now: int) -> None:
        """Bring all engines up to date: everything before ``now`` has happened."""
        ends, engines = self._ends, self._engines
        while ends and ends[0][0] < now:
            ticks, number = heappop(ends)
            if engines[number].until == ticks:
                engines[number].advance(now)


class RoutedCoreEngine:
    """See ``RoutedEngine``.

    Args:
        env: SimPy environment with a clock in ticks, an int.
        replica: One that ``core.serves`` accepts.
        edges: Ticks at which a measurement begins and ends, or none; leaps end there.
        boundaries: Of all engines of the cluster.
        sequences: Of all requests of the cluster: no step has more.

    Attributes:
        number, process, ledger, end_ticks: As of ``RoutedEngine``.
        until: End of the leap in progress; ``NEVER`` while the engine rests.
    """

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        replica: Replica,
        edges: tuple[int, ...],
        boundaries: Boundaries,
        sequences: int,
    ) -> None:
        self.env, self.end_ticks, self.until = env, int(env.now), NEVER
        self.ledger = Ledger(replica.memory.meter, compiled()[0])
        self.number = number
        self._replica, self._boundaries, self._place = replica, boundaries, boundaries.add(self)
        #: Requests on their way, and their tokens.
        self._expected = self._expected_tokens = 0
        self._max_model_len = replica.policy.limits.max_model_len
        none = (np.zeros(0, dtype=np.int64),) * 4
        most = min(replica.policy.limits.max_num_seqs, max(1, sequences))
        parts = started(replica, (*none, np.zeros(0, dtype=bool)), most, edges, routed=True)
        self._core, self._handle, self._cache = parts
        self._changed: Callable[[], None] = ignored
        self._closed = env.event()
        self.process = env.process(self._end())

    def report_to(self, changed: Callable[[], None]) -> None:
        """See ``routing.Seen``."""
        self._changed = changed

    def expect(self, sequence: Sequence) -> None:
        """See ``RoutedEngine``."""
        self._expected += 1
        self._expected_tokens += sequence.start_tokens
        self._changed()

    def send(self, now: int, sequence: Sequence) -> None:
        """See ``RoutedEngine``."""
        lengths = sequence.prompt_tokens, sequence.output_tokens
        # As ``State.note_finished`` expects no end.
        early = sequence.output_tokens < min(sequence.max_tokens, self._max_model_len - sequence.prompt_tokens)
        names = None if self._cache is None else self._cache.names(sequence.index)
        self._expected -= 1
        self._expected_tokens -= sequence.start_tokens
        self._core.send(self._handle, now, *lengths, early, names)
        self.advance(now)

    def advance(self, now: int) -> None:
        """Compute everything before ``now``."""
        status, until, waiting = self._core.advance(self._handle, now)
        raise_fault(status, self._replica.policy.name, waiting)
        self.until = NEVER if status == RESTS else until
        if self.until < NEVER:
            self._boundaries.put(until, self._place)
        self._changed()

    def close(self, now: int) -> None:
        """See ``RoutedEngine``."""
        self._core.close(self._handle)
        self._closed.succeed()

    @property
    def num_requests(self) -> int:
        """See ``RoutedEngine``."""
        return self._expected + self._core.look(self._handle, 0)[0]

    def outstanding_tokens(self, now: int) -> int:
        """See ``RoutedEngine``."""
        return self._expected_tokens + self._core.look(self._handle, now)[1]

    @property
    def kv_rises(self) -> bool:
        """See ``routing.Seen``."""
        return not self._replica.memory.groups.windows()

    def kv_tokens(self, now: int) -> int:
        """See ``RoutedEngine``."""
        return self._expected_tokens + self._core.look(self._handle, now)[2]

    def report(self) -> None:
        """See ``routing.Seen``; a router that follows steps has no core."""

    def _end(self) -> Generator[simpy.Event, None, None]:
        """Serve to the end once no more requests arrive, and take the records."""
        yield self._closed
        status, end, waiting = self._core.advance(self._handle, FOREVER)
        raise_fault(status, self._replica.policy.name, waiting)
        ledger = self.ledger
        tables = ledger.rows, ledger.residencies, ledger.evictions, ledger.chunks
        for table, records in zip(tables, self._core.records(self._handle), strict=True):
            table.extend(np.frombuffer(records, dtype=np.int64).reshape(-1, len(table.fields)))
        if self._cache is not None:
            self._cache.read()
            self._cache.close()
        # The columns of its requests go with it.
        del self._handle
        yield self.env.timeout(max(0, end - int(self.env.now)))
        self.end_ticks = int(self.env.now)
