"""One function for each family of models: from its ``config.json`` to a shape.

Defaults are those of the family's configuration class in Hugging Face transformers: a file leaves out
what it does not change. Parameters count as the checkpoint holds them.

Families of models with LayerNorm and an MLP of two matrices: from their ``config.json`` to a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..types.errors import SettingError
from .attention import Latent, Span
from .config import Config, count, num_layers, numbers, refuse_unread, shape, spans
from .config import shape as read_shape
from .experts import Experts
from .shape import ModelSpec


def opt(config: Config, name: str) -> ModelSpec:
    """OPT."""
    shape = read_shape(config, name)
    if config.get("word_embed_proj_dim", shape["hidden_size"]) != shape["hidden_size"]:
        what = f"a projected embedding is not understood in {name}"
        remedy = f"{what}; give an OPT with an embedding as wide as its layers"
        raise SettingError("word_embed_proj_dim", config["word_embed_proj_dim"], remedy)
    # OPT's position table has two rows more than positions: an offset kept from its training code.
    rows = shape["max_model_len"] + 2
    return _biased(shape, count(config, name, "ffn_dim"), rows)


def gpt2(config: Config, name: str) -> ModelSpec:
    """GPT-2, with the names of its own configuration file."""
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    renamed = {names.get(key, key): value for key, value in config.items()}
    renamed["max_position_embeddings"] = config.get("n_positions")
    shape = read_shape(renamed, name)
    return _biased(shape, count(config, name, "n_inner", 4 * shape["hidden_size"]), shape["max_model_len"])


def gpt_bigcode(config: Config, name: str) -> ModelSpec:
    """StarCoder: GPT-2 with one KV head."""
    one_head = {"num_key_value_heads": 1} if config.get("multi_query", True) else {}
    return gpt2({**config, **one_head}, name)


def _biased(shape: dict[str, Any], intermediate_size: int, positions: int) -> ModelSpec:
    return ModelSpec(
        **shape,
        intermediate_size=intermediate_size,
        gated_mlp=False,
        tied_embeddings=True,
        learned_positions=positions,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_vectors=2,
    )


def falcon(config: Config, name: str) -> ModelSpec:
    """Falcon: one KV head (7b) or a few (40b, 180b), attention and MLP side by side."""
    grouped, heads = bool(config.get("new_decoder_architecture")), count(config, name, "num_attention_heads")
    # The file of falcon-7b says num_kv_heads = 71 beside multi_query; only the new architecture reads it.
    kv_heads = 1 if config.get("multi_query", True) else heads
    if grouped:
        kv_heads = count(config, name, "num_kv_heads", heads)
    shape = read_shape({"max_position_embeddings": 2048, **config, "num_key_value_heads": kv_heads}, name)
    biased, parallel = bool(config.get("bias")), bool(config.get("parallel_attn", True))
    norms = count(config, name, "num_ln_in_parallel_attn", 2 if grouped else 1) if parallel or grouped else 2
    return ModelSpec(
        **shape,
        intermediate_size=count(config, name, "ffn_hidden_size", 4 * shape["hidden_size"]),
        gated_mlp=False,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        norm_vectors=2,
        layer_norms=norms,
    )


def read_config(config: Config, name: str) -> ModelSpec:
    """The spec that a configuration describes, under ``name``; raises SettingError for what it does not understand."""
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    kind = config.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    refuse_unread(config, name, family.reads if family else frozenset())
    if family is None:
        raise SettingError("model_type", kind, f"is not understood in {name}; one of {', '.join(_FAMILIES)}")
    return family.read(config, name)


def _windows(
    config: Config,
    name: str,
    windowed: Callable[[int], bool] = lambda layer: True,
    default: int | None = None,
    switched_on: bool = True,
) -> tuple[Span, ...]:
    """Sliding windows of those layers that are ``windowed``, if the model has any."""
    use = config.get("use_sliding_window", switched_on)
    has = use and config.get("sliding_window", default) is not None
    window = count(config, name, "sliding_window", default) if has else None
    return spans(config, name, num_layers(config, name), windowed, window, None)


def _llama(
    config: Config, name: str, head_dim: int | None = None, intermediate_size: int | None = None, **features: Any
) -> ModelSpec:
    """Gated MLP, rotary positions, RMSNorm; ``features`` are fields of the spec that differ."""
    defaults = {
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": bool(config.get("attention_bias")),
        "output_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
    }
    return ModelSpec(
        **shape(config, name, head_dim),
        intermediate_size=intermediate_size or count(config, name, "intermediate_size"),
        gated_mlp=True,
        **defaults | features,
    )


def _mistral(config: Config, name: str, **features: Any) -> ModelSpec:
    return _llama(config, name, spans=_windows(config, name), **features)


def _mixtral(config: Config, name: str) -> ModelSpec:
    return _mistral(config, name, experts=_experts(config, name, "num_local_experts", "intermediate_size"))


def _qwen(config: Config, name: str, **features: Any) -> ModelSpec:
    first = count(config, name, "max_window_layers", 28)
    windows = _windows(config, name, lambda layer: layer >= first, 4096, switched_on=False)
    return _llama(config, name, spans=windows, **features)


def _qwen2(config: Config, name: str) -> ModelSpec:
    return _qwen(config, name, qkv_bias=True, output_bias=False, mlp_bias=False)


def _qwen3(config: Config, name: str) -> ModelSpec:
    return _qwen(config, name, qk_norm=True)


def _qwen3_moe(config: Config, name: str) -> ModelSpec:
    dense, step = numbers(config, name, "mlp_only_layers"), count(config, name, "decoder_sparse_step", 1)
    experts = _experts(
        config,
        name,
        "num_experts",
        "moe_intermediate_size",
        lambda layer: layer not in dense and (layer + 1) % step == 0,
    )
    return _qwen(config, name, qk_norm=True, experts=experts)


def _gemma2(config: Config, name: str) -> ModelSpec:
    return _gemma(config, name, spans=_windows(config, name, lambda layer: layer % 2 == 0, 4096))


def _gemma3(config: Config, name: str) -> ModelSpec:
    # transformers renamed the key when it brought layer_types.
    every = count(config, name, "sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    windows = _windows(config, name, lambda layer: (layer + 1) % every != 0, 4096)
    defaults = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
    return _gemma(defaults | dict(config), name, spans=windows, qk_norm=True)


def _gemma(config: Config, name: str, **features: Any) -> ModelSpec:
    tied = bool(config.get("tie_word_embeddings", True))
    # Norms before and after attention, and before and after the MLP.
    return _llama(config, name, head_dim=256, tied_embeddings=tied, layer_norms=4, **features)


def _gpt_oss(config: Config, name: str) -> ModelSpec:
    experts = _experts(config, name, "num_local_experts", "intermediate_size", router_bias=True, bias=True)
    return _llama(
        config,
        name,
        spans=_windows(config, name, lambda layer: layer % 2 == 0, 128),
        experts=experts,
        attention_sinks=True,
        qkv_bias=True,
        output_bias=True,
    )


def _llama4(config: Config, name: str) -> ModelSpec:
    layers = num_layers(config, name)
    every = count(config, name, "no_rope_layer_interval", 4)
    # Layers without rotary positions attend to everything; the others to their chunk.
    rotary = numbers(config, name, "no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    if len(rotary) != layers:
        raise SettingError("no_rope_layers", rotary, f"must have one number for each of the {layers} layers of {name}")
    chunk = count(config, name, "attention_chunk_size", 8192)
    step = count(config, name, "interleave_moe_layer_step", 1)
    routed = numbers(config, name, "moe_layers") or range(step - 1, layers, step)
    experts = _experts(
        config,
        name,
        "num_local_experts",
        "intermediate_size",
        lambda layer: layer in routed,
        default_used=1,
        shared_size=count(config, name, "intermediate_size"),
    )
    return _llama(
        config,
        name,
        intermediate_size=count(config, name, "intermediate_size_mlp"),
        spans=spans(config, name, layers, lambda layer: bool(rotary[layer]), None, chunk),
        experts=experts,
    )


def _deepseek(config: Config, name: str) -> ModelSpec:
    heads = count(config, name, "num_attention_heads")
    latent = Latent(
        kv_rank=count(config, name, "kv_lora_rank"),
        rope_dim=count(config, name, "qk_rope_head_dim"),
        nope_dim=count(config, name, "qk_nope_head_dim"),
        v_dim=count(config, name, "v_head_dim"),
        q_rank=0 if config.get("q_lora_rank") is None else count(config, name, "q_lora_rank"),
    )
    # Its file repeats the query heads here, though there are no KV heads.
    heads_alike = {**config, "num_key_value_heads": heads, "head_dim": latent.nope_dim + latent.rope_dim}
    return _llama(heads_alike, name, latent=latent, experts=_deepseek_experts(config, name))


def _deepseek_experts(config: Config, name: str) -> Experts | None:
    if config.get("n_routed_experts") is None:
        return None
    dense = count(config, name, "first_k_dense_replace", 0, least=0)
    step, width = count(config, name, "moe_layer_freq", 1), count(config, name, "moe_intermediate_size")
    return _experts(
        config,
        name,
        "n_routed_experts",
        "moe_intermediate_size",
        lambda layer: layer >= dense and layer % step == 0,
        shared_size=count(config, name, "n_shared_experts", 0, least=0) * width,
        # V3 corrects the router's scores by a bias for each expert.
        router_bias=config.get("topk_method") == "noaux_tc",
    )


def _experts(
    config: Config,
    name: str,
    count_key: str,
    width_key: str,
    routed: Callable[[int], bool] = lambda layer: True,
    default_used: int | None = None,
    **features: Any,
) -> Experts | None:
    """Experts in the layers that are ``routed``; None where no layer is."""
    layers = tuple(layer for layer in range(num_layers(config, name)) if routed(layer))
    experts = count(config, name, count_key)
    used = count(config, name, "num_experts_per_tok", default_used)
    if used > experts:
        raise SettingError("num_experts_per_tok", used, f"must be at most the {experts} experts of {name}")
    return Experts(experts, used, count(config, name, width_key), layers, **features) if layers else None


class _Family(NamedTuple):
    """How a family is read, and which of the features' keys it reads."""

    read: Callable[[Config, str], ModelSpec]
    reads: frozenset[str] = frozenset()


_WINDOWS = frozenset({"sliding_window", "layer_types"})
_DEEPSEEK = _Family(_deepseek, frozenset({"kv_lora_rank", "n_routed_experts"}))
_LLAMA4 = _Family(_llama4, frozenset({"attention_chunk_size", "layer_types", "num_local_experts"}))

_FAMILIES = {
    "opt": _Family(opt),
    "llama": _Family(_mistral, _WINDOWS),
    "mistral": _Family(_mistral, _WINDOWS),
    "qwen2": _Family(_qwen2, _WINDOWS),
    "qwen3": _Family(_qwen3, _WINDOWS),
    "gpt2": _Family(gpt2),
    "gpt_bigcode": _Family(gpt_bigcode),
    "falcon": _Family(falcon),
    "gemma2": _Family(_gemma2, _WINDOWS),
    "gemma3": _Family(_gemma3, _WINDOWS),
    "gemma3_text": _Family(_gemma3, _WINDOWS),
    "mixtral": _Family(_mixtral, _WINDOWS | {"num_local_experts"}),
    "qwen3_moe": _Family(_qwen3_moe, _WINDOWS | {"num_experts"}),
    "gpt_oss": _Family(_gpt_oss, _WINDOWS | {"num_local_experts"}),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
}
