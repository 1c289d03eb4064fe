"""The rule of time: the unit of a trace's times, and their conversion to ticks from the first request on.

Simulated time begins at the first request, whatever a trace counts from: 0, the start of a day, 1970. The unit is, in this order:

1. ``--time-unit``, or ``--timed-trace-sec-multiplier``;
2. none for dates in text;
3. that in which the first time lies between 2020 and 2050, counted from 1970;
4. seconds for fractions where the format has whole milliseconds (Mooncake), if the rate is then likely;
5. the format's own, unless it may be doubted and the rate is unlikely: outside 0.01 to 1,000 requests/s. Then it is the only
   other unit with a likely rate; with several the user must give it, and without any the format's own stays. Where whole
   milliseconds may be whole seconds by their rate, the reason says so.

The rate is that of the middle 80 % of the requests in the first few megabytes, so that a mistyped time does not decide it.

An arrival is rounded to a whole nanosecond, half to even. Whole seconds and the fraction are converted separately, since
``seconds * 1e12`` in float64 has too few bits. A float64 below ``LATEST_S`` differs by less than half a nanosecond from the
decimal text that it was read from. Text of up to nine decimals therefore converts exactly, and every format gives the same
ticks. Integers are exact. Of larger floats, such as seconds since 1970, text of up to six decimals converts exactly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from ...sim.types import ticks
from ...sim.types.errors import MissingSetting
from . import arrow as pa
from .table import Table

LATEST_S = 2**23
"""Arrivals end before this second (97 days): above it float64 has no room for nanoseconds."""

PER_SECOND, TICKS_PER_NS = ticks.PER_SECOND, ticks.PER_US // 1000
#: Ticks of each unit.
TIME_UNITS = {"s": PER_SECOND, "ms": ticks.PER_MS, "us": ticks.PER_US, "ns": TICKS_PER_NS}
#: Likely rates, in requests/s.
LEAST_RATE, MOST_RATE = 0.01, 1000.0
#: Start of 2020 and of 2050, in seconds since 1970.
_LIKELY_DATES_S = 1_577_836_800, 2_524_608_000
_OFFSET = re.compile(r"(Z|[+-]\d\d(:?\d\d)?)$")
_DATE = re.compile(r"\s*\d{4}-\d\d-\d\d")


@dataclass(frozen=True, slots=True)
class Clock:
    """The unit of the times in a column.

    Attributes:
        unit: Name of the unit.
        ticks: Ticks of the unit.
        doubted: Whether an unlikely rate may be taken for another unit: not where the column or the program that wrote it
            names the unit.
        whole: Whether the format has no fractions of the unit.
        reason: Why it is this unit; None if the format documents it.
    """

    unit: str
    ticks: int
    doubted: bool = True
    whole: bool = False
    reason: str | None = None


def clock(unit: str, doubted: bool = True, whole: bool = False, reason: str | None = None) -> Clock:
    """The clock of a unit of ``TIME_UNITS``."""
    return Clock(unit, TIME_UNITS[unit], doubted, whole, reason)


def decided(times: np.ndarray, own: Clock, given: str | None, where: str) -> Clock:
    """The clock of the first times of a file, by the rule above.

    Args:
        times: Int or float64 [n], not NaN, in the order of the file.
        own: The clock of the format.
        given: ``--time-unit``.
        where: The file and the column, for the error.

    Raises:
        MissingSetting: Several units are equally likely.
    """
    if given is not None:
        return own if given == own.unit else clock(given, reason="--time-unit says so")
    times = times[np.isfinite(times) & (times >= 0)]
    if not len(times) or own.reason is not None:
        return own
    since_1970 = [unit for unit, per_unit in TIME_UNITS.items() if _since_1970(times[0], per_unit)]
    if since_1970:
        unit = since_1970[0]
        return own if unit == own.unit else clock(unit, reason="they then count from 1970")
    rates = _rates(times)
    likely = [unit for unit, rate in rates.items() if LEAST_RATE <= rate < MOST_RATE]
    if own.whole and "s" in likely and (times != np.floor(times)).any():
        return clock("s", reason="milliseconds would be whole numbers")
    if not own.doubted or own.unit not in rates or not likely:
        return own
    if LEAST_RATE <= rates[own.unit] <= MOST_RATE:
        # Other programs write whole seconds under the same keys.
        reason = f"that is the format's unit; in s they would be {rates['s']:.3g} requests/s"
        return replace(own, reason=reason) if own.whole and "s" in likely else own
    found = f"in {own.unit} they would be {rates[own.unit]:.3g} requests/s"
    if len(likely) > 1:
        others = " or ".join(f"{rates[unit]:.3g} in {unit}" for unit in likely)
        remedy = f"{where}: {found}, {others}; give --time-unit {' or '.join(likely)}, or {own.unit} if that is right"
        raise MissingSetting("time_unit", remedy)
    return clock(likely[0], reason=found)


def _since_1970(time: float, unit_ticks: int) -> bool:
    seconds = time * (unit_ticks / PER_SECOND)
    return bool(_LIKELY_DATES_S[0] <= seconds < _LIKELY_DATES_S[1])


def _rates(times: np.ndarray) -> dict[str, float]:
    """Requests/s by unit; empty if all arrive at once."""
    ordered = np.sort(times)
    left_out = len(ordered) // 10
    middle = ordered[left_out : len(ordered) - left_out]
    span = float(middle[-1] - middle[0])
    if not span:
        return {}
    return {unit: (len(middle) - 1) / span * (PER_SECOND / per_unit) for unit, per_unit in TIME_UNITS.items()}


def to_ticks(times: np.ndarray, unit_ticks: int, first: float = 0) -> np.ndarray:
    """Ticks (int64 [n]) from ``first`` to ``times`` (int or float64 [n], finite), all counted in units of ``unit_ticks``."""
    if times.dtype.kind == "i" and first == int(first):
        return (times - int(first)) * unit_ticks
    (first_whole,), (first_ns,) = _split(np.array([first], dtype=np.float64), unit_ticks)
    whole, rest_ns = _split(times.astype(np.float64), unit_ticks)
    return (whole - first_whole).astype(np.int64) * unit_ticks + (rest_ns - first_ns) * TICKS_PER_NS


def _split(times: np.ndarray, unit_ticks: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole units (float64 [n]), and the nanoseconds after them (int64 [n])."""
    whole = np.floor(times)
    rest, per_us = times - whole, unit_ticks / ticks.PER_US
    us = np.rint(rest * per_us)
    is_us = np.abs(us / per_us - rest) <= np.spacing(times) / 2
    return whole, np.where(is_us, us * 1000, np.rint(rest * (unit_ticks // TICKS_PER_NS))).astype(np.int64)


def to_seconds(arrival_ticks: np.ndarray) -> np.ndarray:
    """Seconds (float64 [n]) nearest to ``arrival_ticks``; ``to_ticks`` restores whole nanoseconds."""
    whole_s, rest_ticks = np.divmod(arrival_ticks, ticks.PER_SECOND)
    return whole_s + rest_ticks / ticks.PER_SECOND


def utc_date(time: float, unit: Clock) -> str | None:
    """The date of a time, where it is one between 2020 and 2050."""
    if not _since_1970(time, unit.ticks):
        return None
    return (
        datetime.fromtimestamp(time * (unit.ticks / PER_SECOND), UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    )


def has_dates(column: pa.Array) -> bool:
    """Whether the first value of a column is a date."""
    if pa.types.is_timestamp(column.type):
        return True
    return pa.types.is_string(column.type) and is_date(column[0].as_py() or "")


def is_date(text: str) -> bool:
    """Whether a text begins as a date of ISO 8601."""
    return _DATE.match(text) is not None


def is_zoned(column: pa.Array) -> bool:
    """Whether the first date of a column has an offset."""
    return bool(column.type.tz) if pa.types.is_timestamp(column.type) else _OFFSET.search(column[0].as_py()) is not None


def date_ns(table: Table, field: str, zoned: bool) -> np.ndarray:
    """Nanoseconds since 1970 (int64 [n]) of a column of dates, as text in ISO 8601 with up to nine decimals.

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
    except pa.ArrowException:
        if "," in str(column[0].as_py()):
            # ISO 8601 allows both marks of decimals; Python's logging writes the comma.
            points = pa.compute.replace_substring(column, ",", ".")
            return date_ns(table.having(**{field: points}), field, zoned)
        row = next((row for row, value in enumerate(column) if not _is_valid(value, kind)), 0)
        remedy = (
            "must be a date and time such as 2026-03-29T10:00:00, with an offset (Z, +01:00) in all rows or in none"
        )
        raise table.error(row, field, column[row].as_py(), remedy) from None


def _is_valid(value: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        value.cast(kind)
    except pa.ArrowException:
        return False
    return True
