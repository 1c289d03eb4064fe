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
from ..types.notes import note
from ..types.user_files import content_of, json_value
from .checkpoint import INDEX_FILE, file_weights, named_format, needs_quantization_file, with_quantization_file
from .config import Config
from .families import read_config, refuse_unsupported
from .repositories import (
    NAME_A_FILE,
    QUANTIZATION_FILE,
    cached_config,
    config_file,
    download,
    in_formats,
    nearest,
    short_for,
    unsupported,
)
from .shape import ModelSpec
from .stored import Stored, stored, stored_names


@cache
def _presets() -> dict[str, Config]:
    return json_value(resources.files(__package__).joinpath("data/models.json").read_text("utf-8"))


@cache
def _by_repository() -> dict[str, str]:
    """Presets by the repository that their facts are of, in small letters."""
    return {
        str(config["_name_or_path"]).lower(): name for name, config in _presets().items() if "_name_or_path" in config
    }


def preset_config(name: str) -> Config:
    """The ``config.json`` of a preset, as far as it is stored: its own facts, or those of the repository that it is a short name of."""
    facts = _stored_of(name)
    return _presets()[name] if facts is None else facts.config


def _stored_of(preset: str) -> Stored | None:
    """The stored facts that a preset is a short name of; None if it has facts of its own."""
    config = _presets()[preset]
    return stored(str(config["_name_or_path"])) if len(config) == 1 else None


@cache
def _named(name: str) -> ModelSpec:
    """The model of a preset, or of a repository with stored facts, under its short name if it has one."""
    facts = _stored_of(name) if name in _presets() else stored(name)
    if facts is None:
        return read_config(_presets()[name], name)
    spec, preset = (
        read_files(facts.config, facts.quantization_file, facts.name),
        _by_repository().get(facts.name.lower()),
    )
    name = preset if preset is not None and _stored_of(preset) is not None else facts.name
    assumed = spec.assumed if facts.doubt is None else f"{facts.name}: {facts.doubt}."
    return replace(spec, name=name, assumed=assumed)


def read_files(config: Config, beside: Config | None, name: str, checkpoint: str | None = None) -> ModelSpec:
    """The model of a ``config.json`` and of ModelOpt's file, if vLLM reads one beside it.

    Args:
        beside: ``hf_quant_config.json``, if there is one.
        name: Name of the model.
        checkpoint: Name of the checkpoint, which may have a number format; None is the model's.

    Raises:
        SettingError: The family, a key or a value is not supported.
    """
    if beside is not None and needs_quantization_file(config):
        config = with_quantization_file(config, beside)
    return replace(read_config(config, name), named_format=named_format(checkpoint or name, config))


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
    spec = _model(name, _found(name))
    if spec.assumed is not None:
        note(spec.assumed)
    return spec


def _model(name: str, found: str | Path) -> ModelSpec:
    if not isinstance(found, Path):
        return _named(found)
    config = _load(found)
    beside = _quantization_file(name, found, config)
    shown = (found.parent.name or found.stem) if Path(name).exists() else name
    spec = read_files(
        config, None if beside is None else _load(beside, "quantization"), shown, _checkpoint(name, found)
    )
    index = found.with_name(INDEX_FILE)
    if found.name != "config.json" or not index.is_file():
        return spec
    return replace(spec, file_weights=file_weights(_load(index, "index"), spec.num_layers))


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
    if name in _presets():
        return None
    facts = stored(found)
    if facts is None:
        return f"preset {found}"
    doubt = f"; {facts.doubt}" if facts.doubt else ""
    return f"config.json of {facts.name}: {facts.source}, read {facts.read}{doubt}"


def published_formats(name: str) -> list[str]:
    """Repositories with stored facts that have a model in other number formats; none for one that is quantised itself, or a file.

    Their names have suffixes such as ``-FP8`` more, and their shape is the same.
    """
    found = _found(name)
    if isinstance(found, Path):
        return []
    own = _named(found)
    if own.quantization is not None:
        return []
    others = ((each, _named(each)) for each in in_formats(_repository_of(found) or found, stored_names()))
    return [
        each
        for each, spec in others
        if spec.quantization is not None
        and (spec.num_layers, spec.hidden_size, spec.vocab_size) == (own.num_layers, own.hidden_size, own.vocab_size)
    ]


def repository(name: str) -> str | None:
    """The repository on the Hugging Face hub that a name stands for; None for a local file, and for a preset of no published model."""
    found = _found(name)
    if isinstance(found, Path):
        return None if Path(name).exists() else name
    return _repository_of(found)


def _repository_of(found: str) -> str | None:
    """That of a preset, or of stored facts."""
    if found not in _presets():
        return found
    named = _presets()[found].get("_name_or_path")
    return None if named is None else str(named)


def _found(name: str) -> str | Path:
    """A preset or a repository with stored facts, or a ``config.json``.

    In order: a preset's name, a path, the cache of the hub, stored facts, a preset with facts of that repository, the only known model
    that a short name stands for, the hub.
    """
    if name in _presets():
        return name
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise SettingError("model", name, "is a folder without a config.json; name another, or a preset")
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return path
    if path.exists() or name.endswith(".json"):
        raise SettingError("model", name, "is no file here; give the path of a config.json, or a preset")
    if (cached := cached_config(name)) is not None:
        return cached
    if (facts := stored(name)) is not None:
        return facts.name
    if (own := _by_repository().get(name.rstrip("/").lower())) is not None:
        return own
    if (kind := unsupported(name)) is not None:
        refuse_unsupported(kind, name)
    known = [*_presets(), *stored_names()]
    if (taken := _short_for(name, known)) is not None:
        note(f"Model: {taken}, the only known one that {name} may stand for.")
        return taken
    alike = nearest(name, known)
    if (downloaded := config_file(name, alike)) is not None:
        return downloaded
    if alike is not None:
        remedy = f"is no file or folder here; give one, or the model of nearly that name: --model {alike}"
        raise SettingError("model", name, remedy)
    if "/" in name:
        raise SettingError("model", name, f"is no file or folder here; {NAME_A_FILE}")
    raise SettingError("model", name, f"one of {', '.join(_presets())}, or a path to a config.json")


def _short_for(name: str, known: list[str]) -> str | None:
    """The model that a name without an organisation stands for; None without one.

    Raises:
        SettingError: There are several, other than a preset and the repository that its facts are of.
    """
    if name.lower() in _presets():
        return name.lower()
    found = short_for(name, known)
    distinct = {_by_repository().get(each.lower(), each): each for each in reversed(found)}
    if len(distinct) > 1:
        raise SettingError("model", name, f"may be {' or '.join(sorted(distinct.values()))}; give one of these")
    return next(iter(distinct.values()), None)


def _quantization_file(name: str, path: Path, config: Config) -> Path | None:
    """The file of ModelOpt that vLLM reads beside a ``config.json``; of a repository that says a format by its name, from the hub, too."""
    if path.name != "config.json" or not needs_quantization_file(config):
        return None
    beside = path.with_name(QUANTIZATION_FILE)
    if not beside.is_file() and not Path(name).exists() and named_format(name, config):
        download(name, QUANTIZATION_FILE, path.parent.name)
    return beside if beside.is_file() else None


def _checkpoint(name: str, path: Path) -> str:
    """The name of a repository, or of a local folder or file."""
    if not Path(name).exists():
        return name
    path = path.resolve()
    return path.parent.name if path.name == "config.json" else path.stem


def _load(path: Path, field: str = "model") -> Config:
    try:
        config = json_value(content_of(path, field))
    except ValueError as error:
        raise SettingError("model", str(path), f"is not readable as JSON ({error}); give a config.json") from error
    if not isinstance(config, dict):
        raise SettingError("model", str(path), "is not a model's configuration; give a config.json")
    return config
