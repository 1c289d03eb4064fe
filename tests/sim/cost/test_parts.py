"""The parts of a step's time add up to the step, to the tick."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrations import calibration
from fragmeter.sim.cost import CalibratedCost, PaperCost, Server, ServerConstants, StepCost, cost, step_parts
from fragmeter.sim.cost.base import StepParts, prompt_blocks
from fragmeter.sim.cost.curves import Surface
from fragmeter.sim.cost.server import ServedCost
from fragmeter.sim.spec import Deployment, gpu, model

MADE_UP = CalibratedCost(calibration(), model("toy-llama"), gpu("a100-40gb"))
HOSTED = ServedCost(
    MADE_UP, Server(1, "server", "", {}, ServerConstants(step_us=3.0, host_us=720.0)), asynchronous=True
)
IN_PARTS = {
    "made up": MADE_UP,
    "on a server": HOSTED,
    "fitted": cost("fitted", model("opt-13b"), gpu("a100-40gb")),
    "mixed attention": cost("fitted", model("llama-3.1-8b"), gpu("h100-80gb"), asynchronous=True),
    "unpacked heads": cost("fitted", model("qwen3-14b"), gpu("a100-80gb")),
    "unpacked heads of another model than the table's": cost("fitted", model("qwen3-32b"), gpu("rtx-pro-6000")),
    "latent": cost("fitted", model("deepseek-v3"), gpu("h200"), tensor_parallel=8),
    "divided latent vectors": cost(
        "fitted", model("deepseek-v3"), gpu("h200"), 8, deployment=Deployment(decode_context_parallel=8)
    ),
    "divided heads": cost(
        "fitted", model("qwen3-235b-a22b"), gpu("h100-80gb"), 8, deployment=Deployment(decode_context_parallel=2)
    ),
    "divided, by a data sheet": cost(
        "roofline", model("deepseek-v3"), gpu("h200"), 8, deployment=Deployment(decode_context_parallel=4)
    ),
    "experts": cost("roofline", model("mixtral-8x7b"), gpu("a100-80gb"), tensor_parallel=2),
    "windows": cost("roofline", model("gpt-oss-20b"), gpu("h100-80gb")),
}
WHOLE = {
    "a measured step with prompts": CalibratedCost(
        calibration(prefill_step={"coefficients": {"t0_us": 100, "each_us": 1}}), model("toy-llama"), gpu("a100-40gb")
    ),
    "a fitted factor": cost("fitted", model("llama-3.1-8b"), gpu("rtx-4090")),
    "states": cost("roofline", model("qwen3-next-80b-a3b"), gpu("h200"), tensor_parallel=2),
    "a closed form": PaperCost(),
    "scaled": cost("roofline", model("opt-13b"), gpu("a100-40gb"), scale=2.0),
}


def summed(parts: StepParts, decodes: int, context: int, tokens: int, pairs: int) -> int:
    """``StepParts`` as its docstring has it."""
    prefill = parts.per_token * tokens
    prefill += sum(ticks * (min(pairs, window * tokens) if window else pairs) for window, ticks in parts.per_pair)
    if parts.prefill_node is not None:
        surface = Surface(lambda *_: pytest.fail("a node that was not asked for"))
        surface.node = parts.prefill_node
        prefill = surface(tokens, pairs)
    attention = prefill
    if decodes:
        base, slope, until = parts.mixed_decode(decodes, context)
        assert until is None or context < until
        decode = base + slope * context
        together = decode + prefill + parts.per_block * decodes * prompt_blocks(tokens, pairs) - parts.shared
        attention = max(together, decode, prefill)
    total = parts.of_tokens(decodes + tokens) + parts.of_rows(decodes) + attention + parts.more
    return max(parts.least, total)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PARTS)
@given(data=st.data())
def test_parts_add_up_to_the_step(name, data):
    found = IN_PARTS[name]
    parts = step_parts(found)
    decodes, tokens = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 4000))
    context = decodes * data.draw(st.integers(1, 2000))
    pairs = tokens * (tokens + 1) // 2 + tokens * data.draw(st.sampled_from([0, 0, 1000]))
    assert parts is not None
    assert summed(parts, decodes, context, tokens, pairs) == found.step_ticks(decodes, context, tokens, pairs)


@pytest.mark.parametrize("name", WHOLE)
def test_other_step_times_have_no_parts(name):
    assert step_parts(WHOLE[name]) is None


def test_a_cost_model_of_another_package_has_no_parts():
    class Slower(CalibratedCost):
        def step_ticks(self, *amounts: int) -> int:
            return 2 * super().step_ticks(*amounts)

    found: StepCost = Slower(calibration(), model("toy-llama"), gpu("a100-40gb"))
    assert step_parts(found) is None
