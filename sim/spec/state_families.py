"""Families of models with layers that keep a state of fixed size: one function for each converts a ``config.json``.

Defaults are those of the family's configuration class in Hugging Face transformers, as a file leaves out defaults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..types.errors import SettingError
from .attention import FULL, STATE, Indexer
from .attention_families import deepseek, given, llama, read_experts
from .config import Config, count, num_layers, numbers, shape, state_spans
from .shape import Experts, ModelSpec
from .shared_blocks import SharedBlocks
from .states import GatedDelta, KimiDelta, Mamba, Mamba2, ShortConv


def qwen3_next(config: Config, name: str, experts: bool = True, **features: Any) -> ModelSpec:
    """Qwen3-Next: gated delta nets, and full attention in some layers."""
    layers = num_layers(config, name)
    every = count(config, name, "full_attention_interval", 4)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    mixer = GatedDelta(
        key_heads=count(config, name, "linear_num_key_heads", 16),
        value_heads=count(config, name, "linear_num_value_heads", 32),
        key_dim=count(config, name, "linear_key_head_dim", 128),
        value_dim=count(config, name, "linear_value_head_dim", 128),
        conv_kernel=count(config, name, "linear_conv_kernel_dim", 4),
        state_dtype=_state_dtype(config, name, "mamba_ssm_dtype"),
    )
    if mixer.value_heads % mixer.key_heads:
        remedy = f"must be a multiple of the {mixer.key_heads} key heads of {name}"
        raise SettingError("linear_num_value_heads", mixer.value_heads, remedy)
    return llama(
        config,
        name,
        head_dim=256,
        qk_norm=True,
        gated_attention=bool(config.get("attn_output_gate", True)),
        spans=state_spans(name, layers, "layer_types", kinds, "full_attention linear_attention"),
        mixer=mixer,
        experts=_qwen3_next_experts(config, name) if experts else None,
        **features,
    )


def _qwen3_next_experts(config: Config, name: str) -> Experts | None:
    dense, step = numbers(config, name, "mlp_only_layers"), count(config, name, "decoder_sparse_step", 1)
    shared = count(config, name, "shared_expert_intermediate_size", 0, least=0)
    return read_experts(
        config,
        name,
        "num_experts",
        "moe_intermediate_size",
        lambda layer: layer not in dense and (layer + 1) % step == 0,
        shared_size=shared,
        shared_gate=shared > 0,
    )


def qwen3_5(config: Config, name: str) -> ModelSpec:
    """Qwen 3.5 and 3.6 without experts."""
    return qwen3_next(config, name, experts=False)


def qwen3_5_moe(config: Config, name: str) -> ModelSpec:
    """Qwen 3.5 and 3.6 with experts."""
    # All layers have experts; the file has no MLP width.
    return qwen3_next(config, name, intermediate_size=count(config, name, "moe_intermediate_size"))


def _mamba2(config: Config, name: str) -> Mamba2:
    """Mamba-2 with the keys of Bamba and Granite; a ``mamba_d_head`` of "auto" is computed."""
    hidden, expand = count(config, name, "hidden_size"), count(config, name, "mamba_expand", 2)
    heads = count(config, name, "mamba_n_heads", 128)
    auto = config.get("mamba_d_head", "auto") == "auto"
    head_dim = expand * hidden // heads if auto else count(config, name, "mamba_d_head")
    if heads * head_dim != expand * hidden:
        remedy = f"must be mamba_expand * hidden_size / mamba_n_heads in {name}, {expand * hidden} / {heads}"
        raise SettingError("mamba_d_head", head_dim, remedy)
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=count(config, name, "mamba_n_groups", 1),
        state_size=count(config, name, "mamba_d_state", 256),
        conv_kernel=count(config, name, "mamba_d_conv", 4),
        chunk=count(config, name, "mamba_chunk_size", 256),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        proj_bias=bool(config.get("mamba_proj_bias", False)),
    )


def granite_hybrid(config: Config, name: str) -> ModelSpec:
    """Granite 4: Mamba-2 and attention."""
    layers = num_layers(config, name)
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * layers
    shared = count(config, name, "shared_intermediate_size", 1024)
    experts = None
    # Granite's small models have only the shared MLP.
    if count(config, name, "num_local_experts", 8, least=0):
        experts = read_experts(
            config, name, "num_local_experts", "intermediate_size", default_used=2, shared_size=shared
        )
    return llama(
        config,
        name,
        intermediate_size=shared,
        spans=state_spans(name, layers, "layer_types", kinds, "attention full_attention mamba linear_attention"),
        mixer=_mamba2(config, name),
        experts=experts,
    )


def bamba(config: Config, name: str) -> ModelSpec:
    """Bamba: Mamba-2 and attention."""
    layers, attention = num_layers(config, name), numbers(config, name, "attn_layer_indices")
    beyond = [layer for layer in attention if not 0 <= layer < layers]
    if beyond:
        raise SettingError("attn_layer_indices", beyond[0], f"must be one of the {layers} layers of {name}")
    kinds = ["attention" if layer in attention else "mamba" for layer in range(layers)]
    spans = state_spans(name, layers, "attn_layer_indices", kinds, "attention mamba")
    return llama(config, name, spans=spans, mixer=_mamba2(config, name))


def jamba(config: Config, name: str) -> ModelSpec:
    """Jamba: Mamba and attention."""
    layers, hidden = num_layers(config, name), count(config, name, "hidden_size")
    every, first = count(config, name, "attn_layer_period", 8), count(config, name, "attn_layer_offset", 4, least=0)
    step, offset = count(config, name, "expert_layer_period", 2), count(config, name, "expert_layer_offset", 1, least=0)
    kinds = ["attention" if layer % every == first else "mamba" for layer in range(layers)]
    auto = config.get("mamba_dt_rank", "auto") == "auto"
    mixer = Mamba(
        inner=count(config, name, "mamba_expand", 2) * hidden,
        state_size=count(config, name, "mamba_d_state", 16),
        dt_rank=-(-hidden // 16) if auto else count(config, name, "mamba_dt_rank"),
        conv_kernel=count(config, name, "mamba_d_conv", 4),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        proj_bias=bool(config.get("mamba_proj_bias", False)),
    )
    experts = None
    if count(config, name, "num_experts", 16) > 1:
        experts = read_experts(
            {"num_experts": 16} | given(config),
            name,
            "num_experts",
            "intermediate_size",
            lambda layer: layer % step == offset,
            default_used=2,
        )
    spans = state_spans(name, layers, "attn_layer_period", kinds, "attention mamba")
    return llama(config, name, spans=spans, mixer=mixer, experts=experts)


def lfm2(config: Config, name: str) -> ModelSpec:
    """LFM2: gated short convolutions and attention."""
    layers, kinds = num_layers(config, name), config.get("layer_types")
    if kinds is None:
        attention = numbers(config, name, "full_attn_idxs") or range(layers)
        kinds = ["full_attention" if layer in attention else "conv" for layer in range(layers)]
    width = count(config, name, "intermediate_size", config.get("block_ff_dim", 12288))
    if config.get("block_auto_adjust_ff_dim", True):
        multiple, multiplier = (
            count(config, name, "block_multiple_of", 256),
            config.get("block_ffn_dim_multiplier", 1.0),
        )
        if not isinstance(multiplier, (int, float)) or not 0 < multiplier < 100:
            raise SettingError("block_ffn_dim_multiplier", multiplier, f"must be a number above 0 in {name}")
        width = multiple * -(-int(multiplier * int(2 * width / 3)) // multiple)
    inner = count(config, name, "conv_dim", count(config, name, "hidden_size"))
    return llama(
        config,
        name,
        intermediate_size=width,
        tied_embeddings=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
        qk_norm=True,
        spans=state_spans(name, layers, "layer_types", kinds, "full_attention conv"),
        mixer=ShortConv(
            conv_kernel=count(config, name, "conv_L_cache", 3), inner=inner, bias=bool(config.get("conv_bias"))
        ),
    )


def nemotron_h(config: Config, name: str) -> ModelSpec:
    """Nemotron-H and Nemotron 3: Mamba-2, attention and MLPs as layers of their own."""
    key = "hybrid_override_pattern" if config.get("layers_block_type") is None else "layers_block_type"
    kinds = config.get(key)
    words = list(kinds) if isinstance(kinds, (list, str)) else []
    # Files of the first models name the head width attention_head_dim, and some keys as Bamba does.
    renamed = {"head_dim": config.get("attention_head_dim", 128), "num_hidden_layers": len(words)} | given(config)
    layers = num_layers(renamed, name)
    known = "M * - E" if isinstance(kinds, str) else "mamba linear_attention attention full_attention mlp moe"
    spans = state_spans(name, layers, key, kinds, known)
    routed = tuple(layer for layer, kind in enumerate(words) if kind in ("E", "moe"))
    for theirs, ours in (
        ("mamba_n_groups", "n_groups"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_chunk_size", "chunk_size"),
    ):
        renamed.setdefault(ours, config.get(theirs))
    return ModelSpec(
        **shape(renamed, name),
        intermediate_size=count(config, name, "intermediate_size", 21504),
        gated_mlp=False,
        # Neither transformers nor vLLM reads tie_word_embeddings or attention_bias here.
        mlp_bias=bool(config.get("mlp_bias")),
        layer_norms=1,
        spans=spans,
        mixer=Mamba2(
            heads=count(config, name, "mamba_num_heads", 128),
            head_dim=count(config, name, "mamba_head_dim", 64),
            groups=count(renamed, name, "n_groups", 8),
            state_size=count(config, name, "ssm_state_size", 128),
            conv_kernel=count(renamed, name, "conv_kernel", 4),
            chunk=count(renamed, name, "chunk_size", 128),
            conv_bias=bool(config.get("use_conv_bias", config.get("mamba_conv_bias", True))),
            proj_bias=bool(config.get("use_bias", False)),
            # vLLM's NemotronHForCausalLMConfig takes the dtype from the file.
            state_dtype=_state_dtype(config, name, "mamba_ssm_cache_dtype", "float32"),
        ),
        mlp_layers=tuple(layer for layer, kind in enumerate(words) if kind in ("-", "mlp")),
        experts=_nemotron_experts(config, name, routed) if routed else None,
    )


def _nemotron_experts(config: Config, name: str, layers: tuple[int, ...]) -> Experts:
    shared = count(config, name, "moe_shared_expert_intermediate_size", 7688, least=0)
    return Experts(
        count=count(config, name, "n_routed_experts", 8),
        used=count(config, name, "num_experts_per_tok", 2),
        intermediate_size=count(config, name, "moe_intermediate_size", 7688),
        layers=layers,
        shared_size=shared * count(config, name, "n_shared_experts", 1, least=0),
        latent_size=0 if config.get("moe_latent_size") is None else count(config, name, "moe_latent_size"),
        router_bias=True,
    )


def kimi_linear(config: Config, name: str) -> ModelSpec:
    """Kimi Linear and the text part of Kimi K3: Kimi delta attention, and latent attention in some layers."""
    linear = config.get("linear_attn_config")
    linear = linear if isinstance(linear, dict) else {}
    layers = num_layers(config, name)
    # Layer numbers of this file start at 1.
    kimi, full = (numbers(linear, name, key) for key in ("kda_layers", "full_attn_layers"))
    if sorted(kimi + full) != [*range(1, layers + 1)]:
        remedy = f"kda_layers and full_attn_layers must name each of the {layers} layers of {name}, from 1, once"
        raise SettingError("linear_attn_config", config.get("linear_attn_config"), remedy)
    kinds = ["linear_attention" if layer + 1 in kimi else "full_attention" for layer in range(layers)]
    renamed = {
        "n_routed_experts": config.get("num_experts"),
        "num_experts_per_tok": config.get("num_experts_per_token"),
        "n_shared_experts": config.get("num_shared_experts"),
        "max_position_embeddings": config.get("model_max_length"),
        "topk_method": "noaux_tc",
    }
    mixer = KimiDelta(
        heads=count(linear, name, "num_heads"),
        head_dim=count(linear, name, "head_dim"),
        conv_kernel=count(linear, name, "short_conv_kernel_size", 4),
        full_rank_gate=bool(linear.get("use_full_rank_gate")),
        bounded_gate=linear.get("gate_lower_bound") is not None,
    )
    spans = state_spans(name, layers, "linear_attn_config", kinds, "full_attention linear_attention")
    spec = deepseek(renamed | given(config), name)
    assert spec.latent
    experts = spec.experts
    if experts and config.get("routed_expert_hidden_size") is not None:
        latent_size = count(config, name, "routed_expert_hidden_size")
        experts = replace(experts, latent_size=latent_size, latent_norm=bool(config.get("latent_moe_use_norm")))
    return replace(
        spec,
        latent=replace(spec.latent, gated=bool(config.get("mla_use_output_gate"))),
        spans=spans,
        mixer=mixer,
        experts=experts,
        residual_layers=count(config, name, "attn_res_block_size", 0, least=0),
        # Neither transformers nor vLLM reads tie_word_embeddings here.
        tied_embeddings=False,
    )


def glm5_next(config: Config, name: str) -> ModelSpec:
    """GLM-5.3-Flash: Kimi delta attention, and in some layers latent attention to the tokens that an indexer chooses, of which a key
    is of several tokens. Queries and keys have no rotary part. vLLM keeps both kinds of mixers in 16 bits, whatever the checkpoint has.
    Source: ``vllm/models/glm5next`` of vLLM 0.30 and 0.33."""
    linear = config.get("linear_attn_config")
    linear = linear if isinstance(linear, dict) else {}
    layers, kinds = num_layers(config, name), config.get("layer_types")
    spans = state_spans(name, layers, "layer_types", kinds, "linear_attention deepseek_sparse_attention")
    spec = deepseek({"topk_method": "noaux_tc", **given(config)}, name)
    return replace(
        spec,
        spans=spans,
        mixer=KimiDelta(
            heads=count(linear, name, "num_heads"),
            head_dim=count(linear, name, "head_dim"),
            conv_kernel=count(linear, name, "short_conv_kernel_size", 4),
            bounded_gate=linear.get("gate_lower_bound") is not None,
        ),
        indexer=Indexer(
            heads=count(config, name, "index_n_heads"),
            head_dim=count(config, name, "index_head_dim"),
            top_k=count(config, name, "index_topk"),
            layers=tuple(layer for layer, span in enumerate(spans) if span.keeps_tokens),
            fp8_on_b200=True,
            pool_tokens=count(config, name, "index_kpool", least=2),
        ),
        residual_streams=count(config, name, "hc_mult", 1),
        unquantized=frozenset(("mixer", layer) for layer in range(layers)),
    )


def zamba2(config: Config, name: str) -> ModelSpec:
    """Zamba2: Mamba-2 in every layer of the file, and calls of shared blocks of attention and MLP before some of them.

    A call counts as a layer of its own. Calls come first, as vLLM registers their KV caches first.
    """
    layers, hidden = num_layers(config, name), count(config, name, "hidden_size", 2560)
    heads, expand = count(config, name, "num_attention_heads", 32), count(config, name, "mamba_expand", 2)
    blocks = count(config, name, "num_mem_blocks", 1)
    calls = _zamba2_calls(config, name, layers, blocks)
    for key, value in (("num_key_value_heads", heads), ("quantization_config", None)):
        if config.get(key) not in (None, value):
            raise SettingError(key, config[key], f"is not understood in {name}; Zamba2 has {value or 'no such key'}")
    if 2 * hidden % heads:
        raise SettingError("num_attention_heads", heads, f"must divide twice the hidden size {hidden} of {name}")
    mamba_heads = count(config, name, "n_mamba_heads", 8)
    if expand * hidden % mamba_heads:
        raise SettingError("n_mamba_heads", mamba_heads, f"must divide the {expand * hidden} channels of {name}")
    defaults = {
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "num_attention_heads": heads,
        "hidden_size": hidden,
    }
    long = {"max_position_embeddings": 16_384} if config.get("use_long_context") else {}
    sizes = {"head_dim": 2 * hidden // heads, "num_key_value_heads": heads, "num_hidden_layers": calls + layers}
    biased = bool(config.get("add_bias_linear", False))
    return ModelSpec(
        **shape(defaults | given(config) | sizes | long, name),
        intermediate_size=count(config, name, "intermediate_size", 4 * hidden),
        gated_mlp=True,
        tied_embeddings=True,
        mlp_bias=biased,
        spans=(FULL,) * calls + (STATE,) * layers,
        mixer=Mamba2(
            heads=mamba_heads,
            head_dim=expand * hidden // mamba_heads,
            groups=count(config, name, "mamba_ngroups", 1),
            state_size=count(config, name, "mamba_d_state", 64),
            conv_kernel=count(config, name, "mamba_d_conv", 4),
            chunk=count(config, name, "chunk_size", 256),
            conv_bias=bool(config.get("use_conv_bias", True)),
            proj_bias=biased,
        ),
        shared_blocks=SharedBlocks(
            blocks, count(config, name, "adapter_rank", 128), bool(config.get("use_shared_attention_adapter", False))
        ),
        mlp_layers=tuple(range(calls)),
    )


def _zamba2_calls(config: Config, name: str, layers: int, blocks: int) -> int:
    """How many layers call a shared block, at least as many as there are blocks."""
    key = "layers_block_type" if config.get("layers_block_type") is not None else "layer_types"
    kinds = config.get(key)
    known = ("mamba", "linear_attention", "hybrid")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        raise SettingError(key, kinds, f"must say mamba or hybrid for each of the {layers} layers of {name}")
    if (calls := kinds.count("hybrid")) < blocks:
        raise SettingError("num_mem_blocks", blocks, f"must be at most the {calls} hybrid layers of {name}")
    return calls


def mamba2_alone(config: Config, name: str) -> ModelSpec:
    """Mamba-2 without attention. Its file has no context length; vLLM then assumes 2,048 tokens."""
    layers = num_layers(config, name)
    heads, head_dim = count(config, name, "num_heads", 128), count(config, name, "head_dim", 64)
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=count(config, name, "hidden_size"),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        intermediate_size=0,
        vocab_size=count(config, name, "vocab_size"),
        max_model_len=count(config, name, "max_position_embeddings", 2048),
        gated_mlp=False,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        layer_norms=1,
        spans=(STATE,) * layers,
        mixer=Mamba2(
            heads=heads,
            head_dim=head_dim,
            groups=count(config, name, "n_groups", 8),
            state_size=count(config, name, "state_size", 128),
            conv_kernel=count(config, name, "conv_kernel", 4),
            chunk=count(config, name, "chunk_size", 256),
            conv_bias=bool(config.get("use_conv_bias", True)),
            proj_bias=bool(config.get("use_bias", False)),
        ),
        mlp_layers=(),
    )


def _state_dtype(config: Config, name: str, key: str, default: str = "auto") -> str:
    """Number format of the state in the file, by fragmeter's name; "auto" if the file has none."""
    known = {"auto": "auto", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    given = default if config.get(key) is None else config[key]
    if not isinstance(given, str) or given not in known:
        raise SettingError(key, given, f"is not understood in {name}; one of {', '.join(known)}")
    return known[given]
