"""Input files named by the flags of a command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

#: Files that commands read from a folder.
_READ = (".json", ".parquet", ".npz")


def named_files(**arguments: Any) -> dict[str, list[Path]]:
    """Files named by arguments of a command, by the name of the argument or of its field.

    Values of ``name=value`` and of comma-separated lists count too, such as ``trace=a.csv,b.csv``. A result folder
    stands for its tables and documents, but not for a page in it. A text argument that names a folder, such as --model,
    stands for the config.json in it: --policy orca-max does not read a folder of that name.
    """
    found: dict[str, list[Path]] = {}
    for name, argument in arguments.items():
        for field, path in _paths(name, argument):
            found.setdefault(field, []).extend(_files(path))
    return found


def _paths(name: str, value: Any) -> Iterator[tuple[str, Path]]:
    """Values that may name a file, each with its field."""
    if isinstance(value, Path):
        yield name, value
    elif isinstance(value, str):
        for part in filter(None, (value, *re.split("[=,]", value))):
            for path in (Path(part), Path(part, "config.json")):
                if _is_file(path):
                    yield name, path
    elif is_dataclass(value):
        for field in fields(value):
            yield from _paths(field.name, getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _paths(name, one)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _files(path: Path) -> list[Path]:
    try:
        return [file for file in path.iterdir() if file.suffix in _READ] if path.is_dir() else [path]
    except OSError:  # the command itself reports the unreadable file
        return []
