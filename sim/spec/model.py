"""Models by name, and from the ``config.json`` that Hugging Face stores beside the weights.

The presets are such configurations too (``data/models.json``), so both take the same road.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from ..errors import SettingError
from .shape import ModelSpec

Config = Mapping[str, object]

# Keys that change what attention keeps of a token, or what an MLP weighs, and what they stand for.
_NOT_UNDERSTOOD = {
    "kv_lora_rank": "multi-head latent attention",
    "attention_chunk_size": "chunked attention",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "a state-space layer",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
}


@cache
def _presets() -> dict[str, Config]:
    return json.loads(resources.files(__package__).joinpath("data/models.json").read_text("utf-8"))


def model_names() -> list[str]:
    """Names of the presets, smallest OPT first."""
    return list(_presets())


def model(name_or_path: str | Path) -> ModelSpec:
    """The preset of that name, or the model of a ``config.json`` (or of the folder that holds one).

    Raises SettingError for a name that is not known, a file that is not a configuration, and
    attention that is neither multi-head nor grouped-query.
    """
    name = str(name_or_path)
    if name in _presets():
        return read_config(_presets()[name], name)
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise SettingError("model", name, f"one of {', '.join(_presets())}, or a path to a config.json")
    return read_config(_load(path), path.parent.name or path.stem)


def _load(path: Path) -> Config:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SettingError("model", str(path), f"is not readable as JSON ({error}); give a config.json") from error
    if not isinstance(config, dict):
        raise SettingError("model", str(path), "is not a model's configuration; give a config.json")
    return config


def read_config(config: Config, name: str) -> ModelSpec:
    """The spec that a configuration describes, under ``name``; raises SettingError for what it does not understand."""
    for key, meaning in _NOT_UNDERSTOOD.items():
        if config.get(key) is not None:
            remedy = f"{meaning} is not understood in {name}; give an MHA or GQA model"
            raise SettingError(key, config[key], remedy)
    _refuse_windows(config, name)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise SettingError("model_type", family, f"is not understood in {name}; one of {', '.join(_FAMILIES)}")
    return _FAMILIES[family](config, name)


def _refuse_windows(config: Config, name: str) -> None:
    remedy = f"sliding windows are not understood in {name}; give a model with full attention"
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise SettingError("sliding_window", config["sliding_window"], remedy)
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise SettingError("layer_types", kind, f"is not understood in {name}; give a model with full attention")


def _count(config: Config, name: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise SettingError(key, value, f"must be a whole number of at least 1 in {name}")
    return value


def _shape(config: Config, name: str) -> dict[str, int]:
    heads = _count(config, name, "num_attention_heads")
    hidden = _count(config, name, "hidden_size")
    kv_heads = _count(config, name, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise SettingError("num_key_value_heads", kv_heads, f"must divide the {heads} heads of {name}")
    if config.get("head_dim") is None and hidden % heads:
        remedy = f"must be a multiple of the {heads} heads of {name}, or give head_dim"
        raise SettingError("hidden_size", hidden, remedy)
    return {
        "num_layers": _count(config, name, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _count(config, name, "head_dim", hidden // heads),
        "vocab_size": _count(config, name, "vocab_size"),
        "max_model_len": _count(config, name, "max_position_embeddings"),
    }


def _llama(config: Config, name: str, **features: bool) -> ModelSpec:
    defaults = {
        "qkv_bias": bool(config.get("attention_bias")),
        "output_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
    }
    return ModelSpec(
        name=name,
        **_shape(config, name),
        intermediate_size=_count(config, name, "intermediate_size"),
        gated_mlp=True,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        **defaults | features,
    )


def _qwen2(config: Config, name: str) -> ModelSpec:
    return _llama(config, name, qkv_bias=True, output_bias=False, mlp_bias=False)


def _qwen3(config: Config, name: str) -> ModelSpec:
    return _llama(config, name, qk_norm=True)


def _opt(config: Config, name: str) -> ModelSpec:
    shape = _shape(config, name)
    if config.get("word_embed_proj_dim", shape["hidden_size"]) != shape["hidden_size"]:
        what = f"a projected embedding is not understood in {name}"
        remedy = f"{what}; give an OPT whose embedding is as wide as its layers"
        raise SettingError("word_embed_proj_dim", config["word_embed_proj_dim"], remedy)
    # OPT's position table has two rows more than positions: an offset kept from its training code.
    rows = shape["max_model_len"] + 2
    return _biased(name, shape, _count(config, name, "ffn_dim"), rows)


def _gpt2(config: Config, name: str) -> ModelSpec:
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    renamed = {names.get(key, key): value for key, value in config.items()}
    renamed["max_position_embeddings"] = config.get("n_positions")
    shape = _shape(renamed, name)
    return _biased(name, shape, _count(config, name, "n_inner", 4 * shape["hidden_size"]), shape["max_model_len"])


def _biased(name: str, shape: dict[str, int], intermediate_size: int, positions: int) -> ModelSpec:
    return ModelSpec(
        name=name,
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


_FAMILIES: dict[str, Callable[[Config, str], ModelSpec]] = {
    "opt": _opt,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
}
