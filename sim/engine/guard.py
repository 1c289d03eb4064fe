"""Checks of policies, memories and costs that are not of this package.

    Engine ---- schedule, horizon ----> Guard ---- the same ----> Policy       plans, horizons, progress
    Engine ---- advance --------------> Guard ---- the same ----> Memory       blocks, meters, what is left at the end
    Executor -- step_ticks, ... ------> CheckedCost -------------> StepCost    times

``Engine`` calls its policy and memory themselves where both are of this package, and ``engine.replica`` wraps no cost of this
package: a run without plug-ins has none of this. The rules are those of the table in docs/extending.md, by their names.
``leap_check`` checks the rule ``leap``, which takes steps in place of leaps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Values
from functools import wraps
from itertools import chain, islice
from operator import index
from typing import NoReturn, SupportsIndex, TypeVar, cast

import simpy

from ..config.settings import Settings
from ..cost.base import StepCost, among, draft_ticks, outside_ticks
from ..memory import Memory, Transaction
from ..memory.accounting.ledger import Meter
from ..policy.base import PairedPolicy
from ..policy.registry import plugin_of
from ..types.errors import Overdrawn, PluginError
from ..types.plugins import blamed, broken, failed, is_plugin, know, plugin_code
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from ..types.ticks import PER_SECOND

#: Decisions without a decode step, beyond two for each sequence on the device or in a queue, after which a policy stands still.
_MOST_DECISIONS = 1000
#: Longest step: a day.
_LONGEST_TICKS = 86_400 * PER_SECOND
_SEQUENCES = "admitted", "preempted", "swapped_out", "swapped_in", "order", "forked"
_Call = TypeVar("_Call", bound=Callable[..., object])
_Sent = TypeVar("_Sent")


class Guard:
    """A policy and its memory, of which at least one is a plug-in, as an engine calls them.

    Args:
        policy, memory: As of the engine.
    """

    def __init__(self, policy: PairedPolicy, memory: Memory) -> None:
        self._policy, self._memory = policy, memory
        # Since when, in decode steps, nothing was generated, and the decisions since then.
        self._since, self._decisions = -1, 0

    @classmethod
    def of(cls, policy: PairedPolicy, memory: Memory) -> Guard | None:
        """The guard of a policy and a memory; None where both are of this package."""
        know("policy", type(policy))
        know("memory", type(memory))
        return None if suspect(policy, memory) is None else cls(policy, memory)

    def schedule(self, state: State, transaction: Transaction) -> StepPlan:
        """The policy's plan, checked before it is carried out.

        Raises:
            PluginError: It breaks a rule.
        """
        self._check_room(state)
        plan = self._policy.schedule(state, transaction)
        if plan is not CARRY_ON:
            plan = self._checked(plan, state)
        self._check_progress(plan, state)
        return plan

    def horizon(self, state: State, memory: Memory, limit: int) -> int:
        """The steps for which the policy's decision stays the same.

        Raises:
            PluginError: They are no whole number from 1.
        """
        steps = self._policy.horizon(state, memory, limit)
        found = _whole(steps)
        if found is None or found < 1:
            self._refuse(state, "horizon", f"returns {steps!r}; return a whole number of steps, 1 or more", "horizon")
        return found

    def advance(self, state: State, steps: int) -> Meter:
        """The memory's levels, and a check that it has what the steps take.

        Raises:
            PluginError: The levels are none.
            Overdrawn: The policy granted more than is free.
        """
        memory = self._memory
        expected = memory.room_after(state, steps) if steps > 1 and is_plugin(memory) else None
        meter = memory.advance(state, steps)
        if len(meter) != len(memory.meter) or any(_whole(level) is None for level in meter):
            what = f"advance returns {meter!r}; return a whole number for each of {', '.join(memory.meter)}"
            raise broken(type(memory), "advance", "accounts", what, state.decode_step)
        lacking = -memory.room_after(state, 0)
        if lacking > 0:
            # A memory of the package has seen to that.
            raise Overdrawn(f"{lacking} slots more than are free are taken")
        if expected is not None and expected != -lacking:
            what = f"room: {steps} steps leave {-lacking} slots, and room_after said {expected}; let both say the same"
            raise broken(type(memory), "advance", "leap", what, state.decode_step)
        return meter

    def _refuse(self, state: State, rule: str, what: str, method: str = "schedule") -> NoReturn:
        kind = type(self._policy) if is_plugin(self._policy) else type(self._memory)
        raise broken(kind, method, rule, what, state.decode_step)

    def _check_room(self, state: State) -> None:
        """Where no sequence is on the device all slots are free, or keep contents that can be given up.

        Copies from the host, and prompts that go to another replica, hold slots without a sequence; the engine checks at the end.
        """
        memory = self._memory
        if memory.transfers is not None or self._policy.disaggregates:
            return
        held = memory.capacity_slots - memory.pinned_slots - memory.room_after(state, 0)
        if held and not (state.running or state.prefilling or state.stalled or state.finished):
            kind = type(memory) if is_plugin(memory) else type(self._policy)
            what = f"{held} slots are held although no sequence is on the device; release what a sequence held"
            raise broken(kind, "release", "release", what, state.decode_step)

    def _checked(self, plan: StepPlan, state: State) -> StepPlan:
        """The plan, with Python's integers, if it can be carried out."""
        if not isinstance(plan, StepPlan):
            self._refuse(state, "plan", f"schedule returns {type(plan).__name__}; return a StepPlan")
        for name in _SEQUENCES:
            self._require_sequences(state, name, getattr(plan, name))
        plan = plan._replace(
            prefill_tokens=self._count(state, "prefill_tokens", plan.prefill_tokens),
            padded_tokens=self._count(state, "padded_tokens", plan.padded_tokens),
            flush_ticks=self._count(state, "flush_ticks", plan.flush_ticks),
            chunks=self._chunks(plan, state),
        )
        self._check_once(plan, state)
        self._check_members(plan, state)
        self._check_tokens(plan, state)
        return plan

    def _count(self, state: State, name: str, value: object) -> int:
        found = _whole(value)
        if found is None or found < 0:
            self._refuse(state, "tokens", f"{name} = {value!r}; give a whole number, 0 or more")
        return found

    def _require_sequences(self, state: State, name: str, value: object) -> None:
        if not isinstance(value, tuple) or not all(isinstance(each, Sequence) for each in value):
            self._refuse(state, "plan", f"{name} is {_shown(value)}; give a tuple of sequences")

    def _chunks(self, plan: StepPlan, state: State) -> tuple[tuple[Sequence, int], ...]:
        """The chunks of a plan; they are pairs, and stalls are two tuples of sequences, or none."""
        if not isinstance(plan.stalls, tuple) or len(plan.stalls) not in (0, 2):
            self._refuse(state, "plan", f"stalls is {_shown(plan.stalls)}; give two tuples of sequences, or none")
        for part in plan.stalls:
            self._require_sequences(state, "stalls", part)
        pairs = isinstance(plan.chunks, tuple) and all(
            isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], Sequence) for each in plan.chunks
        )
        if not pairs:
            self._refuse(
                state, "plan", f"chunks is {_shown(plan.chunks)}; give a tuple of pairs of a sequence and tokens"
            )
        return tuple((sequence, self._count(state, "tokens of a chunk", tokens)) for sequence, tokens in plan.chunks)

    def _check_once(self, plan: StepPlan, state: State) -> None:
        """No sequence is named twice."""
        moved = chain(plan.admitted, (sequence for sequence, _ in plan.chunks), plan.preempted, plan.swapped_out)
        counts = Counter(chain(moved, plan.swapped_in, *plan.stalls, plan.forked))
        again = next((sequence for sequence, count in counts.items() if count > 1), None)
        if again is not None:
            self._refuse(state, "once", f"request {again.index} is named {counts[again]} times in a plan; name it once")

    def _check_members(self, plan: StepPlan, state: State) -> None:
        """Every sequence is in the queue that its field takes it from."""
        running, prefilling = state.running, state.prefilling
        gone = (state.finished, state.overrunning)
        self._require_in(state, "preempted", plan.preempted, running, prefilling, state.stalled, *gone)
        self._require_in(state, "swapped_out", plan.swapped_out, running)
        if plan.stalls:
            self._require_in(state, "stalls", plan.stalls[0], running, *gone)
            self._require_in(state, "stalls", plan.stalls[1], state.stalled)
        back = (sequence.group for sequence in plan.swapped_in)
        groups = chain(state.forking, (group for group in back if group is not None and not group.forked))
        self._require_in(state, "forked", plan.forked, {sibling for group in groups for sibling in group.siblings})
        swapped = [*state.swapped, *plan.swapped_out]
        if plan.swapped_out:
            swapped.sort(key=lambda sequence: sequence.order)
        self._require_head(state, "swapped_in", plan.swapped_in, swapped, "swapped")
        waiting = self._waiting(plan, state)
        if waiting is None:
            return
        if plan.order and Counter(plan.order) != Counter(waiting):
            what = "order has other sequences than the queue; give those that wait and those preempted, each once"
            self._refuse(state, "members", what)
        chunks = (sequence for sequence, _ in plan.chunks)
        started = [sequence for sequence in chain(plan.admitted, chunks) if sequence not in prefilling]
        self._require_head(state, "admitted and chunks", started, plan.order or waiting, "waiting, or of order")

    def _waiting(self, plan: StepPlan, state: State) -> deque[Sequence] | None:
        """The queue after the preemptions of a plan; None where siblings come back with them, in an order that is not known."""
        gone = (state.finished.keys() | state.overrunning.keys()).difference(plan.taken_back)
        back = [each for each in plan.preempted if each not in gone]
        if not back:
            return state.waiting
        if state.shares:
            return None
        waiting = deque(state.waiting)
        for sequence in back:
            state.put_back(waiting, sequence)
        return waiting

    def _require_in(self, state: State, field: str, sequences: Iterable[Sequence], *places: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if not any(sequence in place for place in places):
                what = f"request {sequence.index} of {field} is in no queue that {field} takes from"
                self._refuse(state, "members", f"{what}; name sequences that are there now")

    def _require_head(
        self, state: State, field: str, taken: Values[Sequence], queue: Iterable[Sequence], name: str
    ) -> None:
        """The sequences that are taken from a queue are the first ones of it, in any order."""
        if not taken:
            return
        head = set(islice(queue, len(taken)))
        other = next((sequence for sequence in taken if sequence not in head), None)
        if other is not None:
            what = f"request {other.index} of {field} is not among the first {len(taken)} of {name}"
            self._refuse(state, "members", f"{what}; take sequences from the head of the queue, or give an order")

    def _check_tokens(self, plan: StepPlan, state: State) -> None:
        """Chunks go on after the step, and the tokens of the step cover what its prompts compute."""
        computed = sum((plan.padded_tokens or each.start_tokens) - each.computed_tokens for each in plan.admitted)
        for sequence, tokens in plan.chunks:
            most = sequence.start_tokens - sequence.computed_tokens - 1
            if tokens > most:
                what = f"a chunk of request {sequence.index} has {tokens} tokens; give {most} at most, or admit it"
                self._refuse(state, "tokens", what)
            computed += tokens
        if plan.prefill_tokens < computed:
            what = f"prefill_tokens = {plan.prefill_tokens}, and its prompts compute {computed}; give their sum"
            self._refuse(state, "tokens", what)

    def _check_progress(self, plan: StepPlan, state: State) -> None:
        """Between two decode steps there are only so many decisions."""
        if state.decode_step != self._since:
            self._since, self._decisions = state.decode_step, 0
        if plan.prefill_tokens and not (plan.preempted or plan.swapped_out):
            # Computed tokens that are not given up are progress.
            return
        self._decisions += 1
        queues = state.waiting, state.swapped, state.prefilling, state.running, state.stalled
        if self._decisions > _MOST_DECISIONS + 2 * sum(map(len, queues)):
            what = f"{self._decisions} plans moved sequences or did nothing, and no token was generated"
            self._refuse(state, "progress", f"{what}; let a sequence that runs go on")


class CheckedCost:
    """A cost that is a plug-in, with checked times. Other attributes, also optional ones such as ``effective_context``, are those
    of the cost.

    Args:
        inner: The cost.
    """

    def __init__(self, inner: StepCost) -> None:
        self.inner = inner
        for name in ("name", "step_ticks", "decode_line", "describe"):
            if not hasattr(inner, name):
                raise self._broken(name, "ticks", f"has no {name}; derive it from a cost, or define what StepCost has")
        self.name = inner.name
        if (outside := outside_ticks(inner)) is not None:
            self._times(outside, "outside_ticks", ())

    def __getattr__(self, name: str) -> object:
        if name == "inner" or name.startswith("__"):
            # Of a copy that has no attributes yet.
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``."""
        work = decodes, decode_context, prefill_tokens, prefill_pairs
        return self._times(self.inner.step_ticks(*work), "step_ticks", work, 1)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; the line goes through the time of the step."""
        line = self.inner.decode_line(decodes, context)
        if not isinstance(line, tuple) or len(line) != 3:
            raise self._broken("decode_line", "line", f"returns {line!r}; return base, slope and end of a line")
        base, slope, until = _whole(line[0]), _whole(line[1]), _whole(line[2])
        if base is None or slope is None or slope < 0 or (line[2] is not None and (until is None or until <= context)):
            remedy = "return whole numbers of ticks, a slope of 0 or more, and an end after the context, or None"
            raise self._broken("decode_line", "line", f"returns {line!r} for a context of {context}; {remedy}")
        step = self.step_ticks(decodes, context, 0, 0)
        if base + slope * context != step:
            what = f"is {base} + {slope} * {context} for {decodes} sequences, and step_ticks says {step}"
            raise self._broken("decode_line", "line", f"{what}; return a line through the times of the steps")
        return base, slope, until

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return self._moves("swap_out_ticks", blocks)

    def swap_in_ticks(self, blocks: int) -> int:
        """See ``StepCost``."""
        return self._moves("swap_in_ticks", blocks)

    def copy_ticks(self, slots: int) -> int:
        """See ``StepCost``."""
        return self._moves("copy_ticks", slots)

    def draft_ticks(self, rows: tuple[int, int, int, int], sampled: tuple[int, int]) -> int:
        """See ``cost.base.draft_ticks``."""
        return self._times(draft_ticks(self.inner, rows, sampled), "draft_ticks", (rows, sampled))

    def among(self, tokens: Values[int]) -> StepCost:
        """See ``cost.base.among``."""
        return checked_cost(among(self.inner, tokens))

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        return self.inner.describe()

    def _moves(self, method: str, amount: int) -> int:
        """Time of a swap or a copy, which a cost may lack as long as no policy asks for it."""
        found = getattr(self.inner, method, None)
        if found is None:
            raise self._broken(method, "ticks", f"has no {method}; define it")
        return self._times(found(amount), method, (amount,))

    def _times(self, ticks: object, method: str, given: tuple[object, ...], least: int = 0) -> int:
        found = _whole(ticks)
        if found is None or not least <= found <= _LONGEST_TICKS:
            what = f"{method}{given!r} = {ticks!r}; return a whole number of ticks from {least} to {_LONGEST_TICKS}"
            raise self._broken(method, "ticks", what)
        return found

    def _broken(self, method: str, rule: str, what: str) -> PluginError:
        return broken(type(self.inner), method, rule, what)


def checked_cost(cost: StepCost) -> StepCost:
    """A cost with checked times, where it is a plug-in."""
    know("cost", type(cost))
    return CheckedCost(cost) if is_plugin(cost) else cost


def whole_numbers(kind: type, method: str, found: object) -> tuple[int, int]:
    """Two sizes or limits that a class of policies computes, checked where it is a plug-in.

    Raises:
        PluginError: They are no whole numbers from 1.
    """
    if not is_plugin(kind):
        return cast(tuple[int, int], found)
    one, other = (_whole(each) for each in found) if isinstance(found, tuple) and len(found) == 2 else (None, None)
    if one is None or other is None or min(one, other) < 1:
        raise broken(kind, method, "limits", f"{method} returns {found!r}; return two whole numbers, 1 or more")
    return one, other


def of_plugins(call: _Call) -> _Call:
    """Convert exceptions of plug-ins in a function of settings, and name the settings' plug-in where one leaves a state in which
    the function cannot go on."""

    @wraps(call)
    def converted(settings: Settings, *others: object, **keywords: object) -> object:
        with plugin_code(lambda: plugin_of(settings.policy, settings.allocator)):
            return call(settings, *others, **keywords)

    return cast(_Call, converted)


def suspect(policy: object, memory: object) -> type | None:
    """The class of the policy, or else of the memory, that is a plug-in; None where both are of this package."""
    return next((type(part) for part in (policy, memory) if is_plugin(part)), None)


def translated(
    serving: Generator[simpy.Event, _Sent, None], policy: PairedPolicy, memory: Memory, cost: StepCost, state: State
) -> Generator[simpy.Event, _Sent, None]:
    """The process of an engine, with errors of plug-ins that name the decode step; itself where there are none."""
    kind = suspect(policy, memory)
    if kind is None and not any(isinstance(each, CheckedCost) for each in (cost, getattr(cost, "inner", None))):
        return serving
    return _translated(serving, kind, state)


def _translated(
    serving: Generator[simpy.Event, _Sent, None], kind: type | None, state: State
) -> Generator[simpy.Event, _Sent, None]:
    try:
        yield from serving
    except PluginError as error:
        raise error.at_step(state.decode_step) from error.__cause__
    except (Exception, SystemExit) as error:
        step = state.decode_step
        found = blamed(error, step, kind) or failed(kind, "schedule", error, step)
        if found is None:
            raise
        raise found from error


def _shown(value: object) -> str:
    """What a field of a plan is, without addresses."""
    parts = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{parts}"


def _whole(value: object) -> int | None:
    """A whole number as Python's integer; None for anything else."""
    try:
        return index(cast(SupportsIndex, value))
    except TypeError:
        return None
