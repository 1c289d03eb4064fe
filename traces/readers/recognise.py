"""Format recognition: by the first bytes of a file, then by its column names, then by its file name suffix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from ...sim.types.errors import TraceError
from ...sim.types.notes import note
from ...sim.types.user_files import json_value
from ..clients.known import benchmark_result
from ..clients.summary import BenchmarkSummary
from ..formats.agents import AGENTS
from ..formats.bailian import BAILIAN
from ..formats.batches import BATCH_INPUT, BATCHES, BatchInputParser, is_batch_input
from ..formats.logs import LOG, LOGS, is_table_of_log
from ..formats.mooncake import MOONCAKE, TITLES, timed
from ..formats.multi_turn import is_multi_turn, multi_turn
from ..formats.named import named_form
from ..formats.own import OWN
from ..formats.ragpulse import RAGPULSE
from ..formats.sharegpt import SHAREGPT, TURNS, ShareGptParser, quarters, token_counter
from ..formats.tables import TABLES
from ..parsing import arrow as pa
from ..parsing.csv_format import CsvParser, header
from ..parsing.files import TraceFile
from ..parsing.form import BLOCK_TOKENS, HASH_IDS, OWN_NAMES, Form, as_it_is
from ..parsing.json_values import Element, batches, elements
from ..parsing.jsonl_format import JsonlParser, keys, whole_lists
from ..parsing.lines import Block
from ..parsing.nested import Nested
from ..parsing.parquet_format import open_parquet, parquet_tables
from ..parsing.pieces import likely_block_tokens
from ..parsing.reading import Reading
from ..parsing.table import Table, shown
from ..parsing.times import has_dates, is_date
from ..parsing.unpickle import pickle_pieces, pickle_table
from ..synthesis.load import LOAD
from ..synthesis.rebuilt import rebuilt

_PARQUET_MAGIC, _PICKLE_MAGIC = b"PAR1", b"\x80"
#: Formats of JSON values that hold requests in structures of their own.
NESTED = (AGENTS, BATCHES, LOGS)
#: Number of rows from which the block size is inferred.
_HEAD_LINES = 64
#: Names of length fields; they distinguish an array of requests from an array of conversations.
_LENGTHS = {name for field in ("prompt_tokens", "output_tokens") for name in OWN_NAMES[field]}
#: Names of our columns in an error.
_NAMES_SHOWN = 3
_TEXT_LINES = (".jsonl", ".ndjson")
#: Names, in lower case, that a column of arrivals may have in files of no known format.
_LIKE_ARRIVALS = re.compile(
    r"arriv\w*|start\w*|created\w*|sent\w*|time|timestamp|date|datetime|ts|\w*[_ ](start|time|timestamp|ts)"
)
_OTHER_TIMES = re.compile(
    r"end|finish|complet|first|last|latenc|duration|process|execution|response|wait|queue|prefill|decode"
)
#: Separators of columns in files that are called CSV.
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True, slots=True)
class Source:
    """A file of a recognised format.

    Attributes:
        form: Its column names and units.
        pieces: Its rows in pieces; a piece of any type can be split.
        parse: Converts a piece into a table.
        reads: Fields of ``Reading`` that only some formats use, and this one does.
        max_concurrency, failed: Of requests that are rebuilt from a summary: most in flight, and how many were not answered.
    """

    form: Form
    pieces: Iterator[Any]
    parse: Callable[[Any], Table]
    reads: frozenset[str] = frozenset()
    max_concurrency: int | None = None
    failed: int = 0


def title_of(file: TraceFile, reading: Reading) -> str:
    """The title of the form that a file is recognised to have; empty for one without columns or keys of its own.

    Raises:
        TraceError: The file is missing, is empty, or is a known kind and no trace.
    """
    return file.form("trace" if reading.named is None else "table", file.head())


def recognise(file: TraceFile, title: str, reading: Reading, content: bool) -> Source:
    """The format of a file, and its parser.

    Args:
        title: Result of ``title_of``.
        content: Whether to read prompt contents.

    Raises:
        TraceError: The file has no known columns.
    """
    head, ending = file.head(), Path(file.bare_name).suffix
    named = None if reading.named is None else named_form(reading.named)
    if head.startswith(_PARQUET_MAGIC) or ending == ".parquet":
        return _parquet(file, head, content, named)
    if named is not None:
        return _of_named(file, named, content, head.lstrip()[:1] in (b"[", b"{") or ending in _TEXT_LINES)
    if head.startswith(_PICKLE_MAGIC) or ending in (".pkl", ".pickle"):
        return Source(OWN, pickle_pieces(file), partial(pickle_table, file.path))
    start = head.lstrip()[:1]
    if title == LOAD:
        raise TraceError(file.path, None, None, None, "is a load; draw a trace from it by traces sample")
    result = benchmark_result(file)
    if isinstance(result, BenchmarkSummary):
        return _summarised(result)
    if result is not None:
        form = result.client.form
        return Source(form, result.pieces(), result.table, _time_unit(form, form.clocks))
    if start == b"[" and ending not in _TEXT_LINES:
        return _array(file, title, reading, content)
    if start == b"{" or ending in (*_TEXT_LINES, ".json"):
        return _jsonl(file, title, reading, content)
    return _csv(file, content, TABLES.get(title))


def _form_of_columns(names: Sequence[str]) -> Form:
    """The form of a table without columns that only one format has."""
    return LOG if is_table_of_log(names) and not any(name in names for name in OWN.clocks) else OWN


def _parquet(file: TraceFile, head: bytes, content: bool, named: Form | None) -> Source:
    parquet = open_parquet(file, head)
    names = parquet.schema_arrow.names
    form = named or _form_of_columns(names)
    require_lengths(file.path, None, form, names)
    _say_unread_times(file.path, form, names)
    tables = parquet_tables(file, parquet, set(form.readers(content)))
    reads = frozenset({"max_inflated_bytes"} | ({"columns"} if named is not None else set()))
    return Source(form, tables, as_it_is, reads | _time_unit(form, names))


def _of_named(file: TraceFile, form: Form, content: bool, is_json: bool) -> Source:
    """A file with columns that the user names, whatever other columns it has."""
    if not is_json:
        source = _csv(file, content, form)
        return replace(source, reads=source.reads | {"columns"})
    values = elements(file)
    heads = list(islice(values, _HEAD_LINES))
    records = [element.value for element in heads if isinstance(element.value, dict)]
    if records:
        require_lengths(file.path, heads[0].line, form, [*keys(records, form.readers(content))])
    parser = JsonlParser(file.path, form.readers(content))
    reads = frozenset({"columns"}) | _time_unit(form, keys(records, form.clocks))
    return Source(form, batches(chain(heads, values)), parser, reads)


def _csv(file: TraceFile, content: bool, form: Form | None = None) -> Source:
    blocks = file.blocks()
    first = next(blocks)
    names, line = header(file.path, first), int(first.lines[0])
    form = form or _form_of_columns(names)
    sessions = [name for name, reader in form.content.items() if content and reader is not whole_lists]
    wanted = [name for name in dict.fromkeys([*form.numbers, *sessions]) if name in names]
    _refuse_repeated(file.path, line, names, wanted)
    if len(names) == 1 and names[0] not in form.numbers:
        for mark, plural in _SEPARATORS.items():
            if mark in names[0]:
                raise TraceError(
                    file.path,
                    line,
                    "columns",
                    shown(names[0]),
                    f"are separated by {plural}; write the file with commas",
                )
        remedy = (
            "is text without columns; give a CSV, Parquet or JSON of requests with the lengths of prompt and output"
        )
        raise TraceError(file.path, line, None, None, remedy)
    require_lengths(file.path, line, form, names)
    _say_unread_times(file.path, form, names)
    rows = (block for block in chain([first.part(1)], blocks) if len(block))
    second = next(rows, None)
    if second is None:
        raise TraceError(file.path, None, None, None, "has a header and no rows; give one request a line")
    texts = [*sessions, *_dates(file.path, names, [name for name in form.clocks if name in names], second.part(0, 1))]
    parser = CsvParser(file.path, names, tuple(wanted), tuple(texts))
    return Source(form, chain([second], rows), parser, _time_unit(form, names))


def _dates(path: str | PathLike[str], names: tuple[str, ...], clocks: Sequence[str], row: Block) -> list[str]:
    """Columns of dates, by the first row: Arrow would read some of them as dates, and name no row with a bad one."""
    try:
        columns = CsvParser(path, names, tuple(clocks), tuple(clocks))(row).columns if clocks else {}
    except TraceError:
        return []
    return [name for name, column in columns.items() if has_dates(column)]


def _summarised(summary: BenchmarkSummary) -> Source:
    """The requests that are rebuilt from a summary; says what is assumed of them."""
    found = rebuilt(summary)
    note(found.assumed)
    columns = {"prompt_tokens": found.prompt_tokens, "output_tokens": found.output_tokens}
    if found.arrival_s is not None:
        columns["arrival_s"] = found.arrival_s
    if summary.ignores_eos:
        columns["ignore_eos"] = np.ones(summary.requests, dtype=np.int64)
    table = Table(
        summary.path,
        {name: pa.array(values) for name, values in columns.items()},
        np.arange(1, summary.requests + 1),
        "rebuilt row",
    )
    form = replace(OWN, title=f"{summary.title}, a summary")
    return Source(form, iter([table]), as_it_is, max_concurrency=found.max_concurrency, failed=summary.failed)


def _time_unit(form: Form, names: Iterable[str]) -> frozenset[str]:
    """``time_unit``, if one of these columns has times."""
    return frozenset({"time_unit"} if any(name in form.clocks for name in names) else ())


def _array(file: TraceFile, title: str, reading: Reading, content: bool) -> Source:
    values = elements(file)
    heads = list(islice(values, _HEAD_LINES))
    records = [element.value for element in heads if isinstance(element.value, dict)]
    if _structure(records) is not None or _LENGTHS & keys(records, _LENGTHS):
        return _objects(file, title, chain(heads, values), reading, content)
    if records and not any(name in record for record in records for name in TURNS):
        require_lengths(file.path, heads[0].line, OWN, [*records[0]])
    parser = ShareGptParser(file.path, reading.tokenizer)
    return Source(SHAREGPT, batches(chain(heads, values)), parser, frozenset({"tokenizer"}))


def _jsonl(file: TraceFile, title: str, reading: Reading, content: bool) -> Source:
    blocks = file.blocks()
    first = next(blocks)
    heads = first.part(0, _HEAD_LINES)
    if _is_spread(heads.texts()[0], file):
        return _objects(file, title, elements(file), reading, content)
    records = list(filter(None, map(_record, heads.texts())))
    if _structure(records) is not None:
        return _objects(file, title, elements(file), reading, content)
    line = int(first.lines[0]) if _record(heads.texts()[0]) else None
    return _records(file, title, chain([first], blocks), records, reading, content, line)


def _is_spread(first_line: bytes, file: TraceFile) -> bool:
    """Whether JSON objects span several lines, as in pretty-printed JSON."""
    if _record(first_line) is not None or not first_line.lstrip().startswith(b"{"):
        return False
    # True also for a truncated or invalid object: the parser's error then names its line.
    if first_line.rstrip()[-1:] in (b"{", b"[", b",", b":"):
        return True
    try:
        return isinstance(next(elements(file)).value, dict)
    except TraceError:
        return False


def _structure(records: Sequence[dict[str, Any]]) -> Callable[..., Source] | None:
    """The reader of records that are no rows; None for rows."""
    if any(map(is_batch_input, records)):
        return _batch_input
    known = next((nested for nested in NESTED if any(map(nested.holds, records))), None)
    if known is None and records and all(map(is_multi_turn, records)):
        return _multi_turn
    return None if known is None else partial(_nested, known)


def _nested(known: Nested, file: TraceFile, values: Iterator[Element], reading: Reading, content: bool) -> Source:
    parser = JsonlParser(file.path, known.form.readers(content), known.unit)
    return Source(known.form, batches(known.requests(values)), parser, _time_unit(known.form, known.form.clocks))


def _multi_turn(file: TraceFile, values: Iterator[Element], reading: Reading, content: bool) -> Source:
    count = quarters if reading.tokenizer is None else token_counter(reading.tokenizer)
    return replace(_nested(multi_turn(count), file, values, reading, content), reads=frozenset({"tokenizer"}))


def _batch_input(file: TraceFile, values: Iterator[Element], reading: Reading, content: bool) -> Source:
    return Source(
        BATCH_INPUT, batches(values), BatchInputParser(file.path, reading.tokenizer), frozenset({"tokenizer"})
    )


def _objects(file: TraceFile, title: str, values: Iterator[Element], reading: Reading, content: bool) -> Source:
    heads = list(islice(values, _HEAD_LINES))
    records = [element.value for element in heads if isinstance(element.value, dict)]
    structure = _structure(records)
    if structure is not None:
        return structure(file, chain(heads, values), reading, content)
    line = heads[0].line if isinstance(heads[0].value, dict) else None
    return _records(file, title, batches(chain(heads, values)), records, reading, content, line)


def _records(
    file: TraceFile,
    title: str,
    pieces: Iterator[Any],
    heads: Sequence[dict[str, Any]],
    reading: Reading,
    content: bool,
    line: int | None,
) -> Source:
    """JSON objects in the form of that title, or our own; ``line`` is the line of the first, None if it is not parsable."""
    form = _jsonl_form(title, heads, reading)
    if line is not None:
        names = [*heads[0], *keys(heads[:1], form.numbers) - heads[0].keys()]
        require_lengths(file.path, line, form, names)
        _say_unread_times(file.path, form, names)
    return Source(form, pieces, JsonlParser(file.path, form.readers(content)), _timed_fields(form, heads))


def _timed_fields(form: Form, records: Sequence[dict[str, Any]]) -> frozenset[str]:
    """Fields of the time unit, and of the block size if the file does not state it, that a form uses."""
    unit = _time_unit(form, set().union(*records))
    if form is RAGPULSE:
        return unit
    if form.title in TITLES:
        return unit | {"timed_trace_chunk_hash_size", "timed_trace_sec_multiplier"}
    has_blocks = any(HASH_IDS in record and BLOCK_TOKENS not in record for record in records)
    return unit | ({"timed_trace_chunk_hash_size"} if has_blocks else set())


def _jsonl_form(title: str, records: Sequence[dict[str, Any]], reading: Reading) -> Form:
    first = records[0] if records else {}
    named, block_size = title in (MOONCAKE.title, RAGPULSE.title), reading.timed_trace_chunk_hash_size
    time = first.get("timestamp")
    if named and (isinstance(first.get(HASH_IDS), dict) or isinstance(time, str) and not is_date(time)):
        return RAGPULSE
    if title == BAILIAN.title:
        return replace(BAILIAN, block_tokens=block_size or BAILIAN.block_tokens)
    form = MOONCAKE if named and BLOCK_TOKENS not in first else OWN
    block_tokens = block_size or likely_block_tokens(_counts(records, form))
    return timed(block_tokens, reading) if form is MOONCAKE else replace(OWN, block_tokens=block_tokens)


def _counts(records: Sequence[dict[str, Any]], form: Form) -> Iterator[tuple[int, int]]:
    """Number of ids and prompt tokens of the records that have both."""
    for record in records:
        ids = record.get(HASH_IDS)
        prompt_tokens = next((record[name] for name in form.names["prompt_tokens"] if name in record), None)
        if type(ids) is list and type(prompt_tokens) is int:
            yield len(ids), prompt_tokens


def _record(text: bytes) -> dict[str, Any] | None:
    """The JSON object on a line; None if the line has no valid one."""
    try:
        record = json_value(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _refuse_repeated(path: str | PathLike[str], line: int, names: Sequence[str], wanted: Sequence[str]) -> None:
    twice = next((name for name in wanted if names.count(name) > 1), None)
    if twice is not None:
        raise TraceError(path, line, "columns", shown(",".join(names)), f"{twice} appears twice; keep one")


def _remedy(field: str, form: Form) -> str:
    if form.names is not OWN.names:
        return f"name it {' or '.join(form.names[field])}"
    names = " or ".join(form.names[field][:_NAMES_SHOWN])
    return f"name it {names}, or say by --columns which it is"


def _say_unread_times(path: str | PathLike[str], form: Form, names: Iterable[str]) -> None:
    """Name the column that likely has the arrivals of a file without a known column of times."""
    found = list(names)
    if form.names is not OWN.names or any(name in (*form.clocks, *form.delays) for name in found):
        return
    likely = [
        name for name in found if _LIKE_ARRIVALS.fullmatch(name.lower()) and not _OTHER_TIMES.search(name.lower())
    ]
    if likely:
        lengths = (
            next(name for name in form.names[field] if name in found) for field in ("prompt_tokens", "output_tokens")
        )
        prompt, output = lengths
        note(
            f"{Path(fspath(path)).name}: {likely[0]} is not read. If requests arrive at these times, give"
            f" --columns arrival={likely[0]},prompt={prompt},output={output}."
        )


def require_lengths(path: str | PathLike[str], line: int | None, form: Form, names: Sequence[str]) -> None:
    """Refuse columns without both lengths, or with ``fork_at`` or ``truncate_to`` but no ``parent``.

    Raises:
        TraceError: A column is missing; names it.
    """
    found = shown(",".join(names))
    for field in ("prompt_tokens", "output_tokens"):
        ours = form.names[field]
        if not any(name in names for name in ours):
            raise TraceError(path, line, "columns", found, f"no column {field}; {_remedy(field, form)}")
    for alone in ("fork_at", "truncate_to"):
        if alone in names and "parent" not in names and form is OWN:
            remedy = (
                f"{alone} gives the fork point of a parent; name the parent in a column of that name, or leave it out"
            )
            raise TraceError(path, line, "columns", found, remedy)
