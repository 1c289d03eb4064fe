"""Families of models by the ``model_type`` of their ``config.json``, and what each of them reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..types.errors import SettingError
from . import attention_families, compressed_families, grouped_families, state_families
from .checkpoint import with_formats
from .config import Config, refuse_unread
from .encoders import encoder_of
from .shape import ModelSpec


def read_config(config: Config, name: str) -> ModelSpec:
    """The spec of a configuration, named ``name``.

    Raises:
        SettingError: The family, a key or a value is not supported.
    """
    text, outer = config.get("text_config", config.get("language_config")), config.get("model_type")
    if isinstance(text, dict):
        config = {**config, **text}
    kind = config.get("model_type")
    if isinstance(kind, str):
        refuse_unsupported(kind, name)
    if not isinstance(kind, str):
        raise SettingError("model_type", kind, f"must name the family of {name}, as {', '.join(_FAMILIES)}")
    family = _FAMILIES.get(kind, _UNKNOWN)
    refuse_unread(config, name, family.reads)
    spec = with_formats(family.read(config, name), config)
    assumed = grouped_families.assumption(spec, kind) if family is _UNKNOWN else spec.assumed
    encoder, outer = encoder_of(config, name), outer if isinstance(outer, str) else None
    return replace(spec, encoder=encoder, model_type=outer, assumed=assumed)


def refuse_unsupported(kind: str, name: str) -> None:
    """Raise SettingError for a ``model_type`` that is known and not supported."""
    if kind in _REFUSED:
        raise SettingError(
            "model_type", kind, f"{_REFUSED[kind]}, which is not understood in {name}; take another model"
        )


class _Family(NamedTuple):
    """Reader of a family, and the keys of ``_FEATURES`` and ``_STATES`` that it reads."""

    read: Callable[[Config, str], ModelSpec]
    reads: frozenset[str] = frozenset()


_WINDOWS = frozenset({"sliding_window", "layer_types"})
_GEMMA4 = _WINDOWS | {
    "global_head_dim", "attention_k_eq_v", "num_kv_shared_layers", "hidden_size_per_layer_input", "num_experts",
}  # fmt: skip
_DEEPSEEK = _Family(attention_families.deepseek, frozenset({"kv_lora_rank", "n_routed_experts"}))
# Files that newer releases of transformers wrote repeat the number of experts.
_SPARSE = _DEEPSEEK.reads | {"index_topk", "layer_types", "num_experts"}
_GLM5_NEXT = _Family(state_families.glm5_next, _SPARSE | {"linear_attn_config"})
_QWEN3_NEXT = frozenset({"linear_num_key_heads", "layer_types", "num_experts"})
_LLAMA4 = _Family(attention_families.llama4, frozenset({"attention_chunk_size", "layer_types", "num_local_experts"}))
_MINIMAX_M3 = _Family(
    attention_families.minimax_m3,
    frozenset({"sparse_attention_config", "num_local_experts", "num_experts", "layer_types"}),
)
_STEP = _Family(attention_families.step, _WINDOWS | {"num_experts", "n_routed_experts"})

_FAMILIES = {
    "opt": _Family(attention_families.opt),
    "llama": _Family(attention_families.mistral, _WINDOWS),
    "mistral": _Family(attention_families.mistral, _WINDOWS),
    "phi3": _Family(attention_families.mistral, _WINDOWS),
    "qwen2": _Family(attention_families.qwen2, _WINDOWS),
    "qwen3": _Family(attention_families.qwen3, _WINDOWS),
    "qwen2_vl": _Family(attention_families.qwen2, _WINDOWS),
    "qwen2_vl_text": _Family(attention_families.qwen2, _WINDOWS),
    "qwen2_5_vl": _Family(attention_families.qwen2, _WINDOWS),
    "qwen2_5_vl_text": _Family(attention_families.qwen2, _WINDOWS),
    "ministral3": _Family(attention_families.mistral, _WINDOWS),
    "ministral": _Family(attention_families.mistral, _WINDOWS),
    "granite": _Family(attention_families.mistral, _WINDOWS),
    "glm4": _Family(grouped_families.glm4),
    "glm4v": _Family(grouped_families.glm4),
    "glm4v_text": _Family(grouped_families.glm4),
    "glm": _Family(grouped_families.glm),
    "chatglm": _Family(grouped_families.chatglm),
    "seed_oss": _Family(grouped_families.seed_oss),
    "smollm3": _Family(grouped_families.smollm3, _WINDOWS),
    "exaone4_5_text": _Family(grouped_families.exaone4, _WINDOWS),
    "exaone4": _Family(grouped_families.exaone4, _WINDOWS),
    "olmo2": _Family(grouped_families.olmo3, _WINDOWS),
    "olmo3": _Family(grouped_families.olmo3, _WINDOWS),
    "cohere": _Family(grouped_families.cohere, _WINDOWS),
    "cohere2": _Family(grouped_families.cohere, _WINDOWS),
    "ernie4_5": _Family(grouped_families.ernie4_5),
    "ernie4_5_moe": _Family(grouped_families.ernie4_5_moe),
    "hunyuan": _Family(grouped_families.hunyuan, _WINDOWS | {"num_experts"}),
    "hunyuan_v1_moe": _Family(grouped_families.hunyuan, _WINDOWS | {"num_experts"}),
    "hunyuan_v1_dense": _Family(grouped_families.hunyuan, _WINDOWS | {"num_experts"}),
    "glm4_moe_lite": _Family(attention_families.glm4_moe_lite, frozenset({"kv_lora_rank", "n_routed_experts"})),
    "gpt2": _Family(attention_families.gpt2),
    "gpt_bigcode": _Family(attention_families.gpt_bigcode),
    "falcon": _Family(attention_families.falcon),
    "gemma2": _Family(attention_families.gemma2, _WINDOWS),
    "gemma3": _Family(attention_families.gemma3, _WINDOWS),
    "gemma3_text": _Family(attention_families.gemma3, _WINDOWS),
    "gemma4_text": _Family(attention_families.gemma4, _GEMMA4),
    "mixtral": _Family(attention_families.mixtral, _WINDOWS | {"num_local_experts"}),
    "qwen3_moe": _Family(attention_families.qwen3_moe, _WINDOWS | {"num_experts"}),
    "qwen3_vl_text": _Family(attention_families.qwen3, _WINDOWS),
    "qwen3_vl_moe_text": _Family(attention_families.qwen3_moe, _WINDOWS | {"num_experts"}),
    "gpt_oss": _Family(attention_families.gpt_oss, _WINDOWS | {"num_local_experts"}),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_vl_v2": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v32": _Family(attention_families.sparse, _SPARSE),
    "deepseek_v4": _Family(
        compressed_families.deepseek_v4,
        frozenset({"index_topk", "sliding_window", "compress_ratios", "n_routed_experts"}),
    ),
    "glm_moe_dsa": _Family(attention_families.glm_moe_dsa, _SPARSE),
    "glm4_moe": _Family(attention_families.glm4_moe, frozenset({"n_routed_experts"})),
    "mimo": _Family(attention_families.qwen2, _WINDOWS),
    "mimo_v2_flash": _Family(
        attention_families.mimo_v2,
        frozenset({"sliding_window", "hybrid_layer_pattern", "n_routed_experts", "attention_chunk_size"}),
    ),
    "nemotron-nas": _Family(attention_families.nemotron_nas, frozenset({"block_configs"})),
    "minimax_m2": _Family(attention_families.minimax_m2, frozenset({"num_local_experts"})),
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_text": _MINIMAX_M3,
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "step3p5": _STEP,
    "step3p7": _STEP,
    "qwen3_next": _Family(state_families.qwen3_next, _QWEN3_NEXT),
    "qwen3_5": _Family(state_families.qwen3_5, _QWEN3_NEXT),
    "qwen3_5_text": _Family(state_families.qwen3_5, _QWEN3_NEXT),
    "qwen3_5_moe": _Family(state_families.qwen3_5_moe, _QWEN3_NEXT),
    "qwen3_5_moe_text": _Family(state_families.qwen3_5_moe, _QWEN3_NEXT),
    "nemotron_h": _Family(
        state_families.nemotron_h, frozenset({"ssm_state_size", "n_routed_experts", "moe_latent_size"})
    ),
    "granitemoehybrid": _Family(
        state_families.granite_hybrid, frozenset({"mamba_d_state", "layer_types", "num_local_experts"})
    ),
    "bamba": _Family(state_families.bamba, frozenset({"mamba_d_state"})),
    "jamba": _Family(state_families.jamba, frozenset({"mamba_d_state", "num_experts"})),
    "kimi_linear": _Family(
        state_families.kimi_linear, frozenset({"linear_attn_config", "kv_lora_rank", "num_experts"})
    ),
    "glm5_next_text": _GLM5_NEXT,
    "glm5_next": _GLM5_NEXT,
    "zamba2": _Family(state_families.zamba2, frozenset({"mamba_d_state", "state_size", "layer_types"})),
    "lfm2": _Family(state_families.lfm2, frozenset({"layer_types"})),
    "mamba2": _Family(state_families.mamba2_alone, frozenset({"state_size"})),
}

#: Any other family.
_UNKNOWN = _Family(grouped_families.unknown, _WINDOWS)

# Known families that this package does not support.
_REFUSED = {
    "falcon_h1": "has attention and Mamba side by side in every layer",
    "deepseek_ref": "is DeepSeek V4 under a name that vLLM does not know",
    "minimax_text_01": "has lightning attention",
    "minimax": "has lightning attention",
    "mllama": "attends to the states of an image encoder in some layers",
    "mllama_text_model": "attends to the states of an image encoder in some layers",
    **dict.fromkeys(
        ("rwkv", "rwkv5", "rwkv6", "rwkv7", "retnet", "xlstm"), "keeps a recurrent state in place of K and V"
    ),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "modernbert"), "is an encoder, which keeps no KV cache"),
    **dict.fromkeys(("t5", "bart", "whisper"), "has an encoder and a decoder that attends to it"),
}
