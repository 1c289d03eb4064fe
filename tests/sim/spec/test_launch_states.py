"""The KV cache of models with fixed-size states, as ``vllm serve`` sizes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.sim.spec import CacheSettings, cache_layers, form_kv_cache, gpu, model, model_names
from fragmeter.sim.spec.releases import release
from fragmeter.sim.spec.startup.activations import phases
from fragmeter.sim.spec.startup.capacity import capacity, fits, longest_model_len, users
from fragmeter.sim.spec.startup.launch import Launch
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
    exports = launch.model.mixer.export_tokens(launch.gpu.major, 33)
    formed = form_kv_cache(cache_layers(model(name), "fp16", ranks, export_tokens=exports), settings)
    assert found.num_blocks == formed.num_blocks(found.stage.kv_cache_bytes)
    assert found.stage.block_bytes == formed.bytes_per_block
    assert launch.block_tokens == formed.block_size
    assert launch.sequence_blocks(8192) == formed.sequence_blocks(8192)
    assert found.num_tokens == found.num_blocks * 8192 // formed.sequence_blocks(8192)


def test_a_sequence_and_the_null_block_must_fit():
    needed, block = EIGHT.sequence_blocks(8192), capacity(EIGHT).stage.block_bytes
    # 8,192 tokens in the one group of attention; three states in each of the groups of states.
    attention, states = 4, 24
    assert needed == -(-8192 // EIGHT.block_tokens) + 3 * states // attention
    exact = replace(EIGHT, kv_cache_memory_bytes=(needed + 1) * block)
    short = replace(EIGHT, kv_cache_memory_bytes=(needed + 1) * block - 1)
    assert fits(exact) and not fits(short)
    assert users(exact, needed + 1, 8192) == 1
    longest = longest_model_len(short)
    assert longest == (needed - 3 * states // attention - 1) * EIGHT.block_tokens
    assert fits(replace(short, max_model_len=longest)) and not fits(replace(short, max_model_len=longest + 1))


@pytest.mark.parametrize(
    ("name", "card", "version", "states"),
    [
        # Mamba-2 exports a state on every GPU since 0.32.
        ("nemotron-h-8b", "a100-80gb", (0, 32), 3),
        ("nemotron-h-8b", "a100-80gb", (0, 31), 2),
        # Gated delta nets do since 0.33, with a kernel of Hopper and Blackwell.
        ("qwen3-next-80b-a3b", "h200", (0, 33), 3),
        ("qwen3-next-80b-a3b", "h200", (0, 32), 2),
        ("qwen3-next-80b-a3b", "a100-80gb", (0, 33), 2),
        # Of Kimi's models, only the decay of K3 has the bound that FlashKDA needs.
        ("kimi-k3", "b300", (0, 29), 3),
        ("kimi-k3", "b300", (0, 28), 2),
        ("kimi-linear-48b-a3b", "b300", (0, 33), 2),
        ("jamba-1.5-mini", "h200", (0, 33), 2),
    ],
)
def test_kernels_that_export_states_reserve_a_third(name, card, version, states):
    launch = replace(EIGHT, model=model(name), gpu=gpu(card), release=release(version), tensor_parallel=1)
    groups = launch.layout.config.groups
    full, kept = (sum((group.kind == "state") is is_state for group in groups) for is_state in (False, True))
    assert launch.sequence_blocks(8192) == full * -(-8192 // launch.block_tokens) + states * kept
    without = replace(launch, enable_prefix_caching=False)
    assert without.sequence_blocks(8192) == full * -(-8192 // without.block_tokens) + kept


def test_blocks_grow_to_multiples_of_the_tokens_at_which_flashinfer_exports_states():
    launch = replace(EIGHT, model=model("qwen3-next-80b-a3b"), gpu=gpu("h200"))
    # A state is as large as 536 tokens: 544 are the next multiple of 16, and 576 that of 64.
    assert launch.block_tokens == 576
    assert replace(launch, release=release((0, 32))).block_tokens == 544
    assert replace(launch, enable_prefix_caching=False).block_tokens == 544


def test_the_projections_of_a_state_are_wider_than_an_mlp():
    tokens, hidden, inner, groups, state, heads = 8192, 4096, 8192 // 2, 8 // 2, 128, 128 // 2
    # Gate, channels of the convolution and step sizes; the output, and output and gate once more for its norm.
    outputs = 2 * inner + 2 * groups * state + heads + 3 * inner
    mlp = 2 * 21_504 // 2
    assert phases(EIGHT, range(52), last=False).forward == tokens * (15 * hidden // 2 + 2 * max(outputs, mlp))
    narrow = replace(EIGHT, model=replace(EIGHT.model, intermediate_size=128))
    assert phases(narrow, range(52), last=False).forward == tokens * (15 * hidden // 2 + 2 * outputs)


def test_ranks_must_divide_the_states():
    with pytest.raises(SettingError, match="must divide the 8 groups of the state"):
        capacity(replace(EIGHT, tensor_parallel=16))
