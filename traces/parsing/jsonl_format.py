"""JSON objects: one per line, or spread over several lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from ...sim.types.errors import TraceError
from . import arrow as pa
from .json_values import Element, Twice, once
from .lines import Block
from .table import Column, Table, shown

Record = dict[str, Any]
#: The largest whole number that is read, and the message for lists with a larger one.
MOST = 2**63 - 1
IN_64_BITS = f"must hold whole numbers from {-MOST - 1} to {MOST}; correct the row"

#: Converts the values of one key in all rows of a table into a column, or raises for the first invalid row.
Reader = Callable[[Table, str, Sequence[Any]], Column]


@dataclass(frozen=True, slots=True)
class JsonlParser:
    """Parser of lines, or of JSON values, into a table.

    Attributes:
        path: The file.
        readers: Reader of each key; other keys may have any values.
        unit: What the lines of elements count.
    """

    path: str | PathLike[str]
    readers: Mapping[str, Reader]
    unit: str = "line"

    def __call__(self, piece: Block | Sequence[Element]) -> Table:
        """The rows of a piece; a key that occurs in no row makes no column.

        Raises:
            TraceError: A value is not an object, or has an invalid field.
        """
        if isinstance(piece, Block):
            piece.check_text(self.path)
            lines = piece.lines
            records = [self._record(*row) for row in zip(lines.tolist(), piece.texts(), strict=True)]
        else:
            lines, records = np.array([element.line for element in piece]), [self._object(element) for element in piece]
        table = Table(self.path, {}, lines, self.unit)
        present = keys(records, self.readers)
        return table.having(
            **{
                name: reader(table, name, [value_at(record, name) for record in records])
                for name, reader in self.readers.items()
                if name in present
            }
        )

    def _object(self, element: Element) -> Record:
        if isinstance(element.value, dict):
            return element.value
        raise TraceError(
            self.path, element.line, "row", shown(element.value), "is not a JSON object; give one a request", self.unit
        )

    def _record(self, line: int, text: bytes) -> Record:
        try:
            record = json.loads(text, object_pairs_hook=once)
        except Twice as twice:
            raise TraceError(self.path, line, "key", shown(str(twice)), "appears twice; keep one") from None
        except (ValueError, RecursionError):  # numbers of thousands of digits, and equally deep brackets
            record = None
        if not isinstance(record, dict):
            remedy = "is not a JSON object; give one object a line"
            raise TraceError(self.path, line, "row", shown(text.decode()), remedy)
        return record


def value_at(record: Record, path: str) -> Any:
    """The value of a key, or of keys within it, as ``usage.prompt_tokens``; None without it. Keys may have dots of their own."""
    if path in record or "." not in path:
        return record.get(path)
    for place, letter in enumerate(path):
        inner = record.get(path[:place]) if letter == "." else None
        if isinstance(inner, dict) and (found := value_at(inner, path[place + 1 :])) is not None:
            return found
    return None


def keys(records: Sequence[Record], names: Iterable[str]) -> set[str]:
    """Keys of the records, and those of ``names`` that are keys within them."""
    found = set().union(*records)
    return found | {name for name in names if "." in name and any(value_at(each, name) is not None for each in records)}


def numbers(table: Table, name: str, values: Sequence[Any]) -> pa.Array:
    """Numbers, int64 or float64; missing values are null."""
    for row, value in enumerate(values):
        if not _is_number(value):
            raise table.error(row, name, value, "must be a finite number; correct the row")
    if any(type(value) is float for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64(), from_pandas=False)
    return pa.array(values, pa.int64())


def flags(table: Table, name: str, values: Sequence[Any]) -> pa.Array:
    """Truth values, or 0 and 1, as ``numbers``."""
    return numbers(table, name, [int(value) if isinstance(value, bool) else value for value in values])


def moments(table: Table, name: str, values: Sequence[Any]) -> pa.Array:
    """Times: numbers, which may be in text, as ``numbers``; or texts of which none is a number, for dates."""
    found = [_number_in_text(value) if isinstance(value, str) else value for value in values]
    texts = [value for value in found if value is not None]
    if texts and all(isinstance(value, str) for value in texts):
        return pa.array(found, pa.string())
    return numbers(table, name, found)


def _number_in_text(text: str) -> float | str:
    try:
        # Nanoseconds since 1970 are exact as whole numbers only.
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text.encode("utf-8", "replace").decode()


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return value is None
    # NaN passes: a later check refuses it and names the requirement. Infinity, the value of 1e999, is refused here.
    return value != value or abs(value) < 2**63


def whole_numbers(table: Table, name: str, values: Sequence[Any]) -> pa.Array:
    """Whole numbers, int64; missing values are null."""
    for row, value in enumerate(values):
        if not _is_number(value) or isinstance(value, float) and not value.is_integer():
            raise table.error(row, name, value, "must be a whole number; correct the row")
    return pa.array([None if value is None else int(value) for value in values], pa.int64())


def whole_lists(table: Table, name: str, values: Sequence[Any]) -> pa.ListArray:
    """Lists of whole numbers, one in every row."""
    try:
        column = pa.array(values)
        kind, missing = column.type, column.null_count
        if kind in (pa.list_(pa.int64()), pa.list_(pa.null())) and not missing and not column.flatten().null_count:
            return column.cast(pa.list_(pa.int64()))
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        pass
    for row, value in enumerate(values):
        _check_list(table, row, name, value)
    return pa.array(values, pa.list_(pa.int64()))


def _check_list(table: Table, row: int, name: str, value: Any) -> None:
    if value is None:
        raise table.error(row, name, None, "is missing; give a list, one whole number a block")
    if not isinstance(value, list):
        raise table.error(row, name, value, "must be a list, one whole number a block; correct the row")
    for number in value:
        if type(number) is not int or not -(2**63) <= number < 2**63:
            raise table.error(row, name, number, IN_64_BITS)


def sessions(table: Table, name: str, values: Sequence[Any]) -> pa.Array:
    """The session of each row, as an Arrow column of JSON texts: the number 1 is ``1`` and the text "1" is ``"1"``, so they differ.

    Rows without a session are null.

    Raises:
        TraceError: A value is neither a whole number nor a text.
    """
    for row, value in enumerate(values):
        if value is not None and type(value) not in (int, str):
            raise table.error(row, name, value, "must be a whole number or a text; correct the row")
    return pa.array([None if value is None else session_text(value) for value in values], pa.string())


def session_text(value: int | str) -> str:
    """The name of a session."""
    return hex(value) if type(value) is int else json.dumps(value)
