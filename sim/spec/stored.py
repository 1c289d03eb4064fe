"""Checkpoints by the name of their repository: the keys of their ``config.json`` that the readers of this folder need.

``data/repositories.json`` has them, each with the file that they were read from and the day. ``python docs/models.py`` writes it from
folders of real ``config.json`` files. The keys go through the same reader as a file, so that a name and its file answer alike.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import NamedTuple

from ..types.user_files import json_value
from .config import Config

DATA = "data/repositories.json"


class Stored(NamedTuple):
    """What is known of a repository.

    Attributes:
        name: The repository, as its publisher writes it.
        source: The file that the keys were read from.
        read: The day on which it was read, as 2026-11-28.
        config: The keys of ``config.json`` that are needed.
        quantization_file: Those of ModelOpt's ``hf_quant_config.json``; None if the repository has none, or vLLM does not read it.
        doubt: Why the file is weaker evidence than the publisher's own, for the reader of an answer; None if it is as good.
    """

    name: str
    source: str
    read: str
    config: Config
    quantization_file: Config | None = None
    doubt: str | None = None


@cache
def _table() -> dict[str, Stored]:
    written = json_value(resources.files(__package__).joinpath(DATA).read_text("utf-8"))
    found = (
        Stored(name, facts["source"], facts["read"], facts["config"], facts.get("hf_quant_config"), facts.get("doubt"))
        for name, facts in written.items()
    )
    return {each.name.lower(): each for each in found}


def stored(name: str) -> Stored | None:
    """The facts of a repository, whatever the case of its letters; None if no file of it is stored."""
    return _table().get(name.rstrip("/").lower())


def stored_names() -> list[str]:
    """The repositories with stored facts."""
    return [each.name for each in _table().values()]
