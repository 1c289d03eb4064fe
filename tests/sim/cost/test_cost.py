"""What a step costs: published figures, exact lines, and terms that never shrink."""

from __future__ import annotations

import json
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragmeter.sim.cost import COST_NAMES, PaperCost, RooflineCost, ScaledCost, StepCost, cost, shares
from fragmeter.sim.cost import paper as paper_module
from fragmeter.sim.cost.calibration import profile, profile_names
from fragmeter.sim.cost.envelope import upper_envelope
from fragmeter.sim.cost.operations import OPERATIONS
from fragmeter.sim.cost.small_kernels import small_kernels
from fragmeter.sim.spec import Deployment, gpu, gpu_names, model
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.ticks import PER_MS, PER_SECOND, PER_US

# SOSP'23, digitised. Fig 1 right: OPT-13B on an A100-40GB, tokens/s by batch size.
FIG1_BATCH = [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
FIG1_TOKENS_PER_S = [147, 269, 380, 481, 577, 659, 740, 812, 884, 920]
# Fig 19a: ms for 256 tokens of OPT-13B by block size.
FIG19_BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
FIG19_RECOMPUTE = [36.4, 37.5, 37, 38.9, 38.6, 39, 38.8, 38.5, 39.3]
FIG19_SWAP_IN = [82.0, 53.8, 35.3, 26.1, 22, 19.3, 18.4, 17.6, 17.3]
FIG19_SWAP_OUT = [55.5, 36.0, 26.1, 21.2, 18.7, 17.5, 16.8, 16.5, 16.3]

ROOFLINES = [
    RooflineCost(model("opt-13b"), gpu("a100-40gb")),
    RooflineCost(model("opt-66b"), gpu("a100-40gb"), 4),
    RooflineCost(model("opt-175b"), gpu("a100-80gb"), 8),
    RooflineCost(model("llama-13b"), gpu("a100-80gb")),
    RooflineCost(model("llama-2-7b"), gpu("h100-80gb")),
    RooflineCost(model("llama-3.1-8b"), gpu("h200"), dtype="bf16"),
    RooflineCost(model("llama-3.1-70b"), gpu("h200"), 4),
]
PLAIN = [PaperCost(), PaperCost(1.12), PaperCost(ms_per_prefill_token_beyond=0.14), *ROOFLINES]
COSTS = [
    *PLAIN,
    RooflineCost(model("mistral-7b-v0.1"), gpu("a100-40gb")),
    RooflineCost(model("gemma-3-27b"), gpu("h100-80gb"), 2, deployment=Deployment(2, "fp8", "fp8")),
    RooflineCost(model("deepseek-v3"), gpu("h200"), 8, deployment=Deployment(1, "fp8", "fp8", cuda_graphs=True)),
    RooflineCost(model("gpt-oss-120b"), gpu("h100-80gb"), deployment=Deployment(4, "int4", "mxfp4", cuda_graphs=True)),
    RooflineCost(model("qwen3-next-80b-a3b"), gpu("h200"), 2, dtype="bf16"),
    RooflineCost(model("nemotron-h-8b"), gpu("a100-80gb"), deployment=Deployment(2, "fp8", "fp8")),
    RooflineCost(model("jamba-1.5-mini"), gpu("h200"), 4, deployment=Deployment(cuda_graphs=True)),
    RooflineCost(model("kimi-linear-48b-a3b"), gpu("h100-80gb"), 4),
    ScaledCost(ROOFLINES[0], 1.37),
    ScaledCost(ROOFLINES[6], 0.111),
]

costs = st.sampled_from(COSTS)
decodes = st.integers(0, 2048)
contexts = st.integers(0, 2_000_000)


@settings(deadline=None)
@given(costs, decodes, contexts)
def test_a_line_is_the_step_to_the_tick(step_cost, batch, context):
    base, slope, until = step_cost.decode_line(batch, context)
    assert until is None or until > context
    for reached in {context, context + 1, (until or context + 7777) - 1}:
        if until is None or reached < until:
            assert base + slope * reached == step_cost.step_ticks(batch, reached, 0, 0)


@settings(deadline=None)
@given(st.sampled_from(PLAIN), decodes)
def test_lines_walk_from_knot_to_knot_without_a_gap(step_cost, batch):
    """The context before each knot and the knot itself, by their own lines, and the line goes on to infinity."""
    knots, context = 0, 0
    while (line := step_cost.decode_line(batch, context))[2] is not None:
        base, slope, until = line
        assert step_cost.decode_line(batch, until - 1) == line
        assert base + slope * (until - 1) == step_cost.step_ticks(batch, until - 1, 0, 0)
        after = step_cost.decode_line(batch, until)
        assert after != line
        assert after[0] + after[1] * until == step_cost.step_ticks(batch, until, 0, 0)
        assert base + slope * until < after[0] + after[1] * until
        knots, context = knots + 1, until
    assert knots <= 2


def test_rooflines_have_the_knot_of_the_attention_floor():
    """OPT-13B on an A100-40GB: 40 calls of 11.5 us last as long as reading 611 tokens of 819,200 bytes."""
    floor, reading = ROOFLINES[0].decode_line(1, 0), ROOFLINES[0].decode_line(1, 611)
    per_token = round(819_200 / (1555e9 * 0.70) * PER_SECOND)
    query_and_output = round(2 * 40 * 5120 * 2 / (1555e9 * 0.70) * PER_SECOND)
    assert query_and_output + 610 * per_token <= 40 * 11.5 * PER_US < query_and_output + 611 * per_token
    assert floor[1:] == (0, 611)
    assert reading[1:] == (per_token, None)


@pytest.mark.slow
@settings(deadline=None)
@given(costs, decodes, contexts, st.integers(0, 4096), st.integers(0, 2**24), st.data())
def test_more_work_never_takes_less_time(step_cost, batch, context, tokens, pairs, data):
    work = [batch, context, tokens, pairs]
    more = list(work)
    more[data.draw(st.integers(0, 3))] += data.draw(st.integers(1, 1000))
    before, after = step_cost.step_ticks(*work), step_cost.step_ticks(*more)
    assert type(before) is int and type(after) is int
    assert 0 < before <= after


@pytest.mark.parametrize("name", ["roofline", "fitted"])
def test_a_scale_is_on_steps_and_on_nothing_else(name):
    plain, scaled = (cost(name, model("llama-3.1-8b"), gpu("h200"), scale=scale) for scale in (1.0, 1.3))
    assert type(plain) is not ScaledCost
    for work in ((32, 32_000, 0, 0), (32, 32_000, 500, 125_250), (0, 0, 4096, 8_390_656)):
        assert scaled.step_ticks(*work) == pytest.approx(1.3 * plain.step_ticks(*work), rel=1e-5)
    assert scaled.swap_in_ticks(7) == plain.swap_in_ticks(7)
    assert scaled.swap_out_ticks(7) == plain.swap_out_ticks(7)
    assert scaled.copy_ticks(7) == plain.copy_ticks(7)
    assert scaled.describe()["scale"]["value"] == 1.3
    assert scaled.name == plain.name


@settings(deadline=None)
@given(costs, st.integers(0, 5000))
def test_swaps_are_linear_in_integers(step_cost, blocks):
    for swap in (step_cost.swap_in_ticks, step_cost.swap_out_ticks):
        assert type(swap(blocks)) is int
        assert swap(blocks) == blocks * swap(1) >= 0
    assert step_cost.swap_in_ticks(1) > step_cost.swap_out_ticks(1) > 0


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(-5, 5)), min_size=1, max_size=6))
def test_the_envelope_is_the_largest_line(lines):
    segments = upper_envelope(lines)
    assert [end is None for *_, end in segments] == [False] * (len(segments) - 1) + [True]
    for x in range(120):
        base, slope, _ = next(segment for segment in segments if segment[2] is None or x < segment[2])
        assert base + slope * x == max(b + s * x for b, s in lines)


def test_fig_1_right_comes_out():
    for batch, tokens_per_s in zip(FIG1_BATCH, FIG1_TOKENS_PER_S, strict=True):
        simulated = batch * PER_SECOND / PaperCost().step_ticks(batch, 0, 0, 0)
        assert simulated == pytest.approx(tokens_per_s, rel=0.03)


def test_fig_19a_recompute_comes_out():
    simulated = PaperCost().step_ticks(0, 0, 256, 256 * 257 // 2) / PER_MS
    assert simulated == pytest.approx(np.mean(FIG19_RECOMPUTE), rel=0.02)


@pytest.mark.parametrize(
    ("measured_ms", "bytes_per_s", "ms_per_block", "largest_residual_ms"),
    [
        (FIG19_SWAP_IN, paper_module.SWAP_IN_BYTES_PER_S, paper_module.SWAP_IN_MS_PER_BLOCK, 3.1),
        (FIG19_SWAP_OUT, paper_module.SWAP_OUT_BYTES_PER_S, paper_module.SWAP_OUT_MS_PER_BLOCK, 0.11),
    ],
)
def test_the_swap_fit_recomputed(measured_ms, bytes_per_s, ms_per_block, largest_residual_ms):
    blocks = 256 / np.array(FIG19_BLOCK_SIZES)
    transfer_ms, per_block_ms = np.polynomial.polynomial.polyfit(blocks, measured_ms, 1)
    assert bytes_per_s == pytest.approx(256 * 819_200 / transfer_ms * 1e3, rel=5e-4)
    assert ms_per_block == pytest.approx(per_block_ms, rel=5e-4)
    residuals = transfer_ms + per_block_ms * blocks - measured_ms
    assert np.abs(residuals).max() < largest_residual_ms


@pytest.mark.parametrize("block_size", FIG19_BLOCK_SIZES)
def test_swap_out_comes_out_of_fig_19a_for_every_block_size(block_size):
    swapped = PaperCost(block_bytes=block_size * 819_200).swap_out_ticks(256 // block_size)
    measured = FIG19_SWAP_OUT[FIG19_BLOCK_SIZES.index(block_size)]
    assert swapped / PER_MS == pytest.approx(measured, abs=0.12)


def test_the_paper_cost_to_the_tick():
    """25.7 + 40 * 0.42 + 300 * 0.047 ms, then scaled, then with the second slope past 256 tokens."""
    assert PaperCost().step_ticks(40, 12_345, 300, 67_890) == 56_600_000_000
    assert PaperCost(1.12).step_ticks(40, 0, 300, 0) == 28_784_000_000 + 40 * 470_400_000 + 300 * 52_640_000
    bent = PaperCost(ms_per_prefill_token_beyond=0.14)
    assert bent.step_ticks(0, 0, 256, 0) == PaperCost().step_ticks(0, 0, 256, 0)
    assert bent.step_ticks(0, 0, 300, 0) - bent.step_ticks(0, 0, 256, 0) == 44 * 140_000_000


def test_scale_leaves_swaps_alone():
    assert PaperCost(2.0).swap_in_ticks(3) == PaperCost().swap_in_ticks(3)
    assert PaperCost(2.0).step_ticks(1, 0, 1, 0) == 2 * PaperCost().step_ticks(1, 0, 1, 0)


def test_the_roofline_meets_the_paper_where_nothing_was_fitted():
    """OPT-13B on the A100-40GB at small batches, where reading the weights dominates: Fig 1 right within 15 %."""
    for batch, tokens_per_s in ((4, 147), (8, 269)):
        simulated = batch * PER_SECOND / ROOFLINES[0].step_ticks(batch, 300 * batch, 0, 0)
        assert simulated == pytest.approx(tokens_per_s, rel=0.15)


@pytest.mark.parametrize(
    ("name", "at_32_by_4k", "at_128_by_1k"),
    [("a100-80gb", 0.63, 0.77), ("h100-80gb", 0.86, 0.84), ("h200", 0.83, 0.75)],
)
def test_decode_attention_reaches_its_published_share(name, at_32_by_4k, at_128_by_1k):
    """32 query and 8 KV heads of 128, as the measurements had."""
    spec, card = model("llama-3.1-8b"), gpu(name)
    step_cost = RooflineCost(spec, card)
    for batch, length, share in ((32, 4096, at_32_by_4k), (128, 1024, at_128_by_1k)):
        ideal = batch * length * spec.slot_bytes() / card.memory_bytes_per_s * PER_SECOND
        assert ideal / step_cost.decode_attention_ticks(batch, batch * length) == pytest.approx(share, abs=0.08)


@pytest.mark.parametrize(
    ("name", "at_1k", "at_4k"), [("a100-80gb", 0.28, 0.49), ("h100-80gb", 0.24, 0.53), ("h200", 0.25, 0.52)]
)
def test_prefill_attention_reaches_its_published_shares(name, at_1k, at_4k):
    spec, card = model("llama-3.1-8b"), gpu(name)
    step_cost = RooflineCost(spec, card)
    for length, share in ((1024, at_1k), (4096, at_4k)):
        pairs = length * (length + 1) // 2
        ideal = 4 * 32 * 128 * 32 * pairs / card.fp16_flops_per_s * PER_SECOND
        assert ideal / step_cost.prefill_attention_ticks(length, pairs) == pytest.approx(share, rel=2e-3)


def test_the_terms_of_a_step_add_up():
    step_cost = RooflineCost(model("opt-66b"), gpu("a100-40gb"), 4)
    terms = [
        step_cost.gemm_ticks(20 + 500),
        step_cost.head_ticks(20),
        step_cost.decode_attention_ticks(20, 9000),
        step_cost.prefill_attention_ticks(500, 125_250),
        step_cost.kv_write_ticks(520),
        step_cost.all_reduce_ticks(520),
        step_cost.overhead_ticks(),
    ]
    assert all(term > 0 for term in terms)
    assert step_cost.step_ticks(20, 9000, 500, 125_250) == sum(terms)
    assert step_cost.step_ticks(0, 0, 0, 0) == step_cost.overhead_ticks()


def test_gemms_are_bound_by_memory_and_then_by_flops():
    step_cost = ROOFLINES[0]
    params = 40 * 12 * 5120**2
    assert step_cost.gemm_ticks(1) == pytest.approx(2 * params / (1555e9 * 0.695) * PER_SECOND, rel=1e-3)
    assert step_cost.gemm_ticks(4096) == pytest.approx(4096 * 2 * params / (312e12 * 0.88) * PER_SECOND, rel=1e-6)


def test_the_head_is_bound_by_memory_and_then_by_flops():
    """OPT-13B's head: 50,272 tokens of 5,120 values; a row is read and its logits are written."""
    step_cost, vocabulary, hidden = ROOFLINES[0], 50_272, 5120
    read = 2 * (vocabulary * hidden + 7 * (hidden + vocabulary)) / (1555e9 * 0.695)
    assert step_cost.head_ticks(7) == pytest.approx(read * PER_SECOND, rel=1e-6)
    computed = 2 * vocabulary * hidden * 8192 / (312e12 * 0.88)
    assert step_cost.head_ticks(8192) == pytest.approx(computed * PER_SECOND, rel=1e-6)


def test_tensor_parallel_halves_the_gemms_and_adds_all_reduces():
    spec, card = model("llama-2-7b"), gpu("a100-80gb")
    one, two = RooflineCost(spec, card), RooflineCost(spec, card, 2)
    assert two.gemm_ticks(2048) == pytest.approx(one.gemm_ticks(2048) / 2, rel=1e-6)
    assert one.all_reduce_ticks(8) == 0
    # 2 a layer, 10 us each; on 2 ranks a ring sends every byte once at 0.8 of 300 GB/s.
    sent = 64 * 8 * 4096 * 2 / (0.8 * 300e9) * PER_SECOND
    assert two.all_reduce_ticks(8) == pytest.approx(64 * 10 * PER_US + sent, rel=1e-6)
    assert two.swap_in_ticks(1) < one.swap_in_ticks(1)


def test_every_coefficient_is_described_with_unit_and_source():
    for step_cost in COSTS:
        described = step_cost.describe()
        assert described["name"] == step_cost.name
        coefficients = {key: entry for key, entry in described.items() if isinstance(entry, dict)}
        assert len(coefficients) >= 7
        assert all(set(entry) == {"value", "unit", "source"} and entry["source"] for entry in coefficients.values())
        assert json.loads(json.dumps(described)) == described
    ticks = {key: entry["value"] for key, entry in PaperCost(1.12).describe().items() if key != "name"}
    assert (ticks["scale"], ticks["step"], ticks["per_decode"]) == (1.12, 28_784_000_000, 470_400_000)


def test_the_factory_builds_by_name():
    spec, card = model("opt-13b"), gpu("a100-40gb")
    assert COST_NAMES == ("paper", "roofline", "fitted")
    for name in COST_NAMES:
        assert isinstance(cost(name, spec, card), StepCost)
        assert cost(name, spec, card).name == name
    assert cost("paper", spec, card, scale=1.12).step_ticks(0, 0, 0, 0) == 28_784_000_000
    small, large = (cost("paper", spec, card, block_size=size) for size in (16, 32))
    assert small.swap_out_ticks(2) > large.swap_out_ticks(1) > small.swap_out_ticks(1)


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_has_its_shares(name):
    here, on_h200 = (
        cost("roofline", model("llama-3.1-8b"), gpu(card)).step_ticks(32, 32_000, 0, 0) for card in (name, "h200")
    )
    bandwidth = gpu(name).memory_bytes_per_s / gpu("h200").memory_bytes_per_s
    # An H20 with the H200's memory has assumed shares.
    assert here == pytest.approx(on_h200, rel=0.05) if bandwidth == 1 else (here > on_h200) == (bandwidth < 1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: cost("vidur", model("opt-13b"), gpu("h200")),
            "cost = 'vidur': one of paper, roofline, fitted, or the path of a calibration file (.json)",
        ),
        (
            lambda: cost("paper", model("opt-66b"), gpu("a100-40gb"), 4),
            "cost = 'paper': is fitted to opt-13b on one a100-40gb; use fitted, the default, for opt-66b on 4 x a100-40gb",
        ),
        (
            lambda: cost("paper", model("opt-13b"), gpu("h200")),
            "cost = 'paper': is fitted to opt-13b on one a100-40gb; use fitted, the default, for opt-13b on 1 x h200",
        ),
        (
            lambda: cost("paper", model("opt-13b"), gpu("mi300x")),
            "cost = 'paper': is fitted to opt-13b on one a100-40gb; use roofline, the default, for opt-13b on 1 x mi300x",
        ),
        (lambda: PaperCost(0.0), "scale = 0.0: must be a positive number"),
        (lambda: PaperCost(float("nan")), "scale = nan: must be a positive number"),
        (lambda: PaperCost(block_bytes=-1), "block_bytes = -1: must be a positive number"),
        (
            lambda: RooflineCost(model("opt-13b"), gpu("h200"), dtype="fp8"),
            "dtype = 'fp8': must be fp16 or bf16: the data sheets give the flops of these",
        ),
        (
            lambda: RooflineCost(model("opt-13b"), gpu("h200"), 3),
            "tensor_parallel = 3: must divide the 40 heads of opt-13b",
        ),
    ],
)
def test_errors_name_the_field_the_value_and_the_remedy(call, text):
    with pytest.raises(SettingError) as error:
        call()
    assert str(error.value) == text


class TestFloors:
    """The shortest calls of the roofline are those of the tables."""

    def test_they_are_medians_over_the_profiles_of_cards(self):
        # That of the A100 40 GB is scaled, and that of the RTX 4090 is of another source, which has 23 us for its shortest GEMM.
        cards = {name: profile(name).ops for name in profile_names() if name not in ("a100-40gb", "rtx-4090")}
        known = list(cards.values())

        def of(*names):
            return median(ops[name].coefficients.t0_us for ops in known for name in names if name in ops)

        experts = [name for name in OPERATIONS if name.startswith("moe")]
        shortest = [
            min(shape.coefficients.t0_us for shape in ops[name].shapes.values())
            for card, ops in cards.items()
            for name in experts
            # The A100's int4 experts have SGLang's table, and the floors are of vLLM's.
            if name in ops and (card, name) != ("a100-80gb", "moe_int4")
        ]
        assert of("small_kernel") == pytest.approx(shares.SMALL_KERNEL_US, abs=0.05)
        assert of("gemm") == pytest.approx(shares.GEMM_US, abs=0.05)
        assert of("gemm_fp8", "gemm_nvfp4") == pytest.approx(shares.QUANTISED_GEMM_US, abs=0.05)
        assert median(shortest) == pytest.approx(shares.EXPERTS_US, abs=0.05)

    def test_a_layer_has_the_time_of_its_kernels(self):
        """Of Mistral 7B by hand: five small kernels and four GEMMs each, on any card and however many ranks."""
        dense = model("mistral-7b-v0.1")
        expected = dense.num_layers * (5 * shares.SMALL_KERNEL_US + 4 * shares.GEMM_US) + shares.HOST_US
        for card, ranks in (("h100-80gb", 1), ("mi300x", 1), ("mi300x", 8)):
            assert RooflineCost(dense, gpu(card), ranks).overhead_ticks() == round(expected * PER_US)

    def test_experts_and_states_have_theirs(self):
        qwen, deployment = model("qwen3-next-80b-a3b"), Deployment()
        more = small_kernels(qwen) * shares.SMALL_KERNEL_US + qwen.num_layers * shares.EXPERTS_US
        overhead = RooflineCost(qwen, gpu("mi300x"), 8, deployment=deployment).overhead_ticks() / PER_US
        # Of each layer five small kernels, two GEMMs of the mixer, the router's, and two of the shared expert.
        layer = 5 * shares.SMALL_KERNEL_US + 5 * shares.GEMM_US
        assert overhead == pytest.approx(more + qwen.num_layers * layer + shares.HOST_US)
