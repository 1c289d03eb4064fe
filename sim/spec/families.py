"""Families of models by the ``model_type`` of their ``config.json``, and what each of them reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..types.errors import SettingError
from . import attention_families, state_families
from .checkpoint import with_formats
from .config import Config, refuse_unread
from .encoders import encoder_of
from .shape import ModelSpec


def read_config(config: Config, name: str) -> ModelSpec:
    """The spec of a configuration, named ``name``.

    Raises:
        SettingError: The family, a key or a value is not supported.
    """
    text, outer = config.get("text_config"), config.get("model_type")
    if isinstance(text, dict):
        config = {**config, **text}
    kind = config.get("model_type")
    if isinstance(kind, str):
        refuse_unsupported(kind, name)
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    refuse_unread(config, name, family.reads if family else frozenset())
    if family is None:
        raise SettingError("model_type", kind, f"is not understood in {name}; one of {', '.join(_FAMILIES)}")
    spec = with_formats(family.read(config, name), config)
    return replace(spec, encoder=encoder_of(config, name), model_type=outer if isinstance(outer, str) else None)


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
    "kimi_k2": _DEEPSEEK,
    "deepseek_v32": _Family(attention_families.sparse, _SPARSE),
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
    "mamba2": _Family(state_families.mamba2_alone, frozenset({"state_size"})),
}

# Known families that this package does not support.
_REFUSED = {
    "falcon_h1": "has attention and Mamba side by side in every layer",
    "deepseek_v4": "attends to compressed tokens, with pages of several sizes in a block of the KV cache",
    "minimax_text_01": "has lightning attention",
    "minimax": "has lightning attention",
}
