"""The beginning of a file, as far as it says what the file is: its bytes, its columns, its JSON keys, its text."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import PurePath

#: Bytes in which text is searched, and in which the keys of the first JSON object are read.
MOST_BYTES, _KEYS_BYTES = 2**20, 2**16
#: Lines among which the first JSON object is searched, and levels of its keys.
_LINES, _LEVELS = 64, 6
#: A bracket and what may follow it in JSON; a log may begin with a date in brackets.
_JSON_START = re.compile(r'[\[{]\s*(?:["{\[\]}]|\Z)')
_JSON_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?|[{}\[\]]', re.DOTALL)


class FileHead:
    """The first bytes of a file, uncompressed, and its name.

    Args:
        content: Its first bytes, or all of them; ``MOST_BYTES`` are read.
        name: Its name or path.
    """

    def __init__(self, content: bytes, name: str) -> None:
        self.content, self.name = content[:MOST_BYTES].removeprefix(b"\xef\xbb\xbf"), PurePath(name).name

    @cached_property
    def text(self) -> str:
        """The bytes as text; those that are not UTF-8 are replaced."""
        return self.content.decode("utf-8", "replace")

    @cached_property
    def columns(self) -> frozenset[str]:
        """Names in the first line of a CSV; empty for JSON."""
        if self.is_json:
            return frozenset()
        first = next((line for line in self.text.split("\n") if line.strip()), "")[:_KEYS_BYTES]
        # No CSV has a line break within the name of a column.
        return frozenset(name.strip().strip('"') for name in next(csv.reader([first.replace("\r", "")]), []))

    @cached_property
    def is_json(self) -> bool:
        """Whether the file begins as a JSON object or array."""
        return _JSON_START.match(self.text.lstrip()[:_KEYS_BYTES]) is not None

    @cached_property
    def keys(self) -> frozenset[str]:
        """Keys of the first JSON object, also of the first element of an array.

        A key within another one has the path ``outer.inner``, also where an array is between them. Only the keys near the beginning
        are known of an object that is longer than the head.
        """
        return frozenset(_paths(self._json))

    @cached_property
    def _json(self) -> str:
        """The text from the first line that begins as JSON."""
        rest = self.text[:_KEYS_BYTES].lstrip()
        for _ in range(_LINES):
            if _JSON_START.match(rest):
                return rest
            rest = rest.partition("\n")[2].lstrip()
        return ""


def _paths(text: str) -> Iterator[str]:
    """The paths of all keys up to the end of the first object, and of the first object of an array."""
    # Of each open bracket: the path of the keys within it, and the key that awaits its value.
    opened: list[str] = []
    within, key = "", ""
    is_array = text.startswith("[")
    for token in _JSON_TOKEN.finditer(text):
        sign = token[0]
        if sign in ("{", "["):
            opened.append(within)
            within = f"{within}{key}." if key else within
            key = ""
        elif sign in ("}", "]"):
            if opened:
                within = opened.pop()
            key = ""
            if len(opened) <= is_array:
                return
        elif token[2]:
            key = token[1]
            if len(opened) <= _LEVELS:
                yield within + key
        else:
            key = ""
