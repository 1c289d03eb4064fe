"""Policies, a memory and costs of one's own, each with one mistake that ``MISTAKES`` says."""

from __future__ import annotations

import sys
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fragmeter.sim.memory import ContiguousMemory, PagedMemory
from fragmeter.sim.policy import Options, Policy
from fragmeter.sim.policy.vllm_sosp23 import VllmSosp23
from fragmeter.sim.types.sequence import CARRY_ON, Sequence, StepPlan
from strategies import LineCost


class Right(Policy):
    """First come, first served; a request is admitted once its prompt and whole output fit."""

    name = "right"

    def memory(self, pool):
        return PagedMemory(pool.num_blocks, pool.block_size, ids=pool.ids)

    def schedule(self, state, transaction):
        free = transaction.memory.num_blocks - sum(self._blocks(each, transaction) for each in state.running)
        admitted = []
        for sequence in state.waiting:
            free -= self._blocks(sequence, transaction)
            if free < 0:
                break
            admitted.append(sequence)
        return self.plan(tuple(admitted), state) if admitted else CARRY_ON

    def plan(self, admitted, state):
        return StepPlan(
            admitted=admitted,
            prefill_tokens=sum(each.start_tokens for each in admitted),
            valid_until_horizon=not state.waiting,
        )

    def _blocks(self, sequence, transaction):
        return transaction.blocks_of(sequence.prompt_tokens + sequence.output_tokens)


@dataclass(frozen=True, kw_only=True)
class FussyOptions(Options):
    patience: Annotated[int, Field(ge=1, description="Taken if it is even.")] = 2

    def __post_init__(self):
        if self.patience % 2:
            raise LookupError("odd")


class Fussy(Right):
    """With options that raise."""

    options_type = FussyOptions


class GrantsTooMuch(Right):
    def schedule(self, state, transaction):
        return self.plan(tuple(state.waiting), state) if state.waiting else CARRY_ON


class PromisesTooMuch(GrantsTooMuch):
    def horizon(self, state, memory, limit):
        return 1 << 20


class PromisesNothing(Right):
    def horizon(self, state, memory, limit):
        return 0


class PromisesHalf(Right):
    def horizon(self, state, memory, limit):
        return limit / 2


class Negative(Right):
    def plan(self, admitted, state):
        return super().plan(admitted, state)._replace(prefill_tokens=-5)


class Fractional(Right):
    def plan(self, admitted, state):
        return super().plan(admitted, state)._replace(prefill_tokens=float(sum(each.start_tokens for each in admitted)))


class TooFewTokens(Right):
    def plan(self, admitted, state):
        return super().plan(admitted, state)._replace(prefill_tokens=1)


class NegativeChunk(Right):
    def plan(self, admitted, state):
        return StepPlan(chunks=((admitted[0], -1),))


class WholeChunk(Right):
    def plan(self, admitted, state):
        tokens = admitted[0].start_tokens
        return StepPlan(chunks=((admitted[0], tokens),), prefill_tokens=tokens)


class Stranger(Right):
    def plan(self, admitted, state):
        return super().plan((Sequence(999, 8, 8, 8),), state)


class AdmitsRunning(Right):
    def schedule(self, state, transaction):
        return self.plan(tuple(state.running), state) if state.running else super().schedule(state, transaction)


class PreemptsWaiting(Right):
    def schedule(self, state, transaction):
        return StepPlan(preempted=tuple(state.waiting))


class Twice(Right):
    def plan(self, admitted, state):
        return super().plan((admitted[0], admitted[0]), state)


class LastFirst(Right):
    def plan(self, admitted, state):
        return (
            super().plan((state.waiting[-1],), state)
            if len(state.waiting) > 1
            else CARRY_ON._replace(valid_until_horizon=False)
        )


class OtherOrder(Right):
    def plan(self, admitted, state):
        return super().plan(admitted[:1], state)._replace(order=admitted[:1])


class AList(Right):
    def plan(self, admitted, state):
        return super().plan([*admitted], state)


class NoPlan(Right):
    def schedule(self, state, transaction):
        return None


class Raises(Right):
    def schedule(self, state, transaction):
        return {}["no such key"]


class RunsOut(Right):
    def schedule(self, state, transaction):
        return next(sequence for sequence in state.stalled)


class RaisesInPart(Right):
    def schedule(self, state, transaction):
        return transaction.blocks_of(None)


class Exits(Right):
    def schedule(self, state, transaction):
        sys.exit(0)


class RaisesWhenMade(Right):
    def __init__(self, limits, options=None, groups=None):
        raise ArithmeticError("no such policy")


class ExitsWhenSized(Right):
    @classmethod
    def pool_size(cls, server, options, num_blocks, block_size):
        sys.exit("no pool")


class HalfABlock(Right):
    @classmethod
    def pool_size(cls, server, options, num_blocks, block_size):
        return 12.5, 4


class NoMemory(Right):
    def memory(self, pool):
        return pool


class OnePool(Right):
    def smallest_pool_blocks(self, workload, block_size):
        return np.int64(1)


class Pauses(Right):
    """Lets the running sequences stand still for nothing."""

    def schedule(self, state, transaction):
        return StepPlan(prefill_only=True) if state.running else super().schedule(state, transaction)


class PreemptsForever(Right):
    """Takes a sequence back before it has a token."""

    def schedule(self, state, transaction):
        if state.prefilling:
            return StepPlan(preempted=tuple(state.prefilling))
        return StepPlan(chunks=((state.waiting[0], 4),), prefill_tokens=4) if state.waiting else CARRY_ON


class Waits(Right):
    def schedule(self, state, transaction):
        return CARRY_ON


class Discards(Right):
    def schedule(self, state, transaction):
        if len(state.waiting) > 1:
            state.waiting.pop()
        return super().schedule(state, transaction)


class LeakingMemory(PagedMemory):
    def release(self, leaving, decode_step):
        leaving = tuple(leaving)
        super().release(leaving, decode_step)
        self.free -= len(leaving)


class Leaks(Right):
    def memory(self, pool):
        return LeakingMemory(pool.num_blocks, pool.block_size)


def leaking(pool):
    """An allocator: another's policy over a memory that leaks."""
    return LeakingMemory(pool.num_blocks, pool.block_size)


class ShortMeter(PagedMemory):
    def advance(self, state, steps):
        return super().advance(state, steps)[:2]


class Shortens(Right):
    def memory(self, pool):
        return ShortMeter(pool.num_blocks, pool.block_size)


class HeldTwice(PagedMemory):
    def advance(self, state, steps):
        live, held, tail = super().advance(state, steps)
        return live, 2 * self.num_blocks * self.block_size, tail


class CountsTwice(Right):
    def memory(self, pool):
        return HeldTwice(pool.num_blocks, pool.block_size)


class Unreserved(GrantsTooMuch):
    """Admits without a reservation."""

    def memory(self, pool):
        return ContiguousMemory(pool.num_blocks, pool.block_size)


class ReservesTooMuch(Unreserved):
    def schedule(self, state, transaction):
        for sequence in state.waiting:
            transaction.reserve(sequence.target_tokens)
        return super().schedule(state, transaction)


class Derived(VllmSosp23):
    """Of a policy of the package, with one of its methods."""

    name = "derived"

    def horizon(self, state, memory, limit):
        raise LookupError("horizon")


class Mistake(NamedTuple):
    """A class, its method with the mistake, and the rule that it breaks or the exception that it raises."""

    kind: type
    method: str
    breaks: str | type[BaseException]
    #: The class with the method, where it is another.
    where: type | None = None


MISTAKES = [
    Mistake(GrantsTooMuch, "schedule", "blocks"),
    Mistake(PromisesTooMuch, "schedule", "blocks"),
    Mistake(PromisesNothing, "horizon", "horizon"),
    Mistake(PromisesHalf, "horizon", "horizon"),
    Mistake(Negative, "schedule", "tokens"),
    Mistake(Fractional, "schedule", "tokens"),
    Mistake(TooFewTokens, "schedule", "tokens"),
    Mistake(NegativeChunk, "schedule", "tokens"),
    Mistake(WholeChunk, "schedule", "tokens"),
    Mistake(Stranger, "schedule", "members"),
    Mistake(AdmitsRunning, "schedule", "members"),
    Mistake(PreemptsWaiting, "schedule", "members"),
    Mistake(Twice, "schedule", "once"),
    Mistake(LastFirst, "schedule", "members"),
    Mistake(OtherOrder, "schedule", "members"),
    Mistake(AList, "schedule", "plan"),
    Mistake(NoPlan, "schedule", "plan"),
    Mistake(Raises, "schedule", KeyError),
    Mistake(RunsOut, "schedule", RuntimeError),
    Mistake(RaisesInPart, "schedule", TypeError),
    Mistake(Exits, "schedule", SystemExit),
    Mistake(RaisesWhenMade, "__init__", ArithmeticError),
    Mistake(ExitsWhenSized, "pool_size", SystemExit),
    Mistake(HalfABlock, "pool_size", "limits"),
    Mistake(NoMemory, "memory", "accounts"),
    Mistake(OnePool, "smallest_pool_blocks", "limits"),
    Mistake(Pauses, "schedule", "execution"),
    Mistake(PreemptsForever, "schedule", "progress"),
    Mistake(Waits, "schedule", "execution"),
    Mistake(Discards, "schedule", "execution"),
    Mistake(Leaks, "release", "release", LeakingMemory),
    Mistake(Shortens, "advance", "accounts", ShortMeter),
    Mistake(CountsTwice, "schedule", "execution"),
    Mistake(Unreserved, "schedule", "execution"),
    Mistake(ReservesTooMuch, "schedule", "blocks"),
    Mistake(Derived, "horizon", LookupError),
]


class Nothing(LineCost):
    def step_ticks(self, *work):
        return 0


class Backwards(LineCost):
    def step_ticks(self, *work):
        return -super().step_ticks(*work)


class Endless(LineCost):
    def step_ticks(self, *work):
        return float("nan")


class Floating(LineCost):
    def step_ticks(self, *work):
        return float(super().step_ticks(*work))


class OffTheLine(LineCost):
    def decode_line(self, decodes, context):
        base, slope, until = super().decode_line(decodes, context)
        return base + 1, slope, until


class Falling(LineCost):
    def decode_line(self, decodes, context):
        return 101 + 13 * decodes + context, -1, None


class Unpriced(LineCost):
    def step_ticks(self, *work):
        raise ZeroDivisionError("no price")


#: Costs, the method with the mistake, and what it breaks or raises.
COSTS = [
    Mistake(Nothing, "step_ticks", "ticks"),
    Mistake(Backwards, "step_ticks", "ticks"),
    Mistake(Endless, "step_ticks", "ticks"),
    Mistake(Floating, "step_ticks", "ticks"),
    Mistake(OffTheLine, "decode_line", "line"),
    Mistake(Falling, "decode_line", "line"),
    Mistake(Unpriced, "step_ticks", ZeroDivisionError),
]
