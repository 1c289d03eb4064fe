"""What sequences keep: bytes a token of real models by hand, and windows against a walk over all keys.

Configurations are those that huggingface.co publishes as ``config.json`` of the repository named beside
each, with the defaults of transformers' configuration classes for keys the file leaves out. Gated
repositories (Llama, Gemma) were read in public copies.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragmeter.sim.spec import Latent, Span, block_bytes, model, stages
from fragmeter.sim.spec.shape import ModelSpec
from fragmeter.sim.types.errors import SettingError

REFUSED = None
# (preset, repository, layers * elements of one token a layer on each rank * 2 bytes, for TP 1, 4, 16)
PER_TOKEN = [
    # 40 heads of 128, all with K and V; 16 does not divide 40.
    ("opt-13b", "facebook/opt-13b", 40 * 2 * 40 * 128 * 2, 40 * 2 * 10 * 128 * 2, REFUSED),
    # 32 heads of 128.
    ("llama-2-7b", "meta-llama/Llama-2-7b-hf", 524_288, 131_072, 32_768),
    # 8 KV heads: 8, 2, and 1 of them on two ranks each.
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 131_072, 32_768, 16_384),
    ("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 327_680, 81_920, 40_960),
    ("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1", 131_072, 32_768, 16_384),
    ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 131_072, 32_768, 16_384),
    # 71 heads, one KV head of 64: 32 * 2 * 64 * 2; neither 4 nor 16 divides 71.
    ("falcon-7b", "tiiuae/falcon-7b", 8_192, REFUSED, REFUSED),
    # 4 KV heads of 128 in 48 layers: one on each of 4 ranks, and on four ranks each of 16.
    ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 98_304, 24_576, 24_576),
    # 16 KV heads of 128 in 62 layers.
    ("gemma-3-27b", "google/gemma-3-27b-it", 507_904, 126_976, 31_744),
    # 8 KV heads of 64 in 36 layers.
    ("gpt-oss-120b", "openai/gpt-oss-120b", 73_728, 18_432, 9_216),
    # 8 KV heads of 128 in 48 layers, 40 query heads.
    ("llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E", 196_608, 49_152, REFUSED),
    # 61 * (512 + 64) * 2, on every rank.
    ("deepseek-v3", "deepseek-ai/DeepSeek-V3", 70_272, 70_272, 70_272),
]


@pytest.mark.parametrize(("name", "repository", "alone", "on_4", "on_16"), PER_TOKEN)
def test_bytes_per_token_of_real_models(name, repository, alone, on_4, on_16):
    spec = model(name)
    for ranks, expected in ((1, alone), (4, on_4), (16, on_16)):
        if expected is REFUSED:
            with pytest.raises(SettingError, match=f"tensor_parallel = {ranks}: must divide"):
                spec.slot_bytes("bf16", ranks)
            continue
        assert spec.slot_bytes("bf16", ranks) == expected
        assert spec.slot_bytes("fp8", ranks) == spec.slot_bytes("int8", ranks) == expected // 2
        assert spec.slot_bytes("int4", ranks) == expected // 4
        assert sum(spec.group_slot_bytes(group, "fp16", ranks) for group in spec.kv_groups()) == expected
        assert block_bytes(spec, ranks, 16, "int4") == 4 * expected


def test_groups_of_real_models():
    """Mistral: all slide. Gemma 3: 5 sliding to 1 full, and 2 sliding left over. gpt-oss: by turns."""
    groups = {
        name: [(group.span.kind, group.span.tokens, group.num_layers) for group in model(name).kv_groups()]
        for name in ("llama-2-7b", "mistral-7b-v0.1", "gemma-3-27b", "gpt-oss-120b", "llama-4-scout", "deepseek-v3")
    }
    assert groups == {
        "llama-2-7b": [("full", 0, 32)],
        "mistral-7b-v0.1": [("sliding", 4096, 32)],
        "gemma-3-27b": [("sliding", 1024, 52), ("full", 0, 10)],
        "gpt-oss-120b": [("sliding", 128, 18), ("full", 0, 18)],
        "llama-4-scout": [("chunked", 8192, 36), ("full", 0, 12)],
        "deepseek-v3": [("full", 0, 61)],
    }
    assert model("gemma-3-27b").kv_groups()[1].layers == (5, 11, 17, 23, 29, 35, 41, 47, 53, 59)
    assert model("llama-4-scout").kv_groups()[1].layers == tuple(range(3, 48, 4))


def test_a_window_stops_growing_and_a_chunk_starts_again():
    """By hand. A layer of Gemma 3 keeps 2 * 16 * 128 * 2 = 8,192 bytes of a token, one of Scout 4,096."""
    mistral, gemma, scout = model("mistral-7b-v0.1"), model("gemma-3-27b"), model("llama-4-scout")
    assert [mistral.kv_bytes(n) // 131_072 for n in (0, 1, 4095, 4096, 4097, 30_000)] == [0, 1, 4095, 4096, 4096, 4096]
    assert gemma.kv_bytes(1000) == 1000 * 62 * 8192
    assert gemma.kv_bytes(10_000) == (10_000 * 10 + 1024 * 52) * 8192 == 153_248 * 8192
    assert gemma.kv_bytes(10_000, "int4", 4) == gemma.kv_bytes(10_000) // 16
    assert scout.kv_bytes(8192) == 8192 * 48 * 4096
    assert scout.kv_bytes(8193) == (8193 * 12 + 1 * 36) * 4096
    assert scout.kv_bytes(20_000) == (20_000 * 12 + (20_000 - 16_384) * 36) * 4096


@pytest.mark.parametrize(
    ("changes", "sliding"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, [0, 1, 2, 3]),
        ({"model_type": "mistral", "sliding_window": None}, []),
        (
            {"model_type": "mixtral", "sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
            [0, 1, 2, 3],
        ),
        # Qwen slides from a layer on, and only where its configuration says so.
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 2}, []),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 2, "use_sliding_window": True}, [2, 3]),
        ({"model_type": "qwen3", "sliding_window": 64, "max_window_layers": 4, "use_sliding_window": True}, []),
        ({"model_type": "gemma2", "sliding_window": 64}, [0, 2]),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, [0, 2]),
        ({"model_type": "gemma3_text", "sliding_window": 64, "_sliding_window_pattern": 3}, [0, 1, 3]),
        (
            {"sliding_window": 64, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            [3],
        ),
    ],
)
def test_which_layers_slide(tmp_path, changes, sliding):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 700,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | changes))
    spec = model(path)
    found = [group.layers for group in spec.kv_groups() if group.span == Span("sliding", 64)]
    assert [layer for layers in found for layer in layers] == sliding
    assert (spec.spans == ()) == (not sliding)


def attended(kind: str, length: int, tokens: int) -> int:
    """Keys that the newest of ``tokens`` may look at, one by one, as the masks of attention are written."""
    newest = tokens - 1
    seen = {
        "full": lambda key: True,
        "sliding": lambda key: newest - key < length,
        "chunked": lambda key: key // max(length, 1) == newest // max(length, 1),
    }[kind]
    return sum(1 for key in range(tokens) if seen(key))


spans = st.one_of(st.just(Span()), st.builds(Span, st.sampled_from(["sliding", "chunked"]), st.integers(1, 40)))


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    st.lists(spans, min_size=1, max_size=9),
    st.integers(0, 130),
    st.sampled_from(["fp16", "bf16", "fp8", "int8", "int4"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 9),
    st.booleans(),
)
def test_kv_bytes_against_a_walk_over_layers_and_keys(layers, tokens, dtype, ranks, pipeline, is_latent):
    latent = Latent(kv_rank=24, rope_dim=8, nope_dim=16, v_dim=16) if is_latent else None
    spec = ModelSpec("m", len(layers), 64, 8, 2, 8, 100, 50, 512, True, spans=tuple(layers), latent=latent)
    pipeline = min(pipeline, len(layers))
    bits = {"fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}[dtype]
    # Two KV heads of 8: both, one, or one that other ranks have too. Latent vectors are not divided.
    elements = 24 + 8 if is_latent else 2 * {1: 2, 2: 1, 4: 1, 8: 1}[ranks] * 8
    stage_bytes = [
        sum(attended(layers[layer].kind, layers[layer].tokens, tokens) * elements * bits // 8 for layer in stage)
        for stage in stages(len(layers), pipeline)
    ]
    assert spec.kv_bytes(tokens, dtype, ranks, pipeline) == max(stage_bytes)
    longest = max(len(stage) for stage in stages(len(layers), pipeline))
    assert spec.slot_bytes(dtype, ranks, pipeline) == longest * elements * bits // 8
    assert sorted(layer for group in spec.kv_groups() for layer in group.layers) == [*range(len(layers))]


def test_pipeline_stages_are_vllms():
    """Those of vLLM's own ``tests/distributed/test_pipeline_partition.py``, and DeepSeek's 61 layers."""
    sizes = {
        (layers, parts): [len(stage) for stage in stages(layers, parts)]
        for layers, parts in ((32, 4), (22, 4), (5, 3), (4, 3), (3, 2), (61, 4), (7, 7), (10, 1))
    }
    assert sizes == {
        (32, 4): [8, 8, 8, 8],
        (22, 4): [5, 6, 6, 5],
        (5, 3): [2, 2, 1],
        (4, 3): [1, 2, 1],
        (3, 2): [2, 1],
        (61, 4): [15, 15, 16, 15],
        (7, 7): [1] * 7,
        (10, 1): [10],
    }


@given(st.integers(1, 100), st.integers(1, 100))
def test_pipeline_stages_are_even_and_in_order(layers, parts):
    if parts > layers:
        with pytest.raises(SettingError, match=f"pipeline_parallel = {parts}: must be from 1 to the {layers} layers"):
            stages(layers, parts)
        return
    found = stages(layers, parts)
    assert [layer for stage in found for layer in stage] == [*range(layers)]
    sizes = [len(stage) for stage in found]
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


def test_the_longest_stage_holds_most():
    spec = model("deepseek-v3")
    assert spec.slot_bytes("fp8", 8, 4) == 16 * 576
    assert spec.kv_bytes(1000, "fp16", 8, 4) == 1000 * 16 * 576 * 2
    # Gemma's full layers are 5, 11, ... 59: of 31 layers a stage the first five of ten, and so the second.
    assert model("gemma-3-27b").kv_bytes(50_000, "fp16", 1, 2) == (50_000 * 5 + 1024 * 26) * 8192
