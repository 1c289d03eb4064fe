"""Declared contents of the files of a result, table by table and key by key, and the check of a folder's files.

A result folder may be edited, truncated or combined from two runs. Each table is therefore read by its declaration into
the types that the run wrote; everything else in it is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...sim.memory.accounting.buckets import BUCKETS, OPTIONAL_BUCKETS
from ...sim.memory.accounting.worths import HOST_WORTHS, WORTH_COLUMNS, WORTHS
from ...sim.metrics.residencies import BEGINS, ENDS, KINDS
from ...sim.output import frames as pd
from ...sim.types.user_files import json_value

#: Limits of ticks (int64), of counts (a product of two also fits in int64), and of slots (the largest pool).
MOST_TICKS, MOST_COUNT, MOST_SLOTS = 2**63 - 1, 2**31 - 1, 2**48
#: Limit of a number in a document, beyond any result and far below the limit of float64.
MOST_NUMBER = 1e100


class Damaged(Exception):
    """A file that no run has written; the text has the file, the reason and the position."""


@dataclass(frozen=True)
class Column:
    """Allowed values of a column.

    Attributes:
        kind: "whole", "number", "text" or "truth".
        least, most: Range of numbers, both included. Infinity is allowed if ``most`` is infinite.
        places: Name, in ``Declaration.read``, of the collection that the numbers index, from 0; None if they index
            nothing.
        words: Allowed texts; empty for any.
        optional: Whether the table may lack the column.
        nulls: Whether rows may have no value.
    """

    kind: Literal["whole", "number", "text", "truth"] = "whole"
    least: float = 0
    most: float = MOST_COUNT
    places: str | None = None
    words: tuple[str, ...] = ()
    optional: bool = False
    nulls: bool = False

    def read(self, found: pa.ChunkedArray, where: str, sizes: Mapping[str, int]) -> Any:
        """The values in the type that a run writes.

        Raises:
            Damaged: The values have another type, or one of them is not allowed.
        """
        if pa.types.is_dictionary(found.type):
            found = pc.cast(found, found.type.value_type)
        unknown = pa.types.is_null(found.type) and (self.nulls or not len(found))
        if not (unknown or any(fits(found.type) for fits in _TYPES[self.kind])):
            raise Damaged(f"{where}: has type {found.type}, not {_MEANT[self.kind]}")
        if found.null_count and not self.nulls:
            raise Damaged(f"{where}: is missing in row {_first(found.is_null())}")
        if self.kind == "truth":
            return np.asarray(found, dtype=bool)
        return self._words(found, where) if self.kind == "text" else self._numbers(found, where, sizes)

    def _words(self, found: pa.ChunkedArray, where: str) -> Any:
        texts = found.to_pylist()
        if not self.words:
            return texts
        odd = next((row for row, text in enumerate(texts, 1) if text not in self.words), None)
        if odd is not None:
            raise Damaged(f"{where}: is none of {', '.join(self.words)} in row {odd}")
        return pd.Categorical(texts, self.words)

    def _numbers(self, found: pa.ChunkedArray, where: str, sizes: Mapping[str, int]) -> Any:
        kind = np.int64 if self.kind == "whole" else np.float64
        missing = np.asarray(found.is_null())
        values = np.full(len(found), self.least, dtype=kind)
        if not missing.all():
            values = np.where(missing, self.least, np.asarray(found.fill_null(0)))
        most = self.most if self.places is None else sizes[self.places] - 1
        # NaN is neither above nor below the limits.
        wrong = ~((values >= self.least) & (values <= most))
        if wrong.any():
            row = int(wrong.argmax())
            raise Damaged(f"{where}: is {values[row]} in row {row + 1}, and not from {self.least} to {most}")
        if self.kind == "number":
            return np.where(missing, np.nan, values.astype(kind))
        values = values.astype(kind)
        return pd.arrays.IntegerArray(values, missing) if self.nulls else values


_TYPES = {
    "whole": (pa.types.is_integer,),
    "number": (pa.types.is_floating, pa.types.is_integer),
    "text": (pa.types.is_string, pa.types.is_large_string),
    "truth": (pa.types.is_boolean,),
}
_MEANT = {"whole": "whole numbers", "number": "numbers", "text": "text", "truth": "true and false"}


@dataclass(frozen=True)
class Declaration:
    """Allowed contents of a table.

    Attributes:
        columns: Its columns by name.
        ascending: Columns with values that never decrease, over the rows that have them.
        others: Whether undeclared columns are read too, if they hold numbers, text or booleans.
    """

    columns: Mapping[str, Column]
    ascending: Sequence[str] = ()
    others: bool = False

    def read(
        self, path: Path, sizes: Mapping[str, int] | None = None, former: Mapping[str, str] | None = None
    ) -> pd.DataFrame:
        """Read the table in a file.

        Args:
            sizes: Size of each collection that columns index.
            former: Names of columns in older files, by their current names.

        Raises:
            Damaged: The table differs from the declaration.
            OSError: The file cannot be read.
        """
        table, where = _read_parquet(path), path.name
        today = {before: now for now, before in (former or {}).items() if now in self.columns}
        names = [today.get(name, name) for name in table.column_names]
        table = table.rename_columns(names)
        missing = [name for name, column in self.columns.items() if not column.optional and name not in names]
        if missing:
            raise Damaged(f"{where}: has no column {missing[0]}")
        known = [name for name in names if name in self.columns]
        columns = {name: self.columns[name].read(table[name], f"{where}: {name}", sizes or {}) for name in known}
        for name in (name for name in names if self.others and name not in self.columns):
            if not any(fits(table[name].type) for kind in _TYPES.values() for fits in (*kind, pa.types.is_null)):
                raise Damaged(f"{where}: {name}: has type {table[name].type}, which no setting has")
            columns[name] = table[name].to_pandas()
        frame = pd.DataFrame(columns, index=range(table.num_rows))
        for before, after in zip(self.ascending, self.ascending[1:]):
            late = (frame[before] > frame[after]).fillna(False).to_numpy(dtype=bool)
            if late.any():
                raise Damaged(f"{where}: {before} is above {after} in row {int(late.argmax()) + 1}")
        return frame


def _read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file; symbolic links are followed.

    Raises:
        Damaged: It is not Parquet, is truncated, or has a column twice.
        OSError: It cannot be read.
    """
    name = path.name
    try:
        # Arrow does not accept paths that are not UTF-8.
        with path.open("rb") as file:
            table = pq.read_table(file)
    except (pa.ArrowException, ValueError):
        raise Damaged(f"{name}: is not a Parquet file") from None
    except OSError as error:
        # Arrow's own errors have no errno.
        if error.errno is not None:
            raise
        raise Damaged(f"{name}: is not a Parquet file") from None
    if len(set(table.column_names)) < len(table.column_names):
        raise Damaged(f"{name}: has a column twice")
    return table


def _first(rows: pa.ChunkedArray) -> int:
    return int(np.asarray(rows).argmax()) + 1


_TICKS = Column(most=MOST_TICKS)
_ANY_TICKS = Column(least=-MOST_TICKS, most=MOST_TICKS)
_SLOTS = Column(most=MOST_SLOTS)
_KNOWN_TICKS = Column(most=MOST_TICKS, nulls=True)
_REPLICA = Column(places="replicas", optional=True)
#: The tables of a result.
TABLES = {
    "requests": Declaration(
        {
            "arrival_ticks": _TICKS,
            "prompt_tokens": Column(least=1),
            "output_tokens": Column(least=1),
            "refused": Column("truth"),
            "rejected": Column("truth", optional=True),
            "n": Column(least=1, most=1024, optional=True),
            "first_scheduled_ticks": _KNOWN_TICKS,
            "first_token_ticks": _KNOWN_TICKS,
            "finish_ticks": _KNOWN_TICKS,
            "recomputed": Column(nulls=True),
            "swapped": Column(nulls=True),
            "replica": Column(places="replicas", optional=True, nulls=True),
        },
        ("arrival_ticks", "first_scheduled_ticks", "first_token_ticks", "finish_ticks"),
    ),
    "residencies": Declaration(
        {
            "request": Column(places="requests"),
            "sequence": Column(places="sequences"),
            "start_ticks": _TICKS,
            "first_token_ticks": _TICKS,
            "end_ticks": _TICKS,
            "begun": Column("text", words=BEGINS),
            "ended": Column("text", words=ENDS),
            "replica": _REPLICA,
        },
        ("start_ticks", "first_token_ticks", "end_ticks"),
    ),
    "steps": Declaration({
        **dict.fromkeys(("start_ticks", "ticks", "first_ticks", "next_ticks", "swap_ticks"), _TICKS),
        "slope_ticks": _ANY_TICKS,
        **dict.fromkeys(("steps", "batch_size", "decodes", "prefill_tokens", "waiting", "growing", "iterations"), Column()),
        "replica": _REPLICA,
    }),
    "memory": Declaration({
        "start_ticks": _TICKS,
        **dict.fromkeys(BUCKETS, _SLOTS),
        **dict.fromkeys((*OPTIONAL_BUCKETS, *WORTH_COLUMNS.values()), Column(most=MOST_SLOTS, optional=True)),
        "replica": _REPLICA,
    }),
    "preemptions": Declaration({
        "request": Column(places="requests"),
        "ticks": _TICKS,
        "kind": Column("text", words=KINDS),
        "replica": _REPLICA,
    }),
    "gaps": Declaration({
        "first_ticks": _TICKS,
        "slope_ticks": _ANY_TICKS,
        "count": Column(least=1),
        "weight": Column(least=1),
    }),
}  # fmt: skip


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 to the limit of int64."""
    return type(value) is int and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    """Whether a value is a finite number within the limits."""
    return type(value) in (int, float) and abs(value) <= MOST_NUMBER


def is_text(value: Any) -> bool:
    """Whether a value is text."""
    return isinstance(value, str)


def read_json(path: Path, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Read the JSON object in a file and check its declared keys and its numbers.

    Raises:
        Damaged: The file has other contents.
        OSError: It cannot be read.
    """
    try:
        document = json_value(path.read_bytes())
    except ValueError:
        raise Damaged(f"{path.name}: is not JSON") from None
    check_document(document, declared, path.name)
    _check_numbers(document, path.name)
    return document


def _check_numbers(value: Any, where: str) -> None:
    """Refuse a document with a number that is not finite or out of range, at any depth.

    Raises:
        Damaged: Names the first one.
    """
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        _check_numbers(inner, f"{where}: {name}" if where.endswith(".json") else f"{where}.{name}")
    if type(value) in (int, float) and not is_number(value):
        raise Damaged(f"{where} is a number beyond {MOST_NUMBER:g}, or none")


def is_number_or_null(value: Any) -> bool:
    """Whether a value is a number or null."""
    return value is None or is_number(value)


def is_list(value: Any) -> bool:
    """Whether a value is a list."""
    return isinstance(value, list)


def is_span(value: Any) -> bool:
    """Whether a value is a list of two numbers."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


_WANTED = {
    is_count: "a whole number, 0 or more",
    is_number: "a number",
    is_number_or_null: "a number or null",
    is_text: "a text",
    is_list: "a list",
    is_span: "two numbers",
}
_SHARES = ("token_states", "reservation", "internal", "external_and_others")
#: Keys of ``summary.json`` and of ``run.json`` that are read, and their types.
SUMMARY = {
    **dict.fromkeys(("completed", "refused", "total_input_tokens", "total_output_tokens", "num_steps"), is_count),
    **dict.fromkeys(("duration", "request_throughput", "output_throughput", "mean_batch"), is_number),
    **dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"), is_number),
    "preemptions": {"recompute": is_count, "swap": is_count},
    "waste": {
        "window_s": is_span,
        **dict.fromkeys(
            ("mean_over_time_pct", "mean_over_iterations_pct"),
            {"paper_view": dict.fromkeys(_SHARES, is_number), "buckets": dict.fromkeys(BUCKETS, is_number)},
        ),
    },
}
#: Those of ``cache_worth`` in ``summary.json``, where it is; the bounds where ``asked_blocks`` is.
CACHE_WORTH = {"pool_pct": dict.fromkeys(WORTHS, is_number)}
CACHE_BOUNDS = dict.fromkeys(
    ("asked_blocks", "hit_blocks", "fixed_schedule_hit_blocks", "infinite_hit_blocks", "closing_blocks"), is_count
)
#: Further parts of ``cache_worth``, each where it is.
CACHE_PARTS = {
    "time_to_live": {"seconds": is_count, "freed_pct": is_number, "lost_blocks": is_count},
    "host": {"pool_pct": dict.fromkeys(HOST_WORTHS, is_number)},
    "duplicates": {"pool_pct": is_number},
}
RUN = {
    "settings": dict.fromkeys(("policy", "model", "gpu"), is_text),
    "replica": {"block_size": is_count},
    "workload": {"name": is_text, "requests": is_count, "sha256": is_text},
    "cost": {},
}


def check_document(document: Any, declared: Mapping[str, Any], where: str) -> None:
    """Refuse a document that lacks a key or has another type under it.

    Raises:
        Damaged: Names the first such key.
    """
    if not isinstance(document, Mapping):
        raise Damaged(f"{where}: is not a JSON object")
    for name, inner in declared.items():
        place = f"{where}: {name}" if where.endswith(".json") else f"{where}.{name}"
        if name not in document:
            raise Damaged(f"{place} is missing")
        if isinstance(inner, Mapping):
            check_document(document[name], inner, place)
        elif not inner(document[name]):
            raise Damaged(f"{place} is not {_WANTED[inner]}")
