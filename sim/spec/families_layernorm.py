"""Families of models with LayerNorm and an MLP of two matrices: from their ``config.json`` to a shape."""

from __future__ import annotations

from typing import Any

from ..types.errors import SettingError
from .config import Config, count
from .config import shape as read_shape
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
