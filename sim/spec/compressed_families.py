"""DeepSeek V4 as a ``config.json`` describes it."""

from __future__ import annotations

from dataclasses import replace

from ..types.errors import SettingError
from .attention_families import given, llama, read_experts
from .compressed import DENSE, HEAD_DIM, INDEX_DIM, ROPE_DIM, SPARSE, Compressed
from .config import Config, count, num_layers, numbers
from .shape import ModelSpec

#: Widths that vLLM's caches and kernels are written for.
_WIDTHS = {"head_dim": HEAD_DIM, "qk_rope_head_dim": ROPE_DIM, "index_head_dim": INDEX_DIM}


def deepseek_v4(config: Config, name: str) -> ModelSpec:
    """DeepSeek V4 Flash and Pro: ``compress_ratios`` lists the layers, and after them those for multi-token prediction, which have a
    window alone. All layers have experts; the first ``num_hash_layers`` choose them by the token instead of a bias."""
    layers, ratios = num_layers(config, name), numbers(config, name, "compress_ratios")
    drafted = count(config, name, "num_nextn_predict_layers", 1, least=0)
    known = {SPARSE} <= set(ratios) <= {0, SPARSE, DENSE}
    if not known or len(ratios) not in (layers, layers + drafted) or any(ratios[layers:]):
        remedy = f"must be 0, {SPARSE} or {DENSE} for each of the {layers} layers of {name}, {SPARSE} for one, and 0 for those that draft"
        raise SettingError("compress_ratios", ratios, remedy)
    for key, width in _WIDTHS.items():
        if count(config, name, key) != width:
            raise SettingError(key, config[key], f"must be {width} in {name}, as vLLM's kernels have it")
    width = count(config, name, "moe_intermediate_size")
    experts = read_experts(
        config,
        name,
        "n_routed_experts",
        "moe_intermediate_size",
        shared_size=count(config, name, "n_shared_experts", 0, least=0) * width,
        router_bias=True,
    )
    compressed = Compressed(
        q_rank=count(config, name, "q_lora_rank"),
        groups=count(config, name, "o_groups"),
        group_rank=count(config, name, "o_lora_rank"),
        window=count(config, name, "sliding_window"),
        ratios=tuple(ratios[:layers]),
        index_heads=count(config, name, "index_n_heads"),
        top_k=count(config, name, "index_topk"),
    )
    spec = llama(given(config), name, intermediate_size=width, experts=experts)
    return replace(spec, compressed=compressed, residual_streams=count(config, name, "hc_mult", 1))
