"""Models by name, or from the ``config.json`` that Hugging Face stores with the weights; ``repositories`` finds it.

The presets are configurations as well (``data/models.json``) and are read by the same functions. ``toy-llama`` and
``toy-opt`` are not published models: they have the same kinds of layers, and a CPU computes a step in milliseconds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from ..types.errors import SettingError
from .config import Config
from .families import read_config
from .repositories import config_file, preset_of
from .shape import ModelSpec


@cache
def _presets() -> dict[str, Config]:
    return json.loads(resources.files(__package__).joinpath("data/models.json").read_text("utf-8"))


def model_names() -> list[str]:
    """Names of the presets, smallest OPT first."""
    return list(_presets())


def model(name_or_path: str | Path) -> ModelSpec:
    """The preset of that name, the model of a ``config.json`` (or of the folder that contains one), or of a repository
    on the Hugging Face hub (``repositories``).

    For a multimodal model this is the text model: encoders are not counted.

    Raises:
        SettingError: The name is unknown, the file is not a configuration, the family is unknown, or the
            configuration has layers that its family does not support.
    """
    name = str(name_or_path)
    if name in _presets():
        return read_config(_presets()[name], name)
    path = Path(name_or_path)
    if path.exists():
        return _of_file(path)
    preset, quantization = preset_of(name, _presets())
    if preset is not None:
        shape = read_config(_presets()[preset], preset)
        return replace(shape, quantization=quantization) if quantization else shape
    found = config_file(name)
    if found is None:
        raise SettingError("model", name, f"one of {', '.join(_presets())}, or a path to a config.json")
    return read_config(_load(found), name)


def _of_file(path: Path) -> ModelSpec:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise SettingError("model", str(path), f"one of {', '.join(_presets())}, or a path to a config.json")
    return read_config(_load(path), path.parent.name or path.stem)


def _load(path: Path) -> Config:
    try:
        config = json.loads(path.read_text("utf-8"))
    # ValueError: not UTF-8, not JSON, or a number of thousands of digits. RecursionError: thousands of nested brackets.
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError("model", str(path), f"is not readable as JSON ({error}); give a config.json") from error
    if not isinstance(config, dict):
        raise SettingError("model", str(path), "is not a model's configuration; give a config.json")
    return config
