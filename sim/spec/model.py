"""Models by name, and from the ``config.json`` that Hugging Face stores beside the weights.

The presets are such configurations too (``data/models.json``), so both take the same road. ``toy-llama`` and
``toy-opt`` are no published models: the same kinds of layers, so small that a CPU computes a step in milliseconds.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path

from ..types.errors import SettingError
from .config import Config
from .families import read_config
from .shape import ModelSpec


@cache
def _presets() -> dict[str, Config]:
    return json.loads(resources.files(__package__).joinpath("data/models.json").read_text("utf-8"))


def model_names() -> list[str]:
    """Names of the presets, smallest OPT first."""
    return list(_presets())


def model(name_or_path: str | Path) -> ModelSpec:
    """The preset of that name, or the model of a ``config.json`` (or of the folder that holds one).

    Of a model that also sees or hears, the text part: encoders are not counted.

    Raises SettingError for a name that is not known, a file that is not a configuration, and a
    configuration that is not understood: of an unknown family, or with layers that its family
    does not describe.
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
    # Of a ValueError: no text, no JSON, numbers of thousands of digits; brackets as deep are a RecursionError.
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError("model", str(path), f"is not readable as JSON ({error}); give a config.json") from error
    if not isinstance(config, dict):
        raise SettingError("model", str(path), "is not a model's configuration; give a config.json")
    return config
