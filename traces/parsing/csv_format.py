"""CSV: one header line, then one request per line."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

import numpy as np

from ...sim.types.errors import TraceError
from . import arrow as pa
from .lines import Block
from .table import Table, shown


@dataclass(frozen=True, slots=True)
class CsvParser:
    """Parser of lines into a table.

    Attributes:
        path: The file.
        names: Column names in the header.
        wanted: Names of the columns to read; other columns may have any contents.
        texts: Names of the columns to read as text, even if their values look like numbers.
    """

    path: str | PathLike[str]
    names: tuple[str, ...]
    wanted: tuple[str, ...]
    texts: tuple[str, ...] = ()

    def __call__(self, block: Block) -> Table:
        """The rows of some lines.

        Raises:
            TraceError: A quote is open, a row is longer or shorter than the header, or the bytes are not text.
        """
        block.check_text(self.path)
        if b'"' in block.data:
            _refuse_open_quote(self.path, block)
        table = self._parse(block.data, block.lines)
        if table.num_rows != len(block):
            line, remedy = None, "has fields that span lines; write each request on one line"
            if len(block) == 1:
                line = int(block.lines[0])
            raise TraceError(self.path, line, None, None, remedy)
        return Table(self.path, dict(zip(table.column_names, table.columns, strict=True)), block.lines)

    def _parse(self, data: bytes, lines: np.ndarray) -> pa.Table:
        ragged: list[pa.csv.InvalidRow] = []

        def remember(row: pa.csv.InvalidRow) -> str:
            ragged.append(row)
            return "error"

        try:
            return pa.csv.read_csv(
                pa.BufferReader(data),
                # pyarrow reports the number of a bad row only without threads. One block, so that types are inferred from all rows.
                read_options=pa.csv.ReadOptions(
                    use_threads=False, column_names=self.names, block_size=max(len(data) + 1, 2**20)
                ),
                parse_options=pa.csv.ParseOptions(invalid_row_handler=remember),
                convert_options=pa.csv.ConvertOptions(
                    null_values=[""],
                    strings_can_be_null=True,
                    include_columns=self.wanted,
                    column_types={name: pa.string() for name in self.texts},
                ),
            )
        except pa.ArrowInvalid as error:
            if not ragged:
                line, complaint = (int(lines[0]) if len(lines) == 1 else None), str(error).splitlines()[0]
                raise TraceError(self.path, line, None, None, f"is not readable as CSV ({complaint})") from None
        row = ragged[0]
        remedy = f"{row.actual_columns} fields where the header has {row.expected_columns}; correct the row"
        raise TraceError(self.path, int(lines[row.number - 1]), "row", shown(row.text), remedy)


def header(path: str | PathLike[str], block: Block) -> tuple[str, ...]:
    """The column names in the first line of a file.

    Raises:
        TraceError: The line is not text, or leaves a quote open.
    """
    first = block.part(0, 1)
    first.check_text(path)
    _refuse_open_quote(path, first)
    try:
        names = pa.csv.read_csv(pa.BufferReader(first.data + b"\n")).column_names
    except pa.ArrowInvalid as error:
        complaint = str(error).splitlines()[0]
        raise TraceError(path, int(first.lines[0]), None, None, f"is not readable as CSV ({complaint})") from None
    return tuple(name.strip() for name in names)


def _refuse_open_quote(path: str | PathLike[str], block: Block) -> None:
    # A quoted field that spans lines would shift the number of every line below it.
    for line, text in zip(block.lines.tolist(), block.texts(), strict=True):
        if text.count(b'"') % 2:
            raise TraceError(path, line, "row", shown(text.decode()), "a quote is left open; close it on its line")
