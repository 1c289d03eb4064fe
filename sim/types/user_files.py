"""Small files of the user, such as settings and prices: read whole, as text, JSON or TOML.

Every reader of such a file goes through here, so that a file that is too large, too deep, not UTF-8 or has a number of
thousands of digits is one error. Traces are read in pieces, by ``traces.parsing``.
"""

from __future__ import annotations

import json
import os
import tomllib
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from .errors import SettingError
from .signatures import EXPECTED, remedy

#: Far beyond any file of settings, logs and metrics included.
MOST_BYTES = 2**28


def user_cache() -> Path:
    """The folder of what can be made again: in ``$XDG_CACHE_HOME``, else in ``~/.cache``. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fragmeter"


def content_of(path: str | PathLike[str], field: str) -> bytes:
    """The bytes of a file.

    Args:
        field: Setting that names it.

    Raises:
        SettingError: It cannot be read, is larger than ``MOST_BYTES``, or is a known kind that the setting does not take.
    """
    try:
        # One byte more than allowed: a device has no size, and may have no end.
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        # ValueError: a path with a null character.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingError(field, fspath(path), f"cannot be read: {reason}") from None
    if len(content) > MOST_BYTES:
        raise SettingError(field, fspath(path), f"has more than {MOST_BYTES >> 20} MiB; is it the right file?")
    if field in EXPECTED and (said := remedy(content, path, field)) is not None:
        raise SettingError(field, fspath(path), said)
    return content


def text_of(path: str | PathLike[str], field: str) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises:
        SettingError: As ``content_of``, or the file is not UTF-8.
    """
    try:
        return content_of(path, field).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingError(field, fspath(path), f"is not UTF-8 text ({error.reason}); save it as UTF-8") from None


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: It is not UTF-8 or not JSON, is nested too deeply, or has a number of thousands of digits.
    """
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def toml_value(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: As ``json_value``; ``tomllib.TOMLDecodeError`` where it is no TOML.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
