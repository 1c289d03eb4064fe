"""An engine behind a router: it learns of a request when the router sends it, possibly in the middle of a leap.

The engine of a single replica knows the next arrival, and its leap ends there. This engine leaps as if no request
arrived. When one does, the leap in progress ends at the next step boundary, where it would have ended if the
arrival had been known:

    leap        |--------|--------|--------|--------|        five boundaries ahead
    arrival                  ^
    new end                           |                      a new leap begins, with the new request waiting

Nothing has to be undone, because a leap changes the memory only at its end. A router that reads the replica in the
middle of a leap sees the last step boundary. The state there follows from the number of steps that are over: tokens as
``batch_size * steps``, blocks from the positions of the sequences in their last blocks.

Simultaneous events: requests arrive first, each visible to the router for the next one; then come the step boundaries
of the replicas, in the order of their numbers. A request that arrives at a boundary is therefore waiting when that
step is decided, and its router sees the replica as it was before the boundary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sized

import simpy
from simpy.events import NORMAL, EventPriority

from ..cost.base import StepCost
from ..engine.engine import Alarm, Engine
from ..engine.executor import Begun, FirstStep
from ..engine.leap_check import NONE
from ..memory import Memory
from ..memory.accounting.ledger import Leap
from ..policy.base import PairedPolicy
from ..types.sequence import Sequence, StepPlan
from ..types.state import State
from ..types.sums import steps_until, ticks_of
from ..workload.source import NEVER
from .coordinator import Counts

#: When the next request comes, while the router may yet send one.
SOMEDAY = NEVER - 1


def ignored() -> None:
    """Where no router looks."""


class Mailbox:
    """Requests that the router has sent to one replica.

    Attributes:
        next_ticks: Arrival of the first request that the engine has not taken; ``SOMEDAY`` while there is none, and
            ``NEVER`` after the last one.
    """

    hears_of_finishes = False

    def __init__(self) -> None:
        self._sent: deque[tuple[int, Sequence]] = deque()
        self._nothing = SOMEDAY
        self.next_ticks = SOMEDAY

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, ticks: int, sequence: Sequence) -> None:
        """A request arrives."""
        self._sent.append((ticks, sequence))
        self._look()

    def deliver(self, now: int, waiting: deque[Sequence]) -> None:
        """Append to ``waiting`` the requests that have arrived by ``now``."""
        while self._sent and self._sent[0][0] <= now:
            waiting.append(self._sent.popleft()[1])
        self._look()

    def finish(self, leaving: Iterable[Sequence], now: int) -> None:
        """See ``Source``; arrivals do not depend on finishes."""

    def close(self) -> None:
        """Announce that no more requests arrive."""
        self._nothing = NEVER
        self._look()

    def _look(self) -> None:
        self.next_ticks = self._sent[0][0] if self._sent else self._nothing


class RoutedState(State):
    """A ``State`` that counts queued tokens.

    Attributes:
        queued_tokens: Tokens of prompts and of outputs so far of all requests that do not decode: sent, waiting, in
            prefill, stalled or swapped out.
    """

    __slots__ = ("queued_tokens",)

    def __init__(self, preempted_first: bool = False) -> None:
        super().__init__(preempted_first)
        self.queued_tokens = 0

    def start(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0) -> None:
        self.queued_tokens -= sequence.start_tokens
        super().start(sequence, decode_step, padded_tokens)

    def _stop(self, sequence: Sequence) -> None:
        super()._stop(sequence)
        self.queued_tokens += sequence.start_tokens


class RoutedEngine(Engine):
    """An ``Engine`` for requests that a router sends one by one.

    Args:
        number: Number of the replica; at one tick, replicas act in the order of their numbers.
        source: The mailbox that requests are sent to.
        policy, memory, cost, edges, leap, check_leaps: See ``Engine``.
    """

    state: RoutedState

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        source: Mailbox,
        policy: PairedPolicy,
        memory: Memory,
        cost: StepCost,
        edges: Iterable[int] = (),
        leap: bool = True,
        check_leaps: int = NONE,
    ) -> None:
        state = RoutedState(policy.preempted_first)
        super().__init__(env, source, policy, memory, cost, edges, leap, check_leaps, state)
        # ``source`` delivers its requests beside the ends of copies where blocks are offloaded.
        self._mailbox = source
        self.number, self.priority = number, EventPriority(NORMAL + number)
        # What is under way: since when, until when, how many steps, the ledger's columns if it has any, whether it is
        # a rest, whether an arrival ends it, how many start in a step in which the others pause, and whether it begins now.
        self._since = self._until = self._steps = self._starting = 0
        self._leap: Leap | None = None
        self._resting = self._stops_at_arrival = self._begins = False
        # Requests on their way.
        self._expected = 0
        self._changed: Callable[[], None] = ignored
        self._alarm: simpy.Event = Alarm(env)

    def report_to(self, changed: Callable[[], None]) -> None:
        """See ``routing.Seen``."""
        self._changed = changed

    def expect(self, sequence: Sequence) -> None:
        """Announce a request that was routed here; routers count it from now on."""
        self.state.queued_tokens += sequence.start_tokens
        self._expected += 1
        self._changed()

    def send(self, now: int, sequence: Sequence) -> None:
        """Deliver an announced request."""
        self._expected -= 1
        self._mailbox.send(now, sequence)
        if self._resting:
            self._wake_up(now)
        elif self._stops_at_arrival and self._steps > 1 and self._leap is not None:
            start, _, first, second, growth, *_ = self._leap
            self._end_after(steps_until(now - start, first, second, growth) + self._ahead)

    def close(self, now: int) -> None:
        """Announce that no more requests arrive."""
        self._mailbox.close()
        if self._resting:
            self._wake_up(now)

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests; in a static batch finished requests count until the batch ends."""
        state = self.state
        queues: tuple[Sized, ...] = (
            self._mailbox,
            state.waiting,
            state.swapped,
            state.prefilling,
            state.running,
            state.stalled,
        )
        return self._expected + sum(map(len, queues))

    def outstanding_tokens(self, now: int) -> int:
        """Their prompts and what they have generated, by the last boundary before ``now``; a static batch with its
        padding."""
        state = self.state
        decoding = state.batch_size * (state.decode_step + self._steps_over(now)) + state.lag_sum - self._starting
        return state.queued_tokens + decoding

    @property
    def kv_rises(self) -> bool:
        """See ``routing.Seen``."""
        return not self.memory.groups.windows()

    def kv_tokens(self, now: int) -> int:
        """Slots of the pool that are taken, by the last boundary before ``now``, and the tokens that are to be
        computed before waiting sequences decode."""
        state, memory = self.state, self.memory
        computed = sum(sequence.computed_tokens for sequence in state.prefilling)
        if memory.transfers is not None:
            computed += memory.transfers.loaded_tokens
        room = memory.room_after(state, self._steps_over(now))
        return memory.capacity_slots - room + state.queued_tokens - computed

    def report(self) -> tuple[int, int | None, Counts] | None:
        """See ``routing.Seen``; as vLLM's scheduler counts (``get_request_counts``, ``get_kv_cache_usage``), once the coming step is
        scheduled."""
        state, memory, now = self.state, self.memory, int(self.env.now)
        steps, until = 0, None
        if not self._begins:
            if self._resting:
                return None
            steps, until = self._next_boundary(now)
        running = len(state.running) + len(state.prefilling) + len(state.stalled)
        room = memory.room_after(state, steps + (self._steps > 0))
        return now, until, Counts(self.num_requests - running, running, 1.0 - room / memory.capacity_slots)

    def _next_boundary(self, now: int) -> tuple[int, int]:
        """Steps of the leap in progress up to the first boundary at or after a tick, and that boundary."""
        if self._steps < 2 or self._leap is None:
            return 0, self._until
        start, _, first, second, growth, *_ = self._leap
        steps = steps_until(now - start, first, second, growth)
        return steps, start + ticks_of(steps, first, second, growth)

    def _steps_over(self, now: int) -> int:
        """Steps of the leap in progress that ended before ``now``."""
        if self._steps < 2 or self._leap is None:
            return 0
        start, _, first, second, growth, *_ = self._leap
        return steps_until(now - start, first, second, growth) - 1

    def _end_after(self, steps: int) -> None:
        """End the leap in progress after so many of its steps, if that is earlier than its end."""
        if self._leap is not None:
            start, _, first, second, growth, *others = self._leap
            until = start + ticks_of(steps, first, second, growth)
            self._cut(until, steps, (start, steps, first, second, growth, *others))

    def _wake_up(self, now: int) -> None:
        """Wake the engine: a request has arrived, or none will."""
        leap = self._leap and (*self._leap[:2], now - self._since, *self._leap[3:])
        self._cut(now, 0, leap)

    def _cut(self, until: int, steps: int, leap: Leap | None) -> None:
        """End the leap or rest in progress at this tick, if that is earlier than its end."""
        if until < self._until:
            self._ring_at(until, steps, leap)

    def _ring_at(self, until: int, steps: int, leap: Leap | None) -> None:
        """Make the engine's wait end at this tick, after so many steps."""
        ticks = until - self._since
        alarm = Alarm(self.env, (steps, ticks, leap))
        # Processes that wait for the old event wait for this one; no process waits for the old one.
        alarm.callbacks, self._alarm.callbacks = self._alarm.callbacks, []
        self._alarm, self._until, self._steps, self._leap = alarm, until, steps, leap
        self.env.schedule(alarm, self.priority, until - self.env.now)

    def _waker(self) -> Callable[[simpy.Event, EventPriority, int], None]:
        return self._wake

    def _wake(self, alarm: simpy.Event, priority: EventPriority, ticks: int) -> None:
        """Set the alarm, unless only the router can end the wait."""
        self._alarm = alarm
        if self._until < SOMEDAY:
            self.env.schedule(alarm, priority, ticks)

    def _begin(
        self,
        now: int,
        steps: int,
        ticks: int,
        leap: Leap | None,
        stops_at_arrival: bool = False,
        rests: bool = False,
        starting: int = 0,
    ) -> None:
        """Record the start of a leap or a rest."""
        self._since, self._until, self._steps, self._leap = now, now + ticks, steps, leap
        self._stops_at_arrival, self._resting, self._starting = stops_at_arrival, rests, starting
        self._begins = True
        self._changed()
        self._begins = False

    def _leap_over(self, now: int, first_step: FirstStep) -> tuple[int, int, Leap]:
        found = super()._leap_over(now, first_step)
        self._begin(now, *found, stops_at_arrival=first_step is None or first_step[4])
        return found

    def _stand_still(self, now: int, first_step: Begun, plan: StepPlan) -> tuple[int, Leap]:
        ticks, leap = super()._stand_still(now, first_step, plan)
        self._begin(now, 0, ticks, leap, starting=len(plan.admitted))
        return ticks, leap

    def _pause(self, now: int, ticks: int, leap: Leap | None) -> tuple[int, Leap | None]:
        self._begin(now, 0, ticks, leap)
        return super()._pause(now, ticks, leap)

    def _rest(self, now: int) -> tuple[int, Leap | None] | None:
        rest = super()._rest(now)
        if rest:
            self._begin(now, 0, *rest, rests=True)
        else:
            self._changed()
        return rest
