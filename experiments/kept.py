"""Documents of finished figures, found again by what they follow from.

A document says under ``follows_from`` the hash of everything that decides it: which figure it is, the lengths that it
serves, the seeds, and the code. One whose hash is another's is out of date and made anew.
"""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from .. import __version__
from ..sim.files import as_json, user_paths, write_whole
from ..traces import LengthPairs

_KEY = "follows_from"
_PACKAGE = Path(__file__).parents[1]
#: What decides a document; pictures do not.
_FOLDERS = ("sim", "traces", "experiments")


def key(figure: str, exact: LengthPairs | None, seeds: tuple[int, ...] | None) -> str:
    """The hash for a figure.

    Args:
        exact: The pairs that it serves; None where it draws them, or serves none.
        seeds: None where nothing is drawn.
    """
    content = [figure, __version__, code_sha256(), None if exact is None else _hash_of(exact), seeds]
    return sha256(json.dumps(content).encode()).hexdigest()


@cache
def code_sha256() -> str:
    """A hash of all code and all facts that a document may follow from."""
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


class Kept:
    """The documents in a folder, one file a figure.

    Args:
        folder: Is made when the first one is kept; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, figure: str, key: str) -> dict[str, Any] | None:
        """A document that follows from the same; None where there is none, or its file is damaged."""
        if self._folder is None:
            return None
        try:
            document = json.loads(self._path(figure).read_bytes())
            return document if document[_KEY] == key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, figure: str, key: str, document: dict[str, Any]) -> dict[str, Any]:
        """The document with its key; in the folder it is put there, whole or not at all.

        Raises:
            UserError: It cannot be written.
        """
        document = document | {_KEY: key}
        if self._folder is not None:
            with user_paths(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(figure), as_json(document))
        return document

    def within(self, name: str) -> Kept:
        """What is kept in a folder of that name within this one: parts of a document that is made piece by piece."""
        return Kept(None if self._folder is None else self._folder / name)

    def _path(self, figure: str) -> Path:
        return self._folder / f"{figure}.json"
