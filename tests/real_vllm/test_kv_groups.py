"""KV groups of the installed vLLM, beside ours for every preset with windows, and of models with states."""

from __future__ import annotations

import pytest

from fragmeter.sim.spec import (
    CacheSettings,
    ModelSpec,
    cache_layers,
    form_kv_cache,
    hybrid_layout,
    model,
    model_names,
    page_bytes,
)

from .kv_groups import Question, groups_of
from .shapes import Layer

#: A Mamba-2 layer of Bamba-9B and a gated delta net of Qwen3-Next, on one rank: (convolution, recurrent state).
MAMBA = Layer("state", state_shapes=((3, 8448), (128, 64, 128)), state_dtypes=("bfloat16", "bfloat16"))
DELTA = Layer("state", state_shapes=((3, 8192), (32, 128, 128)), state_dtypes=("bfloat16", "bfloat16"))
FULL, LATENT = Layer(kv_heads=8, head_size=128), Layer("mla", head_size=576)


def _layers(spec: ModelSpec) -> tuple[Layer, ...]:
    """What the layers of a preset keep."""
    if spec.latent:
        return (Layer("mla", head_size=spec.latent.kv_rank + spec.latent.rope_dim),) * spec.num_layers
    spans = spec.spans or [None] * spec.num_layers
    shape = {"kv_heads": spec.num_kv_heads, "head_size": spec.head_dim}
    return tuple(Layer(*(span and (span.kind, span.tokens) or ()), **shape) for span in spans)


#: Presets with layers of one shape; ``test_kv_formation`` and ``test_sparse`` have the others.
ALIKE = [
    name
    for name in model_names()
    if not (model(name).mixer or model(name).indexer or model(name).window_heads or model(name).mlp_sizes)
]
#: Of families without a preset.
ALIKE += [
    "LGAI-EXAONE/EXAONE-4.0-32B", "allenai/Olmo-3.1-32B-Instruct", "google/gemma-3-4b-it", "google/gemma-2-9b",
    "HuggingFaceTB/SmolLM3-3B", "deepseek-ai/DeepSeek-OCR", "zai-org/glm-4-9b", "tencent/Hunyuan-A13B-Instruct",
]  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_the_groups_of_presets_are_those_of_vllm(name):
    spec, tokens = model(name), 8192
    layers = _layers(spec)
    question = Question(
        layers, max_model_len=min(tokens, spec.max_model_len), disable_hybrid=name.startswith("llama-4")
    )
    answer = groups_of(question)
    ours = hybrid_layout(spec, question.max_model_len)
    if ours is None:
        assert [sorted(group["layers"]) for group in answer["groups"]] == [list(range(spec.num_layers))]
        assert answer["block_bytes"] == 16 * spec.slot_bytes()
        return
    # vLLM's groups come in the order of their kinds' first layers.
    assert sorted(tuple(group["layers"]) for group in answer["groups"]) == sorted(group.layers for group in ours.groups)
    assert answer["block_bytes"] == page_bytes(spec, ours, 1, 16)
    assert answer["num_blocks"] == question.available_bytes // answer["block_bytes"]


@pytest.mark.parametrize(
    "layers, sizes, pages",
    [
        # 2,138,624 bytes of state; a token of attention has 4,096: 528 of them, the next multiple of 16.
        ((MAMBA, MAMBA, MAMBA, FULL) * 2, {528}, {528 * 4096}),
        # The state is of 1,097,728 bytes: 268 tokens, 272 of them.
        ((DELTA, DELTA, DELTA, FULL) * 2, {272}, {272 * 4096}),
        # A latent vector of 1,152 bytes a token, in blocks of multiples of 128 tokens.
        ((DELTA, DELTA, DELTA, LATENT) * 2, {1024}, {1024 * 1152}),
    ],
)
def test_attention_blocks_grow_to_the_size_of_a_state(layers, sizes, pages):
    answer = groups_of(Question(layers))
    assert {group["block_size"] for group in answer["groups"]} == sizes
    assert {group["page_bytes"] for group in answer["groups"]} == pages
    assert [len(group["layers"]) for group in answer["groups"]] == [2, 2, 2, 2]
    assert answer["mamba_cache_mode"] == "align"


def test_without_a_prefix_cache_a_state_has_one_block():
    answer = groups_of(Question((MAMBA, FULL), prefix_caching=False))
    assert [group["block_size"] for group in answer["groups"]] == [8192, 528]
    assert answer["mamba_cache_mode"] == "none"


def test_what_vllm_refuses_is_an_answer():
    assert "To serve at least one request" in groups_of(Question((FULL,), available_bytes=1 << 20))["error"]


def test_questions_come_as_json():
    value = {"layers": [{"kind": "state", "state_shapes": [[3, 8]], "state_dtypes": ["float32"]}], "block_size": 32}
    state = Layer("state", state_shapes=((3, 8),), state_dtypes=("float32",))
    assert Question.from_json(value) == Question((state,), block_size=32)


def test_short_convolutions_are_groups_of_their_own():
    """LFM2: 10 layers keep the last two inputs of 2,048 channels, 6 are attention."""
    spec = model("LiquidAI/LFM2-1.2B")
    state = Layer("state", state_shapes=((2, 2048),), state_dtypes=("bfloat16",))
    heads = Layer(kv_heads=8, head_size=64)
    layers = tuple(heads if spec.span(layer).keeps_tokens else state for layer in range(spec.num_layers))
    answer = groups_of(Question(layers, max_model_len=8192))
    settings = CacheSettings(max_model_len=8192, max_num_batched_tokens=8192, block_size=16)
    ours = form_kv_cache(cache_layers(spec, "bf16", 1, "bf16"), settings)
    theirs = [(tuple(sorted(group["layers"])), group["block_size"], group["page_bytes"]) for group in answer["groups"]]
    assert theirs == [
        (group.layers, group.specs[0].block_size, group.specs[0].page_size_bytes) for group in ours.groups
    ]
    assert answer["block_bytes"] == ours.bytes_per_block
