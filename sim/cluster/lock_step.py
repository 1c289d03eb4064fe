"""Engines that share experts compute their steps together (data parallelism of vLLM, ``DPEngineCoreProc``).

Every layer with experts exchanges tokens between all engines, so none passes it before the last one reaches it:

    engine 0    |== prefill ==|-- decode --|-- decode --|
    engine 1    |-- decode ...|-- decode --|-- decode --|       as long as the prefill of engine 0
    engine 2    |.. dummy ....|.. dummy ...| request|== prefill ==

1. Each engine decides its next step by itself, and proposes it to the ``Barrier`` in place of starting it.
2. An engine without work takes part with a dummy batch of one token (``execute_dummy_batch``).
3. Once all engines that act at a tick have proposed, the barrier asks the cost of each step, given the tokens of all
   (``among``). The longest one is the length of the step on all engines.
4. Later steps of a leap are lines over the steps, one for each engine. The leap goes on as long as one line is the
   highest, and no longer than the shortest leap proposed. A decision that the end of a copy from or to the host may change is
   of one step, as ``VllmV1.horizon`` says.
5. A request that comes to an engine with a dummy batch in progress waits for the end of this step. The leap of all
   engines ends there. Where steps are decided ahead, an engine that runs out of work goes on with a dummy batch before it looks
   for requests again.
6. Engines stop together when none has work. Dummy batches that vLLM runs after that, until the engines next ask each other
   (every 16 steps, ``dp_sync_interval``), are left out: they could delay a request by part of a decode step. So are those of
   engines of which all wait for loads from the host. They count as steps where policies ask for these (``Barrier.count``).
7. Over pipeline stages a step is a pass of one batch of each engine, and engines wait for each other in every stage. An engine that schedules
   nothing waits for its oldest batch (``step_with_batch_queue``), and then takes part with a dummy batch. vLLM's worker answers a
   dummy batch when it has launched it, behind the batches in flight, so that an engine without work holds up no stage.
8. Drafts are verified tokens of the step. The drafter's passes after it are those of an engine whose peers draft as much; the others wait.

Steps start together, so the result is the same for leaps of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import simpy
from simpy.events import NORMAL, URGENT, EventPriority

from ..cost.base import StepCost, among, draft_ticks, effective_context, saved_ticks
from ..engine.batch_queue import BatchQueue
from ..engine.engine import Alarm
from ..engine.executor import Begun, FirstStep
from ..memory import Memory
from ..memory.accounting.ledger import Leap
from ..policy.base import PairedPolicy
from ..types.sequence import StepPlan
from ..types.sums import steps_until, ticks_of
from .disaggregated import PrefillEngine
from .routed import SOMEDAY, RoutedEngine

#: Tokens of a dummy batch.
DUMMY_TOKENS = 1
#: Steps after which engines ask each other whether any has work (``dp_sync_interval``).
SYNC_STEPS = 16


class Work(NamedTuple):
    """What a step computes; the arguments of ``StepCost.step_ticks``."""

    decodes: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0

    @property
    def tokens(self) -> int:
        """Of a dummy batch, if the step computes nothing."""
        return self.decodes + self.prefill_tokens or DUMMY_TOKENS


class Drafted(NamedTuple):
    """What the drafts after a step follow; the arguments of ``draft_ticks``."""

    rows: tuple[int, int, int, int]
    sampled: tuple[int, int]


class Proposal(NamedTuple):
    """The next steps of an engine, before their lengths are known.

    Attributes:
        steps: Most steps for which the engine's decision stays the same; 0 for a step in which no sequence decodes.
        leap: The ledger's columns, with the ticks of an engine alone.
        first: Work of the first step.
        moves: Ticks of copies and swaps before it, less those that its decodes save by naming the same blocks.
        later: Work of the second step.
        drafted: Of the first step; None if it is followed by no drafts.
        after: When the engine can decide again, at the earliest; over pipeline stages.
        dummy_from: When its batches in flight let it begin a dummy batch; None for a batch of its own.
    """

    steps: int
    leap: Leap
    first: Work
    moves: int
    later: Work
    drafted: Drafted | None
    after: int = 0
    dummy_from: int | None = None


class _Line(NamedTuple):
    """Lengths of later steps: ``second``, ``second + growth``, ..., for ``steps`` steps; None: without end."""

    second: int
    growth: int
    steps: int | None


class _Asked(NamedTuple):
    """What a cost was asked for: a step, the drafts after it, and what the step saves (``cost.base.saved_ticks``)."""

    work: Work | None = None
    drafted: Drafted | None = None
    saved: int = 0


class RecordedCost:
    """The cost of an engine, which keeps the last step that it was asked for. See ``StepCost``."""

    def __init__(self, inner: StepCost) -> None:
        self.inner, self.name, self.effective_context = inner, inner.name, effective_context(inner)
        self.swap_out_ticks, self.swap_in_ticks = inner.swap_out_ticks, inner.swap_in_ticks
        self.copy_ticks, self.describe = inner.copy_ticks, inner.describe
        saves = saved_ticks(inner)
        self.saved_ticks = None if saves is None else partial(self._save, saves)
        self._asked = _Asked()

    def _save(self, saves: Callable[[int, int, int], int], *work: int) -> int:
        saved = saves(*work)
        self._asked = self._asked._replace(saved=saved)
        return saved

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``."""
        work = Work(decodes, decode_context, prefill_tokens, prefill_pairs)
        self._asked = self._asked._replace(work=work)
        return self.inner.step_ticks(*work)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``."""
        self._asked = self._asked._replace(work=Work(decodes, context))
        return self.inner.decode_line(decodes, context)

    def draft_ticks(self, rows: tuple[int, int, int, int], sampled: tuple[int, int]) -> int:
        """See ``cost.base.draft_ticks``."""
        self._asked = self._asked._replace(drafted=Drafted(rows, sampled))
        return draft_ticks(self.inner, rows, sampled)

    def take(self) -> _Asked:
        """The last step asked for since the last call, and what goes with it."""
        asked, self._asked = self._asked, _Asked()
        return asked


class LockStepEngine(RoutedEngine):
    """A ``RoutedEngine`` with steps that start and end together with those of other engines.

    Args:
        barrier: Of these engines.
        source, cost, others: As for ``RoutedEngine``, or for the class that is combined with this one; the cost is that of
            an engine alone.
    """

    cost: RecordedCost

    def __init__(
        self,
        barrier: Barrier,
        env: simpy.Environment,
        number: int,
        source: Any,
        policy: PairedPolicy,
        memory: Memory,
        cost: StepCost,
        *others: Any,
    ) -> None:
        super().__init__(env, number, source, policy, memory, RecordedCost(cost), *others)
        self._barrier = barrier
        self._proposal: Proposal | None = None
        self._dummy_until = 0
        policy.steps_together = lambda: barrier.count(int(env.now), policy.schedules_ahead)

    def _leap_over(self, now: int, first_step: FirstStep) -> tuple[int, int, Leap]:
        asked, drafted, saved = self.cost.take()
        found = super()._leap_over(now, first_step)
        self.cost.take()
        state = self.state
        batch_size, context = state.batch_size, state.batch_size * state.decode_step + state.lag_sum
        first = asked or Work(batch_size, context)
        moves = (0 if first_step is None else first_step[2]) - saved
        after = now + first_step[0] if first_step is not None and self.policy.stages > 1 else 0
        self._proposal = Proposal(
            found[0], found[2], first, moves, Work(batch_size, context + batch_size), drafted, after
        )
        return found

    def _stand_still(self, now: int, first_step: Begun, plan: StepPlan) -> tuple[int, Leap]:
        asked, drafted, saved = self.cost.take()
        found, piped = super()._stand_still(now, first_step, plan), self.policy.stages > 1
        if piped and asked is None:
            return self._skip_with(now, *found)
        if not found[0]:
            # It only preempts.
            return self._dummy(now, found[1])
        after = now + first_step[0] if piped else 0
        self._proposal = Proposal(0, found[1], asked or Work(), first_step[2] - saved, Work(), drafted, after)
        return found

    def _skip(self, now: int, ticks: int) -> Leap | None:
        leap = (now, 0, ticks, 0, 0, 0, 0, 0, len(self.state.waiting))
        self._begin(now, 0, ticks, leap)
        return self._skip_with(now, ticks, leap)[1]

    def _skip_with(self, now: int, ticks: int, leap: Leap) -> tuple[int, Leap]:
        """Propose a dummy batch once the oldest batch is over; vLLM waits for all batches before it takes its reply."""
        dummy, over = Work(DUMMY_TOKENS, DUMMY_TOKENS), now + ticks
        self._proposal = Proposal(0, leap, dummy, 0, Work(), None, max(over, self._passed_ticks), over)
        return ticks, leap

    def _wake(self, alarm: simpy.Event, priority: EventPriority, ticks: int) -> None:
        """See ``RoutedEngine``; the barrier sets the alarm of a step."""
        proposal, self._proposal = self._proposal, None
        if proposal is not None:
            self._alarm = alarm
            self._barrier.propose(self, proposal)
        elif self._resting:
            self._sleep(alarm, self._until)
        else:
            super()._wake(alarm, priority, ticks)

    def _sleep(self, alarm: simpy.Event, until: int) -> None:
        """Rest until a tick, and from then on until the other engines are between two steps."""
        self._alarm, self._until, since = alarm, SOMEDAY, self._since
        if until >= SOMEDAY:
            return

        def end(_: simpy.Event) -> None:
            if self._resting and self._since == since:
                self._wake_up(until)

        timer = Alarm(self.env)
        timer.callbacks = [end]
        self.env.schedule(timer, URGENT, until - since)

    def start(self, now: int, steps: int, ticks: int, leap: Leap, passed: int | None) -> None:
        """Begin steps of lengths that the barrier has found, the first of which has ``passed`` all stages then; None of a dummy batch."""
        self._knows_all = False
        if passed is not None:
            self._passed_ticks = passed
        self._begin(now, steps, ticks, leap, self._stops_at_arrival, starting=self._starting)
        self._ring_at(now + ticks, steps, leap)

    def stop_at_edge(self, limit: int, now: int, first: int, second: int, growth: int) -> int:
        """Steps, at most ``limit``, up to the last boundary at or before the next edge of a measurement."""
        return self._stop_at_edge(limit, now, first, second, growth)

    def end_after(self, steps: int) -> None:
        """End the leap in progress after so many of its steps, if that is earlier than its end."""
        super()._end_after(steps)

    def _end_after(self, steps: int) -> None:
        self._barrier.end_after(steps)

    def _wake_up(self, now: int) -> None:
        super()._wake_up(self._barrier.next_start(max(now, self._dummy_until)))

    def _drained(self, now: int) -> tuple[int, Leap | None] | None:
        """See ``Engine``; a dummy batch, begun before what now lets a request go on was known."""
        if not self._unfinished() and self._mailbox.next_ticks > now:
            return None
        return self._dummy(now, (now, 0, 0, 0, 0, 0, 0, 0, len(self.state.waiting)))

    def _pause(self, now: int, ticks: int, leap: Leap | None) -> tuple[int, Leap | None]:
        """See ``Engine``; the other engines do not stop meanwhile."""
        return self._dummy(now, leap or (now, 0, 0, 0, 0, 0, 0, 0, len(self.state.waiting)))

    def _dummy(self, now: int, leap: Leap) -> tuple[int, Leap]:
        """Take part in the next step with a dummy batch; ``leap`` has the ledger's columns without its ticks."""
        ticks = self._barrier.dummy_ticks
        self._dummy_until = now + ticks
        if self._unfinished():
            self._barrier.waits_until = self._dummy_until
        leap, self._knows_all = (*leap[:2], ticks, *leap[3:]), True
        self._begin(now, 0, ticks, leap, rests=True)
        return ticks, leap


class LockStepPrefillEngine(LockStepEngine, PrefillEngine):
    """A ``PrefillEngine`` in lock step with others; after ``barrier`` its arguments are those of that class."""


class Barrier:
    """Starts the steps of engines that share experts together.

    Args:
        env: Their environment.
        engines: Their number.
        priority: Later than those of all engines, at one tick.
        cost: That of each engine.
        stages: Pipeline stages with a batch of their own. A step then lasts until the next batch can enter the first stage.
    """

    def __init__(self, env: simpy.Environment, engines: int, priority: int, cost: StepCost, stages: int = 1) -> None:
        self._env, self._engines, self._priority, self._cost = env, engines, EventPriority(NORMAL + priority), cost
        self._stages, self._passes = stages, BatchQueue(stages, 1)
        self._proposed: dict[LockStepEngine, Proposal] = {}
        # The leap in progress: its engines, start, steps, and the lengths of its steps.
        self._stepping: list[LockStepEngine] = []
        self._start = self._steps = self._first = self._second = self._growth = 0
        self._until = 0
        # Steps before the leap in progress.
        self._before = 0
        #: End of the last dummy batch behind which a request goes on that its engine knows.
        self.waits_until = 0

    @property
    def dummy_ticks(self) -> int:
        """Length of a step in which no engine has work."""
        return self._among(()).step_ticks(DUMMY_TOKENS, DUMMY_TOKENS, 0, 0) // self._stages

    def count(self, now: int, ahead: bool) -> int:
        """Steps before one that starts ``now``, since the engines last stopped together (``step_counter`` of vLLM).

        Args:
            ahead: Whether engines decide a step while the step before it runs: they then learn a step later that none has work.
        """
        done = self._before + self._steps
        if now <= self._until:
            return done
        dummies = -(-(now - self._until) // self.dummy_ticks)
        # The first step after which none knows a request; they ask after that, or after the first step of all.
        idle_from = done + ahead + (self.waits_until > self._until)
        stop = 1 if idle_from == 1 else -(-idle_from // SYNC_STEPS) * SYNC_STEPS
        return 0 if done + dummies >= stop else done + dummies

    def propose(self, engine: LockStepEngine, proposal: Proposal) -> None:
        """An engine is ready for its next step."""
        if not self._proposed:
            settle = Alarm(self._env)
            settle.callbacks = [lambda _: self._settle()]
            self._env.schedule(settle, self._priority, 0)
        self._proposed[engine] = proposal

    def end_after(self, steps: int) -> None:
        """End the leap in progress after so many of its steps, if that is earlier than its end."""
        if steps < self._steps:
            self._steps = steps
            self._until = self._start + ticks_of(steps, self._first, self._second, self._growth)
            for engine in self._stepping:
                engine.end_after(steps)

    def next_start(self, now: int) -> int:
        """When an engine without work can start a step: at once, or after the step that the others are in."""
        if now >= self._until:
            return now
        if self._steps > 1:
            self.end_after(steps_until(now - self._start, self._first, self._second, self._growth))
        return self._until

    def _settle(self) -> None:
        """Start the steps that are proposed."""
        proposed, self._proposed = self._proposed, {}
        now, proposals = int(self._env.now), [*proposed.values()]
        before = self.count(now, next(iter(proposed)).policy.schedules_ahead)
        held = [each.dummy_from for each in proposals if each.dummy_from is not None]
        passed = self._passes.push(max([now, *held]), self._first_ticks(proposals)).over_ticks
        self._passes.pop()
        first = max([self._passes.free_at, *(each.after for each in proposals)]) - now
        steps, second, growth = self._later(proposals)
        if steps > 1:
            # All engines have the same edges.
            steps = next(iter(proposed)).stop_at_edge(steps, now, first, second, growth)
        if steps == 1:
            second = growth = 0
        ticks = ticks_of(steps, first, second, growth)
        self._before, self._start, self._steps, self._until = before, now, steps, now + ticks
        self._first, self._second, self._growth = first, second, growth
        self._stepping = [*proposed]
        for engine, proposal in proposed.items():
            alone = proposal.leap
            own = steps if proposal.steps else 0
            over = passed if proposal.dummy_from is None else None
            engine.start(now, own, ticks, (now, own, first, second, growth, *alone[5:]), over)

    def _among(self, works: Sequence[Work]) -> StepCost:
        idle = self._engines - len(works)
        return among(self._cost, [*(work.tokens for work in works), *[DUMMY_TOKENS] * idle])

    def _first_ticks(self, proposals: Sequence[Proposal]) -> int:
        cost = self._among([proposal.first for proposal in proposals])
        return max(
            proposal.moves
            + (cost.step_ticks(*proposal.first) if any(proposal.first) else 0)
            + (0 if proposal.drafted is None else draft_ticks(cost, *proposal.drafted))
            for proposal in proposals
        )

    def _later(self, proposals: Sequence[Proposal]) -> tuple[int, int, int]:
        """Steps of the leap, ticks of the second one, and by how much each later one is longer."""
        steps = min(proposal.steps or 1 for proposal in proposals)
        if steps == 1:
            return 1, 0, 0
        cost, lines = self._among([proposal.later for proposal in proposals]), []
        for batch_size, context, *_ in (proposal.later for proposal in proposals):
            base, slope, until = cost.decode_line(batch_size, context)
            most = None if until is None else 1 + (until - 1 - context) // batch_size
            lines.append(_Line(base + slope * context, slope * batch_size, most))
        highest = max(lines, key=lambda line: line[:2])
        steps = min([steps, *(1 + line.steps for line in lines if line.steps is not None)])
        for line in lines:
            if line.growth > highest.growth:
                # Up to the step in which this line passes the highest one.
                steps = min(steps, 2 + (highest.second - line.second) // (line.growth - highest.growth))
        return steps, highest.second, highest.growth
