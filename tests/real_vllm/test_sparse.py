"""The KV cache of sparse attention beside vLLM's own layers and groups: the key of an indexer, and blocks with latent vectors or
with K and V."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.models import deepseek_v2
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SparseCacheRole

from fragmeter.sim.spec import CacheSettings, ModelSpec, cache_layers, form_kv_cache, model

from . import server
from .server import Setup
from .shapes import Layer

_BLOCK, _MEMORY = 64, 1 << 36
# What ``MLAAttention.get_kv_cache_spec`` passes on, by fragmeter's name of the format.
_LATENT = {
    "bf16": {"dtype": torch.bfloat16},
    "fp8": {"dtype": torch.uint8},
    "fp8_ds_mla": {"dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656},
}


def _key(spec: ModelSpec, config: object) -> KVCacheSpec:
    """The spec of the keys of vLLM's ``Indexer``, built without its weights."""
    indexer, latent = spec.indexer, spec.latent
    assert indexer and latent
    sizes = {"index_topk": indexer.top_k, "index_n_heads": indexer.heads, "index_head_dim": indexer.head_dim}
    read = SimpleNamespace(**sizes, qk_rope_head_dim=latent.rope_dim)
    nothing = dict.fromkeys(
        ("ReplicatedLinear", "MergedColumnParallelLinear", "LayerNorm", "SparseAttnIndexer"),
        lambda *args, **keywords: torch.nn.Identity(),
    )
    buffer = "vllm.v1.attention.backends.mla.indexer.get_max_prefill_buffer_size"
    with (
        set_current_vllm_config(config),
        mock.patch.multiple(deepseek_v2, **nothing),
        mock.patch(buffer, lambda config: 1),
    ):
        built = deepseek_v2.Indexer(
            config, read, spec.hidden_size, latent.q_rank, None, config.cache_config, None, "indexer"
        )
    return built.k_cache.get_kv_cache_spec(config)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5", "glm-5.2"])
def test_blocks_are_those_of_vllm(name: str):
    spec = model(name)
    setup = Setup((Layer("mla", head_size=576),), _BLOCK, 8192, 8, 8192, True, True)
    config = server.config_of(setup)
    config.cache_config.kv_cache_layout = "LBNHC"
    key = _key(spec, config)
    assert spec.indexer and key.page_size_bytes == _BLOCK * spec.indexer.slot_bytes
    for dtype, fields in _LATENT.items():
        specs: dict[str, KVCacheSpec] = {}
        for layer in range(spec.num_layers):
            leads = layer in spec.indexer.layers
            specs[f"{layer}.attn"] = MLAAttentionSpec(
                block_size=_BLOCK, num_kv_heads=1, head_size=576, is_index_group_leader=leads, **fields
            )
            if leads:
                specs[f"{layer}.indexer"] = key
        groups = get_global_kv_cache_groups(config, [specs])
        (theirs,) = get_kv_cache_configs(config, [specs], [_MEMORY], groups)
        settings = CacheSettings(max_model_len=8192, max_num_batched_tokens=8192, block_size=_BLOCK)
        ours = form_kv_cache(cache_layers(spec, dtype, 8), settings)
        assert (len(groups), len(groups[0].layer_names)) == (1, len(ours.groups[0].layers))
        assert theirs.num_blocks == ours.num_blocks(_MEMORY)
        assert ours.bytes_per_block == _BLOCK * spec.slot_bytes(dtype) == groups[0].kv_cache_spec.page_size_bytes


@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize(("dtype", "theirs"), [("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)])
def test_blocks_of_minimax_m3_are_those_of_vllm(ranks: int, dtype: str, theirs: torch.dtype):
    """Of what ``get_kv_cache_spec`` of ``MiniMaxM3IndexerCache`` and ``MiniMaxM3SparseAttention`` return; the classes need torchvision."""
    spec, block = model("minimax-m3"), 128
    assert spec.indexer and spec.indexer.kernel_block_size == block
    config = server.config_of(Setup((Layer("full", head_size=128),), block, 8192, 8, 8192, True, True))
    config.cache_config.kv_cache_layout = "LBNHC"
    key = MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=spec.indexer.head_dim,
        dtype=torch.bfloat16,
        cache_role=SparseCacheRole.INDEXER,
    )
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(spec.num_layers):
        if layer in spec.indexer.layers:
            specs[f"{layer}.index_cache"] = key
        heads = spec.kv_heads_per_rank(ranks)
        specs[f"{layer}.attn"] = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=128, dtype=theirs)
    groups = get_global_kv_cache_groups(config, [specs])
    (formed,) = get_kv_cache_configs(config, [specs], [_MEMORY], groups)
    settings = CacheSettings(max_model_len=8192, max_num_batched_tokens=8192, block_size=block)
    ours = form_kv_cache(cache_layers(spec, dtype, ranks), settings)
    assert (len(groups), len(groups[0].layer_names)) == (1, len(ours.groups[0].layers)) == (1, 117)
    assert formed.num_blocks == ours.num_blocks(_MEMORY)
    assert ours.bytes_per_block == block * spec.slot_bytes(dtype, ranks) == groups[0].kv_cache_spec.page_size_bytes
