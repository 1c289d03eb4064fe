"""Groups, pages and blocks of DeepSeek V4 beside those of the installed vLLM, from the caches that its own layers declare."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs

from fragmeter.sim.spec import CacheSettings, cache_layers, form_kv_cache, model
from fragmeter.sim.spec.families import read_config
from fragmeter.sim.spec.gpu import GIB
from fragmeter.sim.types.errors import SettingError

from . import server
from .layers import spec_of
from .server import Setup
from .shapes import compressed_layers

FLASH, PRO = "deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"


def _real(ratios, settings: CacheSettings, available: int, ranks: int = 1):
    """(blocks, bytes of a block, for each group its layers, tokens of a block and bytes of its pages), and the longest sequence's blocks."""
    setup = Setup(
        layers=compressed_layers(ratios),
        block_size=256,
        max_model_len=settings.max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefix_caching=True,
        asynchronous=settings.max_concurrent_batches == 2,
    )
    config = server.config_of(setup)
    config.cache_config.kv_cache_layout = "BLHNC"
    config.parallel_config.tensor_parallel_size = ranks
    specs = {str(number): spec_of(layer, config) for number, layer in enumerate(setup.layers)}
    groups = get_global_kv_cache_groups(config, [specs] * ranks)
    try:
        found = get_kv_cache_configs(config, [specs] * ranks, [available] * ranks, groups)
    except ValueError as error:
        return str(error).partition("estimated maximum model length is ")[2].partition(".")[0]
    assert len({one.num_blocks for one in found}) == 1
    return (
        found[0].num_blocks,
        found[0].kv_cache_tensors[0].size // found[0].num_blocks,
        [
            (
                tuple(map(int, group.layer_names)),
                group.kv_cache_spec.block_size,
                [each.page_size_bytes for each in group.kv_cache_spec.kv_cache_specs.values()],
            )
            for group in groups
        ],
    )


def _ours(shape, settings: CacheSettings, available: int, ranks: int = 1):
    config = form_kv_cache(cache_layers(shape, "fp8_ds_mla", ranks), settings)
    try:
        blocks = config.num_blocks(available)
    except SettingError as error:
        return str(error).partition("at most ")[2].partition(" tokens")[0]
    groups = [
        (group.layers, group.block_size, [spec.page_size_bytes for spec in group.specs]) for group in config.groups
    ]
    return blocks, config.bytes_per_block, groups


def _settings(draw: random.Random, most: int = 1 << 20) -> CacheSettings:
    return CacheSettings(
        max_model_len=draw.choice([4096, 30_000, 131_072, most]),
        max_num_batched_tokens=draw.choice([2048, 8192, 16_384]),
        block_size=256,
        max_concurrent_batches=draw.choice([1, 2]),
    )


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("drafts", [False, True], ids=["", "mtp"])
@pytest.mark.parametrize("name", [FLASH, PRO])
def test_the_blocks_of_deepseek_v4_are_those_of_vllm(name: str, drafts: bool, ranks: int, record_property):
    shape, compared = model(name), 0
    if drafts:
        own = replace(shape.compressed, ratios=(*shape.compressed.ratios, 0))
        shape = replace(shape, num_layers=shape.num_layers + 1, compressed=own)
    draw = random.Random(f"{name}/{ranks}")
    for _ in range(8):
        settings, available = _settings(draw), draw.choice([3, 5.44, 12, 26.09, 86]) * GIB
        theirs = _real(list(shape.compressed.ratios), settings, int(available), ranks)
        assert theirs == _ours(shape, settings, int(available), ranks), (settings, available)
        compared += 1
    record_property(f"compared/{name} on {ranks}", [compared, 0, 0])


def test_models_with_any_ratios_have_the_blocks_of_vllm(record_property):
    differing, numbers = [], 200
    for seed in range(numbers):
        draw = random.Random(seed)
        ratios = [4, *draw.choices(draw.choice([[0, 4, 128], [4, 128], [0, 4], [4]]), k=draw.randint(0, 24))]
        draw.shuffle(ratios)
        config = {
            "model_type": "deepseek_v4", "num_hidden_layers": len(ratios), "compress_ratios": ratios, "hidden_size": 256,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
            "index_n_heads": 4, "index_topk": 64, "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 8, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 64, "vocab_size": 1000, "max_position_embeddings": 1 << 20,
            "sliding_window": 128,
        }  # fmt: skip
        shape, settings = read_config(config, "drawn"), _settings(draw)
        available = int(draw.choice([1, 3, 20]) * GIB)
        if _real(ratios, settings, available) != _ours(shape, settings, available):
            differing.append((seed, ratios, settings))
    record_property("compared/ratios", [numbers, 0, len(differing)])
    assert not differing, differing[:3]
