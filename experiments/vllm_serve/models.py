"""The model that a command line names: a path, a preset, or the preset of a Hugging Face repository's shape."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ...sim.spec import ModelSpec, model, model_names
from ...sim.types.errors import SettingError

#: Repositories with the shape of a preset under another name.
_ALIKE = {
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
}
#: Suffixes of quantised repositories' names, and the format of their weights.
_QUANTIZED = (
    (re.compile(r"-awq(-int4)?$"), "awq"),
    (re.compile(r"-gptq(-int4|-4bit)?$"), "gptq"),
    (re.compile(r"-quantized\.w4a16$"), "gptq"),
    (re.compile(r"-quantized\.w8a8$"), "int8"),
    (re.compile(r"-fp8(-dynamic|-kv)?$"), "fp8"),
)
_TUNED = re.compile(r"-(instruct|chat|hf|it|base)(?=-|$)")


def served_model(name: str) -> ModelSpec:
    """The shape of the model with this name on a command line.

    Raises:
        SettingError: The name is not a path, a preset, or a repository with the shape of a preset.
    """
    if name in model_names() or Path(name).exists():
        return model(name)
    preset, quantization = _preset(name)
    if preset is None:
        remedy = f"has no shape here; give --model its config.json, or one of {', '.join(model_names())}"
        raise SettingError("model", name, remedy)
    shape = model(preset)
    return replace(shape, quantization=quantization) if quantization else shape


def _preset(name: str) -> tuple[str | None, str | None]:
    """Preset of that repository, and the number format in the suffix of its name."""
    bare = name.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    quantization = None
    for pattern, form in _QUANTIZED:
        bare, found = pattern.subn("", bare)
        quantization = form if found else quantization
    bare = _TUNED.sub("", bare)
    bare = _ALIKE.get(bare, bare)
    return (bare if bare in model_names() else None), quantization
