"""Readers of trace files, and of data frames.

    file -> bytes (decompressed) -> format, from the content -> rows, in pieces -> checks -> arrays -> trace

Only the numbers of a row are kept, so a million rows take tens of megabytes, whatever the size of the file.
Formats: see ``traces.formats``, each also compressed with gzip or Zstandard.
A data frame gets the checks that files get.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...sim.types.errors import TraceError
from ..formats.own import OWN
from ..formats.probe import PROBE, probe_trace
from ..parsing import arrow as pa
from ..parsing.files import TraceFile
from ..parsing.parquet_format import plain
from ..parsing.reading import MOST_INFLATED_BYTES, Reading
from ..parsing.table import Table, shown
from ..synthesis.load import LOAD
from ..types.trace import Trace
from .gather import Gathering
from .recognise import recognise, require_lengths, title_of

#: Maximum rows of a piece that is read again for every bad row in it; larger pieces are halved first.
_READ_AGAIN_ROWS = 512


def holds_load(path: str | PathLike[str]) -> bool:
    """Whether a file is a load instead of a trace.

    Raises:
        TraceError: The file cannot be read.
    """
    file = TraceFile(path, MOST_INFLATED_BYTES)
    # Columns that the user names may be in any file.
    return file.form("table", file.head()) == LOAD


def format_of(path: str | PathLike[str], reading: Reading = Reading()) -> str:
    """Name of the format of a trace file.

    Raises:
        TraceError: The file cannot be read, or has an unknown format.
    """
    file = TraceFile(path, reading.max_inflated_bytes)
    title = title_of(file, reading)
    return PROBE if title == PROBE else recognise(file, title, reading, content=True).form.title


def fields_read(path: str | PathLike[str], columns: str | None = None) -> frozenset[str]:
    """Fields of ``Reading`` that affect how this file is read.

    Args:
        columns: As of ``Reading``.

    Raises:
        TraceError: The file cannot be read, or has an unknown format.
    """
    file = TraceFile(path, MOST_INFLATED_BYTES)
    reading = Reading(columns=columns)
    title = title_of(file, reading)
    if title in (LOAD, PROBE):
        # Requests are drawn from a load: it has no rows and no blocks, and is small. A probe's file has no bad rows.
        return frozenset()
    source = recognise(file, title, reading, content=True)
    return source.reads | {"skip_bad"} | ({"max_inflated_bytes"} if file.is_compressed() else frozenset())


def read(path: str | PathLike[str], reading: Reading = Reading()) -> Trace:
    """The trace in ``path``: its lengths and its times.

    Our own columns are ``arrival_s``, ``prompt_tokens``, ``output_tokens``, ``max_tokens``, ``n``, ``priority``, ``ignore_eos``, and ``parent`` with
    ``fork_at`` or ``truncate_to`` (see ``sim.workload.dialogue``); the two lengths are required. Other formats are recognised
    by their column names (``traces.formats``); unknown columns are not read.
    Arrivals are converted to ticks by the rule of ``traces.parsing.times``: whole nanoseconds, exactly.

    Raises:
        TraceError: The file cannot be read, or has an invalid row. Names the line as an
            editor shows it (the header is line 1), or the row if the format has no lines.
    """
    return _read(path, reading, content=False)


def read_with_content(path: str | PathLike[str], reading: Reading = Reading(), longest: int | None = None) -> Trace:
    """As ``read``, together with the prompt contents if the file has ``hash_ids`` or ``session_id``.

    Args:
        longest: Most tokens of a request; a longer request is a bad row. None is no limit.
    """
    return _read(path, reading, content=True, **({} if longest is None else {"longest": longest}))


def _read(path: str | PathLike[str], reading: Reading, content: bool, **limits: int) -> Trace:
    file = TraceFile(path, reading.max_inflated_bytes)
    title = title_of(file, reading)
    if title == PROBE:
        return probe_trace(path, Path(file.bare_name).stem, content, **limits)
    source = recognise(file, title, reading, content)
    gathering = Gathering(path, source.form, time_unit=reading.time_unit, **limits)
    for piece in source.pieces:
        _take(gathering, source.parse, piece, reading.skip_bad)
    return gathering.trace(Path(file.bare_name).stem, source.max_concurrency, source.failed)


def _take(gathering: Gathering, parse: Callable[[Any], Table], piece: Any, skip_bad: bool) -> None:
    """Add the rows of a piece; with ``skip_bad``, read ever smaller pieces around the bad rows."""
    while len(piece):
        try:
            gathering.take(parse(piece))
            return
        except TraceError as error:
            if not skip_bad:
                raise
            bad = _named(piece, error)
            if bad is None:
                middle = len(piece) // 2
                for half in (_part(piece, 0, middle), _part(piece, middle)):
                    _take(gathering, parse, half, skip_bad)
                return
            gathering.skip(error)
            piece = _without(piece, bad)


def _named(piece: Any, error: TraceError) -> int | None:
    """The index of the row that an error names, or None if the piece is too large to be read again without that row."""
    if len(piece) == 1:
        return 0
    if len(piece) > _READ_AGAIN_ROWS or isinstance(piece, list):
        return None
    found = np.flatnonzero(piece.lines == error.line)
    return int(found[0]) if len(found) else None


def _part(piece: Any, start: int, end: int | None = None) -> Any:
    return piece[start:end] if isinstance(piece, list) else piece.part(start, end)


def _without(piece: Any, place: int) -> Any:
    if isinstance(piece, list):
        return piece[:place] + piece[place + 1 :]
    return piece.where(np.arange(len(piece)) != place)


#: Name of a trace without a file, in errors, titles and ``run.json``.
FRAME_NAME = "DataFrame"
_UNIT = "iloc"


def is_frame(value: object) -> bool:
    """Whether ``value`` is a data frame that Arrow can read by column name, for example a pandas one."""
    return hasattr(value, "__arrow_c_stream__") and hasattr(value, "columns") and hasattr(value, "iloc")


def trace_of_frame(frame: Any) -> Trace:
    """The trace in a pandas data frame with our own columns, as ``read_with_content`` reads them from a file.

    Args:
        frame: ``prompt_tokens`` and ``output_tokens``; optionally ``arrival_s``, ``max_tokens``, ``n``, ``priority``, ``ignore_eos``,
            ``hash_ids``, ``session_id`` and so on. Other columns are not read.

    Raises:
        TraceError: A column is missing, or a row is invalid; names the row by its ``frame.iloc`` position.
    """
    names = [str(name) for name in frame.columns]
    require_lengths(FRAME_NAME, None, OWN, names)
    wanted = [name for name in OWN.readers(content=True) if name in names]
    twice = next((name for name in wanted if names.count(name) > 1), None)
    if twice is not None:
        raise TraceError(FRAME_NAME, None, "columns", shown(",".join(names)), f"{twice} appears twice; keep one")
    if not len(frame):
        raise TraceError(FRAME_NAME, None, None, None, "has columns and no rows; give one request a row")
    columns = {name: _column(frame, name) for name in wanted}
    gathering = Gathering(FRAME_NAME, OWN)
    gathering.take(Table(FRAME_NAME, columns, np.arange(len(frame)), _UNIT))
    return gathering.trace(FRAME_NAME)


def _column(frame: Any, name: str) -> pa.Array:
    try:
        found = pa.Array.from_pandas(frame[name])
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        complaint = " ".join(str(error).split())
        raise TraceError(FRAME_NAME, None, "column", name, f"holds values of several types ({complaint})") from None
    return plain(found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found)
