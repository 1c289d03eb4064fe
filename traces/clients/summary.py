"""A benchmark's summary: statistics of its requests where the file has no list of them. One form for all clients.

Each client's module maps its names and units to ``BenchmarkSummary``. ``traces.synthesis.rebuilt`` draws requests with these
statistics, and ``traces.readers.measured`` gives what was measured. What a file does not state stays missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from os import PathLike
from typing import Any

from ...sim.types.errors import TraceError
from ..parsing.table import shown
from .load import MOST_VALUE, ClientLoad

#: Latencies by vLLM's names: to the first token, per output token after the first (a mean of each request), between two
#: tokens (of all requests together), end to end.
LATENCIES = ("ttft", "tpot", "itl", "e2el")
#: Throughputs by vLLM's names, per second.
REQUESTS, OUTPUTS, TOKENS = "request_throughput", "output_throughput", "total_token_throughput"
_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")
#: Percentiles by other names.
_RANKS = {"min": 0.0, "median": 50.0, "max": 100.0, "p001": 0.1, "p999": 99.9}
_MEANS, _DEVIATIONS = ("mean", "avg"), ("std", "std_dev")
#: Most requests that are rebuilt.
_MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one quantity.

    Attributes:
        mean, std: Mean and standard deviation; None if the file has none.
        percentiles: Values by percentile, of which 0 is the least value and 100 the largest.
    """

    mean: float | None = None
    std: float | None = None
    percentiles: Mapping[float, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.mean is not None or bool(self.percentiles)

    def times(self, factor: float) -> Statistics:
        """The statistics in another unit."""
        mean, std = (None if value is None else value * factor for value in (self.mean, self.std))
        return Statistics(mean, std, {rank: value * factor for rank, value in self.percentiles.items()})


@dataclass(frozen=True, slots=True)
class BenchmarkSummary:
    """The summary of a benchmark run.

    Attributes:
        title: The client.
        path: The file.
        requests: Number of answered requests.
        failed: Number of others.
        prompts, outputs: Lengths of the answered requests, in tokens.
        latencies: In seconds, by ``LATENCIES``.
        throughputs: By vLLM's names, per second.
        load: How the requests were sent.
        states: Settings of the server that the file states, by their names in Python.
        assumed: Clauses on what the file does not state and its client is known to do.
        ignores_eos: As of ``BenchmarkResult``.
    """

    title: str
    path: str | PathLike[str]
    requests: int
    failed: int
    prompts: Statistics
    outputs: Statistics
    latencies: Mapping[str, Statistics]
    throughputs: Mapping[str, float]
    load: ClientLoad
    states: Mapping[str, object] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    ignores_eos: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= _MOST_REQUESTS:
            remedy = f"must be from 1 to {_MOST_REQUESTS:,} answered requests; give another result"
            raise TraceError(self.path, None, "requests", self.requests, remedy)


class Fields:
    """Reads numbers of a summary, nested objects included, and names what is no number.

    Args:
        path: The file.
        document: Its object, or a part of it.
        within: Names of the objects that the part is in.
    """

    def __init__(self, path: str | PathLike[str], document: Mapping[str, Any], within: str = "") -> None:
        self._path, self._document, self._within = path, document, within

    def part(self, *names: str) -> Fields:
        """A nested object; an empty one if there is none."""
        found, within = self._document, self._within
        for name in names:
            inner = found.get(name)
            found, within = inner if isinstance(inner, dict) else {}, f"{within}{name}."
        return Fields(self._path, found, within)

    def text(self, name: str) -> str | None:
        """A text; None if the value is none."""
        value = self._document.get(name)
        return value if isinstance(value, str) else None

    def value(self, name: str) -> Any:
        """Any value."""
        return self._document.get(name)

    def number(self, name: str) -> float | None:
        """A number that is 0 or more; None if it is missing or no number was measured.

        Raises:
            TraceError: The value is something else.
        """
        value = self._document.get(name)
        if value is None or (isinstance(value, float) and not isfinite(value)):
            return None
        if type(value) not in (int, float) or not 0 <= value < MOST_VALUE:
            raise self.error(name, value, "must be a number, 0 or more; fetch the file again")
        return float(value)

    def count(self, name: str) -> int | None:
        """A whole number; None if it is missing.

        Raises:
            TraceError: The value is something else.
        """
        value = self.number(name)
        if value is None:
            return None
        if value != int(value):
            raise self.error(name, value, "must be a whole number; fetch the file again")
        return int(value)

    def needed(self, *names: str, remedy: str) -> float:
        """The first of these numbers that the file has and that is above 0.

        Raises:
            TraceError: It has none of them; names the first.
        """
        for name in names:
            if value := self.number(name):
                return value
        raise self.error(names[0], self._document.get(names[0]), remedy)

    def statistics(self, before: str = "", after: str = "") -> Statistics:
        """Statistics under names such as ``mean``, ``avg``, ``std``, ``min``, ``median``, ``p99``.

        Args:
            before, after: Text in front of such a name and behind it, as in ``mean_ttft_ms``.

        Raises:
            TraceError: A statistic is no number.
        """
        mean = std = None
        percentiles: dict[float, float] = {}
        for name in self._document:
            if not (name.startswith(before) and name.endswith(after)):
                continue
            short = name[len(before) : len(name) - len(after)]
            rank = _RANKS.get(short)
            if rank is None and (found := _PERCENTILE.fullmatch(short)) is not None:
                rank = float(found[1])
            if rank is None and short not in (*_MEANS, *_DEVIATIONS):
                continue
            value = self.number(name)
            if value is None:
                continue
            if rank is not None and rank <= 100:
                percentiles[rank] = value
            elif short in _MEANS:
                mean = value
            elif short in _DEVIATIONS:
                std = value
        return Statistics(mean, std, dict(sorted(percentiles.items())))

    def error(self, name: str, value: object, remedy: str) -> TraceError:
        """The error for a value."""
        return TraceError(self._path, None, f"{self._within}{name}", shown(value), remedy)


def known(**values: float | None) -> dict[str, float]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
