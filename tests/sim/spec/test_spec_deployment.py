"""Pools and replicas under vLLM's flags: pipeline stages, number formats, CUDA graphs."""

from __future__ import annotations

import pytest

from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.sim.config.settings import settings
from fragmeter.sim.cost import RooflineCost
from fragmeter.sim.engine.replica import build
from fragmeter.sim.memory.contiguous.arena import BestFitArena, FirstFitArena
from fragmeter.sim.spec import Deployment, gpu, host_blocks, model, padded_batch, paper_num_blocks, stage_bytes
from fragmeter.sim.types.errors import SettingError

GIB = 1 << 30
# What SOSP'23's reckoning leaves of an A100-40GB besides weights: workspace, and 2,560 tokens' activations.
A100_USABLE = int(0.95 * 42_298_834_944) - GIB


def test_nothing_set_is_the_paper():
    spec, card = model("opt-13b"), gpu("a100-40gb")
    assert paper_num_blocks(spec, card, 1, 16, Deployment()) == paper_num_blocks(spec, card, 1) == 983
    assert build(settings()).num_blocks == 983
    assert paper_settings().cost == paper_settings(kv_cache_dtype="bf16").cost == "paper"
    assert build(paper_settings()).cost.name == "paper"


@pytest.mark.parametrize(("dtype", "shrinks"), [("bf16", 1), ("fp8", 2), ("int8", 2), ("int4", 4)])
def test_narrow_kv_gives_more_blocks_of_the_same_bytes(dtype, shrinks):
    """What weights and logits leave, in blocks of 13,107,200 bytes, of 6,553,600 and of 3,276,800."""
    left = A100_USABLE - 2 * 12_853_473_280 - 2 * 2560 * 2 * 50_272
    assert left // 13_107_200 == 983
    deployment = Deployment(kv_dtype=dtype)
    assert paper_num_blocks(model("opt-13b"), gpu("a100-40gb"), 1, 16, deployment) == left // (13_107_200 // shrinks)
    assert host_blocks(model("opt-13b"), deployment=deployment) == 20 * GIB // (13_107_200 // shrinks)


def test_vllms_kv_cache_in_nvfp4_is_served_where_vllm_has_kernels():
    """Nine sixteenths of a byte a number, in memory and in the reads of attention."""
    chosen = {"policy": "vllm-v1", "model": "llama-3.1-8b", "gpu": "b200", "cost": "roofline"}
    narrow, wide = (build(settings(**chosen, kv_cache_dtype=form)) for form in ("nvfp4", "fp8"))
    # Its kernels also have outputs of a step in 8 bits.
    assert narrow.num_blocks == pytest.approx(wide.num_blocks * 16 / 9, rel=0.02)
    of_fp8, of_nvfp4 = (replica.cost.decode_line(64, 64 * 8192)[1] for replica in (wide, narrow))
    assert of_nvfp4 == pytest.approx(of_fp8 * 9 / 16, rel=0.001)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"model": "gpt-oss-20b", "gpu": "h100-80gb"},
            "vLLM refuses it for gpt-oss-20b on h100-80gb (No valid attention",
        ),
        ({"policy": "vllm-sosp23"}, "is vLLM's; use --policy vllm-v1, or fp8"),
        ({"kv_cache_dtype": "turboquant_k8v4"}, "is vLLM's, and its scales are not counted"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "is vLLM's, and its scales are not counted"),
    ],
)
def test_formats_of_the_kv_cache_that_are_not_served_say_why(given, complaint):
    with pytest.raises(SettingError) as refused:
        build(settings(**{"policy": "vllm-v1", "kv_cache_dtype": "nvfp4"} | given))
    assert refused.value.field == "kv_cache_dtype" and complaint in str(refused.value)


@pytest.mark.parametrize("name", ["awq", "gptq", "int8", "fp8", "nvfp4"])
def test_quantised_weights_leave_their_bytes_to_the_pool(name):
    spec, card = model("opt-13b"), gpu("a100-40gb")
    saved = spec.weight_bytes() - stage_bytes(spec, quantization=name)[0]
    plain, more = (paper_num_blocks(spec, card, 1, 1, Deployment(quantization=kind)) for kind in (None, name))
    assert more - plain == pytest.approx(saved / 819_200, abs=1)
    assert more > 1.8 * plain


def test_graphs_take_a_gibibyte_a_gpu():
    spec, card = model("opt-13b"), gpu("a100-40gb")
    plain, fewer = (paper_num_blocks(spec, card, 1, 1, Deployment(cuda_graphs=graphs)) for graphs in (False, True))
    assert plain - fewer == pytest.approx(GIB / 819_200, abs=1)


def test_the_fullest_stage_decides_by_hand():
    """OPT-66B, 16 layers on each of four A100-40GB. A slot of a stage is 2 * 16 * 72 * 128 * 2 bytes."""
    layer = 12 * 9216**2 + 9 * 9216 + 4 * 9216
    first = 16 * layer + (50_272 + 2050) * 9216
    last = 16 * layer + (50_272 + 2) * 9216
    widest = 2 * (36_864 * 2 + 9216)
    room = [
        (A100_USABLE - 2 * first - 2 * 2560 * widest) // (16 * 589_824),
        (A100_USABLE - 2 * last - 2 * 2560 * max(widest, 2 * 50_272)) // (16 * 589_824),
    ]
    assert model("opt-66b").slot_bytes("fp16", 1, 4) == 589_824
    assert paper_num_blocks(model("opt-66b"), gpu("a100-40gb"), 1, 16, Deployment(pipeline_parallel=4)) == min(room)


def test_stages_of_untied_embeddings_by_hand():
    """LLaMA-3.1-8B in two stages: both tables count, one each; logits of 2,560 tokens lie on the last."""
    layers = 16 * (2 * 4096 * (32 + 8) * 128 + 3 * 4096 * 14_336 + 2 * 4096)
    table, rotary = 128_256 * 4096, 16 * 131_072 * 128
    first = 2 * (layers + table + rotary) + 2 * 2560 * 2 * (3 * 14_336 + 4096)
    last = 2 * (layers + table + rotary + 4096) + 2 * 2560 * 2 * 128_256
    expected = (A100_USABLE - max(first, last)) // (16 * 2 * 16 * 8 * 128 * 2)
    found = paper_num_blocks(model("llama-3.1-8b"), gpu("a100-40gb"), 1, 16, Deployment(pipeline_parallel=2))
    assert found == expected


def test_a_stage_in_the_middle_may_be_the_fullest():
    """Gemma 3 in four stages of 15, 16, 16 and 15 layers: no table and no logits, but one layer more."""
    layer = 5376 * (32 + 2 * 16 + 32) * 128 + 3 * 5376 * 21_504 + 4 * 5376 + 2 * 128
    taken = 2 * 16 * layer + 2 * 131_072 * 128 + 2 * 2560 * 2 * (3 * 21_504 + 5376)
    card = gpu("a100-80gb")
    expected = (int(0.95 * card.memory_bytes) - GIB - taken) // (16 * 16 * 8192)
    assert paper_num_blocks(model("gemma-3-27b"), card, 1, 16, Deployment(pipeline_parallel=4)) == expected


def test_kinds_that_the_paper_did_not_know_have_one_rotary_table():
    """Gemma 3 in fp8 on an A100-80GB; its head is its embedding, its logits are wider than its MLP."""
    spec, card = model("gemma-3-27b"), gpu("a100-80gb")
    taken = stage_bytes(spec, quantization="fp8")[0] + 2 * 131_072 * 128 + 2 * 2560 * 2 * 262_208
    expected = (int(0.95 * card.memory_bytes) - GIB - taken) // (16 * 507_904)
    assert paper_num_blocks(spec, card, 1, 16, Deployment(quantization="fp8")) == expected
    # DeepSeek-V3 on 8 H200: a table of 64 columns, and again logits wider than all else.
    spec, card = model("deepseek-v3"), gpu("h200")
    taken = stage_bytes(spec, 8, quantization="fp8")[0] - 2 * 129_280 * 7168 // 8
    taken += 2 * 163_840 * 64 + 2 * 2560 * 2 * 129_280
    expected = (int(0.95 * card.memory_bytes) - GIB - taken) // (16 * 70_272)
    assert paper_num_blocks(spec, card, 8, 16, Deployment(quantization="fp8")) == expected


def test_a_model_that_needs_four_gpus_fits_either_way():
    by_rank, by_stage = (
        build(settings(model="opt-66b", **{f"{kind}_parallel_size": 4})).num_blocks for kind in ("tensor", "pipeline")
    )
    assert by_rank == 603
    assert 0.7 * by_rank < by_stage < 1.3 * by_rank


def test_batches_are_padded_to_the_captured_sizes():
    captured = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert padded_batch(0) == 0
    for width in range(1, 513):
        assert padded_batch(width) == min(size for size in captured if size >= width)
    assert [padded_batch(width) for width in (513, 2048)] == [513, 2048]


class TestReplica:
    def test_takes_every_flag_to_the_pool_the_swap_space_and_the_cost(self):
        given = settings(
            model="llama-3.1-70b",
            gpu="h100-80gb",
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            quantization="fp8",
            kv_cache_dtype="fp8",
            enforce_eager=False,
            cost="roofline",
        )
        deployment = Deployment(2, "fp8", "fp8", cuda_graphs=True, vllm_minor=33)
        replica, spec = build(given), model("llama-3.1-70b")
        assert replica.num_blocks == paper_num_blocks(spec, gpu("h100-80gb"), 2, 16, deployment)
        assert replica.memory.host_blocks == host_blocks(spec, 2, deployment=deployment)
        assert isinstance(replica.cost, RooflineCost) and replica.cost.deployment == deployment

    def test_takes_the_checkpoints_format_by_default(self):
        flags = {"model": "deepseek-v3", "gpu": "h200", "tensor_parallel_size": 8}
        assert build(settings(**flags)).cost.deployment.quantization == "fp8"
        assert build(settings(**flags, quantization="awq")).num_blocks > build(settings(**flags)).num_blocks

    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            (
                {"pipeline_parallel_size": 41},
                "pipeline_parallel_size = 41: must be from 1 to the 40 layers",
            ),
            (
                {"model": "falcon-7b", "tensor_parallel_size": 4},
                "tensor_parallel_size = 4: must divide the 71 heads of falcon-7b",
            ),
            (
                {"cost": "paper", "quantization": "awq"},
                "cost = 'paper': is measured with 16-bit weights and KV, on one GPU, without CUDA graphs; use fitted, the default, for others",
            ),
            ({"kv_cache_dtype": "fp6"}, None),
            ({"quantization": "nf4"}, None),
        ],
    )
    def test_refuses_what_cannot_be(self, flags, text):
        with pytest.raises(SettingError) as error:
            build(settings(**flags))
        assert text is None or str(error.value) == text

    def test_has_the_arena_that_is_named(self):
        for name, kind in (("first-fit", FirstFitArena), ("best-fit", BestFitArena)):
            assert type(build(settings(policy="orca-max", arena=name)).memory.arena) is kind
