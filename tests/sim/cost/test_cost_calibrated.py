"""The step time by a calibration: sums by hand, curves within their tolerance, and leaps that give the same bits."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrations import LONGER, OPS, calibration, document
from fragmeter.sim.cluster.lock_step import RecordedCost
from fragmeter.sim.config.settings import settings as replica
from fragmeter.sim.cost import (
    CalibratedCost,
    Calibration,
    ScaledCost,
    ServedCost,
    SpeculativeCost,
    StepCost,
    cost,
    prices_kv,
    profile,
    profile_names,
)
from fragmeter.sim.cost.attention_curves import AttentionCurves
from fragmeter.sim.cost.base import among, context_of_reads, effective_context
from fragmeter.sim.cost.calibrated import experts_model, gemm_model
from fragmeter.sim.cost.curves import Curve, RisingCurve, Surface
from fragmeter.sim.cost.gemms import layer_gemms
from fragmeter.sim.cost.op_work import gemm
from fragmeter.sim.cost.operations import OPERATIONS
from fragmeter.sim.cost.shares import EIGHT_BIT_SHARES
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.ticks import PER_US
from fragmeter.traces import synthetic_pairs, workload

H100 = gpu("h100-80gb")
LLAMA = model("llama-3.1-8b")
LONG_CALLS = OPS["decode_attention"] | {"residuals": LONGER}
COSTS = [
    CalibratedCost(calibration(), LLAMA, H100),
    CalibratedCost(calibration(decode_attention=LONG_CALLS), LLAMA, H100, 2),
    cost("fitted", model("opt-13b"), gpu("a100-40gb")),
    cost("fitted", model("llama-3.1-70b"), gpu("h200"), 4),
    cost("fitted", model("gemma-3-27b"), H100, 2, deployment=Deployment(2, "fp8", "fp8")),
    cost("fitted", model("mixtral-8x7b"), gpu("h200"), deployment=Deployment(cuda_graphs=True)),
    cost("fitted", model("gpt-oss-120b"), gpu("h200"), 2, deployment=Deployment(quantization="mxfp4")),
]
costs = st.sampled_from(COSTS)


def us(ticks: int) -> float:
    return ticks / PER_US


class TestCurve:
    @settings(deadline=None)
    @given(st.floats(0, 100), st.floats(0.01, 10), st.floats(0.5, 8), st.integers(2, 10**6))
    def test_is_within_its_tolerance_everywhere(self, shortest, rate, q, end):
        def smooth(x):
            return (shortest**q + (rate * x) ** q) ** (1 / q) + 1

        curve = Curve(smooth, end)
        x = np.unique(np.geomspace(1, end, 3000).astype(int))
        found = np.array([us(curve(int(at))) for at in x])
        assert found == pytest.approx(smooth(x), rel=2e-3, abs=2e-3)

    def test_follows_a_dip(self):
        """One row takes longer than four in some kernels; the batches after it do not."""
        times = np.array([0.0, 19.1, 16.6, 15.5, 14.9])
        curve = Curve(lambda x: np.where(x < 5, times[np.minimum(x, 4)], 14.9 + (x - 4) / 100), 1000)
        assert [us(curve(x)) for x in range(1, 5)] == pytest.approx(times[1:], rel=1e-3)
        assert us(curve(128)) == pytest.approx(14.9 + 1.24, rel=1e-3)

    def test_a_rising_one_never_falls_and_its_lines_meet(self):
        """Over a curve with a dip: it is level until the curve is back."""
        curve = RisingCurve(lambda x: 10 + x - 30 * ((x > 40) & (x < 60)), 1000)
        assert all(curve(x) <= curve(x + 1) for x in range(2000))
        assert us(curve(50)) == pytest.approx(50, rel=0.02)
        for (base, slope, until), (after, steeper, _) in zip(curve.segments, curve.segments[1:]):
            assert type(base) is int and type(slope) is int
            assert base + slope * until == after + steeper * until
        assert curve.segments[-1][2] is None

    def test_a_straight_line_is_one(self):
        curve = Curve(lambda x: 2.0 * x + 7, 1 << 20)
        assert curve.segments == [(7 * PER_US, 2 * PER_US, None)]


PROFILED = [("opt-13b", "a100-40gb"), ("llama-3.1-8b", "h100-80gb"), ("llama-3.1-8b", "h200")]
ATTENTION = [AttentionCurves(profile(card), model(name), gpu(card), 1, 16) for name, card in PROFILED]


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2), st.integers(1, 256), st.floats(1, 2000))
def test_attention_is_within_its_tolerance_of_the_fitted_operation(place, batch, length):
    """A fifth of a percent, at contexts that are no samples of the curve; and as much again where it levels a dip."""
    (name, card), context = PROFILED[place], round(batch * length)
    spec = model(name)
    shape = spec.attention()
    work = OPERATIONS["decode_attention"](batch, context, shape.heads, shape.kv_heads, shape.head_dim)
    exact = spec.num_layers * float(profile(card).ops["decode_attention"].us(work))
    assert us(ATTENTION[place].decode(batch)(context)) == pytest.approx(exact, rel=4e-3)


class TestSurface:
    def test_is_exact_at_nodes_and_close_between(self):
        surface = Surface(lambda x, y: 3 + x + 0.01 * y)
        assert surface(0, 0) == 3 * PER_US and surface(15, 7) == round(18.07 * PER_US)
        assert surface(16, 1024) == round(29.24 * PER_US)
        for x, y in ((17, 1023), (999, 12_345), (123_456, 7)):
            assert us(surface(x, y)) == pytest.approx(3 + x + 0.01 * y, rel=1e-6)

    @pytest.mark.slow
    @given(st.integers(0, 2), st.integers(1, 1 << 17), st.integers(1, 1 << 34))
    def test_a_node_is_the_same_whichever_is_computed_first(self, place, tokens, pairs):
        """A node comes with the ones around it, in one call of numpy."""
        (name, card), shift = PROFILED[place], max(0, pairs.bit_length() - 4)
        alone, together = (AttentionCurves(profile(card), model(name), gpu(card), 1, 16).prefill for _ in range(2))
        low = pairs >> shift << shift
        together.node(tokens, low - (1 << shift) if low > 1 << shift else low + (1 << shift))
        assert together.node(tokens, low) == alone.node(tokens, low)

    @given(st.integers(1, 10**6), st.integers(1, 10**9))
    def test_a_curved_one_is_within_half_a_percent(self, x, y):
        def curved(x, y):
            return 10 + (x**0.8) * 1e-1 + y**1.2 * 1e-3

        assert us(Surface(curved)(x, y)) == pytest.approx(curved(x, y), rel=5e-3)


@pytest.mark.slow
@settings(deadline=None)
@given(costs, st.integers(0, 300), st.integers(0, 2_000_000))
def test_a_line_is_the_step_to_the_tick(step_cost, batch, context):
    base, slope, until = step_cost.decode_line(batch, context)
    assert type(base) is int and type(slope) is int and slope >= 0
    for reached in {context, context + 1, (until or context + 7777) - 1}:
        if until is None or reached < until:
            assert base + slope * reached == step_cost.step_ticks(batch, reached, 0, 0)


@pytest.mark.slow
@settings(deadline=None)
@given(costs, st.integers(1, 300), st.integers(1, 4000))
def test_more_sequences_and_longer_ones_take_no_less(step_cost, batch, length):
    """To two percent: a fitted table may dip a little from batch to batch."""
    here = step_cost.step_ticks(batch, batch * length, 0, 0)
    assert here <= step_cost.step_ticks(batch, batch * length + 1, 0, 0)
    assert here <= 1.02 * step_cost.step_ticks(batch + 1, (batch + 1) * length, 0, 0)
    prompt = step_cost.step_ticks(batch, batch * length, length, length * (length + 1) // 2)
    assert here < prompt
    longer = length + 1
    assert prompt <= 1.02 * step_cost.step_ticks(batch, batch * length, longer, longer * (longer + 1) // 2)
    chunk = step_cost.step_ticks(batch, batch * length, length, length * (length + 1) // 2 + length * 1000)
    assert prompt < chunk


def test_a_step_by_hand():
    """Llama-3.1-8B, 4 decodes of 100 tokens: bytes over rates, Pythagoras with the shortest call for GEMMs."""

    def gemm(m, n, k):
        return (5**2 + (2 * m * n * k / 100e6) ** 2 + (2 * (n * k + m * n + m * k) / 1e6) ** 2) ** 0.5

    def attention(lanes_bytes, flops, q):
        return (10**q + (flops / 50e6) ** q + (lanes_bytes / 1e6) ** q) ** (1 / q)

    layer = gemm(4, 6144, 4096) + gemm(4, 4096, 4096) + gemm(4, 28_672, 4096) + gemm(4, 4096, 14_336)
    layer += 2 + 4 * 2 * 8 * 128 * 4 / 1e6 + 8 + 4 * (10 * 4096 + 3 * 14_336) * 2 / 1e6
    read = 2 * (2 * 400 * 8 * 128 + 2 * 4 * 32 * 128)
    decode = attention(read, 4 * 400 * 32 * 128, 1.5)
    rest = gemm(4, 128_256, 4096) + 2 + 2 * 4 * 4096 * 2 / 1e6 + 300 + 4 * 0.5
    assert us(COSTS[0].step_ticks(4, 400, 0, 0)) == pytest.approx(32 * (layer + decode) + rest, rel=1.5e-3)
    prompt = 4 * 5050 * 32 * 128 / 50e6 + 10 + 2 * (2 * 100 * 8 * 128 + 2 * 100 * 32 * 128) / 1e6
    with_prompt = COSTS[0].step_ticks(4, 400, 100, 5050) - COSTS[0].step_ticks(4, 400, 100, 0)
    bare = 10 + 2 * (2 * 100 * 8 * 128 + 2 * 100 * 32 * 128) / 1e6
    assert us(with_prompt) == pytest.approx(32 * (prompt - bare), rel=1e-2)
    assert us(COSTS[0].step_ticks(0, 0, 0, 0)) == 300


EVICTING = OPS["step"] | {"coefficients": {"t0_us": 300, "each_us": 0.5, "bytes_per_s": 20e9}}


def test_decodes_lengthen_their_step_by_the_kv_that_they_read():
    """32 layers of K and V, 8 heads of 128, 2 bytes each: 128 KiB a token, at 20 GB/s; of 32 rows half
    of it hides behind arithmetic. A window bounds it; a prompt reads none."""
    plain, found = COSTS[0], CalibratedCost(calibration(step=EVICTING), LLAMA, H100)
    for batch, context in ((1, 5000), (4, 20_000), (64, 128_000)):
        more = found.step_ticks(batch, context, 0, 0) - plain.step_ticks(batch, context, 0, 0)
        assert us(more) == pytest.approx(context * (128 << 10) / 20e3 / (1 + batch / 32), rel=5e-3)
        base, slope, _ = found.decode_line(batch, context)
        assert base + slope * context == found.step_ticks(batch, context, 0, 0)
    assert found.step_ticks(0, 0, 500, 125_250) == plain.step_ticks(0, 0, 500, 125_250)
    assert found.overhead_ticks() == plain.overhead_ticks()
    gemma = model("gemma-3-27b")
    costs = [CalibratedCost(calibration(step=step), gemma, H100) for step in (OPS["step"], EVICTING)]
    short, long = (
        us(costs[1].step_ticks(1, context, 0, 0) - costs[0].step_ticks(1, context, 0, 0)) for context in (500, 16_000)
    )
    assert 1 < long / short < 16


def test_decodes_of_one_piece_each_have_a_time_of_their_own_where_it_was_measured(tmp_path):
    """Half of the time by block tables: under the policies that keep a sequence in one piece, and those alone."""
    piece = {"coefficients": {"t0_us": 5, "flops_per_s": 100e12, "bytes_per_s": 2e12, "q": 1.5}}
    both = calibration(contiguous_attention=piece)
    by_table, whole = (CalibratedCost(both, LLAMA, H100, paged=paged) for paged in (True, False))
    unmeasured = CalibratedCost(calibration(), LLAMA, H100, paged=False)
    assert len({found.step_ticks(4, 400, 0, 0) for found in (by_table, unmeasured, COSTS[0])}) == 1
    calls = ("decode_attention", "contiguous_attention")
    attention = [32 * float(both.ops[call].us(OPERATIONS[call](4, 400, 32, 8, 128))) for call in calls]
    saved = by_table.step_ticks(4, 400, 0, 0) - whole.step_ticks(4, 400, 0, 0)
    assert us(saved) == pytest.approx(attention[0] - attention[1], rel=1e-2)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(document(contiguous_attention=piece)))
    for policy, expected in {"static": whole, "orca-max": whole, "tgi": by_table, "vllm-v1": by_table}.items():
        built = build(replica(cost=str(path), policy=policy, model="llama-3.1-8b", gpu="h100-80gb", enforce_eager=True))
        assert built.cost.step_ticks(4, 400, 0, 0) == expected.step_ticks(4, 400, 0, 0)


def test_steps_with_prompts_take_a_time_of_their_own_beside_their_operations():
    """By rows, one of them a prompt, and by the 24 bytes of each token's inputs; steps that only decode are as before."""
    plain = CalibratedCost(calibration(), LLAMA, H100)
    prefill_step = {"coefficients": {"t0_us": 700, "each_us": 2, "bytes_per_s": 1e9}}
    apart = CalibratedCost(calibration(prefill_step=prefill_step), LLAMA, H100)
    for decodes, context, tokens in ((0, 0, 100), (4, 4000, 100), (4, 4000, 2000)):
        step = (decodes, context, tokens, tokens * (tokens + 1) // 2)
        more = 700 + 2 * (decodes + 1) + 0.024 * tokens - (300 + 0.5 * decodes)
        assert us(apart.step_ticks(*step)) - us(plain.step_ticks(*step)) == pytest.approx(more, rel=2e-3)
    assert apart.decode_line(4, 4000) == plain.decode_line(4, 4000)
    assert apart.step_ticks(4, 4000, 0, 0) == plain.step_ticks(4, 4000, 0, 0)


def test_a_step_with_prompts_takes_no_less_than_its_launches():
    """Launches and operations overlap, and the rest comes after both; steps that only decode are captured."""
    rest = {"coefficients": {"t0_us": 700, "each_us": 2}}
    plain = CalibratedCost(calibration(prefill_step=rest), LLAMA, H100)
    for tokens in (10, 100, 2000):
        step = (4, 4000, tokens, tokens * (tokens + 1) // 2)
        operations = us(plain.step_ticks(*step)) - 700 - 2 * 5
        for launches in (0.5 * operations, 2 * operations):
            ops = {"prefill_step": rest, "launches": {"coefficients": {"t0_us": launches}}}
            found = CalibratedCost(calibration(**ops), LLAMA, H100)
            assert us(found.step_ticks(*step)) == pytest.approx(max(operations, launches) + 710, rel=1e-6)
            assert found.decode_line(4, 4000) == plain.decode_line(4, 4000)
            assert found.parts() is None


def test_graphs_pad_the_layers_and_not_the_output_head():
    """33 decodes run as 40 through the layers; the head, and what goes by rows beside, know 33."""
    only = {name: {"coefficients": {"t0_us": 1e-3}} for name in OPS}
    only["gemm"] = {"coefficients": {"t0_us": 1e-3, "flops_per_s": 1e12}}
    eager, graphs = (
        CalibratedCost(calibration(**only), LLAMA, H100, deployment=Deployment(cuda_graphs=cuda_graphs))
        for cuda_graphs in (False, True)
    )
    layers = 32 * 2 * (6144 * 4096 + 4096 * 4096 + 28_672 * 4096 + 4096 * 14_336) / 1e6
    more = graphs.step_ticks(33, 33 * 100, 0, 0) - eager.step_ticks(33, 33 * 100, 0, 0)
    assert us(more) == pytest.approx((40 - 33) * layers, rel=1e-3)


def test_residuals_reach_the_step():
    """Sequences of 4k tokens take twice as long to attend to, those of 1k as long as without."""
    plain, longer = (
        CalibratedCost(calibration(decode_attention=entry), LLAMA, H100)
        for entry in (OPS["decode_attention"], LONG_CALLS)
    )
    assert longer.step_ticks(8, 8 * 1000, 0, 0) == pytest.approx(plain.step_ticks(8, 8 * 1000, 0, 0), rel=1e-3)
    shape = LLAMA.attention()
    work = OPERATIONS["decode_attention"](8, 8 * 4096, shape.heads, shape.kv_heads, shape.head_dim)
    attention = 32 * float(plain.calibration.ops["decode_attention"].us(work))
    more = us(longer.step_ticks(8, 8 * 4096, 0, 0) - plain.step_ticks(8, 8 * 4096, 0, 0))
    assert more == pytest.approx(attention, rel=3e-3)


def test_gemms_are_those_of_vllm():
    """Q, K and V in one, gate and up in one; on two ranks half of each."""
    shapes = [(gemm.n, gemm.k) for gemm in layer_gemms(LLAMA, 0, 1, None)]
    assert shapes == [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)]
    halves = [(gemm.n, gemm.k) for gemm in layer_gemms(LLAMA, 0, 2, None)]
    assert halves == [(3072, 4096), (4096, 2048), (14_336, 4096), (4096, 7168)]
    router, *experts = layer_gemms(model("mixtral-8x7b"), 0, 1, None)[2:]
    assert (router.n, router.k, router.experts) == (8, 4096, None)
    assert [(gemm.n, gemm.k) for gemm in experts] == [(28_672, 4096), (4096, 14_336)]
    assert experts[0].weight_bytes == 8 * 28_672 * 4096 * 2


def test_experts_that_are_reached_are_read():
    one, all_of_them = (
        layer_gemms(model("mixtral-8x7b"), 0, 1, None)[3].work(np.array(tokens)) for tokens in (1, 10_000)
    )
    assert one.bytes == pytest.approx(2 * 28_672 * 4096 * 2 + 2 * (28_672 + 4096) * 2)
    assert all_of_them.bytes == pytest.approx(8 * 28_672 * 4096 * 2 + 20_000 * (28_672 + 4096) * 2)
    assert one.flops == 2 * 2 * 28_672 * 4096 and one.at["m"] == 1 and all_of_them.at["m"] == 2500


def test_experts_are_one_operation_where_there_is_one():
    """Their own shape's model before that of all shapes; GEMMs where there is neither, and for experts without a gate."""
    fit, spec = profile("h100-80gb"), model("mixtral-8x7b")
    name, found = experts_model(fit, spec, None)
    assert name == "moe" and found is fit.ops["moe"].shapes["8x2x4096x14336"]
    assert experts_model(fit, spec, "fp8")[1] is fit.ops["moe_fp8"].shapes["8x2x4096x14336"]
    assert experts_model(fit, spec, "awq") == ("moe_int4", fit.ops["moe_int4"])
    others = replace(spec, experts=replace(spec.experts, count=9))
    assert experts_model(fit, others, None)[1] is fit.ops["moe"]
    assert experts_model(fit, replace(spec, gated_mlp=False), None) is None
    assert experts_model(fit, spec, "int8") is None and experts_model(fit, LLAMA, None) is None
    assert experts_model(profile("rtx-4090"), spec, None) is None


def test_experts_with_activations_in_mxfp8_have_an_operation_of_their_own():
    """DeepSeek V4's on Blackwell, whose shapes are in the tables, and gpt-oss's where a server asks for them; not on an H200."""
    flash = model("deepseek-ai/DeepSeek-V4-Flash")
    v4 = Deployment(quantization=flash.quantization)
    oss = model("gpt-oss-120b")
    by_default, asked = (
        Deployment(quantization="mxfp4", moe_backend=name) for name in (None, "flashinfer_trtllm_afp8")
    )
    for card, spec, deployment, expected in (
        ("b200", flash, v4, "moe_mxfp4_mxfp8"), ("h200", flash, v4, "moe_mxfp4"),
        ("b200", oss, by_default, "moe_mxfp4"), ("b200", oss, asked, "moe_mxfp4_mxfp8"),
    ):  # fmt: skip
        terms = cost("fitted", spec, gpu(card), deployment=deployment).describe()
        assert {name.partition(".")[0] for name in terms if name.startswith("moe")} == {expected}
    table = profile("b200").ops["moe_mxfp4_mxfp8"]
    assert set(table.shapes) == {"256x6x4096x2048", "384x6x7168x3072"}


@pytest.mark.parametrize("deployment", [Deployment(), Deployment(data_parallel=4, expert_parallel=True)])
def test_a_step_has_the_experts_of_every_layer(deployment):
    """Llama 4 Scout with all but one of its experts' layers dense: the difference is that operation 47 times, less their MLPs."""
    spec, h200 = model("llama-4-scout"), gpu("h200")
    fit = profile("h200")
    step_cost = CalibratedCost(fit, spec, h200, 2, deployment=deployment)
    fewer = CalibratedCost(
        fit, replace(spec, experts=replace(spec.experts, layers=(0,))), h200, 2, deployment=deployment
    )
    ranks = deployment.expert_ranks(2)
    own = fit.ops["moe"].shapes["16x1x5120x8192"]
    work = OPERATIONS["moe"](64 * ranks.engines, 1, 16, 16 // ranks.holders, 5120, 8192 // ranks.slices)
    assert step_cost._experts_us(np.array(64)) == pytest.approx(48 * float(own.us(work)))
    assert step_cost._experts_us(np.array(64)) == pytest.approx(48 * fewer._experts_us(np.array(64)))
    assert step_cost.describe()["moe.t0_us"]["value"] == own.coefficients.t0_us


@pytest.mark.parametrize(
    ("card", "ranks", "fused"),
    [
        *((card, *limit) for card in ("h100-80gb", "h200") for limit in ((2, 4096), (4, 128), (8, 32))),
        *(("b200", *limit) for limit in ((2, 4096), (4, 2048), (8, 64))),
        *(("b300", *limit) for limit in ((2, 4096), (4, 4096), (8, 256))),
    ],
)
def test_small_all_reduces_normalise(card, ranks, fused):
    """Llama 3.1 70B: a message of 64, 32, 4, 2, 1 or 0.5 MiB has so many tokens of 8,192 values. The step grows by two kernels, and
    by the reads and writes of two norms, in each of 80 layers with the next token."""
    spec, fit = model("llama-3.1-70b"), profile(card)
    step_cost, elementwise = CalibratedCost(fit, spec, gpu(card), ranks), fit.ops["elementwise"].coefficients
    less = step_cost._elementwise_us(np.array([fused, fused + 1]), 0)
    plain = elementwise.us(OPERATIONS["elementwise"](np.array([fused, fused + 1]), 8192, 0))
    assert less[1] == plain[1]
    norms = fused * 8 * 8192 * 2 / elementwise.bytes_per_s * 1e6
    assert plain[0] - less[0] == pytest.approx(elementwise.t0_us / 2 + norms)
    one = CalibratedCost(fit, spec, gpu(card))
    assert one._elementwise_us(np.array([fused]), 0)[0] == plain[0]
    a100 = CalibratedCost(profile("a100-80gb"), spec, gpu("a100-80gb"), 4)
    assert a100._elementwise_us(np.array([1]), 0) == a100._us("elementwise", OPERATIONS["elementwise"](1, 8192, 0))


@pytest.mark.parametrize(
    "deployment", [Deployment(vllm_minor=16), Deployment(data_parallel=2), Deployment(pipeline_parallel=2)]
)
def test_all_reduces_do_not_normalise_before_017_nor_with_other_engines_or_stages(deployment):
    """As ``enable_allreduce_rms_fusion`` of vLLM, and its default of False before."""
    spec, fit, tokens = model("llama-3.1-70b"), profile("h100-80gb"), np.array([8.0])
    plain = fit.ops["elementwise"].us(OPERATIONS["elementwise"](tokens, 8192, 0))
    assert CalibratedCost(fit, spec, H100, 4, deployment=deployment)._elementwise_us(tokens, 0) == plain
    assert CalibratedCost(fit, spec, H100, 4, deployment=Deployment(vllm_minor=17))._elementwise_us(tokens, 0) < plain


@pytest.mark.parametrize(("ranks", "mib", "ms"), [(2, 2, 0.013), (4, 2, 0.021), (8, 64, 0.316), (8, 128, 0.561)])
def test_all_reduces_of_hopper_take_what_vllm_published_for_bytes(ranks, mib, ms):
    """The fastest of vLLM's own benchmark (pull requests 24111, 24532, 42324) by the size in bytes; half or twice the size is refused."""
    reduce = profile("h100-80gb").ops["all_reduce"].us(OPERATIONS["all_reduce"](mib << 20, ranks))
    assert float(reduce) / 1e3 == pytest.approx(ms, rel=0.25)


def test_all_reduces_are_those_of_the_profile():
    """Two in each of 80 layers; without a table, those of the links."""
    spec, fit = model("llama-3.1-70b"), profile("h100-80gb")
    step_cost = CalibratedCost(fit, spec, H100, 4)
    own = 160 * float(fit.ops["all_reduce"].us(OPERATIONS["all_reduce"](512 * 16_384, 4)))
    assert us(step_cost._reduced(512)) == pytest.approx(own, rel=2e-3)
    assert CalibratedCost(fit, spec, H100)._reduced is None
    card = gpu("rtx-4090")
    over_pcie = CalibratedCost(profile("rtx-4090"), LLAMA, card, 2)
    assert over_pcie._reduced is None
    assert us(over_pcie._links.all_reduce_ticks(100)) == pytest.approx(64 * (20 + 100 * 8192 / (0.5 * 32e9) * 1e6))


class TestLatentAttention:
    spec = model("deepseek-v3")
    fp8 = Deployment(quantization="fp8")

    def test_decodes_and_prefills_are_those_of_the_profile(self):
        fit = profile("h200")
        step_cost = CalibratedCost(fit, self.spec, gpu("h200"), 8, deployment=self.fp8)
        for sequences, context in ((1, 1), (32, 64_000)):
            work = OPERATIONS["mla_decode_fp8"](sequences, context, 16)
            own = 61 * float(fit.ops["mla_decode_fp8"].us(work))
            assert us(step_cost._attention.decode(sequences)(context)) == pytest.approx(own, rel=2e-3)
        work = OPERATIONS["mla_prefill_fp8"](512, 512 * 513 / 2, 512, 16)
        own = 61 * float(fit.ops["mla_prefill_fp8"].us(work))
        assert us(step_cost._attention.prefill(512, 512 * 513 // 2)) == pytest.approx(own, rel=1e-3)
        described = step_cost.describe()
        assert "mla_decode_fp8.t0_us" in described and "mla_decode.t0_us" not in described
        assert "mixed_attention.each_us" not in described

    def test_a_mixed_step_shares_the_projections(self):
        attention = CalibratedCost(profile("h200"), self.spec, gpu("h200"), 8, deployment=self.fp8)._attention
        decode, prefill = attention.decode(32)(64_000), attention.prefill(512, 131_328)
        assert attention.mixed(32, 64_000, 512, 131_328) == decode + prefill - attention.decode(1)(1)
        assert attention.mixed(1, 1, 1, 1) == max(attention.decode(1)(1), attention.prefill(1, 1))

    def test_other_widths_and_cards_without_a_table_are_refused(self):
        assert CalibratedCost.refusal(self.spec, profile("h200")) is None
        narrow = replace(self.spec, latent=replace(self.spec.latent, kv_rank=256))
        for spec, name in ((narrow, "h200"), (replace(self.spec, hidden_size=5120), "h200"), (self.spec, "a100-80gb")):
            assert "keeps latent vectors" in CalibratedCost.refusal(spec, profile(name))
        assert CalibratedCost.refusal(model("kimi-k2"), profile("h100-80gb"), "fp8") is None

    def test_of_the_matrices_only_experts_and_mlps_are_gemms(self):
        assert [gemm.experts for gemm in layer_gemms(self.spec, 0, 1, "fp8")] == [None, None]
        assert [gemm.experts is None for gemm in layer_gemms(self.spec, 5, 1, "fp8")] == [
            True,
            False,
            False,
            True,
            True,
        ]


def test_full_windows_cost_no_more():
    spec = model("mistral-7b-v0.1")
    step_cost = CalibratedCost(calibration(), spec, H100)
    full = step_cost.step_ticks(8, 8 * 4096, 0, 0)
    assert step_cost.step_ticks(8, 8 * 4000, 0, 0) < full
    assert step_cost.step_ticks(8, 8 * 30_000, 0, 0) == pytest.approx(full, rel=1e-3)


def test_quantised_weights_and_narrow_kv_move_fewer_bytes():
    plain, awq = (
        CalibratedCost(calibration(), LLAMA, H100, deployment=deployment)
        for deployment in (Deployment(), Deployment(quantization="awq"))
    )
    narrow = CalibratedCost(with_kv_cache("fp8"), LLAMA, H100, deployment=Deployment(kv_dtype="fp8"))
    assert awq.step_ticks(1, 100, 0, 0) < 0.5 * plain.step_ticks(1, 100, 0, 0)
    assert narrow.step_ticks(64, 640_000, 0, 0) < 0.7 * plain.step_ticks(64, 640_000, 0, 0)
    assert us(plain.swap_out_ticks(3) - 20 * PER_US) == pytest.approx(
        2 * us(narrow.swap_out_ticks(3) - 20 * PER_US), abs=400
    )


def with_kv_cache(kv_cache_dtype: str, kind: str = "calibration") -> Calibration:
    """The same coefficients, measured with another KV cache."""
    found = document() | {"kv_cache_dtype": kv_cache_dtype, "kind": kind}
    return Calibration(json.dumps(found).encode(), "made-up.json")


@pytest.mark.parametrize(
    ("measured", "kv_dtype"), [("auto", "fp8"), ("auto", "int8"), ("fp8", "fp16"), ("fp8", "bf16"), ("fp8", "int8")]
)
def test_a_calibration_prices_the_kv_cache_that_it_was_measured_with(measured, kv_dtype):
    with pytest.raises(SettingError) as caught:
        CalibratedCost(with_kv_cache(measured), LLAMA, H100, deployment=Deployment(kv_dtype=kv_dtype))
    assert str(caught.value) == (
        f"cost = 'made-up.json': was measured with --kv-cache-dtype {measured}, and the KV cache of this run is {kv_dtype}; "
        f"run with --kv-cache-dtype {'fp16' if measured == 'auto' else measured}, or leave --cost out"
    )
    # A profile prices other formats by their bytes.
    CalibratedCost(with_kv_cache("auto", "profile"), LLAMA, H100, deployment=Deployment(kv_dtype=kv_dtype))


@pytest.mark.parametrize(("measured", "kv_dtype"), [("auto", "fp16"), ("auto", "bf16"), ("fp8", "fp8")])
def test_and_that_one_alone(measured, kv_dtype):
    CalibratedCost(with_kv_cache(measured), LLAMA, H100, deployment=Deployment(kv_dtype=kv_dtype))


def test_a_calibration_without_a_kv_cache_dtype_is_of_16_bits():
    assert calibration().kv_cache_dtype == "auto"


def test_of_another_number_format_calls_move_other_bytes():
    fp16 = profile("h100-80gb")
    fp32 = fp16.in_format("fp32", "auto")
    assert (fp32.dtype, fp32.kv_cache_dtype) == ("fp32", "auto")
    for name in ("gemm", "decode_attention"):
        before, after = (fit.ops[name].coefficients for fit in (fp16, fp32))
        assert after.bytes_per_s == before.bytes_per_s / 2
        assert (after.t0_us, after.flops_per_s) == (before.t0_us, before.flops_per_s)
    assert fp16.in_format("bf16", "fp8").ops == fp16.ops


def test_which_cost_models_price_a_kv_cache(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(document() | {"kv_cache_dtype": "fp8"}))
    assert [prices_kv(str(path), kv_dtype) for kv_dtype in ("fp8", "fp16")] == [True, False]
    assert all(prices_kv(name, "fp8") for name in ("roofline", "fitted"))


def test_swaps_and_copies_by_hand():
    """A block of 16 slots: 2 MiB in 64 pieces, K and V of 32 layers."""
    step_cost = COSTS[0]
    assert us(step_cost.swap_out_ticks(3)) == pytest.approx(20 + 3 * 2**21 / 20e3 + 3 * 64 * 2, abs=1e-3)
    assert us(step_cost.swap_in_ticks(3)) == pytest.approx(20 + 3 * 2**21 / 25e3 + 3 * 64 * 3, abs=1e-3)
    assert us(step_cost.copy_ticks(32)) == pytest.approx(4 + 2 * 2**21 / 0.5e6, abs=1e-3)
    assert step_cost.swap_out_ticks(0) == step_cost.swap_in_ticks(0) == step_cost.copy_ticks(0) == 0


def test_every_coefficient_is_described_with_unit_and_source():
    for step_cost in COSTS:
        described = step_cost.describe()
        assert isinstance(step_cost, StepCost) and described["name"] == step_cost.name
        kernels = ("gemm_kernels", "gemm_tables")
        terms = {name: entry for name, entry in described.items() if isinstance(entry, dict) and name not in kernels}
        assert all(set(entry) == {"value", "unit", "source"} and entry["source"] for entry in terms.values())
        assert {"gemm.flops_per_s", "decode_attention.t0_us", "swap_in.each_us", "step.t0_us"} <= set(terms)
        assert json.loads(json.dumps(described)) == described and len(described["sha256"]) == 64
    assert COSTS[0].describe()["gemm.q"] == {"value": 2, "unit": "1", "source": "made up"}
    assert "all_reduce" in COSTS[1].describe() and "all_reduce" not in COSTS[0].describe()


def test_what_a_calibration_cannot_cost():
    with pytest.raises(SettingError, match="cost = 'made-up.json': has no model of block_copy, swap_in; calibrate"):
        CalibratedCost(calibration(swap_in=None, block_copy=None), LLAMA, H100)
    with pytest.raises(SettingError, match="cost = 'made-up.json': deepseek-v3 keeps latent vectors"):
        CalibratedCost(calibration(), model("deepseek-v3"), H100, 8)


class TestARun:
    @pytest.mark.slow
    @pytest.mark.parametrize("policy", ["vllm-sosp23", "vllm-v1", "orca-max"])
    @pytest.mark.parametrize("name", ["fitted", "file"])
    def test_leap_and_step_are_the_same_bits(self, policy, name, tmp_path):
        """Invariant 6, over the knots of curves."""
        path = tmp_path / "calibration.json"
        path.write_text(json.dumps(document(decode_attention=LONG_CALLS)))
        chosen = {"cost": "fitted" if name == "fitted" else str(path), "policy": policy}
        chosen |= (
            {"model": "opt-13b", "num_gpu_blocks_override": 400}
            if name == "fitted"
            else {"model": "llama-3.1-8b", "gpu": "h200"}
        )
        work = workload(synthetic_pairs("vllm_sosp23_sharegpt_opt", 150, 0, 2048), 4.0)
        leapt, stepped = (simulate(replica(**chosen, leap=leap), work) for leap in (True, False))
        assert summary(leapt) == summary(stepped)
        assert leapt.log.end_ticks == stepped.log.end_ticks
        assert leapt.replica.cost.name == ("fitted" if name == "fitted" else "calibrated")

    def test_knots_are_few(self):
        """Leaps are cut at them: of about 200 samples of a curve most are within the tolerance of a line."""
        knots, context = 0, 32
        while (until := COSTS[2].decode_line(32, context)[2]) is not None:
            knots, context = knots + 1, until
        assert 3 < knots < 25


class TestNumberFormatsOfGemms:
    def test_fp8_has_its_own_model_where_the_profile_has_one(self):
        fit = profile("h100-80gb")
        assert gemm_model(fit, H100, "fp8") is fit.ops["gemm_fp8"]
        assert gemm_model(fit, H100, "awq") is gemm_model(fit, H100, None) is fit.ops["gemm"]

    def test_elsewhere_the_flops_are_scaled_as_the_data_sheet_has_them(self):
        fit, card = profile("rtx-4090"), gpu("rtx-4090")
        scaled, sixteen = gemm_model(fit, card, "fp8"), fit.ops["gemm"]
        share = scaled.coefficients.flops_per_s / sixteen.coefficients.flops_per_s
        assert share == pytest.approx(330.3 / 165.2 * EIGHT_BIT_SHARES["rtx-4090"])
        assert scaled.residuals == sixteen.residuals and "not measured" in scaled.source
        described = cost("fitted", LLAMA, card, deployment=Deployment(quantization="fp8")).describe()
        assert described["gemm_fp8.flops_per_s"]["source"] == scaled.source

    def test_cards_without_such_units_unpack_to_16_bits(self):
        """TensorRT-LLM's table on the A100, at most at Marlin's rate; elsewhere the GEMMs of 16 bits, which read fewer bytes."""
        card = gpu("a100-80gb")
        fit = profile(card.name)
        assert gemm_model(fit, card, "fp8") is fit.ops["gemm_w8"]
        assert all(gemm_model(fit, card, form) is fit.ops["gemm_w4"] for form in ("awq", "gptq", "w4a16", "nvfp4"))
        assert gemm_model(profile("h100-80gb"), gpu("h100-80gb"), "awq") is profile("h100-80gb").ops["gemm"]
        # Few rows read a quarter of the bytes; many are multiplied in 16 bits as well, at half of the rate: Marlin's published 0.60 and less.
        sixteen, four = fit.ops["gemm"], fit.ops["gemm_w4"]
        few, many = ((gemm(m, 28_672, 4096), OPERATIONS["gemm_w4"](m, 28_672, 4096)) for m in (4, 4096))
        assert 0.25 < four.us(few[1]) / sixteen.us(few[0]) < 0.5 and 1.4 < four.us(many[1]) / sixteen.us(many[0]) < 2

    @pytest.mark.parametrize(("m", "n", "k"), [(16, 28_672, 4096), (256, 4096, 14_336), (8192, 28_672, 4096)])
    def test_fp8_gemms_of_an_h100_take_no_longer_than_in_16_bits(self, m, n, k):
        fit = profile("h100-80gb")
        eight, sixteen = (fit.ops[name].us(OPERATIONS[name](m, n, k)) for name in ("gemm_fp8", "gemm"))
        assert 0.5 < eight / sixteen < 1


class TestRepeatedReads:
    """The share of a first read that a repeated one takes."""

    @staticmethod
    def _calibration(**fields) -> Calibration:
        return Calibration(json.dumps(document() | fields).encode(), "made-up.json")

    def test_of_a_file_shorten_the_context(self):
        """Of 1,000 tokens of which 600 are read again, at 0.3 each: 400 + 180."""
        found = CalibratedCost(self._calibration(repeated_reads=0.3), LLAMA, H100)
        read = effective_context(found)
        assert read(1000, 600) == 580 and read(1000, 0) == 1000
        assert found.describe()["repeated_reads"]["value"] == 0.3

    @pytest.mark.parametrize("fields", [{}, {"repeated_reads": 1}, {"repeated_reads": 0.9999}])
    def test_are_first_reads_without_it(self, fields):
        found = CalibratedCost(self._calibration(**fields), LLAMA, H100)
        assert effective_context(found) is None
        if not fields:
            assert found.describe().keys() == CalibratedCost(calibration(), LLAMA, H100).describe().keys()

    def test_no_profile_has_it(self):
        assert all(profile(name).repeated_reads == 1 for name in profile_names())

    @pytest.mark.parametrize("value", [-0.1, 1.1, "much", None])
    def test_out_of_range_are_refused(self, value):
        with pytest.raises(SettingError, match=r"^made-up.json: repeated_reads"):
            self._calibration(repeated_reads=value)

    def test_pass_through_costs_that_change_another(self):
        inner = CalibratedCost(self._calibration(repeated_reads=0.3), LLAMA, H100)
        around = [
            ScaledCost(inner, 2.0),
            ServedCost(inner, None, asynchronous=True),
            SpeculativeCost(inner, None, 2),
            RecordedCost(inner),
            among(inner, [3, 4]),
        ]
        assert [effective_context(each)(1000, 600) for each in around] == [580] * len(around)

    @pytest.mark.slow
    @settings(deadline=None)
    @given(st.floats(0, 1), st.integers(0, 10**6), st.integers(0, 10**6))
    def test_leave_a_context_between_its_distinct_tokens_and_all(self, share, distinct, repeated):
        read = context_of_reads(share)
        if read is not None:
            assert distinct <= read(distinct + repeated, repeated) <= distinct + repeated
            assert abs(read(distinct + repeated, repeated) - distinct - share * repeated) <= 1 + repeated / 2000
