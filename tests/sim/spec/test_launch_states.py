"""The KV cache of models with fixed-size states, as ``vllm serve`` sizes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.sim.spec import CacheSettings, cache_layers, form_kv_cache, gpu, model, model_names
from fragmeter.sim.spec.launch import Launch, activation_bytes, capacity, fits, longest_model_len, users
from fragmeter.sim.types.errors import SettingError

PRESETS = [name for name in model_names() if model(name).mixer]
EIGHT = Launch(
    model=model("nemotron-h-8b"),
    gpu=gpu("h100-80gb"),
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    tensor_parallel=2,
)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_blocks_are_those_that_vllm_forms_in_the_memory_that_is_left(name, caching):
    # 397 billion parameters do not fit on two, and 549 on eight H200; Kimi K3 needs 32 GPUs in 16 bits.
    ranks = 32 if name == "kimi-k3" else 8 if model(name).num_params > 250e9 else 2
    card = "b300" if model(name).num_params > 500e9 else "h200"
    launch = replace(EIGHT, model=model(name), gpu=gpu(card), enable_prefix_caching=caching, tensor_parallel=ranks)
    found = capacity(launch)
    settings = CacheSettings(max_model_len=8192, max_num_batched_tokens=8192, enable_prefix_caching=caching)
    formed = form_kv_cache(cache_layers(model(name), "fp16", ranks), settings)
    assert found.num_blocks == formed.num_blocks(found.stage.kv_cache_bytes)
    assert found.stage.block_bytes == formed.bytes_per_block
    assert launch.block_tokens == formed.block_size
    assert launch.sequence_blocks(8192) == formed.sequence_blocks(8192)
    assert found.num_tokens == found.num_blocks * 8192 // formed.sequence_blocks(8192)


def test_a_sequence_and_the_null_block_must_fit():
    needed, block = EIGHT.sequence_blocks(8192), capacity(EIGHT).stage.block_bytes
    # 8,192 tokens in the one group of attention; two states in each of the groups of states.
    attention, states = 4, 24
    assert needed == -(-8192 // EIGHT.block_tokens) + 2 * states // attention
    exact = replace(EIGHT, kv_cache_memory_bytes=(needed + 1) * block)
    short = replace(EIGHT, kv_cache_memory_bytes=(needed + 1) * block - 1)
    assert fits(exact) and not fits(short)
    assert users(exact, needed + 1, 8192) == 1
    longest = longest_model_len(short)
    assert longest == (needed - 2 * states // attention - 1) * EIGHT.block_tokens
    assert fits(replace(short, max_model_len=longest)) and not fits(replace(short, max_model_len=longest + 1))


def test_the_projections_of_a_state_are_wider_than_an_mlp():
    tokens, hidden, inner, groups, state, heads = 8192, 4096, 8192 // 2, 8 // 2, 128, 128 // 2
    outputs = 2 * inner + 2 * groups * state + heads + inner
    mlp = 2 * 21_504 // 2
    assert activation_bytes(EIGHT, range(52), last=False) == 2 * tokens * (5 * hidden + max(outputs, mlp))
    narrow = replace(EIGHT, model=replace(EIGHT.model, intermediate_size=128))
    assert activation_bytes(narrow, range(52), last=False) == 2 * tokens * (5 * hidden + outputs)


def test_ranks_must_divide_the_states():
    with pytest.raises(SettingError, match="must divide the 8 groups of the state"):
        capacity(replace(EIGHT, tensor_parallel=16))
