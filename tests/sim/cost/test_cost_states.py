"""What layers with a state of fixed size cost: closed forms by hand, and lines that do not bend."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrations import calibration
from fragmeter.sim import settings
from fragmeter.sim.cost import CalibratedCost, RooflineCost
from fragmeter.sim.cost.calibration import profile
from fragmeter.sim.cost.operations import OPERATIONS
from fragmeter.sim.cost.shares import GEMM_US, SHARES, SMALL_KERNEL_US
from fragmeter.sim.cost.states import StateOperations
from fragmeter.sim.engine.replica import build
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.types.errors import NotSimulated, SettingError
from fragmeter.sim.types.ticks import PER_SECOND, PER_US

H200, SHARE = gpu("h200"), SHARES["h200"]
READ_PER_S = H200.memory_bytes_per_s * SHARE.gemm_bandwidth
STATE_PER_S = H200.memory_bytes_per_s * SHARE.decode_bandwidth
FLOPS_PER_S = H200.fp16_flops_per_s * SHARE.gemm_flops
MODELS = ("qwen3-next-80b-a3b", "nemotron-h-8b", "granite-4.0-h-small", "jamba-1.5-mini", "kimi-linear-48b-a3b")
COSTS = {name: RooflineCost(model(name), H200, 2, dtype="bf16") for name in MODELS}


def seconds(ticks: int) -> float:
    return ticks / PER_SECOND


@pytest.mark.parametrize(
    ("name", "ranks", "layers", "state", "scanned"),
    [
        # Bytes of a layer's state on a rank; inputs and outputs of convolution and recurrence, in elements.
        ("qwen3-next-80b-a3b", 1, 36, 1_097_728, 3 * 8192 + 4096),
        ("qwen3-next-80b-a3b", 4, 36, 274_432, (3 * 8192 + 4096) // 4),
        ("nemotron-h-8b", 1, 24, 4_255_744, 3 * 10_240 + 8192),
        ("kimi-linear-48b-a3b", 4, 20, 542_720, 3 * 3072 + 1024),
    ],
)
def test_a_decode_reads_and_writes_the_state_once(name, ranks, layers, state, scanned):
    step_cost = RooflineCost(model(name), H200, ranks, dtype="bf16")
    expected = layers * (2 * state + 2 * scanned) / STATE_PER_S
    assert seconds(step_cost.state_ticks(1, 0)) == pytest.approx(expected, rel=1e-6)
    assert step_cost.state_ticks(64, 0) == 64 * step_cost.state_ticks(1, 0)


@pytest.mark.parametrize(
    ("name", "layers", "flops", "passed", "scanned"),
    [
        # A head: 6 * 128 * 128, 3 * 64 * 128 and 64 * 64. A state is written and read for 64 tokens, in 16 bits.
        ("qwen3-next-80b-a3b", 36, 32 * (98_304 + 24_576 + 4096), 2 * 2 * 32 * 128 * 128 / 64, 3 * 8192 + 4096),
        # As many flops; its state is fp32, and kernels hand on 16 bits.
        ("qwen3.5-35b-a3b", 30, 32 * (98_304 + 24_576 + 4096), 2 * 2 * 32 * 128 * 128 / 64, 3 * 8192 + 4096),
        # Within chunks of 128: products with 8 groups of 128, then 8,192 channels. States written and read twice, in fp32.
        (
            "nemotron-h-8b",
            24,
            2 * 128 * (8 * 128 + 8192) + 4 * 128 * 64 * 128,
            4 * 4 * 128 * 64 * 128 / 128,
            3 * 10_240 + 8192,
        ),
        # Chunks of 256, one group; written and read in fp32, then in 16 bits.
        (
            "granite-4.0-h-small",
            36,
            2 * 256 * (128 + 8192) + 4 * 128 * 64 * 128,
            2 * (4 + 2) * 128 * 64 * 128 / 256,
            3 * 8448 + 8192,
        ),
        # 9 for each of 8,192 * 16 elements; the state stays on the chip.
        ("jamba-1.5-mini", 28, 9 * 8192 * 16, 0, 3 * 8192 + 8192),
    ],
)
def test_a_prompt_is_linear_in_its_tokens(name, layers, flops, passed, scanned):
    step_cost = RooflineCost(model(name), H200, dtype="bf16")
    terms = {term: seconds(entry["value"]) for term, entry in step_cost.describe().items() if "prefill_token" in term}
    read, computed = layers * (passed + 2 * scanned) / STATE_PER_S, layers * flops / FLOPS_PER_S
    assert terms["state_read_per_prefill_token"] == pytest.approx(read, rel=1e-5)
    assert terms["state_flops_per_prefill_token"] == pytest.approx(computed, rel=1e-5)
    assert seconds(step_cost.state_ticks(0, 1)) == pytest.approx(max(read, computed), rel=1e-5)
    assert step_cost.state_ticks(0, 4096) == 4096 * step_cost.state_ticks(0, 1)


@given(st.sampled_from(MODELS), st.integers(0, 512), st.integers(0, 8192), st.integers(0, 10**6))
def test_a_step_adds_up(name, decodes, tokens, context):
    """GEMMs, head, attention, KV, all-reduces, launches and states; no state depends on the context."""
    step_cost = COSTS[name]
    computed = decodes + tokens
    parts = step_cost.overhead_ticks()
    if computed:
        parts += step_cost.gemm_ticks(computed) + step_cost.head_ticks(decodes)
        parts += step_cost.kv_write_ticks(computed) + step_cost.all_reduce_ticks(computed)
    parts += step_cost.decode_attention_ticks(decodes, context) + step_cost.prefill_attention_ticks(tokens, 7 * tokens)
    assert step_cost.step_ticks(decodes, context, tokens, 7 * tokens) == parts + step_cost.state_ticks(decodes, tokens)


def test_only_attention_layers_read_the_context():
    """12 layers of Qwen3-Next with 2 KV heads of 256, 4 of Nemotron-H with 8 of 128."""
    for name, bytes_a_token in (("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2), ("nemotron-h-8b", 4 * 2 * 8 * 128 * 2)):
        step_cost = RooflineCost(model(name), H200)
        _, slope, _ = step_cost.decode_line(64, 10**7)
        assert seconds(slope) == pytest.approx(bytes_a_token / STATE_PER_S, rel=1e-4)
        assert seconds(step_cost.kv_write_ticks(1)) == pytest.approx(bytes_a_token / READ_PER_S, rel=1e-4)


def test_a_layer_that_is_one_thing_is_launched_and_reduced_once():
    """Nemotron-H: 28 mixers of 3 small kernels and 2 GEMMs, 24 MLPs of 2 and 2, and 52 all-reduces; Qwen3-Next has both in 48 layers."""
    kernels = 28 * 3 + 24 * 2, 28 * 2 + 24 * 2
    expected = kernels[0] * SMALL_KERNEL_US + kernels[1] * GEMM_US + 500
    assert COSTS["nemotron-h-8b"].overhead_ticks() == pytest.approx(expected * PER_US, rel=1e-9)
    for name, mixers, mlps in (("nemotron-h-8b", 28, 24), ("qwen3-next-80b-a3b", 48, 48)):
        step_cost = COSTS[name]
        assert step_cost.all_reduce_ticks(0) == (mixers + mlps) * 10 * PER_US


def test_gemms_stream_the_weights_and_their_activations():
    """Nemotron-H-8B by hand: matrices and convolutions, then of one token all inputs and outputs."""
    step_cost, spec = RooflineCost(model("nemotron-h-8b"), H200), model("nemotron-h-8b")
    state = 4096 * (2 * 8192 + 2 * 1024 + 128) + 8192 * 4096 + 4 * 10_240
    attention, mlp = 4096 * 48 * 128 + 4096 * 4096, 2 * 4096 * 21_504
    weights = 24 * state + 4 * attention + 24 * mlp
    hidden = 2 * (28 + 24) * 4096
    made = 24 * (8192 + 10_240 + 128 + 8192) + 4 * (2 * 4096 + 2 * 1024) + 24 * 2 * 21_504
    assert seconds(step_cost.gemm_ticks(1)) == pytest.approx(2 * (weights + hidden + made) / READ_PER_S, rel=1e-6)
    assert spec.num_params - weights - 2 * spec.head_params() == 24 * (10_240 + 3 * 128 + 8192) + 53 * 4096


def test_the_state_is_as_wide_as_its_own_rule_says_whatever_the_kv_cache_is():
    wide, narrow = (
        RooflineCost(model("nemotron-h-8b"), H200, deployment=Deployment(kv_dtype=d)) for d in ("bf16", "fp8")
    )
    assert wide.state_ticks(8, 100) == narrow.state_ticks(8, 100)
    assert wide.kv_write_ticks(1000) > narrow.kv_write_ticks(1000)


def test_terms_of_states_are_described_where_there_are_any():
    described = COSTS["nemotron-h-8b"].describe()
    assert described["state_per_decode"]["value"] == COSTS["nemotron-h-8b"].state_ticks(1, 0)
    assert "assumed" in described["state_flops_per_prefill_token"]["source"]
    without = RooflineCost(model("llama-3.1-8b"), H200)
    assert not [term for term in without.describe() if term.startswith("state_")]
    assert without.state_ticks(100, 100) == 0


def test_no_calibrated_operation_computes_a_state():
    with pytest.raises(SettingError) as error:
        CalibratedCost(calibration(), model("nemotron-h-8b"), H200)
    assert str(error.value).endswith(
        "has layers with a fixed-size state, which no calibrated operation computes; leave --cost out for the default, which covers it"
    )


class TestProfilesOfHybrids:
    """States beside attention, each from its own operation."""

    TWO_RANKS = {
        name: CalibratedCost(profile("h200"), model(name), H200, 2)
        for name in ("qwen3.5-35b-a3b", "nemotron-h-8b", "granite-4.0-h-small", "jamba-1.5-mini")
    }

    @pytest.mark.slow
    @pytest.mark.parametrize("name", TWO_RANKS)
    @given(decodes=st.integers(1, 64), length=st.integers(1, 4000))
    def test_a_line_is_a_step(self, name, decodes, length):
        found, context = self.TWO_RANKS[name], decodes * length
        base, slope, until = found.decode_line(decodes, context)
        assert base + slope * context == found.step_ticks(decodes, context, 0, 0)
        assert until is None or until > context

    def test_gated_delta_nets_have_a_table(self):
        """30 layers on two ranks, each 8 heads of keys and 16 of values; a prompt of 1,000 tokens is one of 1,000."""
        fit = profile("h200")
        found = StateOperations(fit, model("qwen3.5-35b-a3b"), H200, 2, Deployment())
        decode = fit.ops["gdn_decode"].us(OPERATIONS["gdn_decode"](16, 8, 16))
        assert found.decode_us(16) == pytest.approx(30 * float(decode))
        whole, halves = np.array([1000 * 1001 / 2]), np.array([500 * 501.0])
        for pairs, length in ((whole, 1000), (halves, 500)):
            prefill = fit.ops["gdn_prefill"].us(OPERATIONS["gdn_prefill"](1000, length, 8, 16))
            assert found.prefill_us(1000, pairs)[0] == pytest.approx(30 * float(prefill))

    def test_other_states_take_the_data_sheet_and_a_launch_for_each_kernel(self):
        name, fit = "nemotron-h-8b", profile("h200")
        found, sheet = StateOperations(fit, model(name), H200, 2, Deployment()), COSTS[name]
        launch = 24 * fit.ops["small_kernel"].coefficients.t0_us
        assert found.decode_us(8) == pytest.approx(sheet.state_ticks(8, 0) / PER_US + 2 * launch)
        assert found.prefill_us(500, np.array([1.0]))[0] == pytest.approx(
            sheet.state_ticks(0, 500) / PER_US + 6 * launch
        )

    def test_on_an_a100_decodes_have_another_engine_s_table_and_prompts_the_data_sheet(self):
        fit, a100, spec = profile("a100-80gb"), gpu("a100-80gb"), model("qwen3.5-35b-a3b")
        found, sheet = StateOperations(fit, spec, a100, 1, Deployment()), RooflineCost(spec, a100, 1, dtype="bf16")
        assert set(found.operations) == {"gdn_decode"} and "SGLang" in (fit.ops["gdn_decode"].source or "")
        # The table has 7.3 and 6.9 us for one sequence, 6.9 and 134 for 64, with 32 heads of values.
        assert found.decode_us(1) / 30 == pytest.approx(14.2, rel=0.1)
        assert found.decode_us(64) / 30 == pytest.approx(140.9, rel=0.1)
        launches = 6 * 30 * fit.ops["small_kernel"].coefficients.t0_us
        expected = sheet.state_ticks(0, 500) / PER_US + launches
        assert found.prefill_us(500, np.array([1.0]))[0] == pytest.approx(expected)
        assert found.describe()

    def test_mixed_steps_are_the_parts_of_the_compiled_core(self):
        found = self.TWO_RANKS["qwen3.5-35b-a3b"]
        parts = found.parts()
        assert parts is not None and parts.prefill_node is not None
        prefill = parts.prefill_node(512, 512 * 256)
        alone = StateOperations(profile("h200"), model("qwen3.5-35b-a3b"), H200, 2, Deployment())
        assert prefill / PER_US > alone.prefill_us(512, np.array([512 * 256.0]))[0]


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ("vllm-v1", "sglang")])
def test_other_policies_refuse_such_a_model(policy):
    chosen = settings(policy=policy, model="kimi-linear-48b-a3b", gpu="h200")
    with pytest.raises(SettingError) as error:
        build(chosen)
    expected = f"has layers with a fixed-size state, which {policy} does not serve; use --policy vllm-v1 or sglang"
    assert str(error.value) == f"model = 'kimi-linear-48b-a3b': {expected}"


@pytest.mark.parametrize("name", ["jamba-1.5-mini", "zamba2-7b"])
def test_a_policy_is_named_for_the_models_whose_states_it_serves(name):
    with pytest.raises(SettingError, match="use --policy vllm-v1$"):
        build(settings(policy="sarathi", model=name, gpu="h200"))
    with pytest.raises(NotSimulated):
        build(settings(policy="sglang", model=name, gpu="h200"))


def test_vllm_v1_serves_it_in_the_blocks_that_vllm_forms():
    """Blocks of latent vectors grow to 1,920 tokens of 1,152 bytes, which hold a state of 2,170,880 bytes."""
    found = build(settings(policy="vllm-v1", model="kimi-linear-48b-a3b", gpu="h200"))
    assert found.block_size == 1920
    assert found.memory.groups.kinds.count("state") == 3 and found.memory.groups.full == 1
