"""Layers with a state of fixed size: bytes by hand, parameters by the checkpoints, and what is refused.

Configurations are those that huggingface.co publishes in the repository that a preset's ``_name_or_path`` names.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.sim.spec import GatedDelta, KimiDelta, Mamba, Mamba2, Span, model, paper_num_blocks, stage_bytes
from fragmeter.sim.spec.gpu import gpu
from fragmeter.sim.spec.kv_cache import CacheSettings, form_kv_cache
from fragmeter.sim.spec.kv_layers import attention_layers, cache_layers
from fragmeter.sim.spec.matrix import QUANTIZATIONS, format_of
from fragmeter.sim.spec.weights import layer_matrices, num_params
from fragmeter.sim.types.errors import SettingError

PRESETS = (
    "qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b",
    "nemotron-h-8b",
    "nemotron-3-nano-30b-a3b",
    "granite-4.0-h-small",
    "jamba-1.5-mini",
    "kimi-linear-48b-a3b",
)
#: (preset, state layers, (convolution's tokens * channels, matrices) of a layer in elements, bytes of a matrix's element)
STATES = [
    # 16 heads of Q and of K, 32 of V, each of 128; a matrix of 128 x 128 for each of V.
    ("qwen3-next-80b-a3b", 36, 3 * (2 * 16 + 32) * 128, 32 * 128 * 128, 2),
    # The same; its file asks for fp32.
    ("qwen3.5-35b-a3b", 30, 3 * (2 * 16 + 32) * 128, 32 * 128 * 128, 4),
    # 128 heads of 64, B and C of 8 groups of 128; vLLM takes fp32 for Nemotron-H.
    ("nemotron-h-8b", 24, 3 * (128 * 64 + 2 * 8 * 128), 128 * 64 * 128, 4),
    ("nemotron-3-nano-30b-a3b", 23, 3 * (64 * 64 + 2 * 8 * 128), 64 * 64 * 128, 4),
    ("granite-4.0-h-small", 36, 3 * (128 * 64 + 2 * 128), 128 * 64 * 128, 2),
    # 8,192 channels with 16 elements each.
    ("jamba-1.5-mini", 28, 3 * 8192, 8192 * 16, 2),
    # 32 heads of 128 for each of Q, K and V; vLLM takes fp32 for Kimi delta attention.
    ("kimi-linear-48b-a3b", 20, 3 * (3 * 32 * 128), 32 * 128 * 128, 4),
]


@pytest.mark.parametrize(("name", "layers", "conv", "matrices", "bytes_each"), STATES)
def test_bytes_of_a_state_by_hand(name, layers, conv, matrices, bytes_each):
    spec = model(name)
    assert len(spec.state_layers) == layers
    assert spec.mixer.state_bytes(1, "bf16") == conv * 2 + matrices * bytes_each
    assert spec.state_bytes("bf16") == layers * (conv * 2 + matrices * bytes_each)


def test_bytes_of_a_state_on_ranks():
    """Qwen3-Next on 4 ranks: 4 + 4 + 8 heads of 128, 8 matrices of 128 x 128. Nemotron-H-8B on 8, Kimi on 4."""
    qwen, nemotron, kimi = (model(name) for name in ("qwen3-next-80b-a3b", "nemotron-h-8b", "kimi-linear-48b-a3b"))
    assert qwen.mixer.state_bytes(4) == 2 * 3 * 2048 + 2 * 8 * 128 * 128 == 274_432
    assert nemotron.mixer.state_bytes(8) == 2 * 3 * (1024 + 256) + 4 * 16 * 64 * 128 == 531_968
    assert kimi.mixer.state_bytes(4) == 2 * 3 * 3072 + 4 * 8 * 128 * 128 == 542_720
    assert qwen.state_bytes("bf16", 4) == 36 * 274_432
    # Stages of 24 layers, 18 of each with a state; of 52 layers, the first half of Nemotron's has 12 of 24.
    assert qwen.state_bytes("bf16", 4, 2) == 18 * 274_432
    assert nemotron.state_bytes("bf16", 8, 2) == 12 * 531_968


def test_one_group_is_copied_to_every_rank():
    """Granite on 4 ranks: 2,048 channels, and B and C of 128 whole."""
    spec = model("granite-4.0-h-small")
    assert spec.mixer.state_shapes(4) == ((3, 2048 + 256), (32, 64, 128))
    assert spec.mixer.state_bytes(4) == 2 * 3 * 2304 + 2 * 32 * 64 * 128


def test_number_formats_of_a_state_are_vllms():
    """The convolution follows the model, the matrices follow it where no rule of the model's says otherwise."""
    granite, nemotron, kimi = (model(name).mixer for name in PRESETS[4:5] + PRESETS[2:3] + PRESETS[6:])
    assert granite.state_dtypes("bf16") == ("bf16", "bf16")
    assert granite.state_dtypes("bf16", conv_dtype="fp32") == ("fp32", "fp32")
    assert granite.state_dtypes("bf16", state_dtype="fp32") == ("bf16", "fp32")
    assert nemotron.state_dtypes("bf16") == ("bf16", "fp32")
    assert nemotron.state_dtypes("bf16", state_dtype="fp16") == ("bf16", "fp16")
    assert kimi.state_dtypes("fp16") == ("fp16", "fp32")
    assert granite.state_bytes(1, "bf16", state_dtype="fp32") - granite.state_bytes(1, "bf16") == 2 * 128 * 64 * 128


@pytest.mark.parametrize(
    ("name", "ranks", "what"),
    [
        ("qwen3-next-80b-a3b", 32, "16 key heads"),
        ("nemotron-h-8b", 16, "8 groups"),
        ("nemotron-h-8b", 3, "128 heads"),
        ("granite-4.0-h-small", 5, "128 heads"),
        ("jamba-1.5-mini", 3, "8192 channels"),
        ("kimi-linear-48b-a3b", 64, "32 heads of Kimi delta attention"),
    ],
)
def test_ranks_that_cannot_divide_a_state_are_refused(name, ranks, what):
    with pytest.raises(SettingError) as error:
        model(name).state_bytes("bf16", ranks)
    assert str(error.value) == f"tensor_parallel = {ranks}: must divide the {what} of the state of {name}"


def test_a_token_counts_in_attention_layers_only():
    """Bytes of a token by hand, 2 * KV heads * head size * 2 a layer; Kimi's latent vectors are 576 wide."""
    for name, layers, each in (
        ("qwen3-next-80b-a3b", 12, 2 * 2 * 256 * 2),
        ("nemotron-h-8b", 4, 2 * 8 * 128 * 2),
        ("jamba-1.5-mini", 4, 2 * 8 * 128 * 2),
        ("kimi-linear-48b-a3b", 7, 576 * 2),
    ):
        spec = model(name)
        assert spec.slot_bytes() == layers * each
        assert spec.kv_bytes(1000) == 1000 * layers * each
        # One of the stages may have one attention layer more.
        assert spec.slot_bytes("fp16", 1, 2) == -(-layers // 2) * each


def test_groups_are_of_layers_that_keep_something():
    """Nemotron-H keeps nothing in its MLPs; the group of states keeps no token."""
    spec = model("nemotron-h-8b")
    states, attention = spec.kv_groups()
    assert (states.span, states.num_layers) == (Span("state"), 24)
    assert (attention.span, attention.layers) == (Span(), (7, 18, 29, 40))
    assert spec.group_slot_bytes(states) == 0
    assert spec.group_slot_bytes(attention) == spec.slot_bytes()
    assert [Span(kind).held_tokens(10) for kind in ("state", "none", "full")] == [0, 0, 10]
    assert (spec.num_mixers, spec.num_mlps) == (28, 24)
    assert spec.mlp_width(0) == 0 and spec.mlp_width(1) == 2 * 21_504
    qwen = model("qwen3-next-80b-a3b")
    assert (qwen.num_mixers, qwen.num_mlps) == (48, 48)
    assert qwen.attention_layers == tuple(range(3, 48, 4))


def test_states_and_attention_share_blocks_as_vllm_forms_them():
    """Qwen3-Next: a page of 544 tokens, 2,048 bytes each, is the least of whole blocks of 16 that holds a state."""
    layers = cache_layers(model("qwen3-next-80b-a3b"), "bf16", dtype="bf16")
    assert [layer.kind for layer in layers] == ["state", "state", "state", "full"] * 12
    assert layers[0].state_bytes == 1_097_728
    formed = form_kv_cache(layers, CacheSettings(max_model_len=262_144, max_num_batched_tokens=8192))
    assert formed.block_size == -(-1_097_728 // (16 * 2048)) * 16 == 544
    assert [(group.kind, len(group.layers)) for group in formed.groups] == [("state", 12)] * 3 + [("full", 12)]
    # An MLP of Nemotron-H keeps nothing; latent vectors of Kimi are of 8 bits beside states of 16 and 32.
    assert [layer.kind for layer in cache_layers(model("nemotron-h-8b"))][:6] == ["state"] * 4 + ["full", "state"]
    kimi = cache_layers(model("kimi-linear-48b-a3b"), "fp8", 4, "bf16")
    assert [layer.page_bytes(1) for layer in kimi[2:4]] == [542_720, 576]


#: Parameters of the checkpoints on huggingface.co, the multi-token predictor aside; and of the GGUF conversions of Qwen3.5's text part
#: and of Nemotron 3 Nano. Active ones as the model cards round them.
PUBLISHED = {
    "qwen3-next-80b-a3b": (81_324_862_720, None),
    "qwen3.5-35b-a3b": (34_660_610_688, None),
    "nemotron-3-nano-30b-a3b": (31_577_940_288, 3.5),
    "granite-4.0-h-small": (32_207_337_984, 9),
}


@pytest.mark.parametrize(("name", "params", "active_billions"), [(name, *rest) for name, rest in PUBLISHED.items()])
def test_parameters_are_the_published_ones(name, params, active_billions):
    spec = model(name)
    predictor = qwen3_next_predictor() if name == "qwen3-next-80b-a3b" else 0
    encoder = 0 if spec.encoder is None else spec.encoder.params()
    assert spec.num_params - encoder == params - predictor
    assert spec.weight_bytes("bf16") == 2 * spec.num_params
    if active_billions:
        assert num_params(spec, used=True) / 1e9 == pytest.approx(active_billions, abs=0.5)


def qwen3_next_predictor() -> int:
    """Tensors of the layer that predicts a second token, as the checkpoint names them under ``mtp.``."""
    attention = 2048 * (2 * 16 + 2 * 2) * 256 + 16 * 256 * 2048 + 2 * 256
    experts = (512 + 1) * 3 * 2048 * 512 + (512 + 1) * 2048
    # fc, norms of its two inputs, of its output, and the layer's two.
    return 2 * 2048 * 2048 + attention + experts + 5 * 2048


@pytest.mark.parametrize(
    ("name", "params", "billions"),
    [
        # Rounded in the tables of the cards; exact by transformers' own classes (tests/real_vllm).
        ("nemotron-h-8b", 8_100_852_736, 8.1),
        ("jamba-1.5-mini", 51_570_323_328, 51.6),
        ("kimi-linear-48b-a3b", 49_122_681_728, 49.1),
        ("zamba2-7b", 7_356_749_648, 7.36),
    ],
)
def test_parameters_are_near_the_rounded_ones(name, params, billions):
    assert model(name).num_params == params
    assert params / 1e9 == pytest.approx(billions, rel=5e-3)


def test_a_layer_of_qwen3_next_by_hand():
    """Q, K, V and the output's gate, two gates of the state, 4 tokens of convolution, decays, a norm of a head."""
    spec = model("qwen3-next-80b-a3b")
    state, attention = (layer_matrices(spec, layer) for layer in (0, 3))
    projections = 2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4096 * 2048
    assert sum(matrix.params for matrix in state[:3]) == projections + 4 * 8192
    assert spec.mixer.vector_params(2048) == 32 + 32 + 128
    # 16 query heads with a gate each, 2 of K and V, of 256.
    assert sum(matrix.params for matrix in attention[:3]) == 2048 * (2 * 16 + 2 * 2) * 256 + 4096 * 2048
    router, *experts = attention[3:]
    assert router.params == 2048 * (512 + 1)
    assert sum(matrix.params for matrix in experts) == (512 + 1) * 3 * 2048 * 512


class TestSharedBlocks:
    """Zamba2 2.7B: 54 layers of Mamba-2, and 9 calls of 2 blocks of 32 heads of 160 and an MLP of 10,240."""

    #: Q, K, V and output of doubled inputs, MLP, norms.
    BLOCK = 3 * 5120 * 5120 + 5120 * 2560 + 3 * 2560 * 10_240 + 5120 + 2560
    #: A projection, and the two matrices of the MLP's adapter.
    CALL = 2560 * 2560 + 128 * (2560 + 2 * 10_240)
    STATE = 2560 * (2 * 5120 + 2 * 64 + 80) + 5120 * 2560 + (4 + 1) * (5120 + 128) + 3 * 80 + 5120 + 2560

    def test_weights_by_hand(self):
        spec = model("zamba2-2.7b")
        embedding = 32_000 * 2560 + 2560
        assert spec.num_params == 54 * self.STATE + 2 * self.BLOCK + 9 * self.CALL + embedding == 2_662_214_560
        assert stage_bytes(spec) == [2 * spec.num_params]

    def test_each_call_has_its_own_kv_cache(self):
        """A state of 686,848 bytes in a page of 48 tokens; vLLM registers the caches of attention first."""
        layers = cache_layers(model("zamba2-2.7b"), "bf16", dtype="bf16")
        assert [layer.kind for layer in layers] == ["full"] * 9 + ["state"] * 54
        formed = form_kv_cache(layers, CacheSettings(max_model_len=4096, max_num_batched_tokens=2048))
        assert [(group.kind, len(group.layers)) for group in formed.groups] == [("full", 9)] + [("state", 9)] * 6
        page = formed.groups[1].spec
        assert (page.unpadded_page_size_bytes, page.page_size_bytes) == (686_848, 48 * 2 * 32 * 160 * 2)

    def test_adapters_of_attention(self, config):
        """A call of Zamba2 1.2B has adapters of Q, K and V too, of doubled inputs."""
        changes = ZAMBA | {"layers_block_type": ["hybrid"] * 4}
        plain, adapted = (model(config(**changes, use_shared_attention_adapter=flag)) for flag in (False, True))
        assert adapted.num_params - plain.num_params == 4 * 3 * 128 * (512 + 512)

    def test_stages_are_refused(self):
        with pytest.raises(
            SettingError, match="^pipeline_parallel = 2: must be 1 for zamba2-2.7b, which shares weights"
        ):
            stage_bytes(model("zamba2-2.7b"), 1, 2)


class TestKimiK3:
    """69 layers of Kimi delta attention with a gate in one matrix, 24 of gated latent attention, experts on a latent vector and attention
    residuals in blocks of 12 layers; sizes by ``vllm/models/kimi_k3``."""

    INNER = 96 * 128

    def test_parameters_by_hand(self):
        """2.8 trillion, as the model card rounds them."""
        state = 7168 * (4 * self.INNER + 128 + 96) + 128 * self.INNER + self.INNER * 7168
        state += 4 * 3 * self.INNER + 96 + self.INNER + 128
        full = 7168 * (1536 + 576 + self.INNER) + 1536 * 96 * 192 + 512 * 96 * 256 + self.INNER * 7168 + 1536 + 512
        experts = 896 * 3 * 3584 * 3072 + 2 * 7168 * 3584 + 3584 + 3 * 7168 * 6144 + 7168 * 896 + 896
        # Norms before both parts of a layer; for the residuals as many again, and as many projections to one weight.
        layers = 69 * state + 24 * full + 92 * experts + 3 * 7168 * 33_792 + 93 * 6 * 7168
        spec = model("kimi-k3")
        assert spec.num_params - spec.encoder.params() == layers + 2 * 163_840 * 7168 + 3 * 7168
        assert spec.num_params / 1e12 == pytest.approx(2.8, abs=0.05)

    def test_encoder_by_hand(self):
        """27 layers of 12 heads of 128 on 1,024, patches of 14 x 14, and a projector of 4 patches."""
        layer = 4 * 1024 * 1536 + 2 * 1024 * 4096 + 2 * 1024
        projector = 4096 * 4096 + 4096 * 7168 + 7168
        whole = 3 * 14 * 14 * 1024 + 64 * 64 * 1024 + 1024
        assert model("kimi-k3").encoder.params() == 27 * layer + projector + whole

    def test_only_experts_have_four_bits(self):
        """vLLM runs the checkpoint as mxfp4, in which linear layers keep 16 bits: 17 bits for 32 weights and their exponent."""
        spec = model("kimi-k3")
        experts = 92 * 896 * 3 * 3584 * 3072
        assert spec.quantization == "mxfp4"
        assert stage_bytes(spec, quantization="mxfp4")[0] == 2 * (spec.num_params - experts) + experts * 17 // 32

    def test_blocks(self):
        """On 8 ranks a state has 12 matrices of 128 x 128 in fp32 and 3 inputs of 3 x 1,536 channels; 768 latent vectors hold it."""
        formed = form_kv_cache(
            cache_layers(model("kimi-k3"), "bf16", 8, "bf16"),
            CacheSettings(max_model_len=8192, max_num_batched_tokens=8192),
        )
        assert [(group.kind, len(group.layers)) for group in formed.groups] == [("state", 23)] * 3 + [("mla", 24)]
        page = formed.groups[0].spec
        assert page.unpadded_page_size_bytes == 4 * 12 * 128 * 128 + 2 * 3 * 3 * 1536 == 814_080
        assert (page.page_size_bytes, formed.block_size) == (768 * 1152, 768)

    def test_another_encoder_is_refused(self, config):
        vision = {"vt_hidden_size": 64, "mm_projector_type": "patchmergerv2", "attn_bias": False, "linear_bias": True}
        with pytest.raises(SettingError, match="^linear_bias = True: is not understood in tiny"):
            model(config(**KIMI, vision_config=vision))


def test_ranks_divide_what_vllm_divides():
    """Nemotron-H-8B repeats its norms only, Granite B and C of its one group and the routers besides."""
    nemotron, granite = model("nemotron-h-8b"), model("granite-4.0-h-small")
    repeated = 53 * 4096
    assert 8 * nemotron.weight_bytes("bf16", 8) == 2 * (nemotron.num_params + 7 * repeated)
    group = 2 * 128 * (4096 + 4 + 1)
    repeated = 36 * group + 40 * 72 * 4096 + (2 * 40 + 1) * 4096
    assert 4 * granite.weight_bytes("bf16", 4) == 2 * (granite.num_params + 3 * repeated)


@pytest.mark.slow
@given(st.sampled_from(PRESETS), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_stages_hold_the_whole_model(name, ranks, pipeline):
    spec = model(name)
    whole, parts = stage_bytes(spec, ranks)[0], stage_bytes(spec, ranks, pipeline)
    tied = spec.tied_embeddings and pipeline > 1
    assert sum(parts) == whole + tied * 2 * spec.head_params(ranks)
    assert whole == spec.weight_bytes("bf16", ranks)


def test_convolutions_are_never_quantised():
    spec = model("jamba-1.5-mini")
    convolution = layer_matrices(spec, 0)[4]
    assert (convolution.part, convolution.params) == ("convolution", 4 * 8192)
    assert {format_of(convolution, name) for name in QUANTIZATIONS} == {None}


TINY = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
BAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16}
KIMI = {
    "model_type": "kimi_linear",
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 64},
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
ZAMBA = {
    "model_type": "zamba2",
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "num_mem_blocks": 2,
    "n_mamba_heads": 8,
    "num_key_value_heads": None,
}


@pytest.fixture
def config(write_config):
    """Writes a ``config.json`` with changed keys; returns its path."""
    return lambda **changes: write_config(TINY | changes)


@pytest.mark.parametrize(
    ("changes", "states", "mixer"),
    [
        (
            {"model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
            (0, 1, 2),
            GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_kernel=4),
        ),
        (
            {"model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_num_value_heads": 16},
            (0, 2),
            GatedDelta(key_heads=16, value_heads=16, key_dim=128, value_dim=128, conv_kernel=4),
        ),
        (
            {"model_type": "granitemoehybrid", "num_local_experts": 0, **BAMBA, "layer_types": ["mamba"] * 3 + ["attention"]},
            (0, 1, 2),
            Mamba2(heads=8, head_dim=64, groups=1, state_size=16, conv_kernel=4),
        ),
        (
            {"model_type": "bamba", "attn_layer_indices": [1], **BAMBA, "mamba_d_head": 64, "mamba_chunk_size": 128},
            (0, 2, 3),
            Mamba2(heads=8, head_dim=64, groups=1, state_size=16, conv_kernel=4, chunk=128),
        ),
        (
            {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1},
            (0, 1, 3),
            Mamba(inner=512, state_size=16, dt_rank=16, conv_kernel=4),
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*M-", "mamba_n_groups": 2, "attention_head_dim": 64},
            (0, 2),
            Mamba2(heads=128, head_dim=64, groups=2, state_size=128, conv_kernel=4, chunk=128, state_dtype="fp32"),
        ),
        (
            {"model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp"], "num_hidden_layers": None, "mamba_ssm_cache_dtype": "auto"},
            (0,),
            Mamba2(heads=128, head_dim=64, groups=8, state_size=128, conv_kernel=4, chunk=128),
        ),
        (KIMI, (0, 1, 2), KimiDelta(heads=4, head_dim=64, conv_kernel=4)),
        (
            {"model_type": "mamba2", "num_heads": 8, "head_dim": 64, "n_groups": 1, "max_position_embeddings": None},
            (0, 1, 2, 3),
            Mamba2(heads=8, head_dim=64, groups=1, state_size=128, conv_kernel=4),
        ),
    ],
)  # fmt: skip
def test_families(config, changes, states, mixer):
    spec = model(config(**changes))
    assert spec.state_layers == states
    assert spec.mixer == mixer


def test_a_model_of_states_alone_keeps_no_token(config):
    """Mamba-2 of 2.7B: 64 layers of 80 heads; ranks divide them, though there are no heads of attention."""
    shape = {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "n_groups": 1, "vocab_size": 50_288}
    spec = model(config(model_type="mamba2", head_dim=64, tie_word_embeddings=True, **shape))
    layer = 2560 * (2 * 5120 + 2 * 128 + 80) + 5120 * 2560 + (4 + 1) * (5120 + 256) + 3 * 80 + 5120 + 2560
    assert spec.num_params == 64 * layer + 50_288 * 2560 + 2560 == 2_702_599_680
    assert spec.slot_bytes("bf16", 4) == spec.kv_bytes(10_000, "bf16", 4) == 0
    assert spec.state_bytes("bf16", 4) == 64 * 2 * (3 * (1280 + 256) + 20 * 64 * 128)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"model_type": "falcon_h1", "mamba_d_state": 16},
            "model_type = 'falcon_h1': has attention and Mamba side by side in every layer, which is not understood in tiny; take another model",
        ),
        (
            ZAMBA | {"layers_block_type": ["mamba"] * 3 + ["attention"]},
            "layers_block_type = ['mamba', 'mamba', 'mamba', 'attention']: must say mamba or hybrid for each of the 4 layers of "
            "tiny",
        ),
        (
            ZAMBA | {"layers_block_type": [{}] * 4},
            "layers_block_type = [{}, {}, {}, {}]: must say mamba or hybrid for each of the 4 layers of tiny",
        ),
        (ZAMBA | {"num_mem_blocks": 3}, "num_mem_blocks = 3: must be at most the 2 hybrid layers of tiny"),
        (ZAMBA | {"num_key_value_heads": 2}, "num_key_value_heads = 2: is not understood in tiny; Zamba2 has 8"),
        (
            {"model_type": "llama", "mamba_d_state": 16},
            "mamba_d_state = 16: a state-space layer of tiny keeps a state that is not a KV cache; "
            "give a model with K and V in all layers",
        ),
        (
            {"model_type": "qwen3_next", "layer_types": ["mamba"] * 4},
            "layer_types = 'mamba': is not understood in tiny; one of full_attention, linear_attention",
        ),
        (
            {"model_type": "qwen3_5_text", "linear_num_value_heads": 24},
            "linear_num_value_heads = 24: must be a multiple of the 16 key heads of tiny",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*X-"},
            "hybrid_override_pattern = 'X': is not understood in tiny; one of M, *, -, E",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-"},
            "hybrid_override_pattern = 'M*-': must name the kind of each of the 4 layers of tiny",
        ),
        (
            {"model_type": "nemotron_h"},
            "hybrid_override_pattern = None: must name the kind of each of the 4 layers of tiny",
        ),
        (
            {"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2, "moe_latent_size": 64},
            "moe_latent_size = 64: a mixture of experts on a latent vector is not understood in tiny with model_type "
            "'qwen3_next'; give a model of a family that has it",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M*M-", "mamba_ssm_cache_dtype": "fp8"},
            "mamba_ssm_cache_dtype = 'fp8': is not understood in tiny; one of auto, float32, float16, bfloat16",
        ),
        (
            {"model_type": "bamba", "attn_layer_indices": [4], **BAMBA},
            "attn_layer_indices = 4: must be one of the 4 layers of tiny",
        ),
        (
            {"model_type": "bamba", **BAMBA, "mamba_d_head": 32},
            "mamba_d_head = 32: must be mamba_expand * hidden_size / mamba_n_heads in tiny, 512 / 8",
        ),
        (
            KIMI | {"linear_attn_config": KIMI["linear_attn_config"] | {"kda_layers": [0, 1, 2]}},
            "kda_layers and full_attn_layers must name each of the 4 layers of tiny, from 1, once",
        ),
        (KIMI | {"attn_res_block_size": -1}, "attn_res_block_size = -1: must be a whole number of at least 0 in tiny"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_key(config, changes, text):
    with pytest.raises(SettingError) as error:
        model(config(**changes))
    assert str(error.value).endswith(text)


@pytest.mark.parametrize("name", PRESETS)
def test_pools_that_do_not_hold_states_refuse_them(name):
    with pytest.raises(SettingError, match=f"model = '{name}': has layers with a fixed-size state"):
        paper_num_blocks(model(name), gpu("h200"), 4)
    with pytest.raises(SettingError, match=f"model = '{name}': has layers with a fixed-size state"):
        attention_layers(model(name))
