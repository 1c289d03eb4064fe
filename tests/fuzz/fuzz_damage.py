"""Hostile values, and how files are damaged: bytes, lines, JSON documents, tables and arrays."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

#: Texts that stand where a number, a name or a choice is due.
TEXTS = [
    "", " ", "-", "--", "-1", "0", "1", "2", "7", "-0.0", "1.5", "nan", "NaN", "inf", "-inf", "1e999", "1e-999", "1e30",
    "9" * 30, "9" * 400, "1_0", "0x10", "0b1", "١٢", "²", "½", "true", "false", "none", "None", "null", "auto", "[/b]",
    "[red]x", "[link=x]", "a\nb", "a\tb", "a\rb", "\x1b[31mx", "\x7f", "\u202ex", "\u2028", "é", "\udcff", "😀" * 50,
    "x" * 5000, "a=b", "a,b", "=", ",", ":", "1:2:0", "1:2:3:4", "{}", "[]", '"', "'", "\\", "%s%n", "{0}", "$(id)",
    "`id`", "--help", "-h", "--version", "mine.txt", "missing", "../..", "~",
]  # fmt: skip
#: Numbers that may well be right.
NUMBERS = ["0", "1", "2", "3", "4", "8", "16", "33", "64", "100", "2048", "0.5", "0.9", "1.5", "2.0", "1e2", "1e-3"]
#: Paths of which nothing can be read, or not what is due.
INPUTS = [
    "missing.csv", "mine", "mine.txt", "", ".", "/", "/dev/null", "/dev/stdin", "-", "loop", "dangling", "x" * 300, "~",
    "mine.txt/x", "a\nb.csv", "[/b].csv", "\udcff.json", "/proc/self/mem", "empty", "binary",
]  # fmt: skip
#: Places for outputs: what cannot be written, what may not be, and what is written into.
OUTPUTS = [
    "out", "out.json", "out/a/b", "", ".", "./", "..", "-", "mine", "mine/", "mine/out/", "/dev/null", "/dev/full",
    "loop", "dangling/x", "fifo", "x" * 300, "mine.txt/x", "out\nx", "out[/b]", "out\udcff", "out\x1b[31m", "out ",
    "/proc/self/x", "/proc/self/fd/99", "/", "/dev", "out-é.html", "out.csv", "out.parquet", "out.npz", "linked/out",
]  # fmt: skip
#: What stands in a JSON document in the place of something else; ``@`` becomes 5,000 digits.
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 1.5, 0.1, 1e308, 1e-320, float("nan"), float("inf"), -float("inf"), 10**400, 2**31,
    2**63 - 1, 2**63, 2**64, -(2**63) - 1, "", "x", "1", "nan", "[/b]", "9" * 400, "\udcff", "\0", "é\nb", "\x1b[31m", [],
    [[]], {}, {"a": 1}, [None], ["x"], [1, "a"], [-1], [1] * 1000, "@", "mine.txt",
]  # fmt: skip
Rng = random.Random


def hostile_files(folder: Path) -> None:
    """What the hostile paths name."""
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "linked").symlink_to("mine")
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 4)


def damaged_bytes(rng: Rng, data: bytes) -> bytes:
    """Bytes that are flipped, cut, doubled, moved, or written in another way."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randint(0, len(data))
        end = min(len(data), start + rng.choice([1, 1, 2, 8, 100]))
        data = rng.choice(_BYTES)(rng, data, start, end)
    return data


_BYTES: list[Callable[[Rng, bytes, int, int], bytes]] = [
    lambda rng, data, start, end: data[:start] + rng.randbytes(end - start) + data[end:],
    lambda rng, data, start, end: data[:start] + rng.randbytes(end - start) + data[end:],
    lambda rng, data, start, end: data[:start] + data[end:],
    lambda rng, data, start, end: data[:end] + data[start:],
    lambda rng, data, start, end: data[:start],
    lambda rng, data, start, end: data[:start] + b"\0" * rng.choice([1, 9, 5000]) + data[start:],
    lambda rng, data, start, end: (
        rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\n", b"\x1f\x8b", b"PK\3\4", b"PAR1"]) + data
    ),
    lambda rng, data, start, end: data.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\n\n", b" ", b"\0"])),
    lambda rng, data, start, end: data.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-8-sig", "utf-32"])),
    lambda rng, data, start, end: gzip.compress(data, mtime=0)[: rng.choice([9, 20, 10**9])],
    lambda rng, data, start, end: b"",
]


def any_text(rng: Rng, *right: str) -> str:
    """A text that is hostile, or as often a number or one of those that may be right."""
    return rng.choice(TEXTS if rng.random() < 0.5 else right or NUMBERS)


def damaged_lines(rng: Rng, text: str, mark: str = ",") -> bytes:
    """Lines of which some, or some cells, are other ones; columns that are away, doubled or renamed."""
    rows = [line.split(mark) for line in text.splitlines()] or [[""]]
    for _ in range(rng.randint(1, 3)):
        row = rng.randrange(len(rows))
        column = rng.randrange(max(1, len(rows[row])))
        rng.choice(_LINES)(rng, rows, row, column)
        rows = rows or [[""]]
    data = "\n".join(mark.join(row) for row in rows).encode("utf-8", "surrogateescape")
    return damaged_bytes(rng, data) if rng.random() < 0.08 else data


def _cell(rng: Rng, rows: list[list[str]], row: int, column: int) -> None:
    odd = ['"', '"x', "2023-11-16", "[]", "9" * 5000]
    rows[row][column : column + 1] = [any_text(rng, *NUMBERS, *rng.choice(rows), *odd)]


def _column(rng: Rng, rows: list[list[str]], row: int, column: int) -> None:
    how = rng.choice(["away", "twice", "same"])
    value = any_text(rng)
    for cells in rows:
        if how == "away":
            del cells[column : column + 1]
        elif how == "twice":
            cells.extend(cells[column : column + 1])
        elif cells is not rows[0]:
            cells[column : column + 1] = [value]


_LINES: list[Callable[[Rng, list[list[str]], int, int], None]] = [
    _cell, _cell, _cell, _cell, _cell, _cell, _column, _column,
    lambda rng, rows, row, column: rows.insert(row, list(rows[row])),
    lambda rng, rows, row, column: rows.__delitem__(row),
    lambda rng, rows, row, column: rows.__delitem__(slice(1, None)),
    lambda rng, rows, row, column: rows.insert(0, rows.pop(row)),
    lambda rng, rows, row, column: rows.insert(row, [rng.choice(TEXTS)]),
    lambda rng, rows, row, column: rows[row].append(rng.choice(TEXTS)),
    lambda rng, rows, row, column: rows[row].__delitem__(slice(column, None)),
    lambda rng, rows, row, column: rng.shuffle(rows),
]  # fmt: skip


def damaged_document(rng: Rng, document: Any) -> bytes:
    """A JSON document with other values in some places, keys away or doubled; or damaged as text."""
    document = deepcopy(document)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        document = _changed(rng, document)
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 2]))
    text = text.replace('"@"', "9" * 5000)
    if rng.random() < 0.1:
        text = rng.choice(
            ["[" * 100_000, '{"a":' * 50_000, text + text, text[1:], f"[{text}]", "null", "7", "\n" + text]
        )
    data = text.encode("utf-8", "surrogatepass")
    return damaged_bytes(rng, data) if rng.random() < 0.1 else data


def _changed(rng: Rng, document: Any) -> Any:
    """The document with one change at a place that a random walk from its root ends at."""
    place, path = document, []
    while isinstance(place, dict | list) and place and (not path or rng.random() < 0.75):
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        path.append((place, key))
        place = place[key]
    if not path:
        return rng.choice(VALUES)
    parent, key = path[-1]
    how = rng.random()
    if how < 0.5:
        parent[key] = deepcopy(rng.choice(VALUES))
    elif how < 0.65:
        del parent[key]
    elif how < 0.95 and isinstance(place, int | float) and abs(place) < 1e300:
        parent[key] = rng.choice(
            [-place, str(place), [place], place * 10**6, place + 0.5, place + 1, place * 2, place // 2]
        )
    elif isinstance(parent, list):
        parent.extend(deepcopy(parent[: rng.choice([1, 3])]))
    else:
        parent[rng.choice(TEXTS)] = parent.pop(key)
    return document


#: Types that a column is given, each with what fills a row of it.
_TYPES: list[tuple[pa.DataType, Any]] = [
    (pa.null(), None), (pa.bool_(), True), (pa.int8(), 1), (pa.uint64(), 2**64 - 1), (pa.int64(), -(2**63)),
    (pa.int64(), 2**62), (pa.float16(), np.float16(1)), (pa.float64(), float("nan")), (pa.float64(), float("inf")),
    (pa.float64(), 1e300), (pa.string(), "x"), (pa.string(), "[/b]"), (pa.large_string(), "1"), (pa.binary(), b"\xff"),
    (pa.timestamp("ns"), 0), (pa.timestamp("s", tz="UTC"), 10**10), (pa.duration("us"), 1), (pa.date32(), 1),
    (pa.time64("us"), 1), (pa.decimal128(38, 2), 1), (pa.list_(pa.int64()), [1, None]), (pa.list_(pa.string()), ["a"]),
    (pa.list_(pa.list_(pa.int64())), [[1]]), (pa.struct([("a", pa.int64())]), {"a": 1}), (pa.int64(), None),
    (pa.map_(pa.string(), pa.int64()), [("a", 1)]), (pa.dictionary(pa.int8(), pa.string()), "x"), (pa.int32(), -1),
]  # fmt: skip


def hostile_column(rng: Rng, rows: int) -> pa.Array:
    """A column of any type, with or without missing rows."""
    kind, value = rng.choice(_TYPES)
    values = [None if rng.random() < 0.1 else value for _ in range(rows)]
    return pa.array(values, pa.string()).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)


def damaged_table(rng: Rng, table: pa.Table) -> bytes:
    """A Parquet file with columns away, renamed, or of other types, and rows fewer, more, or shuffled."""
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(table.column_names or ["a"])
        how = rng.choice(
            ["type", "type", "type", "away", "name", "none", "fewer", "more", "shuffled", "twice", "shifted"]
        )
        if how == "type" and name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, hostile_column(rng, len(table)))
        elif how == "away" and name in table.column_names:
            table = table.drop_columns([name])
        elif how == "name":
            table = table.rename_columns(
                [rng.choice(["x", "[/b]", "", name]) if each == name else each for each in table.column_names]
            )
        elif how == "twice":
            table = table.append_column(name, hostile_column(rng, len(table)))
        elif how == "none":
            table = table.slice(0, 0)
        elif how == "fewer":
            table = table.slice(rng.randint(0, len(table)), rng.randint(0, len(table)))
        elif how == "more":
            table = pa.concat_tables([table, table])
        elif how == "shuffled":
            table = table.take(pa.array(rng.sample(range(len(table)), len(table)), pa.int64()))
        elif name in table.column_names:
            place = table.column_names.index(name)
            if pa.types.is_integer(table.column(place).type):
                values = [each and rng.choice([each, -each, 10**6, -1, 0]) for each in table.column(place).to_pylist()]
                table = table.set_column(place, name, pa.array(values, pa.int64()))
    sink = io.BytesIO()
    try:
        pq.write_table(table, sink, compression=rng.choice(["none", "snappy", "zstd"]))
    except (pa.ArrowException, ValueError):
        return b"PAR1"
    return damaged_bytes(rng, sink.getvalue()) if rng.random() < 0.1 else sink.getvalue()


def damaged_arrays(rng: Rng, data: bytes) -> bytes:
    """An .npz file with arrays that are away, shorter, of other types and shapes, or hold other numbers."""
    with np.load(io.BytesIO(data)) as found:
        arrays = dict(found)
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice(list(arrays))
        array = arrays[name]
        how = rng.choice(
            ["away", "shorter", "type", "shape", "number", "number", "number", "text", "renamed", "object"]
        )
        if how == "away":
            del arrays[name]
        elif how == "shorter":
            arrays[name] = array[: rng.randint(0, len(array))] if array.ndim else array
        elif how == "type":
            kinds = ["f8", "i8", "u1", "i2", "U5", "?", "c16"]
            arrays[name] = (
                np.zeros(array.shape, rng.choice(kinds))
                if rng.random() < 0.5 or array.dtype.kind not in "iuf"
                else array.astype(rng.choice(kinds))
            )
        elif how == "shape":
            arrays[name] = rng.choice([array[None], array.ravel(), np.zeros((0,), array.dtype), np.array(0)])
        elif how == "number" and array.size and array.dtype.kind in "iuf":
            changed = array.copy()
            changed.flat[rng.randrange(array.size)] = rng.choice(
                [0, 1, 100, np.iinfo(array.dtype).max if array.dtype.kind in "iu" else 1e300]
            )
            arrays[name] = changed
        elif how == "text":
            arrays[name] = np.array(rng.choice(TEXTS).replace("\udcff", "?"))
        elif how == "renamed":
            arrays["x"] = arrays.pop(name)
        elif how == "object":
            arrays[name] = np.array([{}, None], dtype=object)
        if not arrays:
            break
    sink = io.BytesIO()
    np.savez_compressed(sink, **arrays)
    return damaged_bytes(rng, sink.getvalue()) if rng.random() < 0.1 else sink.getvalue()


def damaged_file(rng: Rng, path: Path) -> None:
    """Damage a file in its place, by its form."""
    data = path.read_bytes()
    if rng.random() < 0.1:
        path.write_bytes(damaged_bytes(rng, data))
    elif path.suffix == ".json":
        path.write_bytes(damaged_document(rng, json.loads(data)))
    elif path.suffix == ".parquet":
        path.write_bytes(damaged_table(rng, pq.read_table(io.BytesIO(data))))
    elif path.suffix == ".npz":
        path.write_bytes(damaged_arrays(rng, data))
    elif path.suffix in (".csv", ".jsonl", ".txt"):
        path.write_bytes(damaged_lines(rng, data.decode(), "," if path.suffix == ".csv" else rng.choice([" ", ":"])))
    else:
        path.write_bytes(damaged_bytes(rng, data))


def damaged_folder(rng: Rng, folder: Path) -> None:
    """Damage a folder: some files in it, each once, or what is there."""
    damaged: set[Path] = set()
    for _ in range(rng.choice([1, 1, 1, 2])):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        files = [path for path in files if path not in damaged]
        if not files:
            return
        path = rng.choice(files)
        damaged.add(path)
        how = rng.random()
        if how < 0.75:
            damaged_file(rng, path)
        elif how < 0.85:
            path.unlink()
        elif how < 0.9:
            path.unlink()
            path.mkdir()
        elif how < 0.95:
            path.unlink()
            path.symlink_to(rng.choice(["nowhere", path.name, files[0].name, "/dev/null"]))
        else:
            (folder / rng.choice(["notes.txt", "a[b].json", "x-part", "points"])).touch()
