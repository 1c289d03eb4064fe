"""The file of a story as text: where its tables and fields are, for errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from pydantic import ValidationError

from ...sim.types.errors import SettingError
from ...sim.types.validation import UNKNOWN, requirement

_FIELD = re.compile(r"(\w+)(?:\[(\d+)\])?(?:\.(\w+).*)?")


class Source:
    """A file, and where its fields are.

    Args:
        name: Its name, as errors give it.
        text: Its content.
    """

    def __init__(self, name: str, text: str = "") -> None:
        self._name, self._lines = name, text.splitlines()

    def place(self, field: str = "") -> str:
        """The file, and the line of a field such as "title", "settings.seed" or "requests[2].name".

        The line is that of the heading of its table where the field is missing or shares a line with others.
        """
        line = self._line(field)
        return self._name if line is None else f"{self._name}, line {line}"

    def error(self, field: str, value: object, remedy: str) -> SettingError:
        """An error of a field."""
        return SettingError(f"{self.place(field)}: {field}", value, remedy)

    def complaint(self, error: ValidationError, fields: Mapping[str, Sequence[str]]) -> SettingError:
        """The first error of pydantic; an unknown field, which is often a misspelled one, before a missing one.

        Args:
            fields: The fields of each table; those of the file itself under "".
        """
        first = min(error.errors(), key=lambda each: each["type"] not in UNKNOWN)
        parts = (f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        field, value, remedy = "".join(parts).lstrip("."), first["input"], requirement(first)
        if first["type"] == "missing":
            value, remedy = None, f"{remedy}; give it"
        elif not isinstance(value, str | int | float):
            value = f"a {type(value).__name__}"
        if first["type"] in UNKNOWN:
            table = first["loc"][0] if len(first["loc"]) > 1 else ""
            remedy = f"{remedy}; {_meant(str(first['loc'][-1]), fields[str(table)])}"
        return self.error(field, value, remedy)

    def _line(self, field: str) -> int | None:
        """The line of a field, else of its table; None where neither has a line of its own."""
        found = _FIELD.fullmatch(field)
        if found is None:
            return None
        table, row, key = found[1], int(found[2] or 1), found[3]
        inside, rows, heading = False, 0, None
        for number, line in enumerate(map(str.strip, self._lines), start=1):
            if line.startswith("["):
                is_one = line.partition("#")[0].strip(" []") == table
                rows += is_one
                inside = is_one and rows == row
                heading = number if inside else heading
            elif (inside and _key(line) == key) or (key is None and not rows and _key(line) == table):
                return number
        return heading


def _key(line: str) -> str:
    return line.partition("=")[0].strip().strip("\"'")


def _meant(name: str, fields: Sequence[str]) -> str:
    near = get_close_matches(name, fields, n=1)
    return f"did you mean {near[0]}?" if near else f"leave it out; the fields are {', '.join(fields)}"
