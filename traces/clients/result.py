"""A benchmark's result: what a client measured of each request, in the order in which it sent them.

Values are as the file has them; ``traces.readers.recognise`` checks lengths and start times, ``traces.readers.measured`` latencies.
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
    """A request by the names of its client's file.

    Attributes:
        row: Its place in the file, from 1.
        fields: Lengths, start time and latencies; those that the file does not have are missing.
        failed: Whether it has no whole answer.
    """

    row: int
    fields: Mapping[str, Any]
    failed: bool


@dataclass(frozen=True, slots=True)
class Latency:
    """The name of a latency in a file, and the seconds in its unit."""

    name: str
    unit_s: float

    @property
    def unit(self) -> str:
        """The name of the unit."""
        return {1: "seconds", 1e-3: "milliseconds"}[self.unit_s]


@dataclass(frozen=True, slots=True)
class Client:
    """How a benchmark client names what it measures.

    Attributes:
        form: Names of the lengths and of the start time.
        ttft: Time to first token.
        e2el: End-to-end latency; None where it is the TTFT and all gaps.
        gaps: List of the times between chunks of the answer; None where the file has only their mean.
        streaming: With what the client has to be run so that it measures a TTFT and gaps.
    """

    form: Form
    ttft: Latency
    e2el: Latency | None
    gaps: Latency | None
    streaming: str


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """A benchmark of a server.

    Attributes:
        client: The benchmark client; ``requests`` uses its names.
        path: The file.
        requests: In the order in which they were sent, where the file says when.
        about: The load by the names of ``vllm bench serve``: ``duration`` (seconds), ``request_rate`` (requests/s, inf
            for all at once), ``burstiness``, ``max_concurrency``, ``model_id``; missing or None where the file is silent.
    """

    client: Client
    path: str | PathLike[str]
    requests: Sequence[Request]
    about: Mapping[str, Any]

    def pieces(self) -> Iterator[list[Request]]:
        """The requests, all at once.

        Raises:
            TraceError: There are none.
        """
        if not self.requests:
            raise TraceError(self.path, None, None, None, "has no requests; give another result")
        yield list(self.requests)

    def table(self, requests: Sequence[Request]) -> Table:
        """Lengths and start times; a request that failed has lengths of 0, since no answer is the one it was sent for.

        Raises:
            TraceError: A value that is no number.
        """
        form = self.client.form
        lengths = [name for names in form.names.values() for name in names]
        table = Table(self.path, {}, np.array([request.row for request in requests]), "row")
        present = [name for name in (*lengths, *form.clocks) if any(name in request.fields for request in requests)]
        nothing = dict.fromkeys(lengths, 0)
        records = [{**request.fields, **(nothing if request.failed else {})} for request in requests]
        return table.having(
            **{name: numbers(table, name, [record.get(name) for record in records]) for name in present}
        )

    def error(self, row: int | None, field: str, value: object, remedy: str) -> TraceError:
        """The error that names a value of a request, or of the file where ``row`` is None."""
        return TraceError(self.path, row, field, shown(value), remedy, "row")


def in_order(requests: Sequence[Request], start: str) -> list[Request]:
    """Requests by their start times, where all that were answered have one; those that failed last."""
    answered = [request for request in requests if not request.failed]
    if all(type(request.fields.get(start)) in (int, float) for request in answered):
        answered.sort(key=lambda request: request.fields[start])
        return answered + [request for request in requests if request.failed]
    return list(requests)
