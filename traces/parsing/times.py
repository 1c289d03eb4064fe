"""Conversion between the seconds of a trace and ticks, exact to the nanosecond.

An arrival is rounded to a whole nanosecond, half to even. Whole seconds and the fraction are
converted separately, since ``seconds * 1e12`` in float64 has too few bits. A float64 below
``LATEST_S`` differs by less than half a nanosecond from the decimal text that it was read from. Text
of up to nine decimals therefore converts exactly, and every format gives the same ticks. Integers are exact.
"""

from __future__ import annotations

import numpy as np

from ...sim.types import ticks
from . import arrow as pa
from .table import Table

LATEST_S = 2**23
"""Arrivals end before this second (97 days): above it float64 has no room for nanoseconds."""

PER_SECOND, TICKS_PER_NS = ticks.PER_SECOND, ticks.PER_US // 1000
_OFFSET = r"(Z|[+-]\d\d(:?\d\d)?)$"


def to_ticks(times: np.ndarray, unit_ticks: int) -> np.ndarray:
    """Ticks (int64 [n]) of ``times`` (int or float64 [n], finite), counted in units of ``unit_ticks``."""
    if times.dtype.kind == "i":
        return times * unit_ticks
    whole = np.floor(times)
    fraction_ns = np.rint((times - whole) * (unit_ticks // TICKS_PER_NS))
    return whole.astype(np.int64) * unit_ticks + fraction_ns.astype(np.int64) * TICKS_PER_NS


def to_seconds(arrival_ticks: np.ndarray) -> np.ndarray:
    """Seconds (float64 [n]) nearest to ``arrival_ticks``; ``to_ticks`` restores whole nanoseconds."""
    whole_s, rest_ticks = np.divmod(arrival_ticks, ticks.PER_SECOND)
    return whole_s + rest_ticks / ticks.PER_SECOND


def is_zoned(table: Table, field: str) -> bool:
    """Whether the first date of a column has an offset."""
    return bool(pa.compute.match_substring_regex(table.columns[field].slice(0, 1), _OFFSET)[0].as_py())


def date_ns(table: Table, field: str, zoned: bool) -> np.ndarray:
    """Nanoseconds since 1970 (int64 [n]) of a column of dates in text, ``YYYY-MM-DD HH:MM:SS`` with up to nine decimals.

    Dates with an offset (``+00:00``) are converted to UTC; dates without one are assumed to share a time zone.

    Raises:
        TraceError: A row has no date, an invalid date, or an offset where other rows have none; names the first one.
    """
    column = table.columns[field]
    missing = pa.as_numpy(column.is_null())
    table.refuse(missing, field, np.full(len(missing), None), "is missing; give a date and time")
    kind = pa.timestamp("ns", "UTC" if zoned else None)
    try:
        return pa.as_numpy(column.cast(kind).cast(pa.int64()))
    except pa.ArrowInvalid:
        row = next(row for row, value in enumerate(column) if not _is_date(value, kind))
        remedy = "must be a date and time like those of the rows above; correct the row"
        raise table.error(row, field, column[row].as_py(), remedy) from None


def _is_date(value: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        value.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True
