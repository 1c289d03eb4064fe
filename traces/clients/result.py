"""A benchmark's result: the client's measurements of each request, in sending order.

Values are unconverted. ``traces.readers.recognise`` checks lengths and start times, ``traces.readers.measured`` latencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from ...sim.types.errors import TraceError
from ..parsing.form import Form
from ..parsing.jsonl_format import numbers
from ..parsing.table import Table, shown


@dataclass(frozen=True, slots=True)
class Request:
    """One request, under the field names of the client's file.

    Attributes:
        row: Its position in the file, from 1.
        fields: Lengths, start time and latencies; fields that the file does not have are missing.
        failed: Whether the answer is missing or incomplete.
    """

    row: int
    fields: Mapping[str, Any]
    failed: bool


@dataclass(frozen=True, slots=True)
class Latency:
    """The field name of a latency in a file, and the seconds in its unit."""

    name: str
    unit_s: float

    @property
    def unit(self) -> str:
        """The name of the unit."""
        return {1: "seconds", 1e-3: "milliseconds"}[self.unit_s]


@dataclass(frozen=True, slots=True)
class Client:
    """Field names of a benchmark client.

    Attributes:
        form: Names of the lengths and of the start time.
        ttft: Time to first token.
        e2el: End-to-end latency; None if it is the TTFT plus all gaps.
        gaps: List of the times between chunks of the answer; None if the file has only their mean.
        streaming: The client option that makes it measure a TTFT and gaps.
    """

    form: Form
    ttft: Latency
    e2el: Latency | None
    gaps: Latency | None
    streaming: str


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """The result of a benchmark run.

    Attributes:
        client: The benchmark client; ``requests`` uses its field names.
        path: The file.
        requests: In sending order, if the file has start times.
        about: The load, under the names of ``vllm bench serve``: ``duration`` (seconds), ``request_rate`` (requests/s, inf
            for all at once), ``burstiness``, ``max_concurrency``, ``model_id``,
            ``backend``; missing or None if the file has no value.
        ignores_eos: Whether the client sends ``ignore_eos``, so that each answer has all of its ``max_tokens``.
    """

    client: Client
    path: str | PathLike[str]
    requests: Sequence[Request]
    about: Mapping[str, Any]
    ignores_eos: bool = False

    def pieces(self) -> Iterator[list[Request]]:
        """The requests, as a single piece.

        Raises:
            TraceError: There are no requests.
        """
        if not self.requests:
            raise TraceError(self.path, None, None, None, "has no requests; give another result")
        yield list(self.requests)

    def table(self, requests: Sequence[Request]) -> Table:
        """Lengths and start times; failed requests get lengths of 0, since they have no whole answer.

        Raises:
            TraceError: A value is not a number.
        """
        form = self.client.form
        lengths = [name for names in form.names.values() for name in names]
        table = Table(self.path, {}, np.array([request.row for request in requests]), "row")
        present = [name for name in (*lengths, *form.clocks) if any(name in request.fields for request in requests)]
        nothing = dict.fromkeys(lengths, 0)
        records = [{**request.fields, **(nothing if request.failed else {})} for request in requests]
        columns = {name: numbers(table, name, [record.get(name) for record in records]) for name in present}
        if self.ignores_eos:
            columns["ignore_eos"] = numbers(table, "ignore_eos", [1] * len(records))
        return table.having(**columns)

    def error(self, row: int | None, field: str, value: object, remedy: str) -> TraceError:
        """The error that names file, request (``row``, from 1), field and bad value; without a row the value is the whole file's."""
        return TraceError(self.path, row, field, shown(value), remedy, "row")


def in_order(requests: Sequence[Request], start: str) -> list[Request]:
    """Requests sorted by start time, failed ones last; in file order if an answered request has no start time."""
    answered = [request for request in requests if not request.failed]
    if all(type(request.fields.get(start)) in (int, float) for request in answered):
        answered.sort(key=lambda request: request.fields[start])
        return answered + [request for request in requests if request.failed]
    return list(requests)
