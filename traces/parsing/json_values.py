"""The elements of a JSON array, or values that follow each other, one at a time, without holding all of them."""

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
#: A literal, a number or an escape that is cut in two has fewer signs.
_UNSURE = 32
#: Values that are parsed together.
_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Element:
    """One element.

    Attributes:
        value: What it says.
        line: Where it begins, as an editor counts.
    """

    value: Any
    line: int


class Twice(Exception):
    """A key that an object has twice."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, of which each key is there once.

    Raises:
        Twice: One is there again.
    """
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise Twice(next(name for name in names if names.count(name) > 1))
    return record


def elements(file: TraceFile) -> Iterator[Element]:
    """The elements of the array that a file is, or else the values in it.

    Raises:
        TraceError: As ``TraceFile.pieces``; or names the line at which it is no JSON any more.
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
        text.expect(",", "is no JSON here: a comma or ] must follow; fetch the file again")


def batches(values: Iterable[Element]) -> Iterator[list[Element]]:
    """Some values at a time."""
    values = iter(values)
    while batch := list(islice(values, _BATCH)):
        yield batch


class _Text:
    """What has been read and not yet understood."""

    def __init__(self, file: TraceFile) -> None:
        self._path, self._pieces = file.path, file.pieces()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder(object_pairs_hook=once)
        self._text, self._place, self._line = "", 0, 1

    def next(self) -> str:
        """The next sign that is no space; empty at the end. It stays."""
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
        """Go past a sign that must be there."""
        if self.next() != sign:
            raise self._error(remedy)
        self._place += 1

    def element(self) -> Element:
        """Go past a value."""
        if not self.next():
            raise self._error("ends within the array; fetch the file again")
        tried, ended = 0, False
        while True:
            size = len(self._text) - self._place
            # Not again before there is twice as much to understand.
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
        """The value, None where it may go on in what is still to come."""
        try:
            value, end = self._json.raw_decode(self._text, self._place)
        except json.JSONDecodeError as error:
            if error.pos < len(self._text) - _UNSURE and not error.msg.startswith("Unterminated string"):
                raise self._error(f"is no JSON ({error.msg}); correct or drop it") from None
            return None
        except Twice as twice:
            raise self._error(f"has the key {twice} twice; keep one") from None
        except (ValueError, RecursionError):  # numbers of thousands of digits, and brackets as deep
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
            raise self._error("is no UTF-8 text below here; save the file as UTF-8") from None
        self._text, self._place = self._text[self._place :] + text, 0
        return True

    def _error(self, remedy: str) -> TraceError:
        return TraceError(self._path, self._line, None, None, remedy)
