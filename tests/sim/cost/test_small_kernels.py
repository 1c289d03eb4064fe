"""Small kernels of a layer, counted by hand from vLLM's models, and what they add to a step."""

from __future__ import annotations

import pytest

from fragmeter.sim.cost import CalibratedCost
from fragmeter.sim.cost.calibration import profile
from fragmeter.sim.cost.op_work import all_reduce
from fragmeter.sim.cost.small_kernels import norm_all_reduces, small_kernels
from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.types.ticks import PER_US


@pytest.mark.parametrize(
    ("name", "minor", "count"),
    [
        ("llama-3.1-8b", None, 0),
        ("qwen3-14b", None, 0),
        # The choice of experts, and in each of 32 layers nothing else.
        ("mixtral-8x7b", None, 32),
        # Also a norm of Q and K.
        ("qwen3-30b-a3b", None, 48 * 2),
        # 40 layers with experts: choice, shared output, product with its gate, and its use. 10 with attention: norm and gate.
        ("qwen3.5-35b-a3b", None, 40 * 4 + 10 * 2 + 30 * 3),
        ("qwen3.5-35b-a3b", 18, 40 * 4 + 10 * 2 + 30 * 3),
        # Before 0.18: three copies and the gating.
        ("qwen3.5-35b-a3b", 17, 40 * 4 + 10 * 2 + 30 * 7),
        # Two norms around an all-reduce; choice, and the router's input in fp32.
        ("minimax-m2.5", None, 62 * 4),
        # The first three layers are dense.
        ("deepseek-v3.2", None, 58 * 2),
        # 23 layers with experts, each with shared ones.
        ("nemotron-3-nano-30b-a3b", None, 23 * 2),
    ],
)
def test_counts(name, minor, count):
    assert small_kernels(model(name), minor) == count


def test_add_a_launch_each_to_a_step():
    fit, card, spec = profile("h200"), gpu("h200"), model("qwen3.5-35b-a3b")
    new, old = (CalibratedCost(fit, spec, card, deployment=Deployment(vllm_minor=minor)) for minor in (18, 17))
    launch = fit.ops["small_kernel"].coefficients.t0_us
    longer = (old.step_ticks(8, 8000, 0, 0) - new.step_ticks(8, 8000, 0, 0)) / PER_US
    assert longer == pytest.approx(30 * 4 * launch, rel=0.02)


def test_norms_over_all_ranks_are_all_reduces():
    """Of MiniMax M2: 62 of eight bytes a token, beside 2 x 62 of the hidden states."""
    fit, card, spec = profile("h200"), gpu("h200"), model("minimax-m2.5")
    assert norm_all_reduces(spec) == 62 and norm_all_reduces(model("qwen3-30b-a3b")) == 0
    cost = CalibratedCost(fit, spec, card, 4, deployment=Deployment(quantization="fp8"))
    reduce = fit.ops["all_reduce"]
    expected = 2 * 62 * reduce.us(all_reduce(64 * 3072 * 2, 4)) + 62 * reduce.us(all_reduce(64 * 8, 4))
    assert cost._reduced is not None
    assert cost._reduced(64) / PER_US == pytest.approx(float(expected), rel=0.01)
