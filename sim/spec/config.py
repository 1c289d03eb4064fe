"""Readers of the ``config.json`` keys that model families share; keys that no family supports are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..types.errors import SettingError
from .attention import FULL, NONE, STATE, Span

Config = Mapping[str, object]
#: Upper bounds, beyond any model: of heads, hidden sizes, vocabularies and contexts; and of layers, which are listed.
MOST_COUNT, MOST_LAYERS = 2**40, 2**14

#: Rotary scaling of which the positions of ``config.json`` are the scaled ones already (``_get_and_verify_max_len`` of vLLM 0.33).
_WITHIN_POSITIONS = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
# Keys of layers with a state of fixed size instead of K and V. Only some families read them.
_STATES = {
    "linear_num_key_heads": "linear attention",
    "linear_attn_config": "linear attention",
    "mamba_d_state": "a state-space layer",
    "ssm_state_size": "a state-space layer",
    "state_size": "a state-space layer",
    "lru_width": "a recurrent layer",
}
# Layer kinds of models with states, by their names in config.json (names of transformers 5 first).
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "*": FULL,
    "deepseek_sparse_attention": FULL,
    "linear_attention": STATE,
    "mamba": STATE,
    "conv": STATE,
    "M": STATE,
    "mlp": NONE,
    "-": NONE,
    "moe": NONE,
    "E": NONE,
}
# Keys that only some families read. In other families they would change the cache or the weights unnoticed.
_FEATURES = {
    "kv_lora_rank": "multi-head latent attention",
    "index_topk": "an indexer of sparse attention",
    "attention_chunk_size": "chunked attention",
    "sliding_window": "a sliding window",
    "layer_types": "attention that differs from layer to layer",
    "hybrid_layer_pattern": "attention that differs from layer to layer",
    "block_configs": "attention that differs from layer to layer",
    "sparse_attention_config": "sparse attention",
    "compress_ratios": "compressed attention",
    "global_head_dim": "other heads in some layers",
    "attention_k_eq_v": "a K that is also V",
    "num_kv_shared_layers": "a KV cache that layers share",
    "hidden_size_per_layer_input": "an embedding for each layer",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "moe_latent_size": "a mixture of experts on a latent vector",
}


def count(config: Config, name: str, key: str, default: object = None, least: int = 1, most: int = MOST_COUNT) -> int:
    """A whole number from ``least`` to ``most``; null counts as absent."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise SettingError(key, value, f"must be a whole number of at least {least} in {name}")
    if value > most:
        raise SettingError(key, value, f"must be at most {most:,} in {name}; no model has more")
    return value


def num_layers(config: Config, name: str) -> int:
    """Number of layers."""
    return count(config, name, "num_hidden_layers", most=MOST_LAYERS)


def numbers(config: Config, name: str, key: str) -> list[int]:
    """A list of whole numbers; empty if the key is null or absent."""
    value = config.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise SettingError(key, value, f"must be a list of whole numbers in {name}")
    return value


def shape(config: Config, name: str, head_dim: int | None = None) -> dict[str, Any]:
    """The fields of ``ModelSpec`` that all families read the same way.

    Args:
        head_dim: Default, if it is not hidden size / heads.
    """
    heads = count(config, name, "num_attention_heads")
    hidden = count(config, name, "hidden_size")
    kv_heads = count(config, name, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise SettingError("num_key_value_heads", kv_heads, f"must divide the {heads} heads of {name}")
    if config.get("head_dim") is None and head_dim is None and hidden % heads:
        remedy = f"must be a multiple of the {heads} heads of {name}, or give head_dim"
        raise SettingError("hidden_size", hidden, remedy)
    return {
        "name": name,
        "num_layers": num_layers(config, name),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": count(config, name, "head_dim", head_dim or hidden // heads),
        "vocab_size": count(config, name, "vocab_size"),
        "max_model_len": longest_sequence(config, name),
    }


def longest_sequence(config: Config, name: str) -> int:
    """Tokens of the longest sequence, as vLLM derives it: the positions, or those of Command R's own key, times the factor of rotary
    scaling where that is not within them already."""
    longest = count(config, name, "max_position_embeddings")
    if config.get("model_max_length") is not None:
        longest = count(config, name, "model_max_length")
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or "gemma3" in str(config.get("model_type")):
        return longest
    factor, kind = scaling.get("factor"), scaling.get("rope_type", scaling.get("type"))
    if kind in _WITHIN_POSITIONS or not isinstance(factor, (int, float)) or not 0 < factor <= MOST_LAYERS:
        return longest
    return int(longest * factor)


def refuse_unread(config: Config, name: str, read: frozenset[str]) -> None:
    """Refuse keys of states and of features that the family does not ``read``."""
    for key, meaning in _STATES.items():
        if config.get(key) is not None and key not in read:
            what = f"{meaning} of {name} keeps a state that is not a KV cache"
            raise SettingError(key, config[key], f"{what}; give a model with K and V in all layers")
    for key, meaning in _FEATURES.items():
        if config.get(key) is not None and key not in read:
            what = f"{meaning} is not understood in {name} with model_type {config.get('model_type')!r}"
            raise SettingError(key, config[key], f"{what}; give a model of a family that has it")


def spans(
    config: Config, name: str, num_layers: int, windowed: Callable[[int], bool], window: int | None, chunk: int | None
) -> tuple[Span, ...]:
    """The span of every layer; empty if all layers have full attention.

    Args:
        windowed: Whether a layer has the window or chunk; used without ``layer_types``.
        window, chunk: Tokens of the sliding window and of the chunk, or None.
    """
    kinds = config.get("layer_types")
    local = "chunked_attention" if chunk else "sliding_attention"
    if kinds is None:
        has = bool(window or chunk)
        kinds = [local if has and windowed(layer) else "full_attention" for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise SettingError("layer_types", kinds, f"must name the kind of each of the {num_layers} layers of {name}")
    found = tuple(_span(kind, name, window, chunk) for kind in kinds)
    return found if set(found) != {FULL} else ()


def state_spans(name: str, num_layers: int, key: str, kinds: object, known: str) -> tuple[Span, ...]:
    """The span of every layer of a model with states.

    Args:
        key: The key that lists the kinds of the layers, for errors.
        kinds: The kind of each layer: a list of words or a string of letters.
        known: The kinds that the family supports.
    """
    if not isinstance(kinds, (list, str)) or len(kinds) != num_layers:
        raise SettingError(key, kinds, f"must name the kind of each of the {num_layers} layers of {name}")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known.split():
            raise SettingError(key, kind, f"is not understood in {name}; one of {', '.join(known.split())}")
    return tuple(_KINDS[kind] for kind in kinds)


def _span(kind: object, name: str, window: int | None, chunk: int | None) -> Span:
    if kind == "full_attention":
        return FULL
    if kind == "sliding_attention" and window:
        return Span("sliding", window)
    if kind == "chunked_attention" and chunk:
        return Span("chunked", chunk)
    if kind in ("sliding_attention", "chunked_attention"):
        key = "sliding_window" if kind == "sliding_attention" else "attention_chunk_size"
        raise SettingError(key, None, f"must say how long the {kind} of {name} is")
    remedy = f"is not understood in {name}; layers of full, sliding or chunked attention keep a KV cache, others do not"
    raise SettingError("layer_types", kind, remedy)
