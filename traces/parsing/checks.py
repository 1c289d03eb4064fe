"""Checks of rows: convert a table with the file's column names into arrays with ours, or raise for the first invalid value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...sim.types.errors import SettingError
from ...sim.workload.dialogue import NO_PARENT, Dialogue
from ..types.start import Start
from . import arrow as pa
from .form import BLOCK_TOKENS, HASH_IDS, SESSION, Form
from .jsonl_format import session_text
from .pieces import sized_pieces, whole_pieces
from .table import Table, shown
from .times import (
    LATEST_S,
    PER_SECOND,
    TIME_UNITS,
    Clock,
    clock,
    date_ns,
    decided,
    has_dates,
    is_zoned,
    to_ticks,
    utc_date,
)

Arrays = dict[str, np.ndarray]
_TOO_MANY_TOKENS = 2**31
#: Maximum number of sequences of one request.
MOST_SEQUENCES = 1024
#: Bound of priorities either way: exact as a float.
_HIGHEST_PRIORITY = 2**31
#: Columns of a dialogue; they are checked against each other once all rows are read.
DIALOGUE = ("parent", "fork_at", "truncate_to")
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Before:
    """State carried from the rows checked so far to the next ones.

    Attributes:
        field: Name of the column of times; None before a row has one.
        unit: The unit of the times, decided from the first rows that have any; None before.
        zoned: Whether times are dates with an offset; None for numbers.
        first, last: The times of the first and of the last row, in the file's unit; None before the first row.
        earliest: The earliest time, in the same unit; None before the first row.
        last_ticks: Ticks from the first row to the last; negative if the last row is earlier.
        start: How the file writes the earliest time.
    """

    field: str | None = None
    unit: Clock | None = None
    zoned: bool | None = None
    first: float | int | None = None
    last: float | int | None = None
    earliest: float | int | None = None
    last_ticks: int = 0
    start: Start | None = None

    def time(self, ticks_after_first: int) -> object:
        """A time of the file, in its unit, or as a date."""
        first, unit = self.first or 0, self.unit or clock("ns")
        if self.zoned is not None:
            return str(np.datetime64(int(first) + ticks_after_first // unit.ticks, "ns"))
        return shown(first + ticks_after_first / unit.ticks)


def checked(
    table: Table, form: Form, before: Before, longest: int = 2 * _TOO_MANY_TOKENS, time_unit: str | None = None
) -> tuple[Arrays, Before]:
    """The arrays of some rows under our names, and the state for the next rows.

    Args:
        time_unit: Unit of the times, if the user gives it.
        longest: Maximum of prompt + output, in tokens.

    Raises:
        TraceError: A value is invalid; names the first one of the first such column.
    """
    arrays = {
        "prompt_tokens": _lengths(table, _column(table, form, "prompt_tokens")),
        "output_tokens": _lengths(table, _column(table, form, "output_tokens")),
    }
    total_tokens = arrays["prompt_tokens"] + arrays["output_tokens"]
    remedy = f"longer than the model's {longest} tokens; shorten or drop the request"
    table.refuse(total_tokens > longest, "prompt_tokens + output_tokens", total_tokens, remedy)
    if "max_tokens" in table.columns:
        arrays["max_tokens"] = _max_tokens(table, arrays["output_tokens"], _column(table, form, "output_tokens"))
    if "ignore_eos" in table.columns:
        arrays["ignore_eos"] = _ignored(table, arrays)
        arrays.setdefault("max_tokens", arrays["output_tokens"])
    if "n" in table.columns:
        arrays["n"] = _sequences(table)
    if "priority" in table.columns and "priority" in form.names:
        arrays["priority"] = _priorities(table)
    for name in (name for name in DIALOGUE if name in table.columns and name in form.names):
        arrays[name] = _optional(table, name)
    arrays |= _content(table, arrays["prompt_tokens"], form.block_tokens)
    if before.unit is None:
        before = _begun(table, form, before, time_unit)
    delay = next((name for name in form.delays if name in table.columns), None)
    if delay is not None:
        arrays["delay_ticks"] = delays = _delays(table, delay, _unit_of_delays(form, delay, before, time_unit))
        if SESSION in arrays:
            alone = np.array([name is None for name in arrays[SESSION]]) & (delays > 0)
            written = pa.as_numpy(table.columns[delay])
            table.refuse(
                alone, delay, written, "applies only to a turn of a session, and the row has no session_id; give one"
            )
        table = _timed(table, delay, form, before)
    field = _clock_of(table, form)
    if field is not None:
        arrays["arrival_ticks"], before = _arrivals(table, field, before, form.in_order or "parent" in arrays)
    return arrays, before


def _clock_of(table: Table, form: Form) -> str | None:
    """Name of the column of times; None without one."""
    return next((name for name in form.clocks if name in table.columns), None)


def _begun(table: Table, form: Form, before: Before, time_unit: str | None) -> Before:
    """The state with the unit of the times, if these rows have any.

    Raises:
        UserError: The unit is not clear, or is given for dates.
    """
    field = _clock_of(table, form)
    times = None if field is None else table.columns[field].drop_null()
    if field is None or times is None or not len(times):
        return before
    if has_dates(times):
        if time_unit is not None:
            raise SettingError("time_unit", time_unit, f"{table.path} has dates, which need no unit; leave it out")
        return replace(before, field=field, unit=clock("ns"), zoned=is_zoned(times))
    own = form.clocks[field]
    if _is_numeric(times.type):
        numbers = numbers_of(Table(table.path, {field: times}, np.arange(len(times))), field, "a time")
        own = decided(numbers, own, time_unit, f"{table.path}: {field}")
    return replace(before, field=field, unit=own)


def _unit_of_delays(form: Form, delay: str, before: Before, time_unit: str | None) -> int:
    """Ticks of the unit of delays: that of the times, if the format has one unit for both."""
    own = form.delays[delay]
    if before.unit is not None and before.zoned is None and form.clocks[before.field or ""] == own:
        return before.unit.ticks
    return own.ticks if time_unit is None else TIME_UNITS[time_unit]


def _column(table: Table, form: Form, field: str) -> str:
    """The file's name of a required column; its first alternative if these rows have none of the names."""
    names = form.names[field]
    return next((name for name in names if name in table.columns), names[0])


def _lengths(table: Table, field: str) -> np.ndarray:
    lengths = _counts(table, field, "tokens")
    table.refuse(lengths >= _TOO_MANY_TOKENS, field, lengths, "no model is that long; correct the row")
    return lengths.astype(np.int64)


def _max_tokens(table: Table, output_tokens: np.ndarray, output_name: str) -> np.ndarray:
    max_tokens = _lengths(table, "max_tokens")
    remedy = f"must be at least {output_name}, the output that comes; raise it or leave the column out"
    table.refuse(max_tokens < output_tokens, "max_tokens", max_tokens, remedy)
    return max_tokens


def _ignored(table: Table, arrays: Arrays) -> np.ndarray:
    """Whether each request generates all of its ``max_tokens``; if the file has none, they are the output of one that does."""
    meaning, column = "1 or 0 (true or false)", table.columns["ignore_eos"]
    if pa.types.is_boolean(column.type):
        table = table.having(ignore_eos=column.cast(pa.int64()))
    found = numbers_of(table, "ignore_eos", meaning)
    table.refuse((found != 0) & (found != 1), "ignore_eos", found, f"must be {meaning}; correct the row")
    ignored, outputs = found.astype(np.int64), arrays["output_tokens"]
    if "max_tokens" not in arrays:
        remedy = "lets the request end before its max_tokens, which the file does not have; give that column, too"
        table.refuse(ignored == 0, "ignore_eos", ignored, remedy)
        return ignored
    remedy = "is of a request that generates all of its max_tokens, and this one generates fewer; give 0"
    table.refuse((ignored == 1) & (arrays["max_tokens"] != outputs), "ignore_eos", ignored, remedy)
    return ignored


def _sequences(table: Table) -> np.ndarray:
    numbers = _counts(table, "n", "sequences")
    table.refuse(numbers > MOST_SEQUENCES, "n", numbers, f"must be at most {MOST_SEQUENCES}; correct the row")
    return numbers.astype(np.int64)


def _priorities(table: Table) -> np.ndarray:
    meaning = "a whole number, lower ones first"
    numbers = numbers_of(table, "priority", meaning)
    broken = ~np.isfinite(numbers) | (numbers != np.floor(numbers)) | (np.abs(numbers) > _HIGHEST_PRIORITY)
    remedy = f"must be {meaning}, from -{_HIGHEST_PRIORITY} to {_HIGHEST_PRIORITY}; correct the row"
    table.refuse(broken, "priority", numbers, remedy)
    return numbers.astype(np.int64)


def _content(table: Table, prompt_tokens: np.ndarray, block_tokens: int) -> Arrays:
    arrays = {}
    if HASH_IDS in table.columns and BLOCK_TOKENS in table.columns:
        arrays = sized_pieces(table, prompt_tokens)
    elif HASH_IDS in table.columns:
        arrays = whole_pieces(table, prompt_tokens, block_tokens)
    if SESSION in table.columns:
        arrays[SESSION] = _session_texts(table)
    return arrays


def _session_texts(table: Table) -> np.ndarray:
    """Names of sessions, None for a row without one; object [n]."""
    column, remedy = table.columns[SESSION], "must be a whole number or a text; correct the row"
    if pa.types.is_floating(column.type):
        # pandas stores whole numbers as floats if some are missing.
        values = pa.as_numpy(column.fill_null(0)).astype(np.float64)
        table.refuse(~(np.abs(values) < 2**63) | (values != np.floor(values)), SESSION, values, remedy)
        column = column.cast(pa.int64())
    if pa.types.is_integer(column.type):
        texts = (None if value is None else session_text(value) for value in column.to_pylist())
        return np.array(list(texts), dtype=object)
    if not (pa.types.is_string(column.type) or pa.types.is_null(column.type)):
        row = int(pa.as_numpy(column.is_valid()).argmax())
        raise table.error(row, SESSION, column[row].as_py(), remedy)
    return pa.as_numpy(column)


def dialogue(rows: Table, arrays: Mapping[str, np.ndarray]) -> Dialogue:
    """Which earlier request each request continues: its ``parent``, from the token ``fork_at`` on or cut to ``truncate_to`` tokens.

    Args:
        rows: Positions of all rows, for errors; it needs no columns.
        arrays: Columns under our names; those of ``DIALOGUE`` are float64 with NaN for a row without a value.
    """
    prompt_tokens, output_tokens = arrays["prompt_tokens"], arrays["output_tokens"]
    nowhere = np.full(len(rows), np.nan)
    parents, fork, cut = (arrays.get(name, nowhere) for name in DIALOGUE)
    child = ~np.isnan(parents)
    earlier = (parents >= 0) & (parents < np.arange(len(rows)))
    rows.refuse(child & ~earlier, "parent", parents, "must be an earlier row, from 0 on")
    parent = np.where(child, parents, NO_PARENT).astype(np.int64)
    both = child & (np.isnan(fork) == np.isnan(cut))
    rows.refuse(both, "fork_at", fork, "a row with a parent has either fork_at or truncate_to; give one of them")
    for name, values in (("fork_at", fork), ("truncate_to", cut)):
        rows.refuse(~child & ~np.isnan(values), name, values, "has no parent to begin with; give one or leave it out")
        most = np.minimum(prompt_tokens, (prompt_tokens + output_tokens)[parent]) - 1
        wrong = child & ((values < 1) | (values > most))
        remedy = "must leave a token of its own prompt, and of the parent's text; correct the row"
        rows.refuse(wrong, name, values, remedy)
    tokens = np.where(child, np.where(np.isnan(fork), cut, fork), 0)
    return Dialogue(parent, tokens.astype(np.int64), child & ~np.isnan(cut))


def _delays(table: Table, field: str, unit_ticks: int) -> np.ndarray:
    """Ticks (int64 [n]) between the answer to the previous turn and each turn; 0 for a row without a delay."""
    delays = _numbers_or_nan(table, field, "a time between a turn and the answer before it, 0 or more")
    delays[np.isnan(delays)] = 0
    latest = LATEST_S * PER_SECOND // unit_ticks
    wrong = (delays < 0) | (delays >= latest)
    table.refuse(wrong, field, delays, f"must be from 0 to {latest}; correct the row, or give --time-unit")
    return to_ticks(delays, unit_ticks)


def _timed(table: Table, delay: str, form: Form, before: Before) -> Table:
    """The table, where a row with a delay but no time of its own gets the time of the row above."""
    field = _clock_of(table, form) or before.field or next(iter(form.clocks))
    times = table.columns.get(field, pa.nulls(len(table)))
    if before.last is None and times.null_count == len(times):
        return table
    if pa.types.is_null(times.type):
        times = times.cast(pa.float64())
    if not (pa.types.is_integer(times.type) or pa.types.is_floating(times.type)):
        return table
    above = pa.compute.fill_null_forward(times)
    if before.last is not None:
        if isinstance(before.last, float):
            above = above.cast(pa.float64())
        above = pa.compute.fill_null(above, before.last)
    timed = pa.compute.is_null(table.columns[delay])
    return table.having(**{field: pa.compute.if_else(timed, times.cast(above.type), above)})


def _optional(table: Table, field: str) -> np.ndarray:
    """A column of whole numbers, float64 with NaN for missing values."""
    meaning = "tokens of the parent's text, 1 or more"
    if field == "parent":
        meaning = "the row of an earlier request, the first being 0"
    values = _numbers_or_nan(table, field, meaning)
    broken = ~np.isnan(values) & (values != np.floor(values))
    table.refuse(broken, field, values, f"must be {meaning}; correct the row")
    return values


def _numbers_or_nan(table: Table, field: str, meaning: str) -> np.ndarray:
    """A column of numbers, float64 with NaN for missing values."""
    column = table.columns[field]
    if pa.types.is_string(column.type):
        # A CSV column is text if it is empty throughout, or if one of its values is not a number.
        texts = np.array(["" if text is None else text for text in column.to_pylist()], dtype=object)
        wrong = np.array([bool(text) and not _NUMBER.fullmatch(text) for text in texts])
        table.refuse(wrong, field, texts, f"must be {meaning}; correct the row")
        return np.array([float(text) if text else np.nan for text in texts])
    missing = pa.as_numpy(column.is_null())
    if missing.all():
        return np.full(len(column), np.nan)
    if not _is_numeric(column.type):
        raise _not_a_number(table, field, meaning)
    values = numbers_of(table.having(**{field: column.fill_null(0)}), field, meaning).astype(np.float64)
    table.refuse(~np.isfinite(values), field, values, f"must be {meaning}; correct the row")
    values[missing] = np.nan
    return values


def _counts(table: Table, field: str, what: str) -> np.ndarray:
    """A column of whole numbers of at least 1, float64."""
    counts = numbers_of(table, field, f"a whole number of {what}, 1 or more")
    broken = ~np.isfinite(counts) | (counts != np.floor(counts))
    table.refuse(broken, field, counts, f"must be a whole number of {what}; correct the row")
    table.refuse(counts < 1, field, counts, "must be 1 or more; correct or drop the row")
    return counts


def _arrivals(table: Table, field: str, before: Before, in_order: bool) -> tuple[np.ndarray, Before]:
    """Arrival times of the table's rows in ticks, int64 [n], relative to the first row of the file; negative if a row is earlier than it.

    Args:
        in_order: Whether each row has to be at or after the row above.
    """
    column, unit = table.columns[field], before.unit or clock("ns")
    if before.zoned is not None:
        times = date_ns(table, field, before.zoned)
    else:
        written_first = column[0].as_py() if pa.types.is_string(column.type) else None
        if before.first is None and written_first is not None and not _NUMBER.fullmatch(written_first):
            remedy = "must be a number, or a date and time such as 2026-03-29T10:00:00; write it so"
            raise table.error(0, field, written_first, remedy)
        times = numbers_of(table, field, "a time, 0 or more")
        table.refuse(~np.isfinite(times), field, times, "must be a finite time; correct or drop the row")
        table.refuse(times < 0, field, times, "must be 0 or more; count from the start of the run")
    first = times[0].item() if before.first is None else before.first
    written, latest = pa.as_numpy(column), LATEST_S * PER_SECOND // unit.ticks
    for far, side in ((times - first >= latest, "after"), (first - times >= latest, "before")):
        remedy = f"is more than 97 days {side} the first; cut the trace, correct the row, or give --time-unit"
        table.refuse(far, field, written, remedy)
    arrivals = to_ticks(times, unit.ticks, first)
    if in_order:
        falls = np.diff(arrivals, prepend=before.last_ticks) < 0
        table.refuse(falls, field, written, "is before the row above; sort the rows by arrival")
    earliest, start, row = before.earliest, before.start, int(times.argmin())
    if earliest is None or times[row] < earliest:
        earliest = times[row].item()
        start = _start(str(column[row].as_py()), earliest, unit, before.zoned)
    seen = {"first": first, "last": times[-1].item(), "last_ticks": int(arrivals[-1])}
    return arrivals, replace(before, **seen, earliest=earliest, start=start)


def _start(written: str, time: float, unit: Clock, zoned: bool | None) -> Start:
    if zoned is not None:
        return Start(written, None, written)
    return Start(f"{shown(time)}", unit.unit, utc_date(time, unit), unit.reason)


def numbers_of(table: Table, field: str, meaning: str) -> np.ndarray:
    """The column as int64 or float64 [n]; refuses missing values and values that are not numbers."""
    column = table.columns.get(field, pa.nulls(len(table)))
    kind = column.type
    if not (_is_numeric(kind) or pa.types.is_null(kind)):
        raise _not_a_number(table, field, meaning)
    wide = not pa.types.is_integer(kind) or pa.types.is_uint64(kind)
    if column.null_count:
        missing = pa.as_numpy(column.is_null())
        table.refuse(missing, field, np.full(len(missing), None), f"is missing; give {meaning}")
    wanted = pa.float64() if wide else pa.int64()
    # A cast loads pyarrow.compute, which takes longer than most files.
    return pa.as_numpy(column if kind == wanted else column.cast(wanted, safe=False))


def _is_numeric(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _not_a_number(table: Table, field: str, meaning: str) -> Exception:
    column = table.columns[field]
    try:
        values = column.cast(pa.string()).to_pylist()
    except pa.ArrowException:  # a list or a struct has no text
        values = column.to_pylist()
    row = next((row for row, value in enumerate(values) if not _NUMBER.fullmatch(str(value))), 0)
    return table.error(row, field, values[row], f"must be {meaning}; correct the row")


def failed(table: Table, form: Form) -> np.ndarray:
    """bool [n]: whether each row is a failed request, by a length that marks one."""
    gone = np.zeros(len(table), dtype=bool)
    for name in (_column(table, form, field) for field in ("prompt_tokens", "output_tokens")):
        column = table.columns.get(name)
        if None in form.failures:
            gone |= True if column is None else pa.as_numpy(column.is_null())
        if column is not None and pa.types.is_integer(column.type) and 0 in form.failures:
            gone |= pa.as_numpy(pa.compute.equal(column, 0).fill_null(False))
    return gone
