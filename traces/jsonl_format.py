"""JSON lines: one object a line."""

from __future__ import annotations

import json
from os import PathLike

import numpy as np
import pyarrow as pa
import pyarrow.json

from ..sim.errors import TraceError
from .checks import KNOWN_NAMES
from .lines import filled_lines
from .table import Table, shown
from .trace import Rows


def read_jsonl(path: str | PathLike[str], data: bytes) -> Table:
    """The table of a file of JSON lines; blank lines and unknown keys are skipped.

    Raises:
        TraceError: a line that is no object, or a known key whose value is no number.
    """
    data, lines = filled_lines(path, data)
    try:
        table = _parse(data)
    except pa.ArrowInvalid as error:
        raise _explained(path, data, lines, str(error)) from None
    first = _record(data.partition(b"\n")[0])
    if table.num_rows != len(lines) or first is None:
        raise _explained(path, data, lines, f"{table.num_rows} objects on {len(lines)} lines")
    names = list(first)
    present = [name for name in KNOWN_NAMES if name in names or table[name].null_count < len(lines)]
    return Table(path, names, {name: table[name] for name in present}, Rows("line", lines), int(lines[0]))


def _parse(data: bytes) -> pa.Table:
    return pyarrow.json.read_json(
        pa.BufferReader(data),
        # One block, so that no object straddles two; Arrow counts its bytes in int32.
        read_options=pyarrow.json.ReadOptions(block_size=min(len(data) + 1, 2**31 - 1)),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=pa.schema([(name, pa.float64()) for name in KNOWN_NAMES]),
            unexpected_field_behavior="ignore",
        ),
    )


def _explained(path: str | PathLike[str], data: bytes, lines: np.ndarray, complaint: str) -> TraceError:
    # Arrow names a row at best; a failed file is read again, slowly, to name line, field and value.
    for line, text in zip(lines.tolist(), data.split(b"\n")):
        record = _record(text)
        if record is None:
            return TraceError(path, line, "row", shown(text.decode()), "is no JSON object; give one object a line")
        for name in KNOWN_NAMES:
            if not _is_number(record.get(name)):
                return TraceError(path, line, name, shown(record[name]), "must be a finite number; correct the row")
    return TraceError(path, None, None, None, f"is no readable JSON lines file ({complaint.splitlines()[0]})")


def _record(text: bytes) -> dict[str, object] | None:
    try:
        record = json.loads(text, parse_int=float)  # as Arrow has them; an int may be too long to print
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, float) and abs(value) < 2**63)
