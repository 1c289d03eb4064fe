"""What ``vllm bench serve --save-result --save-detailed`` wrote: one JSON object with a list for each quantity.

    {"date": ..., "request_rate": 4.0, ..., "input_lens": [...], "output_lens": [...], "start_times": [...],
     "errors": ["", ...]}

``start_times`` are seconds of a clock that starts anywhere (older releases have none); requests go by them. Those with
an error or without output failed; they are left out and counted.

Source: vllm-project/vllm, vllm/benchmarks/serve.py and pull request 32667.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from ...sim import ticks
from ...sim.errors import TraceError
from ..files import TraceFile
from ..form import Clock, Form, lengths
from ..jsonl_format import numbers
from ..table import Table, shown

#: What tells the file, near its beginning.
MARK = b'"input_lens"'
_PROMPT, _OUTPUT, _START, _ERRORS = "input_lens", "output_lens", "start_times", "errors"
BENCH_SERVE = Form(
    "vllm bench serve",
    frozenset({_PROMPT, _OUTPUT}),
    {_START: Clock(ticks.PER_SECOND, from_first=True)},
    lengths(_PROMPT, _OUTPUT),
    content={},
    failures=True,
)


Record = tuple[int, dict[str, Any]]
"""A request: its place in the lists, from 1, and its value in each."""


def bench_pieces(file: TraceFile) -> Iterator[list[Record]]:
    """The requests in the order in which they were sent.

    Raises:
        TraceError: No such result, or lists of different lengths.
    """
    lists = _lists(file, bench_result(file))
    records = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    numbered = list(enumerate(records, 1))
    if all(type(record.get(_START)) in (int, float) for record in records):
        numbered.sort(key=lambda row: row[1][_START])
    yield numbered


def bench_table(path: str | PathLike[str], batch: Sequence[Record]) -> Table:
    """Some requests; one that failed in the middle has an output of 0, since it is not the one it was sent for.

    Raises:
        TraceError: A value that is no number.
    """
    table = Table(path, {}, np.array([row for row, _ in batch]), "row")
    records = [record | ({_OUTPUT: 0} if record.pop(_ERRORS, None) else {}) for record in (dict(part) for _, part in batch)]
    return table.having(**{name: numbers(table, name, [record[name] for record in records]) for name in records[0]})


def bench_result(file: TraceFile) -> dict[str, Any]:
    """The object that the file holds.

    Raises:
        TraceError: It holds none.
    """
    try:
        result = json.loads(file.whole())
    except (ValueError, RecursionError) as error:
        complaint = error.msg if isinstance(error, json.JSONDecodeError) else "brackets too deep or numbers too long"
        line = getattr(error, "lineno", None)
        remedy = f"is no readable result of vllm bench serve ({complaint}); give one JSON object"
        raise TraceError(file.path, line, None, None, remedy) from None
    return result if isinstance(result, dict) else {}


def bench_list(file: TraceFile, result: Mapping[str, Any], name: str) -> list[Any]:
    """What a result says of each request under a name that it must have.

    Raises:
        TraceError: It says nothing, or not of each.
    """
    if name not in result:
        raise TraceError(file.path, None, name, None, "is missing; run vllm bench serve with --save-detailed")
    values, prompts = result[name], result[_PROMPT]
    if not isinstance(values, list) or not isinstance(prompts, list) or len(values) != len(prompts):
        remedy = "must be a list with a value for each request; fetch the file again"
        raise TraceError(file.path, None, name, shown(values), remedy)
    return values


def _lists(file: TraceFile, result: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = [_PROMPT, _OUTPUT, *(name for name in (_START, _ERRORS) if name in result)]
    lists = {name: bench_list(file, result, name) for name in names}
    if not lists[_PROMPT]:
        raise TraceError(file.path, None, None, None, "has no requests; give another result")
    return lists
