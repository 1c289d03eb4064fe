"""Parquet: our own columns, as ``traces convert`` writes them, or files of other programs with the same column names."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...sim.types.errors import TraceError
from . import arrow as pa
from .files import TraceFile
from .table import Table

_BATCH_ROWS = 65_536


def _damage() -> tuple[type[Exception], ...]:
    """Errors that a damaged file raises; a column name that is not text raises a ValueError."""
    return pa.ArrowException, OSError, ValueError


def open_parquet(file: TraceFile, head: bytes) -> pa.parquet.ParquetFile:
    """Open a Parquet file, in place unless the whole file is compressed.

    Raises:
        TraceError: The file is damaged.
    """
    with open(file.path, "rb") as raw:
        compressed = raw.read(4) != head[:4]
    try:
        source = pa.BufferReader(file.whole()) if compressed else pa.memory_map(str(file.path))
        return pa.parquet.ParquetFile(source)
    except _damage() as error:
        raise _unreadable(file, error) from None


def parquet_tables(file: TraceFile, parquet: pa.parquet.ParquetFile, wanted: set[str]) -> Iterator[Table]:
    """The wanted columns, a batch of rows at a time.

    Raises:
        TraceError: The file is damaged, has no rows, or exceeds the limit on decompressed size.
    """
    names = [name for name in parquet.schema_arrow.names if name in wanted]
    if not parquet.metadata.num_rows:
        raise TraceError(file.path, None, None, None, "has columns and no rows; give one request a row")
    row, left = 1, file.max_inflated_bytes
    try:
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
            left -= batch.nbytes
            if left < 0:
                raise file.too_large()
            columns = dict(zip(batch.schema.names, map(plain, batch.columns), strict=True))
            yield Table(file.path, columns, np.arange(row, row + len(batch)), "row")
            row += len(batch)
    except _damage() as error:
        raise _unreadable(file, error) from None


def plain(column: pa.Array) -> pa.Array:
    """The column in the type that the text readers produce, if its values convert to that type."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return column.cast(pa.list_(kind.value_type))
    return column


def _unreadable(file: TraceFile, error: Exception) -> TraceError:
    complaint = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TraceError(file.path, None, None, None, f"is not a readable Parquet file ({complaint})")
