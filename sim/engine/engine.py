"""The engine of one replica: a SimPy process that leaps from decision to decision.

Between two decisions every running sequence gains one token per step. One SimPy event therefore spans
all steps up to the next decision, which comes at the first of

    the finish of a sequence      known from the calendar
    an arrival                    that the policy could admit
    the policy's horizon          where the pool could run out of blocks
    a knot of the step's cost     where its slope changes
    an edge of a measurement window

While no sequence waits, a finish changes no decision: the engine does not call the policy again before its
horizon ends or a request arrives.

With ``leap=False`` every step is a separate event. The results are the same bits.

With asynchronous scheduling (``Policy.schedules_ahead``) a step is decided while the step before it runs. The decision is
made here when the step starts, from what was known a step earlier:

    step k          | ... | .... |        arrivals up to its start are known to the decision of step k + 1
    step k + 1            | .... | ...    sequences that finish in step k keep their blocks and places in that decision,
                                          and are released after it; those that end with an EOS compute a token in vain

A step is therefore decided anew after a finish if a sequence waits, and the leap to an arrival is one step longer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import simpy
from simpy.events import NORMAL, EventPriority

from ..cost.base import StepCost, effective_context
from ..memory import Memory
from ..memory.accounting.ledger import FLIGHT, Leap, Ledger
from ..policy.base import PairedPolicy
from ..types.errors import SimulationFault
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from ..types.sums import whole_steps
from ..workload.source import NEVER, Source
from .batch_queue import Batch, BatchQueue
from .executor import Begun, Executor, FirstStep
from .guard import Guard, translated
from .leap_check import NONE, Calls, LeapCheck
from .observer import Observer
from .transfers import TransferSource

#: Steps of the longest leap: the ledger's sums over a row stay within 64 bits.
LONGEST_LEAP = 1 << 16
#: Decisions that preempt, with no decode between them, from which on batches in flight are taken to preempt each other for ever.
MOST_PREEMPTING = 1000
#: What an alarm rings with: None, or where a leap or rest ends before its time, its steps, ticks and ledger's columns.
Cut = tuple[int, int, Leap | None] | None

#: How a plan is carried out, and how the steps that follow are taken: a leap, a step without decodes, or none.
Actions = tuple[
    Callable[[StepPlan, int], FirstStep],
    Callable[[int, FirstStep], tuple[int, int, Leap]],
    Callable[[int, Begun, StepPlan], tuple[int, Leap]],
    Callable[[int], tuple[int, Leap | None] | None],
]


class Engine:
    """Serves a source's requests with a policy over a memory.

    Args:
        env: SimPy environment with a clock in ticks, an int.
        source: Delivers the requests.
        policy, memory, cost: Scheduler, KV memory and step times.
        edges: Ticks at which a measurement begins or ends; leaps end there.
        leap: False to make every step an event.
        check_leaps: ``NONE``, ``SOME`` or ``ALL`` of ``leap_check``: leaps to take step by step.
        state: Waiting and running sequences; None makes a state without groups.
        observers: Notified of plans and steps.

    Attributes:
        ledger: Rows and residencies so far.
        end_ticks: Finish of the last request, once the run is over.
        stopped: Whether an observer ended the run before that.
    """

    #: SimPy's order of events at one tick.
    priority = NORMAL

    def __init__(
        self,
        env: simpy.Environment,
        source: Source,
        policy: PairedPolicy,
        memory: Memory,
        cost: StepCost,
        edges: Iterable[int] = (),
        leap: bool = True,
        check_leaps: int = NONE,
        state: State | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.env, self.source, self.policy, self.memory, self.cost = env, source, policy, memory, cost
        self.state = state or State(policy.preempted_first)
        memory.clock, transfers = lambda: int(env.now), memory.transfers
        if transfers is not None:
            transfers.connect(memory.clock, cost.swap_in_ticks, cost.swap_out_ticks)
            self.source = source = TransferSource(source, transfers, self.state)
        self._transfers = transfers
        self.state.speculates = memory.speculation is not None
        self._effective = effective_context(cost)
        guard = Guard.of(policy, memory)
        calls = Calls(policy.schedule, policy.horizon) if guard is None else Calls(guard.schedule, guard.horizon)
        if check_leaps != NONE:
            calls = LeapCheck(policy, memory, cost, calls, check_leaps).calls
        self._schedule, self._horizon = calls
        self._advance = memory.advance if guard is None else guard.advance
        self.ledger = Ledger(memory.meter if policy.stages == 1 else (*memory.meter, FLIGHT))
        if policy.stages > 1:
            memory.pipelined = True
        self._executor = Executor(self.state, memory, cost, self.ledger, policy.stages > 1)
        self.leap = self._may_leap = leap
        self.end_ticks = int(env.now)
        self.stopped = False
        self._observers = tuple(observers)
        # Whether what passes now is no step, so that the next decision knows all that happens meanwhile.
        self._knows_all = False
        self._ahead = policy.schedules_ahead
        # When the last batch has passed all stages, where it waits for other engines in each.
        self._passed_ticks = 0
        # The plan being carried out, for observers.
        self._plan = CARRY_ON
        self._edges = sorted(edges, reverse=True)
        #: Finished requests of a closed loop that the source has not been notified of.
        self._answered: list[Sequence] = []
        #: Whether requests finished since the last call of the scheduler, which tells the workers (vLLM's ``finished_req_ids``).
        self._has_finished = False
        #: Decode step up to which the policy's decision stays the same if no request arrives.
        self._holds_until = 0
        loop = self._serve() if policy.stages == 1 else self._serve_batches()
        self.process = env.process(translated(loop, policy, memory, cost, self.state))

    def stop(self) -> None:
        """End the run after the step or leap in progress."""
        self.stopped = True

    def _serve(self) -> Generator[simpy.Event, Cut, None]:
        source, policy, memory, state = self.source, self.policy, self.memory, self.state
        # Local names: a run makes millions of these calls.
        wake, priority, transaction, schedule = self._waker(), self.priority, memory.transaction, self._schedule
        enter, advance, calendar = self.ledger.enter, self._advance, state.calendar
        take_finished = state.take_ended if policy.leaves_together else state.take_finished
        release = self._release_and_notify if source.hears_of_finishes else memory.release
        ahead, finish = self._ahead, self._finish
        ended: list[Sequence] = []
        deferred, free_deferred = memory.deferred, self._free_deferred
        carry_out, leap_over, stand_still, rest = self._actions()
        alarm = Alarm(self.env)
        tiers = self._transfers if self._transfers is not None and self._transfers.behind else None
        # When what the next decision knows was known.
        seen = now = int(self.env.now)
        leap: Leap | None
        while not self.stopped:
            if tiers is not None:
                tiers.seen_ticks = seen
            if source.next_ticks <= seen:
                source.deliver(seen, state.waiting)
                plan = schedule(state, transaction(state.decode_step))
            elif state.decode_step >= self._holds_until:
                plan = schedule(state, transaction(state.decode_step))
            else:
                plan = CARRY_ON
            first_step = None if plan is CARRY_ON else carry_out(plan, now)
            if ended:
                first_step = finish(ended, plan, first_step, now)
            elif deferred:
                first_step = free_deferred(first_step)
            steps = 0
            # In this order because reading the fields of a plan is slow.
            if state.batch_size and (plan is CARRY_ON or not plan.prefill_only):
                steps, ticks, leap = leap_over(now, first_step)
            elif first_step and (first_step[0] or plan.preempted):
                ticks, leap = stand_still(now, first_step, plan)
                if ended and self._is_over():
                    # What the last step computes in vain is no part of the run.
                    break
            elif ended or seen < now:
                # Nothing was scheduled ahead, so the next decision is taken at once, with all that is known by now.
                ended, seen = [], now
                if not (idle := self._drained(now)):
                    continue
                ticks, leap = idle
            elif idle := rest(now):
                ticks, leap = idle
            else:
                self._check_done()
                break
            alarm.callbacks = []
            wake(alarm, priority, ticks)
            cut = yield alarm
            if cut:
                # The old alarm has yet to fire, but no process waits for it.
                alarm = Alarm(self.env)
                steps, ticks, leap = cut
            # Equals SimPy's clock; adding is cheaper than reading it.
            seen = now = now + ticks
            if ahead:
                ended = []
            if leap:
                enter(leap + advance(state, steps))
                state.decode_step = decode_step = state.decode_step + steps
                if ahead and not self._knows_all:
                    # The start of the last step.
                    seen = now - leap[3] - leap[4] * (steps - 2) if steps > 1 else leap[0]
                if calendar and calendar[0][0] == decode_step:
                    if ahead:
                        ended = self._hold_finished()
                    else:
                        release(take_finished(), decode_step)
        self.end_ticks = now

    def _serve_batches(self) -> Generator[simpy.Event, Cut, None]:
        """As ``_serve``, with a batch in each pipeline stage (``batch_queue``); every batch is a step of its own."""
        source, state, stages = self.source, self.state, self.policy.stages
        wake, priority, actions = self._waker(), self.priority, self._actions()
        queue = BatchQueue(stages, stages + self._ahead)
        # When what the next decision knows was known.
        seen = now = int(self.env.now)
        preempting = 0
        while not self.stopped:
            if source.next_ticks <= seen:
                source.deliver(seen, state.waiting)
            steps, batch, known = 0, None, None
            call = self._call(queue, now, seen, actions)
            if call is None:
                seen, idle = self._drain(queue, now, seen, actions)
                if not idle:
                    self._check_done()
                    break
                ticks, leap = idle
                seen = max(seen, now + ticks)
            else:
                batch, known, plan, first_step = call
                if known is not None:
                    seen = max(seen, known.over_ticks)
                    if self._ahead and known.ended:
                        self._settle(known, now, state.decode_step)
                        known = None
                ticks = max(seen, queue.free_at, now) - now
                begun = self._row(now, ticks, plan, first_step, actions)
                if begun is None:
                    break
                steps, leap = begun
                preempting = 0 if steps else preempting + bool(plan.preempted)
                if preempting > MOST_PREEMPTING:
                    # vLLM starts with a pool that holds the longest sequence, not what its batches in flight keep besides.
                    remedy = "use a larger pool (num_gpu_blocks_override) or fewer pipeline stages"
                    raise SimulationFault(
                        f"policy {self.policy.name} is stuck: no sequence decodes before it is preempted; {remedy}"
                    )
            if ticks or leap:
                alarm = Alarm(self.env)
                alarm.callbacks = []
                wake(alarm, priority, ticks)
                cut = yield alarm
                if cut:
                    steps, ticks, leap = cut
                    seen = max(seen, now) if self._ahead and batch is not None and batch.computes else now + ticks
                    if batch is not None:
                        batch.over_ticks = self._passed_ticks if batch.computes else seen
                now += ticks
            if leap:
                flight = batch.over_ticks - now if batch is not None and batch.computes else 0
                self.ledger.enter((*leap, *self._advance(state, steps), flight))
                state.decode_step += steps
                if batch is not None and state.calendar and state.calendar[0][0] == state.decode_step:
                    batch.ended = self._hold_in_flight()
            if known is not None:
                self._settle(known, now, state.decode_step - 1)
        self.end_ticks = now

    def _call(
        self, queue: BatchQueue, now: int, seen: int, actions: Actions
    ) -> tuple[Batch, Batch | None, StepPlan, FirstStep] | None:
        """Decide a batch: that, the one whose tokens are then waited for, and the plan; None where nothing in flight changes the next decision."""
        if not (self._has_requests() or self._has_finished):
            return None
        state, memory, self._has_finished = self.state, self.memory, False
        plan = self._schedule(state, memory.transaction(state.decode_step))
        first_step = None if plan is CARRY_ON else actions[0](plan, now)
        if plan.taken_back:
            queue.take_back(plan.taken_back)
        changes = queue.computes or bool(plan.preempted)
        decodes = plan.stalls[1] if plan.stalls else ()
        ticks, _, wait, *_ = first_step or (0, 0, 0)
        batch = queue.push(now if ticks else seen, ticks - wait, decodes, wait)
        batch.scheduled = memory.batch
        known = queue.pop()
        return (batch, known, plan, first_step) if changes or batch.computes or wait else None

    def _row(
        self, now: int, ticks: int, plan: StepPlan, first_step: FirstStep, actions: Actions
    ) -> tuple[int, Leap | None] | None:
        """Steps and ledger's columns of a row; None where the run is over, and the last batches compute in vain."""
        _, leap_over, stand_still, _ = actions
        if self.state.batch_size and first_step is not None:
            steps, _, leap = leap_over(now, (ticks, *first_step[1:3], False, False))
            return steps, leap
        if first_step is not None and (first_step[0] or plan.preempted):
            _, leap = stand_still(now, (ticks, *first_step[1:]), plan)
            return None if not self._has_requests() and self._is_over() else (0, leap)
        return 0, self._skip(now, ticks)

    def _skip(self, now: int, ticks: int) -> Leap | None:
        """The ledger's columns of a call that schedules nothing, until the oldest batch is over."""
        if not ticks:
            return None
        return self._pause(now, ticks, (now, 0, ticks, 0, 0, 0, 0, 0, len(self.state.waiting)))[1]

    def _drain(
        self, queue: BatchQueue, now: int, seen: int, actions: Actions
    ) -> tuple[int, tuple[int, Leap | None] | None]:
        """When the oldest batch is over, or all are, and how long nothing runs then: as ``_rest``. A request that comes before the
        others are over is scheduled at once."""
        while batch := queue.pop_oldest():
            self.memory.land(batch.scheduled)
            seen = max(seen, batch.over_ticks)
            if seen > now and not self._is_over():
                return seen, self._pause(now, seen - now, None)
            if self.source.next_ticks <= seen:
                return seen, (0, None)
        if self.source.next_ticks <= now:
            # It came after what the last decision knew.
            return now, (0, None)
        return seen, actions[3](now)

    def _has_requests(self) -> bool:
        """Whether any request has not finished, as far as the next decision knows, or has blocks to offer to the host."""
        state, transfers = self.state, self._transfers
        offers = transfers is not None and transfers.has_finished
        return bool(self._unfinished() or state.running or state.finished or offers)

    def _pause(self, now: int, ticks: int, leap: Leap | None) -> tuple[int, Leap | None]:
        """Ticks that pass while nothing can be scheduled, and the ledger's columns for them."""
        for observer in self._observers:
            observer.idle_started(now, ticks)
        return ticks, leap

    def _actions(self) -> Actions:
        """The four actions of the loop; without observers these are the methods themselves, at no extra cost."""
        if self._observers:
            return self._carry_out_observed, self._leap_over_observed, self._stand_still_observed, self._rest_observed
        return self._carry_out, self._leap_over, self._stand_still, self._rest

    def _waker(self) -> Callable[[simpy.Event, EventPriority, int], None]:
        """The function that schedules an alarm, given its priority and the ticks until it fires.

        An alarm that fires with a value ends a leap or rest early; the value has its steps, ticks and ledger columns.
        """
        return self.env.schedule

    def _rest(self, now: int) -> tuple[int, Leap | None] | None:
        """How long nothing runs: ticks until a request arrives or a copy ends, with the ledger's columns; None if neither is to come."""
        until, waiting = self.source.next_ticks, len(self.state.waiting)
        if until < NEVER and self._transfers is not None and self._transfers.loaded:
            # They hold blocks, so the ledger has a row.
            self.state.idle_spans += 1
            return until - now, (now, 0, until - now, 0, 0, 0, 0, 0, waiting)
        if until < NEVER and (not waiting or self._transfers is not None or self.policy.admits_by_queue):
            self.state.idle_spans += 1
            return until - now, None
        return None

    def _drained(self, now: int) -> tuple[int, Leap | None] | None:
        """Ticks that pass before the next decision after steps scheduled ahead, and the ledger's columns; None if none do."""
        return None

    def _carry_out(self, plan: StepPlan, now: int) -> FirstStep:
        """Carry out a new decision of the policy."""
        self._holds_until = 0
        return self._executor.carry_out(plan, now)

    def _hold_finished(self) -> list[Sequence]:
        """The sequences that finished in the last step; the next decision does not know it yet."""
        ended = self.state.note_finished(self.policy.expects_end)
        for sequence in self.state.finished:
            self.memory.stall(sequence, self.state.decode_step, finished=True)
        return ended

    def _hold_in_flight(self) -> list[Sequence]:
        """As ``_hold_finished``; what the last batch sampled is known once it has passed all stages."""
        state = self.state
        ended = state.note_finished(self.policy.expects_end if self._ahead else None)
        for sequence in ended:
            self.memory.stall(sequence, state.decode_step, finished=True)
            if sequence in state.overrunning:
                state.wait_in_vain(sequence)
        return ended

    def _settle(self, batch: Batch, now: int, decode_step: int) -> None:
        """What a batch sampled is known: release the sequences that it ended, but for those preempted meanwhile.

        Args:
            decode_step: The last step that was carried out.
        """
        state = self.state
        if not batch.ended:
            self.memory.land(batch.scheduled)
            return
        self._has_finished = True
        leaving = [each for each in batch.ended if each in state.finished or each in state.overrunning]
        lost = [each for each in batch.ended if each not in leaving]
        for sequence in lost:
            state.waiting.remove(sequence)
        vain = tuple(each for each in state.overrunning if each in state.running)
        # Between two steps nobody looks.
        for observer in self._observers if decode_step == state.decode_step else ():
            observer.requests_finished(now, batch.ended, vain)
        self.memory.land(batch.scheduled)
        if self.source.hears_of_finishes:
            self._release_and_notify(leaving, decode_step, lost)
        else:
            self.memory.release_finished(leaving, decode_step)
        for sequence in leaving:
            state.forget(sequence)

    def _finish(self, ended: list[Sequence], plan: StepPlan, first_step: FirstStep, now: int) -> FirstStep:
        """Release sequences that finished in the last step, now that the plan of the coming step is carried out.

        Returns:
            ``first_step``, with the tokens that are computed in vain; no longer valid if a sequence waits for what was released.
        """
        state, decode_step = self.state, self.state.decode_step
        if plan.taken_back:
            ended = [sequence for sequence in ended if sequence not in plan.taken_back]
        if first_step is None and state.overrunning:
            self._plan = plan
            context = state.batch_size * decode_step + state.lag_sum
            if self._effective is not None:
                context = self._effective(context, self.memory.repeated_slots())
            base, slope, _ = self.cost.decode_line(state.batch_size, context)
            first_step = base + slope * context, 0, 0, True, True
        leaving = ended
        # Those that the plan preempts have no blocks any more.
        lost: list[Sequence] = []
        if plan.preempted:
            leaving = [sequence for sequence in ended if sequence not in plan.preempted]
            lost = [sequence for sequence in ended if sequence in plan.preempted]
        for observer in self._observers:
            observer.requests_finished(now, ended, tuple(state.overrunning))
        if self.memory.deferred:
            self.memory.free_deferred(decode_step)
        if self.source.hears_of_finishes:
            self._release_and_notify(leaving, decode_step, lost)
        else:
            self.memory.release_finished(leaving, decode_step)
        state.forget_finished()
        if state.waiting or self.memory.deferred:
            return _for_one_step(first_step)
        return first_step

    def _free_deferred(self, first_step: FirstStep) -> FirstStep:
        """Blocks that waited for the last step come free, now that the plan of the coming step is carried out. As ``_finish``."""
        self.memory.free_deferred(self.state.decode_step)
        return _for_one_step(first_step) if self.state.waiting else first_step

    def _release_and_notify(self, leaving: list[Sequence], decode_step: int, lost: Iterable[Sequence] = ()) -> None:
        """Release the finished sequences, and notify the source of the answers.

        Args:
            lost: Finished sequences that were preempted.
        """
        if self._ahead or self.policy.stages > 1:
            self.memory.release_finished(leaving, decode_step)
        else:
            self.memory.release(leaving, decode_step)
        self._answered += (*lost, *leaving)
        # In a static batch all requests are answered together.
        if not self.policy.leaves_together or not self.state.running:
            self.source.finish(self._answered, int(self.env.now))
            self._answered = []

    def _leap_over(self, now: int, first_step: FirstStep) -> tuple[int, int, Leap]:
        """Steps for which the decision stays valid, their ticks, and the ledger's columns for them."""
        state = self.state
        decode_step, batch_size = state.decode_step, state.batch_size
        context = batch_size * decode_step + state.lag_sum
        if self._effective is not None:
            # By the same for every step of the leap.
            context = self._effective(context, self.memory.repeated_slots())
        if first_step is None:
            prefill = swap = waiting = 0
            valid_until_horizon = stops_at_arrival = self.leap
            base, slope, until = self.cost.decode_line(batch_size, context)
            first = base + slope * context
        else:
            first, prefill, swap, valid_until_horizon, stops_at_arrival = first_step
            valid_until_horizon = valid_until_horizon and self.leap
            waiting = len(state.waiting)
            base, slope, until = self.cost.decode_line(batch_size, context + batch_size)
        second, growth = base, 0
        if slope:
            second, growth = base + slope * (context + batch_size), slope * batch_size
        limit = state.calendar[0][0] - decode_step if valid_until_horizon else 1
        if stops_at_arrival and limit > 1:
            # ``steps_until`` and ``ticks_of``, spelt out: calls here cost 5 % of a run.
            ahead = self.source.next_ticks - now - first - 1
            reach = 1 if ahead < 0 else 2 + (whole_steps(ahead, second, growth) if growth else ahead // second)
            if self._ahead and self.source.next_ticks > now:
                reach += 1
            if reach < limit:
                limit = reach
        if limit > 1:
            if until is not None:
                limit = min(limit, 1 + (until - 1 - context) // batch_size)
            if self._edges:
                limit = self._stop_at_edge(limit, now, first, second, growth)
            if decode_step + limit > self._holds_until:
                limit = self._ask_horizon(limit)
        more = limit - 1
        ticks = first + more * second
        if growth:
            ticks += growth * (more * (more - 1) // 2)
        return limit, ticks, (now, limit, first, second, growth, batch_size, prefill, swap, waiting)

    def _ask_horizon(self, limit: int) -> int:
        """Steps, at most ``limit``, for which the policy's decision stays the same."""
        state = self.state
        steps = min(self._horizon(state, self.memory, limit), LONGEST_LEAP)
        if not state.waiting and not state.swapped:
            # No sequence could take the place of a finished one: the decision holds across finishes.
            self._holds_until = state.decode_step + steps
        return min(steps, limit)

    def _stop_at_edge(self, limit: int, now: int, first: int, second: int, growth: int) -> int:
        """Steps up to the last boundary at or before the next edge; a step across the edge is a leap of its own."""
        edges = self._edges
        while edges and edges[-1] <= now:
            edges.pop()
        if not edges:
            return limit
        ahead = edges[-1] - now - first
        return 1 if ahead < 0 else min(limit, 1 + whole_steps(ahead, second, growth))

    def _stand_still(self, now: int, first_step: Begun, plan: StepPlan) -> tuple[int, Leap]:
        """A step in which no sequence decodes: it only prefills, or only swaps because all sequences were preempted."""
        ticks, prefill, swap, _, _ = first_step
        batch_size = len(plan.admitted) + len(plan.chunks)
        return ticks, (now, 0, ticks, 0, 0, batch_size, prefill, swap, len(self.state.waiting))

    # The same four actions, with notification of the observers.

    def _carry_out_observed(self, plan: StepPlan, now: int) -> FirstStep:
        self._plan = plan
        for observer in self._observers:
            observer.plan_decided(now, plan)
        return self._carry_out(plan, now)

    def _leap_over_observed(self, now: int, first_step: FirstStep) -> tuple[int, int, Leap]:
        self.leap = self._may_leap and not any(observer.every_step for observer in self._observers)
        steps, ticks, leap = self._leap_over(now, first_step)
        plan = CARRY_ON if first_step is None else self._plan
        for observer in self._observers:
            observer.step_started(now, ticks, leap, plan)
        return steps, ticks, leap

    def _stand_still_observed(self, now: int, first_step: Begun, plan: StepPlan) -> tuple[int, Leap]:
        ticks, leap = self._stand_still(now, first_step, plan)
        for observer in self._observers:
            observer.step_started(now, ticks, leap, plan)
        return ticks, leap

    def _rest_observed(self, now: int) -> tuple[int, Leap | None] | None:
        idle = self._rest(now)
        if idle:
            for observer in self._observers:
                observer.idle_started(now, idle[0])
        return idle

    def _is_over(self) -> bool:
        """Whether the run is over: every request has finished, and the source sends no more."""
        return self.source.next_ticks >= NEVER and not self.state.running and not self._unfinished()

    def _unfinished(self) -> int:
        """Requests that do not decode and have not finished."""
        state = self.state
        return len(state.waiting) + len(state.swapped) + len(state.prefilling) + len(state.stalled)

    def _check_done(self) -> None:
        """Check that nothing is left when nothing can go on: no sequence, and no slot that one held."""
        left = self._unfinished() + len(self.state.running)
        if left:
            raise self.policy.stuck(left)
        memory = self.memory
        held = memory.capacity_slots - memory.pinned_slots - memory.room_after(self.state, 0)
        if held:
            raise SimulationFault(f"{held} slots are held after the last request")


def _for_one_step(first_step: FirstStep) -> FirstStep:
    """The plan of a step does not hold for the next one."""
    if first_step is None:
        return None
    ticks, prefill, swap, _, stops_at_arrival = first_step
    return ticks, prefill, swap, False, stops_at_arrival


class Alarm(simpy.Event):
    """A reusable timeout: faster than a new one for every leap."""

    def __init__(self, env: simpy.Environment, value: object = None) -> None:
        super().__init__(env)
        self._ok, self._value = True, value
