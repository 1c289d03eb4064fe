"""Parts of one's own that promise too much of a leap. Each serves every request, and with ``--no-leap`` gives other results."""

from __future__ import annotations

from importlib import import_module
from itertools import islice
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

import planted
from fragmeter.sim.memory import PagedMemory
from fragmeter.sim.policy.options import VllmV1Options
from fragmeter.sim.policy.vllm_sosp23 import VllmSosp23
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.types.sequence import CARRY_ON
from strategies import KneeCost

# Flags are made once: of the package alone, whichever test comes first.
import_module("fragmeter.experiments.cli.replica_flags")


# An option as one adds it after reading docs/extending.md.
@dataclass(frozen=True, kw_only=True)
class AFewOptions(VllmV1Options):
    max_admitted_per_step: Annotated[int, Field(ge=1, description="Requests that a step may admit.")] = 1


class AdmitsAFew(VllmV1):
    """vLLM V1, which admits at most so many requests in a step."""

    name = "admits-a-few"
    options_type = AFewOptions

    def _queue(self, state):
        return islice(super()._queue(state), self.options.max_admitted_per_step)


class Right(planted.Right):
    """First come, first served; whatever waits, nothing changes before a finish."""

    def plan(self, admitted, state):
        return super().plan(admitted, state)._replace(valid_until_horizon=True)

    def horizon(self, state, memory, limit):
        return limit


# Of each promise one that does not hold.
class AdmitsInALeap(Right):
    """Admits one request a step, and says that nothing changes in the steps that follow."""

    def schedule(self, state, transaction):
        plan = super().schedule(state, transaction)
        if plan is CARRY_ON:
            return plan
        return self.plan(plan.admitted[:1], state)._replace(valid_until_horizon=True)

    def horizon(self, state, memory, limit):
        return limit


class PreemptsInALeap(VllmSosp23):
    """Overlooks that blocks run out, where a block is left for the first step."""

    def horizon(self, state, memory, limit):
        return min(limit, 2 * super().horizon(state, memory, limit))


class SleepsInALeap(Right):
    """Says that it would admit no request that arrives."""

    def schedule(self, state, transaction):
        return super().schedule(state, transaction)._replace(stops_at_arrival=False)

    def horizon(self, state, memory, limit):
        return limit


class GrowsTooLittle(PagedMemory):
    def advance(self, state, steps):
        return super().advance(state, min(steps, 1))


class GrowsTooLittleInALeap(Right):
    """Of a memory in which a leap grows by one step."""

    def memory(self, pool):
        return GrowsTooLittle(pool.num_blocks, pool.block_size)

    def horizon(self, state, memory, limit):
        return limit


class EndlessLine(KneeCost):
    """A cost with a line that goes on past its knee."""

    def decode_line(self, decodes, context):
        return (*super().decode_line(decodes, context)[:2], None)


class CountsCalls(Right):
    """Admits nothing in every third call while something runs. No promise is broken, but steps call more often than leaps."""

    def __init__(self, limits, options=None, groups=None):
        super().__init__(limits, options, groups)
        self._calls = 0

    def schedule(self, state, transaction):
        self._calls += 1
        if state.running and state.waiting and self._calls % 3 == 0:
            return CARRY_ON._replace(valid_until_horizon=False)
        return super().schedule(state, transaction)

    def horizon(self, state, memory, limit):
        return 1 if state.waiting else limit
