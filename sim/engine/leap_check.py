"""Checks that a leap is what its steps are.

A leap rests on two promises: of the policy that its decision stays the same, and of the cost that its line goes through the times
of the steps. A checked leap is taken step by step, and the policy is asked before each step:

    leap           |-----------------------------|     not taken
    steps          |----|----|----|----|----|----|     each takes the ticks that it would have taken in the leap
    schedule       ^    ^    ^    ^    ^    ^          from the second on it moves no sequence and computes no prompt

That is another run beside the one of the results, which has a row for each leap. The engine calls ``LeapCheck`` where it calls the
policy; without checks it calls the policy itself.

``require_same`` compares both runs. So it also finds a memory that grows otherwise in a leap, and a policy that decides otherwise
because it was asked more often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np

from ..config.settings import Settings
from ..cost.base import StepCost, effective_context
from ..memory import Memory, Transaction
from ..memory.accounting.ledger import LEAP
from ..policy.base import PairedPolicy
from ..policy.registry import plugin_of
from ..runs.run_log import RunLog
from ..types.errors import SimulationFault
from ..types.plugins import broken, is_plugin
from ..types.sequence import CARRY_ON, StepPlan
from ..types.state import State

#: Which leaps an engine takes step by step.
NONE, SOME, ALL = range(3)
#: What ``SOME`` are: so many at first, and then one in so many.
FIRST_LEAPS, ONE_IN = 200, 20
#: Fields of a plan that move sequences or take time.
_CHANGES = (
    "admitted", "chunks", "preempted", "swapped_out", "swapped_in", "stalls", "forked", "prefill_tokens", "prefill_only", "flush_ticks",
)  # fmt: skip
_REMEDY = "return valid_until_horizon=False, or fewer steps from horizon"


class Calls(NamedTuple):
    """What an engine calls of its policy."""

    schedule: Callable[[State, Transaction], StepPlan]
    horizon: Callable[[State, Memory, int], int]


@dataclass(frozen=True)
class _Promise:
    """What a leap that is checked would have had.

    Attributes:
        start, end: Its first decode step, and the one after its last.
        held_until: Decode step up to which the decision stays the same also after a finish, as no sequence waits.
        waiting: Sequences in the queue.
        stops_at_arrival: Of the plan.
        context: Of the first step.
        lines: Base and slope of the ticks of a step over its context, as the cost says for the first step and for the second. A leap
            takes the second one where its first step does more than decode.
    """

    start: int
    end: int
    held_until: int
    waiting: int
    stops_at_arrival: bool
    context: int
    lines: tuple[tuple[int, int], ...]

    def holds(self, state: State) -> bool:
        """Whether it says something of the step that is decided."""
        if not self.start < state.decode_step < self.held_until:
            return False
        return not self.has_arrivals(state) or (not self.stops_at_arrival and state.decode_step < self.end)

    def has_arrivals(self, state: State) -> bool:
        """Whether a request has arrived since."""
        return len(state.waiting) > self.waiting


class LeapCheck:
    """A policy, a memory and a cost, as an engine calls them.

    Args:
        policy, memory, cost: Of the engine.
        calls: What it would call without checks.
        which: ``SOME`` leaps or ``ALL``.
    """

    def __init__(self, policy: PairedPolicy, memory: Memory, cost: StepCost, calls: Calls, which: int) -> None:
        self._policy, self._memory, self._cost, self._every = policy, memory, cost, which == ALL
        self._schedule, self._horizon = calls
        self._effective = effective_context(cost)
        self._leaps = 0
        self._plan, self._planned_at = CARRY_ON, -1
        self._promise: _Promise | None = None

    @property
    def calls(self) -> Calls:
        """What the engine calls."""
        return Calls(self.schedule, self.horizon)

    def schedule(self, state: State, transaction: Transaction) -> StepPlan:
        """The policy's plan, which changes nothing where a promise holds.

        Raises:
            PluginError, SimulationFault: It does.
        """
        plan, promise = self._schedule(state, transaction), self._promise
        if promise is not None and not promise.holds(state):
            promise = self._promise = None
        if promise is not None and plan is not CARRY_ON:
            self._require_no_change(plan, promise, state)
        self._plan, self._planned_at = plan, state.decode_step
        return plan

    def horizon(self, state: State, memory: Memory, limit: int) -> int:
        """The steps for which the policy's decision stays the same; 1 in a leap that is checked.

        Raises:
            PluginError, SimulationFault: The step does not take the ticks that a leap would have had.
        """
        steps, promise = self._horizon(state, memory, limit), self._promise
        if promise is not None and promise.holds(state):
            self._require_ticks(promise, state)
            return 1
        self._promise = None
        if steps < 2:
            return steps
        self._leaps += 1
        if not (self._every or self._leaps <= FIRST_LEAPS or self._leaps % ONE_IN == 0):
            return steps
        self._promise = self._promised(state, steps, limit)
        return 1

    def _promised(self, state: State, steps: int, limit: int) -> _Promise:
        start, batch_size = state.decode_step, state.batch_size
        end = start + min(steps, limit)
        context = self._context(state)
        lines = (self._cost.decode_line(batch_size, each) for each in (context, context + batch_size))
        return _Promise(
            start=start,
            end=end,
            held_until=end if state.waiting or state.swapped else start + steps,
            waiting=len(state.waiting),
            stops_at_arrival=self._planned_at != start or self._plan.stops_at_arrival,
            context=context,
            lines=tuple((base, slope) for base, slope, _ in lines),
        )

    def _context(self, state: State) -> int:
        """Sum of the contexts of the step, as the cost reads it."""
        context = state.batch_size * state.decode_step + state.lag_sum
        return context if self._effective is None else self._effective(context, self._memory.repeated_slots())

    def _require_no_change(self, plan: StepPlan, promise: _Promise, state: State) -> None:
        for field in _CHANGES:
            found = getattr(plan, field)
            if not found or found == ((), ()):
                continue
            remedy = _REMEDY
            if promise.has_arrivals(state):
                remedy = "a request has arrived; return stops_at_arrival=True"
            what = f"the plan of decode step {promise.start} promises no change before step {promise.held_until}"
            self._refuse(self._policy, "schedule", field, f"{_shown(found)}, and {what}; {remedy}", state)

    def _require_ticks(self, promise: _Promise, state: State) -> None:
        if state.decode_step >= promise.end:
            return
        context = promise.context + (state.decode_step - promise.start) * state.batch_size
        leapt = [base + slope * context for base, slope in promise.lines]
        ticks = self._cost.step_ticks(state.batch_size, self._context(state), 0, 0)
        if ticks not in leapt:
            what = f"the step takes {ticks}, and the line of decode step {promise.start} says {leapt[0]}; end the line earlier"
            self._refuse(_innermost(self._cost), "decode_line", "ticks", what, state)

    def _refuse(self, part: object, method: str, field: str, what: str, state: State) -> NoReturn:
        what = f"{field}: {what}"
        if not is_plugin(part):
            # The class that changed a part of what this one does.
            part = next((each for each in (self._policy, self._memory) if is_plugin(each)), part)
        if is_plugin(part):
            raise broken(type(part), method, "leap", what, state.decode_step)
        raise SimulationFault(f"policy {self._policy.name}, decode step {state.decode_step}: {what}")


def leaps_to_check(settings: Settings) -> int:
    """``NONE``, ``SOME`` or ``ALL``: those that are asked for, else some under a policy or an allocator of another package."""
    if settings.check_leaps is not None or not settings.leap:
        return ALL if settings.check_leaps and settings.leap else NONE
    return NONE if plugin_of(settings.policy, settings.allocator) is None else SOME


def _innermost(cost: object) -> object:
    """The cost that others wrap."""
    while (inner := getattr(cost, "inner", None)) is not None:
        cost = inner
    return cost


def _shown(found: object) -> str:
    """What a field of a plan has, by the requests."""
    if not isinstance(found, tuple):
        return str(found)
    flat = [each for part in found for each in (part if isinstance(part, tuple) else (part,))]
    requests = [str(each.index) for each in flat if hasattr(each, "index") and not isinstance(each, int)]
    return f"request{'s' * (len(requests) > 1)} {', '.join(requests[:5])}{', ...' * (len(requests) > 5)}"


#: Tables of a log that have a record for each change of a sequence: the field of a plan, and when it was.
_EVENTS = {
    "residencies": ("admitted", "start_ticks"),
    "evictions": ("preempted", "ticks"),
    "chunks": ("chunks", "start_ticks"),
}

#: Columns of a row that say how long a leap is, or what waits while it lasts.
_OF_A_LEAP = ("steps", "iterations", "ticks", "next_ticks", "slope_ticks", "waiting")


def first_difference(leapt: RunLog, stepped: RunLog) -> tuple[int, str] | None:
    """Decode step and field of the first difference of a run with leaps and the same run in steps; None if they are equal."""
    found = min(_differences(leapt, stepped), default=None)
    if found is None:
        return None
    ticks, _, field = found
    row = int(stepped.row_at(np.array([ticks]))[0])
    return (int(stepped.row_step[row]) if row >= 0 else 0), field


def _differences(leapt: RunLog, stepped: RunLog) -> Iterator[tuple[int, int, str]]:
    """The first difference of each table: ticks, its place among those of one tick, and the field."""
    for place, (table, (field, when)) in enumerate(_EVENTS.items()):
        columns = [
            [log[name] for name in log if name != "residency"]
            for log in (getattr(leapt, table), getattr(stepped, table))
        ]
        times = getattr(leapt, table)[when], getattr(stepped, table)[when]
        shorter = min(map(len, times))
        differs = np.zeros(shorter, dtype=bool)
        for one, other in zip(*columns, strict=True):
            differs |= one[:shorter] != other[:shorter]
        at = int(np.flatnonzero(differs)[0]) if differs.any() else shorter
        ticks = [int(column[at]) for column in times if at < len(column)]
        if ticks:
            yield min(ticks), place, field
    # Of rows those that begin at the same time.
    here, there = (log.rows["ticks"] > 0 for log in (leapt, stepped))
    starts, others = leapt.rows["start_ticks"][here], stepped.rows["start_ticks"][there]
    places = np.searchsorted(others, starts)
    found = others[np.minimum(places, len(others) - 1)] == starts if len(others) else np.zeros(len(starts), dtype=bool)
    if not found.all():
        yield int(starts[~found][0]), len(_EVENTS), "ticks"
    for name in leapt.rows:
        if name not in _OF_A_LEAP:
            differs = leapt.rows[name][here][found] != stepped.rows[name][there][places[found]]
            if differs.any():
                yield int(starts[found][differs][0]), len(_EVENTS) + (name in LEAP), name
    if leapt.end_ticks != stepped.end_ticks:
        yield min(leapt.end_ticks, stepped.end_ticks), len(_EVENTS) + 1, "ticks"


def require_same(leapt: RunLog, stepped: RunLog, policy: PairedPolicy) -> None:
    """Refuse a policy with which a run with leaps differs from the same run in steps.

    Raises:
        PluginError, SimulationFault: Names the decode step and the field.
    """
    found = first_difference(leapt, stepped)
    if found is None:
        return
    step, field = found
    what = f"{field}: a run with leaps differs from one in steps; {_REMEDY}, and let no decision depend on how often schedule was called"
    if is_plugin(policy):
        raise broken(type(policy), "schedule", "leap", what, step)
    raise SimulationFault(f"policy {policy.name}, decode step {step}: {what}")
