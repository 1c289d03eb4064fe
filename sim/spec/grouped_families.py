"""Families of grouped-query attention that differ from Llama in biases, norms, windows or experts, and the decoder of an unknown family.

Defaults are those of the family's configuration class in Hugging Face transformers, as in ``attention_families``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..types.errors import SettingError
from .attention_families import llama, mistral, read_experts, sliding_windows
from .config import Config, count, num_layers
from .shape import ModelSpec


def glm4(config: Config, name: str) -> ModelSpec:
    """GLM-4-0414 and the text model of GLM-4.1V: norms before and after attention and MLP."""
    return _glm(config, name, layer_norms=4)


def glm(config: Config, name: str) -> ModelSpec:
    """GLM-4 in the format of transformers."""
    return _glm(config, name)


def _glm(config: Config, name: str, **features: Any) -> ModelSpec:
    biased = bool(config.get("attention_bias"))
    return llama(config, name, qkv_bias=biased, output_bias=False, mlp_bias=False, **features)


def chatglm(config: Config, name: str) -> ModelSpec:
    """ChatGLM 3 and GLM-4 in their own format (``ChatGLMConfig`` of vLLM)."""
    heads = count(config, name, "num_attention_heads")
    grouped = count(config, name, "multi_query_group_num") if config.get("multi_query_attention") else heads
    renamed = {
        "num_hidden_layers": config.get("num_layers"),
        "num_key_value_heads": grouped,
        "head_dim": config.get("kv_channels"),
        "intermediate_size": config.get("ffn_hidden_size"),
        "vocab_size": config.get("padded_vocab_size"),
        "max_position_embeddings": config.get("seq_length"),
    }
    linear = bool(config.get("add_bias_linear"))
    biased = linear or bool(config.get("add_qkv_bias"))
    return llama({**config, **renamed}, name, qkv_bias=biased, output_bias=linear, mlp_bias=linear)


def seed_oss(config: Config, name: str) -> ModelSpec:
    """Seed-OSS."""
    biased, after = bool(config.get("attention_bias", True)), bool(config.get("attention_out_bias"))
    return llama(config, name, head_dim=128, qkv_bias=biased, output_bias=after)


def smollm3(config: Config, name: str) -> ModelSpec:
    """SmolLM 3."""
    tied = bool(config.get("tie_word_embeddings", True))
    return llama(config, name, tied_embeddings=tied, spans=sliding_windows(config, name, switched_on=False))


def exaone4(config: Config, name: str) -> ModelSpec:
    """EXAONE 4: layers with a window in a pattern; norms after attention and MLP."""
    pattern, layers = config.get("sliding_window_pattern", 4), num_layers(config, name)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        local = [pattern[layer % len(pattern)] == "L" for layer in range(layers)]
        # The last layer has full attention in any pattern.
        spans = sliding_windows(config, name, lambda layer: local[layer] and layer != layers - 1)
    else:
        every = count(config, name, "sliding_window_pattern", 4)
        spans = sliding_windows(config, name, lambda layer: (layer + 1) % every != 0)
    return llama(config, name, qk_norm=True, spans=spans, output_bias=False, qkv_bias=False)


def olmo3(config: Config, name: str) -> ModelSpec:
    """OLMo 2 and 3: queries and keys are normalised over all heads, which counts as over one; norms after attention and MLP."""
    spans = sliding_windows(config, name, lambda layer: (layer + 1) % 4 != 0)
    return llama(config, name, qk_norm=True, spans=spans)


def cohere(config: Config, name: str) -> ModelSpec:
    """Command R and Command A: attention and MLP in parallel behind one norm without a bias."""
    every = count(config, name, "sliding_window_pattern", 4)
    tied, normalised = bool(config.get("tie_word_embeddings", True)), bool(config.get("use_qk_norm"))
    spans = sliding_windows(config, name, lambda layer: (layer + 1) % every != 0)
    return llama(config, name, tied_embeddings=tied, layer_norms=1, qk_norm=normalised, spans=spans)


def ernie4_5(config: Config, name: str) -> ModelSpec:
    """ERNIE 4.5."""
    biased, tied = bool(config.get("use_bias")), bool(config.get("tie_word_embeddings", True))
    return llama(config, name, tied_embeddings=tied, qkv_bias=biased, output_bias=biased, mlp_bias=biased)


def ernie4_5_moe(config: Config, name: str) -> ModelSpec:
    """ERNIE 4.5 with experts."""
    layers, step = num_layers(config, name), count(config, name, "moe_layer_interval", 1)
    first = count(config, name, "moe_layer_start_index", 1, least=0)
    last = (
        count(config, name, "moe_layer_end_index", layers - 1)
        if config.get("moe_layer_end_index") != -1
        else layers - 1
    )
    width = count(config, name, "moe_intermediate_size")
    experts = read_experts(
        {**config, "num_experts_per_tok": config.get("moe_k")},
        name,
        "moe_num_experts",
        "moe_intermediate_size",
        lambda layer: first <= layer <= last and (layer + 1) % step == 0,
        shared_size=count(config, name, "moe_num_shared_experts", 0, least=0) * width,
        router_bias=True,
    )
    tied = bool(config.get("tie_word_embeddings", True))
    return llama(config, name, tied_embeddings=tied, qkv_bias=bool(config.get("use_bias")), experts=experts)


def hunyuan(config: Config, name: str) -> ModelSpec:
    """Hunyuan V1, dense and with experts in every layer (``hunyuan_v1.py`` of vLLM)."""
    if config.get("use_cla") or config.get("use_mla"):
        key = "use_cla" if config.get("use_cla") else "use_mla"
        raise SettingError(key, True, f"is not understood in {name}; Hunyuan with K and V in every layer is")
    used = _alike(config, name, "moe_topk", None)
    experts = None
    if count(config, name, "num_experts", 1) > 1:
        width = _alike(config, name, "moe_intermediate_size", count(config, name, "intermediate_size"))
        shared = _alike(config, name, "num_shared_expert", 1) if config.get("use_mixed_mlp_moe", True) else 0
        experts = read_experts(
            {**config, "num_experts_per_tok": used, "moe_intermediate_size": width},
            name,
            "num_experts",
            "moe_intermediate_size",
            shared_size=shared * count(config, name, "intermediate_size"),
        )
    head_dim = config.get("head_dim", config.get("attention_head_dim"))
    return llama(
        {**config, "head_dim": head_dim},
        name,
        qk_norm=bool(config.get("use_qk_norm")),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        experts=experts,
    )


def _alike(config: Config, name: str, key: str, default: int | None) -> int:
    """A number that a file gives once, or for each layer the same."""
    value = config.get(key)
    if isinstance(value, list):
        if not value or set(map(str, value)) != {str(value[0])}:
            raise SettingError(key, value, f"must be one number for all layers of {name}")
        value = value[0]
    return count({key: value}, name, key, default)


#: Keys of attention, norms and experts that no reader of an unknown family can take as plain.
_NOT_PLAIN = {
    "is_encoder_decoder": "an encoder",
    "cross_attention_layers": "layers that attend to an encoder",
    "num_local_experts": "a mixture of experts",
    "moe_num_experts": "a mixture of experts",
    "n_experts": "a mixture of experts",
    "moe_intermediate_size": "a mixture of experts",
    "attn_type_list": "layers of several kinds",
    "block_types": "layers of several kinds",
    "layers_block_type": "layers of several kinds",
    "conv_L_cache": "convolutions that keep a state",
    "q_lora_rank": "multi-head latent attention",
    "use_cla": "a KV cache that layers share",
    "kv_shared_layers": "a KV cache that layers share",
}
_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def unknown(config: Config, name: str) -> ModelSpec:
    """A decoder of an unknown family as plain grouped-query attention: K and V in every layer, an MLP, two norms.

    An MLP with SiLU is gated and has three matrices, others have two.

    Raises:
        SettingError: Its file has what cannot be plain, or lacks a size.
    """
    kind = config.get("model_type")
    for key, meaning in _NOT_PLAIN.items():
        if config.get(key):
            what = f"{meaning} is not understood in {name} with the unknown model_type {kind!r}"
            raise SettingError(key, config[key], f"{what}; give a model of a known family")
    missing = [key for key in _NEEDED if config.get(key) is None]
    if missing:
        remedy = f"is not understood in {name}, and its file lacks {', '.join(missing)}, of which plain attention would be computed"
        raise SettingError("model_type", kind, remedy)
    return replace(mistral(config, name), gated_mlp=config.get("hidden_act", "silu") in ("silu", "swish"))


def assumption(spec: ModelSpec, kind: str) -> str:
    """What the answer says of a model of an unknown family."""
    mlp = "a gated MLP" if spec.gated_mlp else "an MLP of two matrices"
    return (
        f"{spec.name}: model_type {kind!r} is not known; computed as plain grouped-query attention with K and V and {mlp} in every layer."
        " Weights are an estimate."
    )
