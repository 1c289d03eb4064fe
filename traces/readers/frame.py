"""Conversion of an in-memory data frame into a trace, with the checks that files get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ...sim.types.errors import TraceError
from ..formats.own import OWN
from ..parsing.parquet_format import plain
from ..parsing.table import Table, shown
from ..types.trace import Trace
from .gather import Gathering
from .recognise import require_lengths

#: Name of a trace without a file, in errors, titles and ``run.json``.
FRAME_NAME = "DataFrame"
_UNIT = "iloc"


def is_frame(value: object) -> bool:
    """Whether ``value`` is a data frame that Arrow can read by column name, for example a pandas one."""
    return hasattr(value, "__arrow_c_stream__") and hasattr(value, "columns") and hasattr(value, "iloc")


def trace_of_frame(frame: Any) -> Trace:
    """The trace in a pandas data frame with our own columns, as ``read_with_content`` reads them from a file.

    Args:
        frame: ``prompt_tokens`` and ``output_tokens``; optionally ``arrival_s``, ``max_tokens``, ``n``, ``priority``,
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
