"""From a file to a trace.

    file -> bytes (gunzipped) -> format, by content and then by ending -> table -> checks -> trace

Formats: CSV and JSON lines (both also gzipped), Parquet, and the SOSP'23 artifact's pickle.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from ..sim.errors import TraceError
from .checks import KNOWN_NAMES, checked
from .csv_format import read_csv
from .jsonl_format import read_jsonl
from .table import Table
from .trace import Rows, Trace
from .unpickle import read_pickle

_GZIP_MAGIC, _PARQUET_MAGIC, _PICKLE_MAGIC = b"\x1f\x8b", b"PAR1", b"\x80"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read(path: str | PathLike[str]) -> Trace:
    """The trace in ``path``.

    Columns are ``arrival_s``, ``prompt_tokens``, ``output_tokens``, ``max_tokens``, ``n``, and ``parent`` with
    ``fork_at`` or ``truncate_to`` (see ``sim.dialogue``), of which the lengths must be there; or ``input``, ``output``; or ``input_length``, ``output_length`` with
    ``timestamp`` in milliseconds. Other columns (``hash_ids``, ``session_id``) are not read.
    Arrivals become ticks by the rule of ``traces.times``: whole nanoseconds, exactly.

    Raises:
        TraceError: the file cannot be read, or holds a row that cannot be true. Names the line as an
            editor shows it (the header is line 1), or the row where the format has no lines.
    """
    data = _content(path)
    return checked(_stem(path), _format(path, data)(path, data))


def _content(path: str | PathLike[str]) -> bytes:
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise TraceError(path, None, None, None, "no such file; check the path") from None
    except OSError as error:
        raise TraceError(path, None, None, None, f"cannot be read ({error.strerror}); give a trace file") from None
    if data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            raise TraceError(path, None, None, None, "is a damaged gzip file; fetch it again") from None
    data = data.removeprefix(_BYTE_ORDER_MARK)
    if not data.strip():
        raise TraceError(path, None, None, None, "is empty; give a header and one request a line")
    return data


def _ending(path: str | PathLike[str]) -> str:
    return Path(fspath(path).removesuffix(".gz")).suffix


def _stem(path: str | PathLike[str]) -> str:
    return Path(fspath(path).removesuffix(".gz")).stem


def _format(path: str | PathLike[str], data: bytes) -> Callable[[str | PathLike[str], bytes], Table]:
    if data.startswith(_PARQUET_MAGIC) or _ending(path) == ".parquet":
        return read_parquet
    if data.startswith(_PICKLE_MAGIC) or _ending(path) in (".pkl", ".pickle"):
        return read_pickle
    if data.lstrip().startswith(b"{") or _ending(path) in (".jsonl", ".ndjson", ".json"):
        return read_jsonl
    return read_csv


def read_parquet(path: str | PathLike[str], data: bytes) -> Table:
    """The known columns of a Parquet file.

    Raises:
        TraceError: damaged, or without rows.
    """
    try:
        file = pyarrow.parquet.ParquetFile(pa.BufferReader(data))
        names = file.schema_arrow.names
        table = file.read(columns=[name for name in KNOWN_NAMES if name in names])
    except (pa.ArrowException, OSError) as error:
        complaint = str(error).splitlines()[0]
        raise TraceError(path, None, None, None, f"is no readable Parquet file ({complaint})") from None
    if not table.num_rows and table.num_columns:
        raise TraceError(path, None, None, None, "has columns and no rows; give one request a row")
    return Table(path, names, dict(zip(table.column_names, table.columns)), Rows())
