"""Files, each whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .errors import UserError


def as_json(document: Any) -> str:
    """A document as text that any reader takes: no NaN, no infinity."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, text as UTF-8, beside its place and move it there.

    Raises:
        UserError: It cannot be written.
    """
    with whole_file(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, beside its place, that is moved there when all is written.

    Raises:
        UserError: It cannot be written.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    with user_paths(target):
        try:
            with part.open("wb") as file:
                yield file
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def require_writable_file(path: str | os.PathLike[str]) -> None:
    """As ``require_writable``, for a file, which may be there and is then replaced."""
    if Path(path).is_dir():
        raise UserError(f"{os.fspath(path)}: is a folder; name a file")
    require_writable(Path(path).parent, path)


def require_writable(folder: str | os.PathLike[str], wanted: str | os.PathLike[str], create: bool = False) -> None:
    """Refuse a place before work is put into what is to lie there.

    Args:
        wanted: What the user asked for, for the message.
        create: Whether missing folders will be made.

    Raises:
        UserError: The folder is missing or takes no files.
    """
    place = Path(folder)
    while create and not place.exists() and place != place.parent:
        place = place.parent
    with user_paths(wanted), tempfile.TemporaryFile(dir=place):
        pass


@contextmanager
def user_paths(wanted: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the operating system into the user's, with a remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{os.fspath(wanted)}: cannot be written ({error.strerror}); choose another place") from None
