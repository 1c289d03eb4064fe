"""Files of a folder, damaged in ways that are drawn: what a disk, a script or a hand does to them."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_HUGE = "9" * 400
#: What stands where another value stood, as JSON has it.
JSON_VALUES = [
    "null", "true", "-1", "0", "1.5", "1e300", "NaN", "Infinity", "1e999", _HUGE, str(2**63), '"x"', '"-1"', '""',
    '"[/b]"', '"\\ud800"', '"a\\nb"', "[]", "{}", "[null]", '{"a": null}',
]  # fmt: skip
_INTS = [-1, 0, 1, 10**6, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
_FLOATS = [0.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e300]


def damage(folder: Path, draw: random.Random, pattern: str = "*.*") -> str:
    """Damage one of the files with matching names; says which and how."""
    path = draw.choice(sorted(folder.glob(pattern)))
    own = {".json": _json, ".parquet": _parquet, ".npz": _archive}[path.suffix]
    how = _bytes if draw.random() < 0.15 else own
    return f"{path.relative_to(folder)}: {how(path, draw)}"


def _bytes(path: Path, draw: random.Random) -> str:
    """As no format has it."""
    data = bytearray(path.read_bytes())
    how = draw.choice(["empty", "cut", "flipped", "gone", "folder", "zeros", "another"])
    if how in ("gone", "folder"):
        path.unlink()
        if how == "folder":
            path.mkdir()
        return how
    if how == "another":
        path.write_bytes(draw.choice(sorted(each for each in path.parent.iterdir() if each.is_file())).read_bytes())
        return how
    if how == "cut":
        del data[draw.randrange(len(data)) :]
    elif how == "flipped":
        for _ in range(draw.choice([1, 1, 10])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes({"empty": b"", "zeros": bytes(len(data))}.get(how, bytes(data)))
    return how


def _places(document: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from _places(value, (*path, key))


def _json(path: Path, draw: random.Random) -> str:
    """A value that is another, or gone."""
    document = {"": json.loads(path.read_bytes())}
    place = draw.choice([place for place in _places(document) if place])
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    if len(place) > 1 and draw.random() < 0.3:
        del inner[place[-1]]
        value = "gone"
    else:
        value = draw.choice(JSON_VALUES)
        inner[place[-1]] = "@@"
    path.write_text(json.dumps(document[""]).replace('"@@"', value))
    return f"{place[1:]} {value[:12]}"


def _parquet(path: Path, draw: random.Random) -> str:
    """A column or rows that are others, or gone."""
    table = pq.read_table(path)
    how = draw.choice(["column"] * 4 + ["rows"])
    if how == "rows":
        how = draw.choice(list(_ROWS))
        table = _ROWS[how](table, draw)
    elif table.num_columns:
        name = draw.choice(table.column_names)
        how = draw.choice(list(_COLUMNS))
        place, column = table.column_names.index(name), table[name].combine_chunks()
        new = _COLUMNS[how](column, draw)
        table = table.remove_column(place) if new is None else table.set_column(place, name, new)
        how = f"{name} {how}"
    pq.write_table(table.replace_schema_metadata(None) if draw.random() < 0.5 else table, path)
    return how


_ROWS: dict[str, Callable[[pa.Table, random.Random], pa.Table]] = {
    "none": lambda table, draw: table.slice(0, 0),
    "fewer": lambda table, draw: table.slice(draw.randrange(table.num_rows + 1)),
    "twice": lambda table, draw: pa.concat_tables([table, table]),
    "backwards": lambda table, draw: table.take(pa.array(range(table.num_rows)[::-1], pa.int64())),
    "one more": lambda table, draw: pa.concat_tables([table, table.slice(0, 1)]),
    "no columns": lambda table, draw: table.select([]),
}


def _one(values: list[Any]) -> Callable[[pa.Array, random.Random], pa.Array]:
    """One row has one of the values; in a text, a text of it."""

    def changed(column: pa.Array, draw: random.Random) -> pa.Array:
        found = column.to_pylist()
        value = draw.choice(values)
        if found:
            found[draw.randrange(len(found))] = value
        plain = [int(each) if isinstance(each, bool) else each for each in found]
        if any(isinstance(each, str) for each in plain):
            plain = [None if each is None else str(each) for each in plain]
        elif any(isinstance(each, float) for each in plain):
            plain = [None if each is None else float(each) for each in plain]
        return pa.array(plain)

    return changed


_COLUMNS: dict[str, Callable[[pa.Array, random.Random], pa.Array | None]] = {
    "gone": lambda column, draw: None,
    "whole number": _one(_INTS),
    "float": _one(_FLOATS),
    "null": _one([None]),
    "all null": lambda column, draw: pa.nulls(len(column), column.type),
    "untyped null": lambda column, draw: pa.nulls(len(column)),
    "text": lambda column, draw: pa.array([str(value) for value in column.to_pylist()], pa.string()),
    "number": lambda column, draw: pa.array([draw.choice(_INTS) for _ in column], pa.int64()),
    "bool": lambda column, draw: pa.array([bool(value) for value in column.to_pylist()], pa.bool_()),
    "list": lambda column, draw: pa.array([[0]] * len(column), pa.list_(pa.int64())),
    "narrow": lambda column, draw: pa.array([1] * len(column), pa.int8()),
    "float32": lambda column, draw: pa.array([1.5] * len(column), pa.float32()),
    "date": lambda column, draw: pa.array([0] * len(column), pa.timestamp("us")),
    "negative": lambda column, draw: pc.negate(column) if pa.types.is_integer(column.type) else column,
    "swapped": lambda column, draw: column.take(pa.array(draw.sample(range(len(column)), len(column)), pa.int64())),
}


def _archive(path: Path, draw: random.Random) -> str:
    """An array that is another, or gone, or ``meta`` that says something else."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = dict(archive)
    name = draw.choice(["meta", *arrays])
    if name == "meta":
        meta = json.loads(str(arrays["meta"]))
        key, value = draw.choice(list(meta)), draw.choice(JSON_VALUES)
        arrays["meta"] = np.array(json.dumps(meta | {key: "@@"}).replace('"@@"', value))
        how = f"{key} {value[:12]}"
    else:
        how, arrays[name] = _array(arrays[name], draw)
        if how == "gone":
            del arrays[name]
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    path.write_bytes(content.getvalue())
    return f"{name} {how}"


def _array(array: np.ndarray, draw: random.Random) -> tuple[str, np.ndarray]:
    how = draw.choice(["gone", "shorter", "flat", "floats", "text", "one", "one", "one", "all", "narrow"])
    new = copy.copy(array)
    if how == "shorter":
        new = array[: max(0, len(array) - 1)]
    elif how == "flat":
        new = array.ravel()
    elif how in ("floats", "text"):
        new = array.astype(np.float64 if how == "floats" else "U8")
    elif how == "narrow":
        new = array.astype(np.int16)
    elif how in ("one", "all") and array.size:
        limits = np.iinfo(array.dtype)
        value = min(max(draw.choice(_INTS), limits.min), limits.max)
        new.reshape(-1)[slice(None) if how == "all" else draw.randrange(array.size)] = value
    return how, new
