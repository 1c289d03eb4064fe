"""Store of finished figures' documents, found again by the hash of their inputs.

A document has under ``follows_from`` the hash of everything that determines it: the figure, its lengths, its seeds, the
code and numpy's version. A document with another hash is out of date and is made again. Its file also has the hash of
its content, and a damaged document is made again, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...sim.output.files import as_json
from ...sim.output.folders import OutputFolder
from ...sim.types.user_files import json_value
from ...traces import LengthPairs, Trace

_KEY, _CONTENT = "follows_from", "content_sha256"
_PACKAGE = Path(__file__).parents[2]
#: Files that determine a document; pictures do not.
_FOLDERS = ("sim", "traces", "experiments")


def key(
    figure: str, exact: Sequence[LengthPairs | None], seeds: tuple[int, ...] | None, record: Trace | None = None
) -> str:
    """The hash for a figure.

    Args:
        exact: The pairs of each set that it serves; None for a set that it draws or does not serve.
        seeds: None if nothing is drawn.
        record: Requests that it serves with the contents of their prompts, if it does.
    """
    content = [figure, versions(), [None if pairs is None else _hash_of(pairs) for pairs in exact], seeds]
    if record is not None:
        columns = {} if record.content is None else record.content.columns()
        every = [record.arrival_ticks, *(getattr(record.content, name) for name in columns)]
        content.append(
            [_hash_of(record.pairs), _hash([column if column is None else column.tolist() for column in every])]
        )
    return _hash(content)


def versions() -> dict[str, str]:
    """Inputs of every result besides its own: the code of fragmeter, and numpy's version, which draws and rounds."""
    return {"fragmeter": __version__, "code_sha256": code_sha256(), "numpy": np.__version__}


@cache
def code_sha256() -> str:
    """A hash of all code and facts that a document depends on."""
    found = sha256()
    for folder in _FOLDERS:
        for path in sorted((_PACKAGE / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                found.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def _hash_of(pairs: LengthPairs) -> str:
    found = sha256(pairs.name.encode())
    for lengths in (pairs.prompt_tokens, pairs.output_tokens):
        found.update(lengths.astype("<i8").tobytes())
    return found.hexdigest()


def _hash(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Kept:
    """Documents in a folder, one file each.

    Args:
        folder: None stores nothing.
        within: Subfolder of the documents.
    """

    def __init__(self, folder: OutputFolder | None, within: str = "") -> None:
        self._folder, self._within = folder, within

    def find(self, name: str, key: str) -> dict[str, Any] | None:
        """The stored document with this key; None if there is none, or its file is damaged."""
        if self._folder is None:
            return None
        try:
            document = json_value(self._folder.read(self._path(name)))
            content = {name: value for name, value in document.items() if name != _CONTENT}
            return document if (content[_KEY], document[_CONTENT]) == (key, _hash(content)) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, name: str, key: str, document: dict[str, Any]) -> dict[str, Any]:
        """Store the document with its key and the hash of its content; the file appears whole or not at all.

        Raises:
            UserError: It cannot be written.
        """
        document = document | {_KEY: key}
        # Hash the content as a reader parses it: keys of JSON are text.
        document[_CONTENT] = _hash(json.loads(as_json(document)))
        if self._folder is not None:
            self._folder.write(self._path(name), as_json(document))
        return document

    def _path(self, name: str) -> str:
        return f"{self._within}{name}.json"
