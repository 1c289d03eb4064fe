"""Published figures of wasted KV cache memory beside what the simulator computes from the same settings.

``tests/data/published_waste.json`` has each figure with its source, its settings, what the source leaves open, and the limit of the error
with when it was stated. What holds for all figures of a source is there once.
Its kind is

    predicted    by rules of the simulator, from the settings of the source
    fitted       with an input that was chosen to give the value, or that the source measured
    arithmetic   a closed formula, or a quotient of the source's own numbers

Each function below computes the figures of one source, and uses the published value of a figure nowhere in that figure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from fragmeter.experiments.paper.rows import Row, value_row
from fragmeter.sim import settings, simulate
from fragmeter.sim.memory.accounting.kv_groups import STATE
from fragmeter.sim.metrics.summary import waste
from fragmeter.sim.spec import (
    AttentionLayer,
    CacheSettings,
    Deployment,
    KvCacheConfig,
    Span,
    StateLayer,
    cache_layers,
    form_kv_cache,
    gpu,
    model,
)
from fragmeter.sim.spec.attention import FP8_DS_MLA
from fragmeter.sim.spec.attention import FULL as EVERY_TOKEN
from fragmeter.sim.spec.gpu import GIB
from fragmeter.sim.spec.kv_layers import Layer
from fragmeter.sim.spec.startup.capacity import stage_memories
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.workload.workload import Workload
from paths import DATA

#: Values by name and metric.
Values = dict[tuple[str, str], float]


@cache
def _facts() -> Mapping[str, Any]:
    return json.loads((DATA / "published_waste.json").read_text("utf-8"))


def published() -> Sequence[Mapping[str, Any]]:
    """The published figures."""
    return _facts()["values"]


def rows() -> list[Row]:
    """A row for each published figure."""
    found = computed()
    keys = [(fact["name"], fact["metric"]) for fact in published()]
    return [
        value_row(*key, fact["published"], [found[key]], kind=fact["kind"])
        for key, fact in zip(keys, published(), strict=True)
    ]


def passes(fact: Mapping[str, Any], row: Row) -> bool:
    """Whether a figure is within its limit: points of a percentage, else a share of the published value."""
    error = row["error"] if row["metric"].endswith("_pct") else row["error"] / row["published"]
    return abs(error) <= fact["limit"] + 1e-9


def computed() -> Values:
    """Every figure as computed here."""
    return {**_one_page_for_all_layers(), **_fp8(), **_zamba2(), **_ascend(), **_usage(), **_giant_pages(), **_glm()}


def _one_page_for_all_layers() -> Values:
    """vllm#11382: each token has a page in every layer, also in those that do not keep it."""
    # Text is kept by self attention, images by cross attention.
    text, image, of_self, of_cross = 43, 4 * 1601, 32, 8
    kept = (text * of_self + image * of_cross) / ((text + image) * (of_self + of_cross))
    return {
        ("mllama", "wasted_pct"): 100 * (1 - kept),
        ("Gemma 2", "wasted_pct"): _wasted_by_windows([EVERY_TOKEN, Span("sliding", 4096)], 8192),
        ("Ministral 8B", "wasted_pct"): _wasted_by_windows([EVERY_TOKEN, *[Span("sliding", 32_768)] * 3], 131_072),
    }


def _wasted_by_windows(spans: Sequence[Span], tokens: int) -> float:
    return 100 * (1 - sum(span.held_tokens(tokens) for span in spans) / (len(spans) * tokens))


def _formed(attention: AttentionLayer, layers: int, state: StateLayer, states: int) -> KvCacheConfig:
    chosen = CacheSettings(max_model_len=32_768, max_num_batched_tokens=2048, enable_prefix_caching=False)
    return form_kv_cache([*[attention] * layers, *[state] * states], chosen)


def _fp8() -> Values:
    """vllm#55196: sequences that fit with an fp8 KV cache over those with bf16, in the same memory. Falcon-H1 1.5B has
    attention and Mamba 2 in each of its 24 layers; the state stays in bf16."""
    inner, heads, head_dim, state_dim = 3072, 48, 64, 256
    state = StateLayer(shapes=((3, inner + 2 * state_dim), (heads, head_dim, state_dim)), dtypes=("bf16", "bf16"))
    formed = {
        dtype: _formed(AttentionLayer(num_kv_heads=2, head_size=128, dtype=dtype), 24, state, 24)
        for dtype in ("bf16", "fp8")
    }
    return {
        (f"fp8 KV at {name}", "times_the_sequences"): formed["bf16"].sequence_bytes(tokens)
        / formed["fp8"].sequence_bytes(tokens)
        for name, tokens in (("32k", 32_768), ("short context", 512))
    }


def _zamba2() -> Values:
    """Pages of Zamba2 2.7B, and the blocks in the memory that the planner of the published run was given."""
    chosen = CacheSettings(max_model_len=4096, max_num_batched_tokens=2048, enable_prefix_caching=False)
    formed = form_kv_cache(cache_layers(model("zamba2-2.7b"), "bf16", dtype="bf16"), chosen)
    page = next(group for group in formed.groups if group.kind == STATE).spec
    return {
        ("Zamba2 2.7B", "useful_bytes_of_a_page"): page.unpadded_page_size_bytes,
        ("Zamba2 2.7B", "bytes_of_a_page"): page.page_size_bytes,
        ("Zamba2 2.7B", "groups"): len(formed.groups),
        ("Zamba2 2.7B", "blocks"): formed.num_blocks(2_915_421_184),
        ("Zamba2 2.7B", "blocks_for_0.1_of_the_card"): 0.1 * (12 << 30) / formed.bytes_per_block,
    }


def _ascend() -> Values:
    """vllm-ascend#6610: what its own numbers of tokens say."""
    return {("Qwen3-Next on Ascend", "wasted_pct"): 100 * (1 - 15_872 / 25_984)}


def _usage() -> Values:
    """vllm#57336: runs of the simulator; the bytes of a token do not matter for a pool of so many blocks."""
    short, long = _usage_of(17), _usage_of(400)
    return {
        ("opt-125m, 17-token prompts", "usage_by_blocks_pct"): short["by_blocks"],
        ("opt-125m, 17-token prompts", "usage_by_tokens_pct"): short["by_tokens"],
        ("opt-125m, 400-token prompts", "gap_of_the_two_pct"): long["by_blocks"] - long["by_tokens"],
    }


def _usage_of(prompt_tokens: int) -> dict[str, float]:
    """Usage over the middle of a stream of equal requests that all wait from the start."""
    requests, sequences, blocks = 4096, 256, 768
    work = Workload("stream", np.zeros(requests), np.full(requests, prompt_tokens), np.full(requests, 2))
    given = settings(
        policy="vllm-v1",
        gpu="h100-80gb",
        max_num_seqs=sequences,
        num_gpu_blocks_override=blocks + 1,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    return waste(simulate(given, work).window)["mean_over_iterations_pct"]["usage"]


#: Tokens that a sequence of vllm#54458 drafts; fitted.
_DRAFTS = 3
#: Bytes of 512 elements in 4 bits, with a scale of 8 bits for 16 of them.
_FOUR_BIT_LATENT = 512 // 2 + 512 // 16
_MAX_MODEL_LEN = 131_072


def _giant_pages() -> Values:
    """vllm#54458: a request holds a block of 7,808 tokens in each KV group, however short it is."""
    formed = giant_pages()
    _, most = blocks_of_a_short_request()
    name, drafting = "GLM-5.3-Flash, 12-token prompt", f"GLM-5.3-Flash, TP 2, {_DRAFTS} drafts"
    return {
        (drafting, "tokens_of_a_block"): formed.block_size,
        (drafting, "groups"): len(formed.groups),
        (name, "most_blocks"): most,
        (name, "most_token_equivalents"): 0.329 * 457_880,
    }


def giant_pages() -> KvCacheConfig:
    """The KV cache of vllm#54458, without the layers of its DFlash drafter."""
    return glm_cache(2, _FOUR_BIT_LATENT, drafts=_DRAFTS)


def blocks_of_a_short_request() -> tuple[int, int]:
    """Blocks of a sequence of vllm#54458 that is shorter than a block: while it decodes, and at the most, with the states before
    the current ones."""
    formed = giant_pages()
    most = sequence_blocks(formed, 12, _DRAFTS)
    return most - _state_groups(formed), most


def sequence_blocks(formed: KvCacheConfig, tokens: int, drafts: int) -> int:
    """Maximum of blocks of a sequence that drafts: in each group of states one more for each draft, as any may be the last
    that is accepted (``num_speculative_blocks`` of vLLM's ``MambaSpec``)."""
    return formed.sequence_blocks(tokens) + drafts * _state_groups(formed)


def _state_groups(formed: KvCacheConfig) -> int:
    return sum(group.kind == STATE for group in formed.groups)


def _glm() -> Values:
    """Blocks, groups and memory of GLM-5.3-Flash in logs of servers."""
    four, fp8 = glm_cache(4), glm_cache(4, FP8_DS_MLA)
    name = "GLM-5.3-Flash, TP 4"
    drafting = {drafts: glm_cache(4, drafts=drafts, mtp=True) for drafts in (2, 3, 5)}
    memory = stage_memories(glm_launch(max_num_seqs=256))[0]
    return {
        (name, "tokens_of_a_block"): four.block_size,
        (f"{name}, fp8", "tokens_of_a_block"): fp8.block_size,
        (name, "padding_of_a_state_pct"): _state_padding_pct(four),
        (f"{name}, fp8", "padding_of_a_state_pct"): _state_padding_pct(fp8),
        **{
            (f"{name}, {drafts} drafts", "padding_of_a_state_pct"): _state_padding_pct(formed)
            for drafts, formed in drafting.items()
        },
        # The memory of the first three is the log's own.
        (name, _POOL): thousand_tokens(four, 47.29, 0),
        (f"{name}, 3 drafts", _POOL): thousand_tokens(drafting[3], 45.07, 3),
        (f"{name}, 5 drafts", _POOL): thousand_tokens(drafting[5], 45.06, 5),
        (f"{name}, 3 drafts, 6 GiB", _POOL): thousand_tokens(drafting[3], 6.0, 3),
        (name, "GiB_of_weights_and_outside_torch"): (memory.weights.likely + memory.non_torch.likely) / GIB,
        (name, "GiB_of_activations"): memory.activations.likely / GIB,
        (name, "GiB_of_CUDA_graphs"): memory.cuda_graphs.likely / GIB,
        (name, "GiB_of_the_KV_cache"): memory.kv_cache_bytes / GIB,
        ("GLM-5.3-Flash, TP 8", "tokens_of_a_block"): glm_cache(8).block_size,
        ("GLM-5.3-Flash, TP 2, 7 drafts", "tokens_of_a_block"): glm_cache(2, FP8_DS_MLA, drafts=7).block_size,
        ("GLM-5.3-Flash", "groups"): len(four.groups),
        ("GLM-5.3-Flash", "most_states_of_a_group"): max(len(g.layers) for g in four.groups if g.kind == STATE),
    }


_POOL = "thousand_tokens_of_the_pool"


def thousand_tokens(formed: KvCacheConfig, gib: float, drafts: int) -> float:
    """The size of the pool, as vLLM logs it, with blocks that are not aligned to rows."""
    blocks = int(gib * GIB) // max(group.page_size_bytes for group in formed.groups)
    return blocks * _MAX_MODEL_LEN // sequence_blocks(formed, _MAX_MODEL_LEN, drafts) / 1000


def glm_launch(max_num_seqs: int) -> Launch:
    """The start of GLM-5.3-Flash on 4 H200."""
    shape = model("glm-5.3-flash")
    return Launch(
        model=shape,
        gpu=gpu("h200"),
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        tensor_parallel=4,
        deployment=Deployment(quantization=shape.quantization, kv_dtype="bf16", cuda_graphs=True),
    )


def glm_cache(ranks: int, latent: str | int = "bf16", drafts: int = 0, mtp: bool = False) -> KvCacheConfig:
    """The KV cache of GLM-5.3-Flash with prefix caching, before prefills exported states.

    Args:
        latent: Number format of a latent vector, or its bytes.
        drafts: Tokens that a sequence drafts: each is one more input that the convolutions keep.
        mtp: Whether the model's MTP layer drafts: one more layer of sparse latent attention.
    """
    shape = model("glm-5.3-flash")
    assert shape.latent and shape.indexer
    layers: list[Layer] = []
    for layer in cache_layers(shape, latent if isinstance(latent, str) else "fp8", ranks, dtype="bf16"):
        if isinstance(layer, StateLayer):
            (inputs, channels), recurrent = layer.shapes
            layer = replace(layer, shapes=((inputs + drafts, channels), recurrent))
        elif isinstance(layer, AttentionLayer) and layer.head_size == shape.latent.kv_rank and isinstance(latent, int):
            layer = replace(layer, head_size=latent)
        layers.append(layer)
    if mtp:
        # A latent vector, keys and a ring, as of any other such layer.
        layers += [layer for layer in layers if not isinstance(layer, StateLayer)][-3:]
    chosen = CacheSettings(
        max_model_len=_MAX_MODEL_LEN, max_num_batched_tokens=8192, block_size=shape.indexer.kernel_block_size
    )
    return form_kv_cache(layers, chosen)


def _state_padding_pct(formed: KvCacheConfig) -> float:
    state = next(group for group in formed.groups if group.kind == STATE).spec
    return 100 * (state.page_size_bytes / state.unpadded_page_size_bytes - 1)
