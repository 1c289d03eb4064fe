"""Number formats of a checkpoint, from the ``quantization_config`` of its ``config.json``.

A format is that of the whole checkpoint (``quant_method``) less the modules that it leaves in 16 bits (``ignore``,
``modules_to_not_convert``), or one for each module (``quantized_layers``). Modules are projections of single layers; here they
are parts of the model (``matrix.PARTS``), so that all layers with a part must have it in one format. A part is looked up by one
of its modules, under the names that families give it:

    mixer    layers.7.self_attn.o_proj, layers.7.linear_attn.out_proj, ...
    expert   layers.7.mlp.experts.0.down_proj, layers.7.block_sparse_moe.experts.0.w2, ...

ModelOpt up to 0.29 wrote a file of its own, ``hf_quant_config.json``, with the same keys under ``quantization``. vLLM reads it where
``config.json`` has no ``quantization_config``, or none of the modules of a mixed checkpoint.

Sources: ``get_config`` and ``get_quant_config`` for that file; ``compressed_tensors.py``, ``modelopt.py`` and
``resolve_kv_cache_dtype_string`` of vLLM 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..types.errors import SettingError
from .config import Config
from .matrix import PARTS, QUANTIZATIONS, quantization_name
from .repositories import QUANTIZATION_FILE
from .shape import FileWeights, ModelSpec

_BY_ALGORITHM: dict[tuple[object, object], str] = {
    ("modelopt", "FP8"): "fp8",
    ("modelopt", "FP8_PER_CHANNEL_PER_TOKEN"): "fp8",
    ("modelopt", "FP8_PB_WO"): "fp8",
    ("modelopt", "NVFP4"): "nvfp4",
    ("modelopt", "MXFP8"): "mxfp8",
    ("compressed-tensors", "float-quantized"): "fp8",
    ("compressed-tensors", "int-quantized"): "int8",
    ("compressed-tensors", "nvfp4-pack-quantized"): "nvfp4",
    ("compressed-tensors", "mxfp4-pack-quantized"): "mxfp4",
}
_PACKED = {(4, 128): "w4a16", (4, 32): "w4a16-g32"}
_OF_LAYERS = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "MXFP8": "mxfp8"}
_KNOWN = "one of awq, gptq and auto-round with 4 bits in groups of 128, w4a16, fp8, int8, mxfp4, mxfp8, nvfp4, or null for 16 bit"
_MODULES = {
    "mixer": ("self_attn.o_proj", "linear_attn.out_proj", "mixer.out_proj", "mixer.o_proj"),
    "mlp": ("mlp.down_proj", "feed_forward.down_proj", "mixer.down_proj"),
    "shared": (
        "mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj", "mixer.shared_experts.down_proj",
        "block_sparse_moe.shared_experts.down_proj",
    ),
    "expert": (
        "mlp.experts.0.down_proj", "experts.0.down_proj", "block_sparse_moe.experts.0.w2", "mixer.experts.0.down_proj",
    ),
}  # fmt: skip
#: Formats of the experts of DeepSeek V4 by its ``expert_dtype`` (``DeepseekV4FP8Config`` of vLLM); of NVIDIA's copies by another key.
_EXPERTS_OF_V4 = {"fp4": "mxfp4", "fp8": "fp8"}
#: Gemma 4 has its experts beside the MLP of a layer, which counts as a shared expert.
_MODULES_OF_GEMMA4 = _MODULES | {"shared": ("mlp.down_proj",), "expert": ("experts.0.down_proj",)}


#: The index of a checkpoint's files of weights, and the names of layers and of drafters in it.
INDEX_FILE = "model.safetensors.index.json"
_LAYER = re.compile(r"^(?:model\.|language_model\.)*(?:layers\.(\d+)|mtp)\.")
#: More bytes than any checkpoint has.
_MOST_BYTES = 1 << 50
#: What vLLM requires of NVFP4 in ModelOpt's own file.
_REQUIRED_OF_NVFP4 = ("group_size", "exclude_modules")
#: Parts of layers in 16 bits.
Plain = frozenset[tuple[str, int]]
#: Formats in the names of quantised checkpoints.
_IN_NAMES = re.compile(
    r"(?:^|[-_./])(nvfp4|mxfp4|fp4|mxfp8|fp8|awq|gptq|int[48]|w[48]a(?:4|8|16)|[48]-?bit)(?=$|[-_.])", re.IGNORECASE
)


def named_format(name: str, config: Config) -> str | None:
    """The format in the name of a checkpoint with a ``config.json`` that says nothing of one, such as "NVFP4"; None without."""
    text = config.get("text_config")
    if "quantization_config" in {**config, **(text if isinstance(text, dict) else {})}:
        return None
    found = _IN_NAMES.search(name)
    return found and found[1]


def file_weights(index: Mapping[str, Any], num_layers: int) -> FileWeights | None:
    """What an index of safetensors says of the size of all tensors; None if it does not. A drafter's are named ``mtp``, or are of layers past
    the model's."""
    found, names = index.get("metadata"), index.get("weight_map")
    total = found.get("total_size") if isinstance(found, dict) else None
    if isinstance(total, bool) or not isinstance(total, int | float) or not 0 < total < _MOST_BYTES:
        return None
    layers = (_LAYER.search(name) for name in names) if isinstance(names, dict) else ()
    past = any(found is not None and (found[1] is None or int(found[1]) >= num_layers) for found in layers)
    return FileWeights(int(total), past)


def needs_quantization_file(config: Config) -> bool:
    """Whether vLLM looks for ``QUANTIZATION_FILE`` beside this ``config.json``."""
    given = config.get("quantization_config")
    if given is None:
        return True
    keys = given if isinstance(given, dict) else {}
    return (
        _method(keys) == "modelopt" and keys.get("quant_algo") == "MIXED_PRECISION" and "quantized_layers" not in keys
    )


def with_quantization_file(config: Config, found: Mapping[str, Any]) -> Config:
    """A configuration that ``needs_quantization_file``, with the contents of that file."""
    inner = found.get("quantization")
    inner = inner if isinstance(inner, dict) else {}
    given = config.get("quantization_config")
    if isinstance(given, dict):
        return {**config, "quantization_config": {**given, "quantized_layers": inner.get("quantized_layers")}}
    return {**config, "quantization_config": found}


def with_formats(spec: ModelSpec, config: Config) -> ModelSpec:
    """The model with the number formats of its weights and of its KV cache.

    Raises:
        SettingError: A format is not supported, or layers differ in it.
    """
    given = config.get("quantization_config")
    if given is None:
        return spec
    keys: Mapping[str, Any] = given if isinstance(given, dict) else {}
    method, assumed = _method(keys), None
    if isinstance(own := keys.get("quantization"), dict):
        method, keys, assumed = "modelopt", {**keys, **own}, _lacking(spec, own)
    if spec.compressed:
        return _of_v4(spec, config, keys, method)
    modules = _MODULES_OF_GEMMA4 if config.get("model_type") == "gemma4_text" else _MODULES
    if isinstance(keys.get("quantized_layers"), dict) and method == "modelopt":
        formats, plain = _listed(spec, keys["quantized_layers"], modules)
    else:
        formats, plain = _ignoring(spec, _format(spec, given, keys, method), keys, modules)
    return replace(
        spec,
        quantization=quantization_name(formats),
        fp8_block=_fp8_block(keys, method),
        unquantized=plain | spec.unquantized,
        kv_dtype=_kv_dtype(keys, method),
        assumed=assumed,
    )


def _of_v4(spec: ModelSpec, config: Config, keys: Mapping[str, Any], method: object) -> ModelSpec:
    """DeepSeek V4: attention and shared experts in fp8, whatever the modules listed; experts in a format of their own."""
    dtype, of_experts = config.get("expert_dtype", "fp4"), str(keys.get("moe_quant_algo") or "").upper()
    if method != "fp8" or dtype not in _EXPERTS_OF_V4 or of_experts not in ("", "NVFP4"):
        key = "expert_dtype" if method == "fp8" and not of_experts else "quantization_config"
        raise SettingError(key, config.get(key), f"is not understood in {spec.name}; fp8, with experts in fp4 or fp8")
    experts = "nvfp4" if of_experts else _EXPERTS_OF_V4[dtype]
    formats = _complete(spec, {"mixer": "fp8", "shared": "fp8", "expert": experts})
    return replace(spec, quantization=quantization_name(formats), fp8_block=_fp8_block(keys, method))


def _fp8_block(keys: Mapping[str, Any], method: object) -> int | None:
    """Inputs and outputs that share a scale, where they are as many."""
    block = keys.get("weight_block_size")
    if method != "fp8" or not isinstance(block, list) or len(block) != 2 or block[0] != block[1]:
        return None
    return block[0] if isinstance(block[0], int) and block[0] > 0 else None


def _lacking(spec: ModelSpec, own: Mapping[str, Any]) -> str | None:
    """The assumption to report where ModelOpt's own file lacks keys that vLLM requires with NVFP4; None where it has them, or another format."""
    missing = [key for key in _REQUIRED_OF_NVFP4 if key not in own]
    if "NVFP4" not in str(own.get("quant_algo")).upper() or not missing:
        return None
    return (
        f"{spec.name}: {QUANTIZATION_FILE} lacks {', '.join(missing)}, which vLLM requires with NVFP4; all layers are taken to be in NVFP4,"
        " in groups of 16."
    )


def _method(keys: Mapping[str, Any]) -> object:
    """The library of a format; "modelopt" for each of its own methods."""
    method, producer = keys.get("quant_method"), keys.get("producer")
    wrote = producer.get("name") if isinstance(producer, dict) else None
    if str(method).startswith("modelopt") or (method is None and wrote == "modelopt"):
        return "modelopt"
    return method


def _format(spec: ModelSpec, given: object, keys: Mapping[str, Any], method: object) -> str:
    """The format of all quantised modules."""
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method == "mxfp4":
        return "mxfp4"
    algorithm = keys.get("quant_algo") or keys.get("format")
    # ModelOpt and llm-compressor write one method for several formats.
    if found := _BY_ALGORITHM.get((method, algorithm)):
        return found
    if (method, algorithm) == ("compressed-tensors", "pack-quantized") and (form := _packed(keys)):
        return form
    if method in ("awq", "gptq", "auto-round") and (keys.get("bits"), keys.get("group_size")) == (4, 128):
        # AutoRound packs as GPTQ or AWQ do, which have the same bytes.
        return "awq" if method == "awq" else "gptq"
    raise SettingError("quantization_config", given, f"is not understood in {spec.name}; {_KNOWN}")


def _packed(keys: Mapping[str, Any]) -> str | None:
    """The format of integers that compressed-tensors packs, if all groups of modules have one with symmetric scales."""
    groups = keys.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    if not all(isinstance(each, dict) and each.get("symmetric") and each.get("type") == "int" for each in weights):
        return None
    sizes = {(each.get("num_bits"), each.get("group_size")) for each in weights}
    return _PACKED.get(sizes.pop()) if len(sizes) == 1 else None


def _kv_dtype(keys: Mapping[str, Any], method: object) -> str | None:
    """Format of the KV cache that vLLM takes from the checkpoint; None if it takes none.

    vLLM asks for a ``quant_method`` here, which it fills in for ModelOpt's own file alone.
    """
    scheme = keys.get("kv_cache_scheme")
    if method == "modelopt" and (keys.get("quant_method") or "quantization" in keys):
        scheme = scheme or keys.get("kv_cache_quant_algo")
        if isinstance(scheme, dict):
            bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
            eight = bits == 8 and scheme.get("dynamic") is False
            scheme = "fp8" if eight else "nvfp4" if bits == 4 else None
        return str(scheme).lower() if str(scheme).lower() in ("fp8", "nvfp4") else None
    return "fp8" if method == "compressed-tensors" and scheme else None


def _ignoring(
    spec: ModelSpec, form: str, keys: Mapping[str, Any], modules: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, str], Plain]:
    """One format for all parts that no pattern names, and the parts of layers that one does."""
    named = ("ignore", "exclude_modules", "modules_to_not_convert")
    key = next((key for key in named if keys.get(key)), "ignore")
    patterns = keys.get(key) or []
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise SettingError(f"quantization_config.{key}", patterns, f"must be a list of names of modules in {spec.name}")
    # Layers for multi-token prediction count from 0 again.
    tests = [_pattern(each) for each in patterns if not each.startswith("mtp")]
    found: dict[str, str] = {}
    plain: set[tuple[str, int]] = set()
    for part in (part for part in QUANTIZATIONS[form].parts if part in _MODULES):
        layers = _layers(spec, part)
        left = {
            layer
            for layer in layers
            if any(test.search(name) for name in _names(modules[part], layer) for test in tests)
        }
        if len(left) < len(layers):
            found[part] = form
            plain.update((part, layer) for layer in left)
    return _complete(spec, found), frozenset(plain)


def _listed(
    spec: ModelSpec, layers: Mapping[str, Any], modules: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, str], Plain]:
    """The format of each part, from a list of modules with theirs, and the parts of layers that it does not list."""
    algorithms = {_bare(name): value.get("quant_algo") for name, value in layers.items() if isinstance(value, dict)}
    found: dict[str, str] = {}
    plain: set[tuple[str, int]] = set()
    for part in PARTS:
        places = (
            {layer: list(_names(modules[part], layer)) for layer in _layers(spec, part)}
            if part != "head"
            else {0: ["lm_head"]}
        )
        given = {
            layer: {str(algorithms[name]) for place in names for name in _prefixes(place) if name in algorithms}
            for layer, names in places.items()
        }
        forms = set().union(*given.values())
        if forms and (len(forms) > 1 or not forms <= _OF_LAYERS.keys()):
            known = ", ".join(_OF_LAYERS)
            remedy = f"of {part} of {spec.name} is not understood; one of {known} for all layers"
            raise SettingError("quantization_config.quantized_layers", ", ".join(sorted(forms)), remedy)
        if forms:
            found[part] = _OF_LAYERS[forms.pop()]
            plain.update((part, layer) for layer, listed in given.items() if not listed)
    return _complete(spec, found), frozenset(plain)


def deciding_modules(spec: ModelSpec, listed: Any) -> Any:
    """Of the modules that a checkpoint names, or gives formats, those by which the format of a part of the model is decided."""
    known = [
        name
        for modules in (_MODULES, _MODULES_OF_GEMMA4)
        for part in modules
        for layer in _layers(spec, part)
        for name in _names(modules[part], layer)
    ]
    if isinstance(listed, dict):
        places = {prefix for name in [*known, "lm_head"] for prefix in _prefixes(name)}
        return {
            name: {"quant_algo": value.get("quant_algo")} for name, value in listed.items() if _bare(name) in places
        }
    return [text for text in listed if any(_pattern(text).search(name) for name in known)] or listed[:1]


def _complete(spec: ModelSpec, found: dict[str, str]) -> dict[str, str]:
    """With the format of all other layers for parts that the model does not have: a name without parts means all."""
    forms = {found.get(part) for part in _MODULES if _layers(spec, part)}
    alone = forms.pop() if len(forms) == 1 else None
    if alone is None or "head" in found:
        return found
    return dict.fromkeys(QUANTIZATIONS[alone].parts, alone)


def _layers(spec: ModelSpec, part: str) -> list[int]:
    """The layers that have a part."""
    experts = spec.experts
    has = {
        "mixer": lambda layer: spec.span(layer).kind != "none",
        "mlp": lambda layer: spec.has_mlp(layer) and not spec.has_experts(layer),
        "shared": lambda layer: spec.has_experts(layer) and experts is not None and experts.shared_size > 0,
        "expert": spec.has_experts,
    }[part]
    return [layer for layer in range(spec.num_layers) if has(layer)]


def _names(modules: Iterable[str], layer: int) -> Iterable[str]:
    return (f"layers.{layer}.{module}" for module in modules)


def _prefixes(name: str) -> Iterable[str]:
    """A module and the modules that contain it."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _bare(name: str) -> str:
    """A module's name from its layer on."""
    return name[name.index("layers.") :] if "layers." in name else name


def _pattern(text: str) -> re.Pattern[str]:
    """A search for the modules that an entry names: a regular expression (``re:``), a name with ``*``, or a name and all below."""
    if text.startswith("re:"):
        return re.compile(text[3:])
    name = re.escape(_bare(text)).replace(r"\*", ".*")
    return re.compile(rf"(^|\.){name}(\.|$)")
