"""An option of your own for vLLM V1: admit at most so many requests in a step.

PYTHONPATH=examples/extending fragmeter simulate --policy a_few_a_step:AFewAStep --max-admitted-per-step 2
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from fragmeter.sim.policy.options import VllmV1Options
from fragmeter.sim.policy.vllm_v1 import VllmV1


@dataclass(frozen=True, kw_only=True)
class AFewOptions(VllmV1Options):
    max_admitted_per_step: Annotated[int, Field(ge=1, description="Waiting requests that a step may admit.")] = 1


class AFewAStep(VllmV1):
    name = "a-few-a-step"
    system = "example"
    options_type = AFewOptions

    def _queue(self, state):
        return islice(super()._queue(state), self.options.max_admitted_per_step)

    def schedule(self, state, transaction):
        plan = super().schedule(state, transaction)
        is_cut = len(state.waiting) > self.options.max_admitted_per_step
        # Without this line a leap would pass the steps in which those behind are admitted; fragmeter refuses it.
        return plan._replace(valid_until_horizon=False) if is_cut and plan.prefill_tokens else plan
