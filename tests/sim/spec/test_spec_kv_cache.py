"""KV groups, blocks and pages of real models by hand, with the figures of their ``config.json``; and what is true of all.

``tests/real_vllm`` compares the same module with vLLM itself.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.sim.spec import (
    AttentionLayer,
    CacheSettings,
    KvCacheConfig,
    Span,
    StateLayer,
    attention_layers,
    form_kv_cache,
    model,
    model_names,
    stages,
)
from fragmeter.sim.spec.attention import FULL
from fragmeter.sim.spec.kv_layers import Layer
from fragmeter.sim.types.errors import SettingError


def server(**changes) -> CacheSettings:
    """A server with the defaults of ``vllm serve`` on a large GPU, two steps of 8,192 tokens in flight."""
    return CacheSettings(**{"max_model_len": 131_072, "max_num_batched_tokens": 8192, **changes})


def of_preset(name: str, ranks: int = 1, **changes) -> KvCacheConfig:
    return form_kv_cache(attention_layers(model(name), "bf16", ranks), server(**changes))


def groups(config: KvCacheConfig) -> list[tuple[str, int, int]]:
    """Kind, layers and block size of each group."""
    return [(group.kind, len(group.layers), group.block_size) for group in config.groups]


# Models with attention alone.


def test_gpt_oss_120b():
    """18 layers with a window of 128 tokens, 18 full ones. 2 * 8 heads * 64 * 2 bytes = 2,048 a token, 32,768 a page."""
    config = of_preset("gpt-oss-120b")
    assert groups(config) == [("sliding", 18, 16), ("full", 18, 16)]
    assert config.groups[0].layers == tuple(range(0, 36, 2))
    assert config.bytes_per_block == 18 * 32_768
    assert config.padding_bytes(config.groups[0]) == 0
    # 131,072 / 16 blocks, and (127 + 2 * 8,192) / 16 = 1,031.9 of the window, and one more.
    assert config.sequence_blocks(131_072) == 8192 + 1033
    # One KV head on each of eight ranks.
    assert of_preset("gpt-oss-120b", 8).bytes_per_block == 18 * 32_768 // 8


def test_gemma_3_27b():
    """52 layers with a window of 1,024 tokens, 10 full ones; 2 * 16 heads * 128 * 2 bytes = 8,192 a token."""
    config = of_preset("gemma-3-27b")
    sliding = [("sliding", 9, 16)] * 4 + [("sliding", 8, 16)] * 2
    assert groups(config) == [*sliding, ("full", 10, 16)]
    assert config.bytes_per_block == 10 * 16 * 8192
    # Groups of 9 and 8 layers leave one and two pages of a block.
    assert [config.padding_bytes(group) // 131_072 for group in config.groups] == [1, 1, 1, 1, 2, 2, 0]
    # Six groups of ceil((1,023 + 16,384) / 16) + 1.
    assert config.sequence_blocks(131_072) == 8192 + 6 * 1089
    assert config.scheduler_block_size == config.hash_block_size == 16


def test_mistral_of_windows_alone():
    """One group; a sequence of 32,768 tokens takes ceil((4,095 + 16,384) / 16) + 1 blocks."""
    config = of_preset("mistral-7b-v0.1", max_model_len=32_768)
    assert groups(config) == [("sliding", 32, 16)]
    assert config.bytes_per_block == 32 * 16 * 4096
    assert config.sequence_blocks(32_768) == 1281
    # There is nothing to disable.
    assert of_preset("mistral-7b-v0.1", disable_hybrid_kv_cache_manager=True).groups == config.groups


def test_llama_4_scout():
    """36 layers with chunks of 8,192 tokens, 12 full ones; 4,096 bytes a token. vLLM disables the manager by default."""
    config = of_preset("llama-4-scout")
    assert groups(config) == [("chunked", 12, 16)] * 3 + [("full", 12, 16)]
    assert config.bytes_per_block == 12 * 65_536
    # ceil((8,192 + 16,384) / 16) in three groups.
    assert config.sequence_blocks(131_072) == 8192 + 3 * 1536
    whole = of_preset("llama-4-scout", disable_hybrid_kv_cache_manager=True)
    assert groups(whole) == [("full", 48, 16)]
    assert whole.bytes_per_block == 48 * 65_536
    assert whole.sequence_blocks(131_072) == 8192


def test_deepseek_v3():
    """61 layers of one latent vector of 512 + 64 elements, 1,152 bytes, on every rank."""
    for ranks in (1, 8):
        config = of_preset("deepseek-v3", ranks)
        assert groups(config) == [("mla", 61, 16)]
        assert config.bytes_per_block == 61 * 16 * 1152


def test_full_layers_of_different_heads_are_one_group():
    """Pages of 65,536 and 32,768 bytes side by side."""
    config = form_kv_cache([heads(8), heads(4)] * 3, server())
    assert groups(config) == [("full", 6, 16)]
    assert config.bytes_per_block == 3 * (65_536 + 32_768)


# Models with states. Sizes as vLLM has them: the last inputs of a convolution, and a recurrent state.


def qwen3_next() -> list[Layer]:
    """Qwen3-Next-80B-A3B: three gated delta nets, then full attention, twelve times.

    Convolution over 2 * 16 * 128 + 32 * 128 = 8,192 channels, three inputs: 49,152 bytes. 32 heads of 128 * 128:
    1,048,576. Together 1,097,728. Attention: 2 * 2 heads * 256 * 2 bytes = 2,048 a token.
    """
    delta = StateLayer(shapes=((3, 8192), (32, 128, 128)), dtypes=("bf16", "bf16"))
    full = AttentionLayer(num_kv_heads=2, head_size=256, dtype="bf16")
    return [delta, delta, delta, full] * 12


def test_qwen3_next():
    """Blocks of 16 tokens have 32,768 bytes; a state has 33.5 of these, so a block has 34 * 16 tokens."""
    config = form_kv_cache(qwen3_next(), server(max_model_len=262_144))
    assert groups(config) == [("state", 12, 544)] * 3 + [("full", 12, 544)]
    assert [group.layers[:3] for group in config.groups] == [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]
    assert (config.block_size, config.mamba_block_size, config.mamba_cache_mode) == (544, 544, "align")
    assert config.bytes_per_block == 12 * 544 * 2048 == 13_369_344
    # 1,114,112 - 1,097,728 bytes of each state's page.
    assert [config.padding_bytes(group) for group in config.groups] == [12 * 16_384] * 3 + [0]
    # ceil(262,144 / 544) blocks of attention, and two states in each of three groups.
    assert config.sequence_blocks(262_144) == 482 + 3 * 2
    assert config.scheduler_block_size == config.hash_block_size == 544


def test_without_prefix_caching_a_sequence_has_one_block_of_states():
    """A block of states is as long as the longest sequence, so the least common multiple is long: 2^18 and 2^5 * 17."""
    config = form_kv_cache(qwen3_next(), server(max_model_len=262_144, enable_prefix_caching=False))
    assert groups(config) == [("state", 12, 262_144)] * 3 + [("full", 12, 544)]
    assert config.mamba_cache_mode == "none"
    assert config.sequence_blocks(262_144) == 482 + 3
    assert config.scheduler_block_size == config.hash_block_size == 17 * 262_144


def test_the_block_size_asked_for_is_raised_in_whole_steps():
    """Of 64 tokens: 131,072 bytes, 8.4 of them in a state, so 9 * 64 tokens. Of 1,024: large enough as it is."""
    for requested, block_size in ((64, 576), (1024, 1024)):
        config = form_kv_cache(qwen3_next(), server(block_size=requested))
        assert {group.block_size for group in config.groups} == {block_size}


def test_nemotron_h_8b():
    """24 Mamba 2 layers, 4 of attention (MLP layers keep nothing); 2 * 8 heads * 128 * 2 bytes = 4,096 a token.

    Convolution over 8,192 + 2 * 8 * 128 = 10,240 channels: 61,440 bytes. 128 heads of 64 * 128 in fp32: 4,194,304.
    Together 64.9 times 16 * 4,096 bytes, so 65 * 16 = 1,040 tokens.
    """
    mamba = StateLayer(shapes=((3, 10_240), (128, 64, 128)), dtypes=("bf16", "fp32"))
    layers = [mamba] * 4 + ([heads(8)] + [mamba] * 5) * 4
    config = form_kv_cache(layers, server(max_model_len=8192))
    assert groups(config) == [("state", 4, 1040)] * 6 + [("full", 4, 1040)]
    assert config.bytes_per_block == 4 * 1040 * 4096
    assert config.padding_bytes(config.groups[0]) == 4 * (4_259_840 - 4_255_744)
    # ceil(8,192 / 1,040) and six times two.
    assert config.sequence_blocks(8192) == 8 + 12


@pytest.mark.parametrize(
    ("channels", "state_heads", "kv_heads", "padding"),
    [
        # 8,192 + 2 * 128 channels: 50,688 + 2,097,152 bytes; 32.8 times 65,536.
        (8448, 128, 8, 14_848),
        # On four ranks every rank has the one group of B and C: (8,192 + 4 * 2 * 128) / 4 channels.
        (2304, 32, 2, 2_560),
    ],
)
def test_granite_4_h_small(channels, state_heads, kv_heads, padding):
    """36 Mamba 2 layers and 4 of attention, on one and on four ranks."""
    mamba = StateLayer(shapes=((3, channels), (state_heads, 64, 128)), dtypes=("bf16", "bf16"))
    config = form_kv_cache(([mamba] * 9 + [heads(kv_heads)]) * 4, server())
    assert groups(config) == [("state", 4, 528)] * 9 + [("full", 4, 528)]
    assert config.bytes_per_block == 4 * 528 * 512 * kv_heads
    assert config.padding_bytes(config.groups[0]) == 4 * padding


def test_jamba():
    """28 Mamba 1 layers and 4 of attention, 4,096 bytes a token.

    8,192 channels: 49,152 bytes of convolution and 8,192 * 16 * 2 of state, 4.75 times 65,536: 80 tokens.
    """
    mamba = StateLayer(shapes=((3, 8192), (8192, 16)), dtypes=("bf16", "bf16"))
    config = form_kv_cache(([mamba] * 4 + [heads(8)] + [mamba] * 3) * 4, server())
    assert groups(config) == [("state", 4, 80)] * 7 + [("full", 4, 80)]
    assert config.bytes_per_block == 4 * 80 * 4096
    assert config.padding_bytes(config.groups[0]) == 4 * (327_680 - 311_296)


def test_kimi_linear_48b():
    """20 layers of KDA and 7 of MLA, 1,152 bytes a token, in steps of 128 tokens.

    Convolution over 3 * 32 * 128 channels: 73,728 bytes. 32 heads of 128 * 128 in fp32: 2,097,152. Together 14.7 times
    128 * 1,152 bytes, so 15 * 128 = 1,920 tokens.
    """
    kda = StateLayer(shapes=((3, 12_288), (32, 128, 128)), dtypes=("bf16", "fp32"))
    mla = AttentionLayer(num_kv_heads=1, head_size=576, dtype="bf16", latent=True)
    config = form_kv_cache([kda, kda, kda, mla] * 6 + [kda, kda, mla], server())
    assert groups(config) == [("state", 7, 1920)] * 2 + [("state", 6, 1920), ("mla", 7, 1920)]
    assert config.bytes_per_block == 7 * 1920 * 1152
    # 40,960 bytes at the end of every state's page, and one page that the third group does not have.
    assert [config.padding_bytes(group) for group in config.groups] == [286_720, 286_720, 2_457_600, 0]


def test_states_alone():
    """Without attention nothing is raised: pages of states are as large as the largest one."""
    small, large = (StateLayer(shapes=((1000 * times,),), dtypes=("fp32",)) for times in (1, 2))
    config = form_kv_cache([small, large, small], server())
    assert groups(config) == [("state", 1, 16)] * 3
    assert [group.layers for group in config.groups] == [(0,), (2,), (1,)]
    assert config.bytes_per_block == 8000
    assert [config.padding_bytes(group) for group in config.groups] == [4000, 4000, 0]


# Pages of attention that differ.


def heads(number: int, span: Span = FULL) -> AttentionLayer:
    """512 bytes a token and head."""
    return AttentionLayer(num_kv_heads=number, head_size=128, dtype="bf16", span=span)


WINDOW = Span("sliding", 512)


def test_a_smaller_page_gets_more_tokens():
    """Half the bytes a token: blocks of 32 tokens, a hash for every 16."""
    config = form_kv_cache([heads(8), heads(4, WINDOW)], server())
    assert groups(config) == [("full", 1, 16), ("sliding", 1, 32)]
    assert (config.bytes_per_block, config.scheduler_block_size, config.hash_block_size) == (65_536, 32, 16)


def test_a_page_that_does_not_divide_the_largest_is_padded():
    """Three heads beside eight: 24,576 of 65,536 bytes."""
    config = form_kv_cache([heads(8), heads(3, WINDOW)], server())
    assert groups(config) == [("full", 1, 16), ("sliding", 1, 16)]
    assert config.padding_bytes(config.groups[1]) == 65_536 - 24_576


def test_windows_beside_latent_vectors_that_cannot_be_padded_are_kept_whole():
    mla = AttentionLayer(num_kv_heads=1, head_size=576, dtype="bf16", latent=True)
    config = form_kv_cache([mla, heads(3, WINDOW)], server())
    assert groups(config) == [("full", 2, 16)]
    assert config.bytes_per_block == 16 * (1152 + 3 * 512)
    with pytest.raises(SettingError, match=r"^page_size_bytes = 18432: .* 65,536 bytes"):
        form_kv_cache([mla, heads(8, Span("chunked", 512))], server())


@pytest.mark.parametrize(
    ("full", "sliding", "sizes"),
    [(4, 5, [4, 5]), (4, 6, [4, 3, 3]), (10, 13, [10, 13]), (20, 30, [20, 15, 15]), (2, 7, [2, 2, 2, 2, 1])],
)
def test_the_rarest_kind_decides_below_one_and_a_half_times(full, sliding, sizes):
    config = form_kv_cache([heads(8)] * full + [heads(8, WINDOW)] * sliding, server())
    assert [len(group.layers) for group in config.groups] == sizes


# Blocks, and what is refused.


def test_blocks_of_the_pool_and_the_longest_sequence():
    """Llama 3.1 8B, 131,072 bytes a token: 8,192 blocks for 131,072 tokens, and the null block."""
    config, block = of_preset("llama-3.1-8b"), 2_097_152
    assert config.num_blocks(8193 * block) == config.num_blocks(8194 * block - 1) == 8193
    message = "^max_model_len = 131072: needs 16.00 GiB of KV cache and has 16.00 .*; at most 131056 tokens fit"
    with pytest.raises(SettingError, match=message):
        config.num_blocks(8193 * block - 1)
    with pytest.raises(SettingError, match="no sequence fits"):
        config.num_blocks(block)
    with pytest.raises(SettingError, match="no sequence fits"):
        config.num_blocks(0)


def test_a_number_of_blocks_that_is_given():
    config = of_preset("llama-3.1-8b", num_gpu_blocks_override=9000)
    assert config.num_blocks(0) == 9000
    with pytest.raises(SettingError, match="^max_model_len = 131072: .* at most 15984 tokens fit"):
        of_preset("llama-3.1-8b", num_gpu_blocks_override=1000).num_blocks(1 << 40)


def test_a_model_that_keeps_nothing_has_the_null_block():
    config = form_kv_cache([], server())
    assert (config.groups, config.bytes_per_block, config.num_blocks(0)) == ((), 0, 1)
    assert config.scheduler_block_size == 16


def test_stages_keep_the_groups_of_the_whole_model():
    """Gemma 3 in two stages of 31 layers: of each group at most five are in either."""
    config = of_preset("gemma-3-27b")
    for part in stages(62, 2):
        stage = config.on_stage(part)
        assert [group.block_size for group in stage.groups] == [16] * 7
        assert stage.bytes_per_block == 5 * 131_072
        assert stage.sequence_blocks(8192) == config.sequence_blocks(8192)
    assert [len(group.layers) for group in config.on_stage(range(1)).groups] == [1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "layers",
    [
        [StateLayer(shapes=((8,),), dtypes=("fp32",)), heads(8)],
        [heads(8, WINDOW), heads(8, Span("sliding", 64))],
        [heads(8), heads(8, WINDOW), heads(8, Span("sliding", 64))],
    ],
)
def test_what_cannot_be_one_group_without_the_hybrid_manager(layers):
    assert len(form_kv_cache(layers, server()).groups) == len(layers)
    with pytest.raises(SettingError, match="^disable_hybrid_kv_cache_manager = True: cannot make one group"):
        form_kv_cache(layers, server(disable_hybrid_kv_cache_manager=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: server(block_size=0), "block_size = 0: must be at least 1"),
        (lambda: server(max_concurrent_batches=0), "max_concurrent_batches = 0: must be at least 1"),
        (lambda: heads(0), "num_kv_heads = 0: must be at least 1"),
        (lambda: heads(8, Span("sliding", 0)), "span = 0: must be at least 1 token"),
        (lambda: AttentionLayer(num_kv_heads=1, head_size=64, dtype="fp7"), "dtype = 'fp7'"),
        (lambda: AttentionLayer(num_kv_heads=1, head_size=64, span=WINDOW, latent=True), "span = 'sliding'"),
        (lambda: StateLayer(shapes=((8,), (4,)), dtypes=("fp32",)), "dtypes = .* each of 2 tensors"),
        (lambda: StateLayer(shapes=((0,),), dtypes=("fp32",)), "shapes = "),
    ],
)
def test_settings_and_layers_that_cannot_be(make, message):
    with pytest.raises(SettingError, match=f"^{message}"):
        make()


# What is true of every model.

_dtypes = st.sampled_from(["fp16", "fp32", "fp8"])
_spans = st.sampled_from([FULL, FULL, WINDOW, Span("sliding", 64), Span("chunked", 256)])
_attention = st.builds(
    AttentionLayer,
    num_kv_heads=st.integers(1, 8),
    head_size=st.sampled_from([64, 80, 128]),
    span=_spans,
    head_size_v=st.sampled_from([None, 64]),
    dtype=_dtypes,
)
_states = st.builds(
    StateLayer, shapes=st.tuples(st.tuples(st.integers(1, 300), st.integers(1, 300))), dtypes=st.tuples(_dtypes)
)
_layers = st.lists(_attention | _states, min_size=1, max_size=4).flatmap(
    lambda kinds: st.lists(st.sampled_from(kinds), min_size=1, max_size=40)
)
_servers = st.builds(
    CacheSettings,
    max_model_len=st.integers(1, 50_000),
    max_num_batched_tokens=st.integers(1, 10_000),
    block_size=st.sampled_from([None, 8, 16, 24, 64]),
    enable_prefix_caching=st.booleans(),
    max_concurrent_batches=st.integers(1, 2),
)


@pytest.mark.slow
@given(_layers, _servers, st.integers(0, 1 << 20))
def test_every_layer_is_in_one_group_and_bytes_add_up(layers, settings, more):
    config = form_kv_cache(layers, settings)
    assert sorted(layer for group in config.groups for layer in group.layers) == list(range(len(layers)))
    for group in config.groups:
        assert list(group.layers) == sorted(group.layers)
        assert {spec.block_size for spec in group.specs} == {group.block_size}
        assert config.scheduler_block_size % group.block_size == 0
        assert group.block_size % config.hash_block_size == 0 or not settings.enable_prefix_caching
        assert [spec.layer for spec in group.specs] == [layers[layer] for layer in group.layers]
        assert all(spec.page_size_bytes >= spec.unpadded_page_size_bytes > 0 for spec in group.specs)
        assert group.unpadded_page_size_bytes <= group.page_size_bytes <= config.bytes_per_block
        assert config.padding_bytes(group) >= 0
    if len(config.groups) > 1:
        assert len({spec.page_size_bytes for group in config.groups for spec in group.specs}) == 1
    needed = config.sequence_bytes(settings.max_model_len) + config.bytes_per_block
    blocks = config.num_blocks(needed + more)
    assert blocks * config.bytes_per_block <= needed + more < (blocks + 1) * config.bytes_per_block
    with pytest.raises(SettingError):
        config.num_blocks(needed - 1)


@pytest.mark.slow
@given(_layers, _servers, st.integers(1, 5))
def test_stages_share_the_layers_of_every_group(layers, settings, number):
    config = form_kv_cache(layers, settings)
    parts = [config.on_stage(part) for part in stages(len(layers), min(number, len(layers)))]
    for place, group in enumerate(config.groups):
        mine = [part.groups[place] for part in parts]
        assert sum((one.layers for one in mine), ()) == group.layers
        assert sum(one.unpadded_page_size_bytes for one in mine) == group.unpadded_page_size_bytes
    assert all(part.bytes_per_block <= config.bytes_per_block for part in parts)


@pytest.mark.parametrize("name", [name for name in model_names() if model(name).mixer is None])
def test_blocks_of_presets_without_the_hybrid_manager_are_those_of_all_layers(name):
    config = form_kv_cache(attention_layers(model(name), "fp8"), server(disable_hybrid_kv_cache_manager=True))
    assert config.bytes_per_block == 16 * model(name).slot_bytes("fp8")
