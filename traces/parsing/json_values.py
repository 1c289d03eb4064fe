"""Incremental JSON reader: the elements of an array, or consecutive values, one at a time in bounded memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...sim.types.errors import TraceError
from .files import LONGEST_LINE_BYTES, TraceFile

_SPACE = " \t\r\n"
#: Characters; a literal, number or escape that a piece boundary splits is shorter.
_UNSURE = 32
#: Number of values that are parsed together.
_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Element:
    """One element.

    Attributes:
        value: The parsed value.
        line: The line on which it begins, from 1.
    """

    value: Any
    line: int


class Twice(Exception):
    """An object has the same key twice."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of some pairs; refuses duplicate keys.

    Raises:
        Twice: A key occurs twice.
    """
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise Twice(next(name for name in names if names.count(name) > 1))
    return record


def elements(file: TraceFile) -> Iterator[Element]:
    """The elements of a file that is an array, or else its consecutive values.

    Raises:
        TraceError: As ``TraceFile.pieces``; or the file stops being JSON, and the error names the line.
    """
    text = _Text(file)
    if text.next() != "[":
        while text.next():
            yield text.element()
        return
    text.expect("[", "begins with no [; give a JSON array")
    if text.next() == "]":
        return
    while True:
        yield text.element()
        sign = text.next()
        if sign == "]":
            return
        text.expect(",", "is not JSON here: a comma or ] must follow; fetch the file again")


def batches(values: Iterable[Element]) -> Iterator[list[Element]]:
    """The values in batches."""
    values = iter(values)
    while batch := list(islice(values, _BATCH)):
        yield batch


class _Text:
    """Buffer of text that is read but not yet parsed."""

    def __init__(self, file: TraceFile) -> None:
        self._path, self._pieces = file.path, file.pieces()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder(object_pairs_hook=once)
        self._text, self._place, self._line = "", 0, 1

    def next(self) -> str:
        """The next character that is not white space, without consuming it; empty at the end."""
        while True:
            start = self._place
            end = start
            while end < len(self._text) and self._text[end] in _SPACE:
                end += 1
            self._pass(end)
            if end < len(self._text):
                return self._text[end]
            if not self._more():
                return ""

    def expect(self, sign: str, remedy: str) -> None:
        """Consume a required character."""
        if self.next() != sign:
            raise self._error(remedy)
        self._place += 1

    def element(self) -> Element:
        """Parse and consume one value."""
        if not self.next():
            raise self._error("ends within the array; fetch the file again")
        tried, ended = 0, False
        while True:
            size = len(self._text) - self._place
            # Retry only once the text has doubled, so that the total parsing work is linear.
            if ended or size >= 2 * tried:
                tried = size
                found = self._decoded()
                if found is not None:
                    return found
            if ended:
                raise self._error("ends within an element; fetch the file again")
            if size > LONGEST_LINE_BYTES:
                raise self._error(f"has an element of more than {LONGEST_LINE_BYTES:,} characters; drop it")
            ended = not self._more()

    def _decoded(self) -> Element | None:
        """The value, or None if it may continue in text that is not yet read."""
        try:
            value, end = self._json.raw_decode(self._text, self._place)
        except json.JSONDecodeError as error:
            if error.pos < len(self._text) - _UNSURE and not error.msg.startswith("Unterminated string"):
                raise self._error(f"is not JSON ({error.msg}); correct or drop it") from None
            return None
        except Twice as twice:
            raise self._error(f"has the key {twice} twice; keep one") from None
        except (ValueError, RecursionError):  # numbers of thousands of digits, and equally deep brackets
            raise self._error("cannot be read as JSON; correct or drop it") from None
        found = Element(value, self._line)
        self._pass(end)
        return found

    def _pass(self, end: int) -> None:
        self._line += self._text.count("\n", self._place, end)
        self._place = end

    def _more(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None:
            return False
        try:
            text = self._decoder.decode(piece)
        except UnicodeDecodeError:
            raise self._error("is not UTF-8 text below here; save the file as UTF-8") from None
        self._text, self._place = self._text[self._place :] + text, 0
        return True

    def _error(self, remedy: str) -> TraceError:
        return TraceError(self._path, self._line, None, None, remedy)
