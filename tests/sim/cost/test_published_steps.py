"""Decode steps of OPT-13B beside published ones, to which no profile is fitted (docs/step-times.md has the figures)."""

from __future__ import annotations

from statistics import fmean

from fragmeter.sim.cost import cost
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.types.ticks import PER_MS

#: LLMServe/DistServe, simdistserve/estimators/profile_data/profiler-a100-80g.vllm.json, decoding_smallbs (up to 95 sequences):
#: ms of a step, of a context token and of a sequence.
STEP_MS, CONTEXT_MS, SEQUENCE_MS = 19.562534, 0.000494112, 0.0506057


def test_the_profile_of_the_a100_meets_distserves_fit_of_vllm():
    step_cost, errors = cost("fitted", model("opt-13b"), gpu("a100-80gb")), []
    for batch in (8, 32, 64):
        for tokens in (256, 1024):
            simulated_ms = step_cost.step_ticks(batch, batch * tokens, 0, 0) / PER_MS
            published_ms = STEP_MS + CONTEXT_MS * batch * tokens + SEQUENCE_MS * batch
            errors.append(round(100 * (simulated_ms / published_ms - 1), 1))
    assert (round(fmean(errors), 1), min(errors), max(errors)) == (-1.8, -4.0, 1.9)
