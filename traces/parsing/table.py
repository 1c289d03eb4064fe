"""A parsed but unchecked trace file: Arrow columns, and the file position of each row."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, replace
from os import PathLike
from typing import TypeAlias

import numpy as np

from ...sim.types.errors import TraceError
from . import arrow as pa

_MOST_CHARACTERS = 80


class _Text(str):
    """Text that is its own repr, for values already shortened."""

    def __repr__(self) -> str:
        return str(self)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, _MOST_CHARACTERS, _MOST_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print ints of more than 4,300 digits.
        return repr(x) if abs(x) < 2**64 else f"a number of {x.bit_length()} bits"


def shown(value: object) -> object:
    """``value`` formatted for a one-line error: as a Python scalar, whole floats as ints, long values shortened."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARACTERS else f"{value[:40]}...{value[-40:]}"
    if value is None or isinstance(value, int) and abs(value) < 2**64:
        return value
    return _Text(" ".join(_Short().repr(value).split()))


Column: TypeAlias = "pa.Array | pa.ChunkedArray"


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Some rows of a trace file, under the file's own column names, not yet checked.

    Attributes:
        path: The file.
        columns: Arrow arrays [n] of the columns read; texts are not interpreted yet.
        lines: int64 [n], the line number of each row as in an editor, or the row number from 1.
        unit: ``"line"`` for text, ``"row"`` for formats without lines.
    """

    path: str | PathLike[str]
    columns: dict[str, Column]
    lines: np.ndarray
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.lines)

    def part(self, start: int, end: int | None = None) -> Table:
        """The rows from ``start`` up to ``end``."""
        columns = {name: column[start:end] for name, column in self.columns.items()}
        return replace(self, columns=columns, lines=self.lines[start:end])

    def where(self, keep: np.ndarray) -> Table:
        """The rows for which ``keep`` (bool [n]) is true."""
        if keep.all():
            return self
        columns = {name: column.filter(pa.array(keep)) for name, column in self.columns.items()}
        return replace(self, columns=columns, lines=self.lines[keep])

    def having(self, **columns: Column) -> Table:
        """The table with these columns added or replaced."""
        return replace(self, columns=self.columns | columns)

    def error(self, row: int, field: str, value: object, remedy: str) -> TraceError:
        """The error for a value in the row at index ``row``."""
        return TraceError(self.path, int(self.lines[row]), field, shown(value), remedy, self.unit)

    def refuse(self, bad: np.ndarray, field: str, values: np.ndarray, remedy: str) -> None:
        """Raise for the first row for which ``bad`` (bool [n]) is true, if there is one."""
        if bad.any():
            row = int(bad.argmax())
            raise self.error(row, field, values[row], remedy)
