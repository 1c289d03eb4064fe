"""What a trace must hold: from a parsed table to a trace, or one line that says which value cannot be."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pyarrow as pa

from ..sim import ticks
from ..sim.dialogue import NO_PARENT, Dialogue
from ..sim.errors import TraceError
from .table import Table, shown
from .times import LATEST_S, to_ticks
from .trace import Trace

LENGTH_NAMES = {
    "prompt_tokens": ("prompt_tokens", "input", "input_length"),
    "output_tokens": ("output_tokens", "output", "output_length"),
    "max_tokens": ("max_tokens",),
    "n": ("n",),
    "parent": ("parent",),
    "fork_at": ("fork_at",),
    "truncate_to": ("truncate_to",),
}
"""Names by which a file may call a column, ours first; then the SOSP'23 pairs' and Mooncake's."""

ARRIVAL_UNIT_TICKS = {"arrival_s": ticks.PER_SECOND, "timestamp": ticks.PER_MS}
"""Names of the arrival column and its unit: seconds in ours, milliseconds in Mooncake's."""

KNOWN_NAMES = [*(name for names in LENGTH_NAMES.values() for name in names), *ARRIVAL_UNIT_TICKS]

_TOO_MANY_TOKENS = 2**31
#: Sequences that one request may ask for.
MOST_SEQUENCES = 1024
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)


def checked(name: str, table: Table) -> Trace:
    """The trace ``name`` in ``table``.

    Raises:
        TraceError: names the first value of the first column that cannot be true.
    """
    _refuse_repeated(table)
    prompt_tokens = _lengths(table, _required(table, "prompt_tokens"))
    output_name = _required(table, "output_tokens")
    output_tokens = _lengths(table, output_name)
    max_tokens = None
    if "max_tokens" in table.columns:
        max_tokens = _lengths(table, "max_tokens")
        remedy = f"must be at least {output_name}, the output that comes; raise it or leave the column out"
        table.refuse(max_tokens < output_tokens, "max_tokens", max_tokens, remedy)
    n = _sequences(table) if "n" in table.columns else None
    _refuse_without_parents(table)
    dialogue = _dialogue(table, prompt_tokens, output_tokens) if "parent" in table.columns else None
    return Trace(name, prompt_tokens, output_tokens, _arrivals(table), max_tokens, table.rows, n=n, dialogue=dialogue)


def _refuse_repeated(table: Table) -> None:
    twice = next((name for name in KNOWN_NAMES if table.names.count(name) > 1), None)
    if twice is not None:
        found = shown(",".join(table.names))
        raise TraceError(table.path, table.header_line, "columns", found, f"{twice} is there twice; keep one")


def _refuse_without_parents(table: Table) -> None:
    alone = next((name for name in ("fork_at", "truncate_to") if name in table.columns), None)
    if alone is not None and "parent" not in table.columns:
        remedy = f"{alone} says where a parent is left; name the parent in a column of that name, or leave it out"
        raise TraceError(table.path, table.header_line, "columns", shown(",".join(table.names)), remedy)


def _required(table: Table, column: str) -> str:
    names = LENGTH_NAMES[column]
    for name in names:
        if name in table.columns:
            return name
    remedy = f"no column {column}; name it {' or '.join(names)}"
    raise TraceError(table.path, table.header_line, "columns", shown(",".join(table.names)), remedy)


def _lengths(table: Table, field: str) -> np.ndarray:
    lengths = _counts(table, field, "tokens")
    table.refuse(lengths >= _TOO_MANY_TOKENS, field, lengths, "no model is that long; correct the row")
    return lengths.astype(np.int64)


def _sequences(table: Table) -> np.ndarray:
    numbers = _counts(table, "n", "sequences")
    table.refuse(numbers > MOST_SEQUENCES, "n", numbers, f"must be at most {MOST_SEQUENCES}; correct the row")
    return numbers.astype(np.int64)


def _dialogue(table: Table, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> Dialogue:
    """Who goes on from whom: ``parent`` with either ``fork_at`` or ``truncate_to``, in those rows that have one."""
    parents = _optional(table, "parent", "the row of an earlier request, the first being 0")
    child = ~np.isnan(parents)
    rows = np.arange(len(parents))
    table.refuse(child & ((parents < 0) | (parents >= rows)), "parent", parents, "must be an earlier row, from 0 on")
    parent = np.where(child, parents, NO_PARENT).astype(np.int64)
    fork, cut = (_optional(table, name, "tokens of the parent's text, 1 or more") for name in ("fork_at", "truncate_to"))
    both = child & (np.isnan(fork) == np.isnan(cut))
    table.refuse(both, "fork_at", fork, "a row with a parent has either fork_at or truncate_to; give one of them")
    for name, values in (("fork_at", fork), ("truncate_to", cut)):
        table.refuse(~child & ~np.isnan(values), name, values, "has no parent to begin with; give one or leave it out")
        most = np.minimum(prompt_tokens, (prompt_tokens + output_tokens)[parent]) - 1
        wrong = child & ((values < 1) | (values > most))
        table.refuse(wrong, name, values, "must leave a token of its own prompt, and of the parent's text; correct the row")
    tokens = np.where(child, np.where(np.isnan(fork), cut, fork), 0)
    return Dialogue(parent, tokens.astype(np.int64), child & ~np.isnan(cut))


def _optional(table: Table, field: str, meaning: str) -> np.ndarray:
    """A column of whole numbers that may be missing (NaN), float64."""
    if field not in table.columns:
        return np.full(len(table.columns["parent"]), np.nan)
    column = table.columns[field]
    if pa.types.is_string(column.type):
        # So a column is read that is empty throughout, or in which some value is no number.
        texts = np.array(["" if text is None else text for text in column.to_pylist()], dtype=object)
        wrong = np.array([bool(text) and not _NUMBER.fullmatch(text) for text in texts])
        table.refuse(wrong, field, texts, f"must be {meaning}; correct the row")
        return np.full(len(column), np.nan)
    missing = np.asarray(column.is_null())
    if missing.all():
        return np.full(len(column), np.nan)
    filled = replace(table, columns={field: column.fill_null(0)})
    values = _numbers(filled, field, meaning).astype(np.float64)
    table.refuse(~missing & (values != np.floor(values)), field, values, f"must be {meaning}; correct the row")
    values[missing] = np.nan
    return values


def _counts(table: Table, field: str, what: str) -> np.ndarray:
    """A column of whole numbers from 1 up, float64."""
    counts = _numbers(table, field, f"a whole number of {what}, 1 or more")
    broken = ~np.isfinite(counts) | (counts != np.floor(counts))
    table.refuse(broken, field, counts, f"must be a whole number of {what}; correct the row")
    table.refuse(counts < 1, field, counts, "must be 1 or more; correct or drop the row")
    return counts


def _arrivals(table: Table) -> np.ndarray | None:
    field = next((name for name in ARRIVAL_UNIT_TICKS if name in table.columns), None)
    if field is None:
        return None
    unit_ticks = ARRIVAL_UNIT_TICKS[field]
    times = _numbers(table, field, "a time, 0 or more")
    table.refuse(~np.isfinite(times), field, times, "must be a finite time; correct or drop the row")
    table.refuse(times < 0, field, times, "must be 0 or more; count from the start of the run")
    latest = LATEST_S * (ticks.PER_SECOND // unit_ticks)
    table.refuse(times >= latest, field, times, f"must be below {latest}; subtract the first arrival from all")
    early = np.concatenate(([False], np.diff(times) < 0))
    table.refuse(early, field, times, "is before the row above; sort the rows by arrival")
    return to_ticks(times, unit_ticks)


def _numbers(table: Table, field: str, meaning: str) -> np.ndarray:
    """The column as int64 or float64 [n]; refuses missing values and what is no number."""
    column, kind = table.columns[field], table.columns[field].type
    wide = pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_uint64(kind)
    if not (wide or pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise _not_a_number(table, field, meaning)
    missing = np.asarray(column.is_null())
    table.refuse(missing, field, np.full(len(missing), None), f"is missing; give {meaning}")
    return np.asarray(column.cast(pa.float64() if wide else pa.int64(), safe=False))


def _not_a_number(table: Table, field: str, meaning: str) -> TraceError:
    column = table.columns[field]
    try:
        values = column.cast(pa.string()).to_pylist()
    except pa.ArrowException:  # a list or a struct has no text
        values = column.to_pylist()
    row = next((row for row, value in enumerate(values) if not _NUMBER.fullmatch(str(value))), 0)
    return table.error(row, field, values[row], f"must be {meaning}; correct the row")
