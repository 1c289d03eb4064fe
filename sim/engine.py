"""The engine of one replica: a SimPy process that leaps from decision to decision.

Between two decisions decoding is lockstep: every running sequence gains one token a step. So one
SimPy event spans as many steps as hold the same decision, up to the nearest of

    a sequence that finishes      the calendar knows when
    an arrival                    where one could be admitted
    the policy's horizon          the pool could run dry
    a knot of the step's cost     its slope changes
    an edge of a measurement window

With ``leap=False`` every step is an event of its own. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from math import isqrt
from typing import Any

import simpy

from .cost.base import StepCost
from .errors import SimulationFault
from .memory.ledger import Leap, Ledger
from .policy.base import Policy
from .sequence import CARRY_ON, Plan, Sequence
from .source import NEVER, Source
from .state import State

#: Steps of the longest leap: the ledger's sums over a row stay within 64 bits.
_LONGEST_LEAP = 1 << 16


class Engine:
    """Serves a source's requests with a policy over a memory.

    Args:
        env: SimPy environment whose clock counts ticks, from an int.
        source: Where requests come from.
        policy, memory, cost: Who runs, who holds which slot, how long a step takes.
        edges: Ticks at which a measurement begins or ends; leaps stop there.
        leap: False to make every step an event.
    """

    def __init__(
        self,
        env: simpy.Environment,
        source: Source,
        policy: Policy,
        memory: Any,
        cost: StepCost,
        edges: Iterable[int] = (),
        leap: bool = True,
    ) -> None:
        self.env, self.source, self.policy, self.memory, self.cost = env, source, policy, memory, cost
        self.state = State()
        self.ledger = Ledger()
        self.leap = leap
        #: When the last request was done; the run may go on for those who only watch the clock.
        self.end_ticks = env.now
        self._edges = sorted(edges, reverse=True)
        self.process = env.process(self._serve())

    def _serve(self) -> Generator[simpy.Event, None, None]:
        env, source, policy, memory = self.env, self.source, self.policy, self.memory
        state, ledger = self.state, self.ledger
        take_finished = state.take_ended if policy.leaves_together else state.take_finished
        now = env.now
        while True:
            if source.next_ticks <= now:
                source.deliver(now, state.waiting)
            plan = policy.schedule(state, memory.transaction(state.clock))
            memory.commit(plan, state.clock)
            if plan is not CARRY_ON:
                state.begin(plan)
                ledger.open(plan, state)
            if state.width:
                steps, ticks, leap = self._leap_over(plan, now)
                yield env.timeout(ticks)
                ledger.close(leap + memory.pass_steps(state, steps))
                state.clock += steps
                if state.calendar[0][0] == state.clock:
                    memory.release(take_finished(), state.clock)
            elif plan.preempted or plan.swapped_out:
                ticks = self._swap_alone(plan, now)
                yield env.timeout(ticks)
            elif source.next_ticks < NEVER and not state.waiting:
                ticks = source.next_ticks - now
                yield env.timeout(ticks)
            else:
                self._check_done()
                self.end_ticks = now
                return
            # What SimPy's clock says too; adding up is cheaper than asking.
            now += ticks

    def _leap_over(self, plan: Plan, now: int) -> tuple[int, int, Leap]:
        """How many steps the plan carries, how long they take, and the ledger's columns for them."""
        state = self.state
        clock, width, waiting = state.clock, state.width, len(state.waiting)
        context = width * clock + state.lag_sum
        decodes, prefill, swap, steady, wakes = width, 0, 0, True, True
        if plan is CARRY_ON:
            base, slope, until = self.cost.decode_line(width, context)
            first = base + slope * context
        else:
            admitted, prefill, _, swapped_out, swapped_in, padded, steady, wakes, _ = plan
            decodes -= len(admitted)
            first = self.cost.step_ticks(decodes, context - prefill, prefill, _causal_pairs(admitted, padded))
            if swapped_out or swapped_in:
                swap = self._swap_ticks(plan)
                first += swap
            base, slope, until = self.cost.decode_line(width, context + width)
        limit = state.calendar[0][0] - clock
        if limit == 1 or not steady or not self.leap:
            return 1, first, (now, 1, first, first, 0, 0, width, decodes, prefill, swap, waiting)
        if limit > _LONGEST_LEAP:
            limit = _LONGEST_LEAP
        second, growth = base + slope * (context + width), slope * width
        if until is not None:
            limit = min(limit, 1 + (until - 1 - context) // width)
        if wakes:
            limit = self._stop_at_arrival(limit, now + first, second, growth)
        if self._edges:
            limit = self._stop_at_edge(limit, now, first, second, growth)
        if limit > 1:
            limit = self.policy.horizon(state, self.memory, limit)
        more = limit - 1
        ticks = first + more * second
        if growth:
            ticks += growth * (more * (more - 1) // 2)
        return limit, ticks, (now, limit, ticks, first, second, growth, width, decodes, prefill, swap, waiting)

    def _stop_at_arrival(self, limit: int, then: int, second: int, growth: int) -> int:
        """Steps up to the first boundary at or after the next arrival; the first step ends ``then``."""
        ahead = self.source.next_ticks - then - 1
        if ahead < 0:
            return 1
        steps = 2 + (_whole_steps(ahead, second, growth) if growth else ahead // second)
        return steps if steps < limit else limit

    def _stop_at_edge(self, limit: int, now: int, first: int, second: int, growth: int) -> int:
        """Steps up to the last boundary at or before the next edge; one that straddles it goes alone."""
        edges = self._edges
        while edges and edges[-1] <= now:
            edges.pop()
        if not edges:
            return limit
        ahead = edges[-1] - now - first
        return 1 if ahead < 0 else min(limit, 1 + _whole_steps(ahead, second, growth))

    def _swap_ticks(self, plan: Plan) -> int:
        """Time that the plan's blocks take to the host and back."""
        size = self.memory.block_size
        out = sum(-(-(sequence.start_tokens - 1) // size) for sequence in plan.swapped_out)
        back = sum(-(-(sequence.start_tokens - 1) // size) for sequence in plan.swapped_in)
        return (self.cost.swap_out_ticks(out) if out else 0) + (self.cost.swap_in_ticks(back) if back else 0)

    def _swap_alone(self, plan: Plan, now: int) -> int:
        """Everything was pushed out: no step runs, and only the swap takes time."""
        ticks = self._swap_ticks(plan)
        nothing = (0,) * 8
        self.ledger.close((now, 0, ticks, ticks, 0, 0, 0, 0, 0, ticks, len(self.state.waiting), *nothing))
        return ticks

    def _check_done(self) -> None:
        left = len(self.state.waiting) + len(self.state.swapped)
        if left:
            raise SimulationFault(f"policy {self.policy.name} is stuck: nothing runs and {left} requests wait")


def _causal_pairs(admitted: tuple[Sequence, ...], padded_tokens: int) -> int:
    """Pairs of query and key that the prefills attend to."""
    pairs = 0
    for sequence in admitted:
        tokens = padded_tokens or sequence.start_tokens
        pairs += tokens * (tokens + 1) // 2
    return pairs


def _whole_steps(ticks: int, second: int, growth: int) -> int:
    """Decode steps that fit in ``ticks``: the largest j with ``j*second + growth*j*(j-1)/2 <= ticks``."""
    if not growth:
        return ticks // second
    # The root of the quadratic; flooring the square root first changes nothing, as the rest are integers.
    linear = 2 * second - growth
    return (isqrt(linear * linear + 8 * growth * ticks) - linear) // (2 * growth)
