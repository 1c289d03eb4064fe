"""CSV: one header line, one request a line."""

from __future__ import annotations

from os import PathLike

import numpy as np
import pyarrow as pa
import pyarrow.csv

from ..sim.errors import TraceError
from .lines import filled_lines
from .table import Table, shown
from .trace import Rows


def read_csv(path: str | PathLike[str], data: bytes) -> Table:
    """The table of a CSV file; blank lines are skipped.

    Raises:
        TraceError: an open quote, no rows, or a row that is longer or shorter than the header.
    """
    data, lines = filled_lines(path, data)
    if b'"' in data:
        _refuse_open_quote(path, data.split(b"\n"), lines)
    if len(lines) < 2:
        raise TraceError(path, None, None, None, "has a header and no rows; give one request a line")
    table = _parse(path, data, lines)
    if table.num_rows != len(lines) - 1:
        raise TraceError(path, None, None, None, "has fields that span lines; write each request on one line")
    names = [name.strip() for name in table.column_names]
    return Table(path, names, dict(zip(names, table.columns)), Rows("line", lines[1:]), int(lines[0]))


def _refuse_open_quote(path: str | PathLike[str], texts: list[bytes], lines: np.ndarray) -> None:
    # A quoted field that spans lines would shift the number of every line below it.
    for line, text in zip(lines.tolist(), texts):
        if text.count(b'"') % 2:
            raise TraceError(path, line, "row", shown(text.decode()), "a quote is left open; close it on its line")


def _parse(path: str | PathLike[str], data: bytes, lines: np.ndarray) -> pa.Table:
    ragged: list[pyarrow.csv.InvalidRow] = []

    def remember(row: pyarrow.csv.InvalidRow) -> str:
        ragged.append(row)
        return "error"

    try:
        return pyarrow.csv.read_csv(
            pa.BufferReader(data),
            read_options=pyarrow.csv.ReadOptions(use_threads=False),  # only then a bad row knows its number
            parse_options=pyarrow.csv.ParseOptions(invalid_row_handler=remember),
            convert_options=pyarrow.csv.ConvertOptions(null_values=[""], strings_can_be_null=True),
        )
    except pa.ArrowInvalid as error:
        if not ragged:
            raise TraceError(path, None, None, None, f"is no readable CSV ({str(error).splitlines()[0]})") from None
    row = ragged[0]
    remedy = f"{row.actual_columns} fields where the header has {row.expected_columns}; correct the row"
    raise TraceError(path, int(lines[row.number - 1]), "row", shown(row.text), remedy)
