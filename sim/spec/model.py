"""Models by name, or from the ``config.json`` that Hugging Face stores with the weights; ``repositories`` finds it.

The presets are configurations as well (``data/models.json``) and are read by the same functions. ``toy-llama`` and
``toy-opt`` are not published models: they have the same kinds of layers, and a CPU computes a step in milliseconds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path

from ..types.errors import SettingError
from ..types.user_files import content_of, json_value
from .checkpoint import named_format, needs_quantization_file, with_quantization_file
from .config import Config
from .families import read_config, refuse_unsupported
from .repositories import (
    QUANTIZATION_FILE,
    Known,
    cached_config,
    config_file,
    download,
    namesake,
    preset_of,
    unsupported,
)
from .shape import ModelSpec


@cache
def _presets() -> dict[str, Config]:
    return json_value(resources.files(__package__).joinpath("data/models.json").read_text("utf-8"))


@cache
def _preset(name: str) -> ModelSpec:
    return read_config(_presets()[name], name)


def model_names() -> list[str]:
    """Names of the presets, smallest OPT first."""
    return list(_presets())


def model(name_or_path: str | Path) -> ModelSpec:
    """The preset of that name, the model of a ``config.json`` (or of the folder that contains one), or of a repository
    on the Hugging Face hub (``repositories``).

    For a multimodal model this is the text model, with the weights of its vision encoder (``encoders``).

    Raises:
        SettingError: The name is unknown, the file is not a configuration, the family is unknown, or the
            configuration has layers that its family does not support.
    """
    name = str(name_or_path)
    found = _found(name)
    if isinstance(found, Path):
        config = _load(found)
        if (beside := _quantization_file(name, found, config)) is not None:
            config = with_quantization_file(config, _load(beside))
        spec = read_config(config, (found.parent.name or found.stem) if Path(name).exists() else name)
        return replace(spec, named_format=_named_format(name, found, config))
    spec = _preset(found.preset)
    return replace(spec, quantization=found.quantization or spec.quantization, kv_dtype=found.kv_dtype or spec.kv_dtype)


def origin(name: str) -> str | None:
    """Source of the shape of a model that is named, for ``run.json``; None for a preset by its own name.

    That of a file has the SHA-256 of its contents, and of one from the hub its revision.
    """
    found = _found(name)
    if isinstance(found, Path):
        digest = f"config.json with SHA-256 {sha256(found.read_bytes()).hexdigest()}"
        if (beside := _quantization_file(name, found, _load(found))) is not None:
            digest += f", {QUANTIZATION_FILE} with SHA-256 {sha256(beside.read_bytes()).hexdigest()}"
        if Path(name).exists():
            return digest
        return f"{name} on the Hugging Face hub, revision {found.parent.name}, {digest}"
    if name == found.preset:
        return None
    guessed = f"; weights in {found.quantization} by the name" if found.is_guess else ""
    return f"preset {found.preset}, which has the shape of {name}{guessed}"


def _found(name: str) -> Known | Path:
    """A preset, or a ``config.json``: in order a preset's name, a path, a preset's repository, the cache of the hub, the hub.

    The file in the cache says more than the suffix of a name.
    """
    if name in _presets():
        return Known(name)
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise SettingError("model", name, "is a folder without a config.json; name another, or a preset")
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return path
    if path.exists() or name.endswith(".json"):
        raise SettingError("model", name, "is no file here; give the path of a config.json, or a preset")
    known = preset_of(name, _presets())
    if known is not None and not (known.is_guess and cached_config(name)):
        return known
    if (kind := unsupported(name)) is not None:
        refuse_unsupported(kind, name)
    alike = namesake(name, _presets())
    if (downloaded := config_file(name, alike)) is not None:
        return downloaded
    if alike is not None:
        raise SettingError(
            "model", name, f"is no file or folder here; give one, or the preset of that name: --model {alike}"
        )
    raise SettingError("model", name, f"one of {', '.join(_presets())}, or a path to a config.json")


def _quantization_file(name: str, path: Path, config: Config) -> Path | None:
    """The file of ModelOpt that vLLM reads beside a ``config.json``; of a repository that says a format by its name, from the hub, too."""
    if path.name != "config.json" or not needs_quantization_file(config):
        return None
    beside = path.with_name(QUANTIZATION_FILE)
    if not beside.is_file() and not Path(name).exists() and _named_format(name, path, config):
        download(name, QUANTIZATION_FILE, path.parent.name)
    return beside if beside.is_file() else None


def _named_format(name: str, path: Path, config: Config) -> str | None:
    """``named_format`` of a repository, or of a local folder or file."""
    if not Path(name).exists():
        return named_format(name, config)
    path = path.resolve()
    return named_format(path.parent.name if path.name == "config.json" else path.stem, config)


def _load(path: Path) -> Config:
    try:
        config = json_value(content_of(path, "model"))
    except ValueError as error:
        raise SettingError("model", str(path), f"is not readable as JSON ({error}); give a config.json") from error
    if not isinstance(config, dict):
        raise SettingError("model", str(path), "is not a model's configuration; give a config.json")
    return config
