"""AIPerf's ``profile_export.jsonl``: one line per request, in the order in which answers ended.

    {"metadata": {"request_start_ns": 1763847600000000000, "benchmark_phase": "profiling", "was_cancelled": false, ...},
     "metrics": {"input_sequence_length": {"value": 128, "unit": "tokens"}, "time_to_first_token": {"value": 50.0, "unit":
     "ms"}, "request_latency": ..., "inter_chunk_latency": {"value": [10.0, ...], "unit": "ms"}, ...}, "error": {...}}

The export does not say how requests were sent. They are those of a closed loop if nearly all of them were sent at once when
another one had ended, and brought the requests in flight back to their highest number: that many users.

Metrics that a request does not have are missing or null. Requests of the warm-up are left out. Requests with an error
and cancelled requests count as failed. ``profile_export_aiperf.json`` has statistics only, and
``profile_export_raw.jsonl`` has no lengths.

Source: ai-dynamo/aiperf, releases 0.3.0, 0.6.0 and 0.13.0: common/models/record_models.py,
post_processors/record_export_jsonl_writer.py, metrics/metric_dicts.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...sim.types.errors import TraceError
from ..parsing.files import TraceFile
from ..parsing.form import Form, lengths
from ..parsing.json_values import elements
from ..parsing.table import shown
from ..parsing.times import clock
from .result import BenchmarkResult, Client, Latency, Request, in_order

_PROMPT, _OUTPUT, _START = "input_sequence_length", "output_sequence_length", "request_start_ns"
_TTFT, _E2EL, _GAPS = "time_to_first_token", "request_latency", "inter_chunk_latency"
#: The unit in which each metric is exported.
_UNITS = {_PROMPT: "tokens", _OUTPUT: "tokens", _TTFT: "ms", _E2EL: "ms", _GAPS: "ms"}
#: Requests of each user, at least, and the share of the requests, that show a closed loop; and how soon one follows another.
_LEAST_TURNS, _NEARLY_ALL, _AT_ONCE_NS = 3, 0.9, 50e6
#: Coefficient of variation of the gaps between the requests of several users, at least.
_LEAST_CV = 0.1
AIPERF = Client(
    Form(
        "AIPerf",
        frozenset({"metadata", "metrics"}),
        {_START: clock("ns", doubted=False)},
        lengths(_PROMPT, _OUTPUT),
        content={},
        failures=True,
    ),
    ttft=Latency(_TTFT, 1e-3),
    e2el=Latency(_E2EL, 1e-3),
    gaps=Latency(_GAPS, 1e-3),
    streaming="--streaming",
)


def is_aiperf(value: Any) -> bool:
    """Whether a JSON value is a record of the per-request export or of the raw export."""
    return isinstance(value, dict) and isinstance(value.get("metadata"), dict) and _START in value["metadata"]


def is_aiperf_summary(document: Mapping[str, Any]) -> bool:
    """Whether an object is a statistics export of AIPerf or genai-perf."""
    return "aiperf_version" in document or {"input_config", "request_throughput"} <= document.keys()


def read_aiperf(file: TraceFile) -> BenchmarkResult:
    """The requests of an export.

    Raises:
        TraceError: A line is not a request record, or the export has no lengths.
    """
    records = enumerate(_records(file), 1)
    requests = [_request(file, row, record) for row, record in records if not _is_warmup(record)]
    answered = [request.fields for request in requests if not request.failed]
    return BenchmarkResult(AIPERF, file.path, in_order(requests, _START), {"max_concurrency": _users(answered)})


def _users(requests: Sequence[Mapping[str, Any]]) -> int | None:
    """Users of a closed loop that sent the requests; None for an open loop, and if there are too few requests to say."""
    try:
        starts_ns = np.array([request[_START] for request in requests], dtype=np.float64)
        ends_ns = starts_ns + 1e6 * np.array([request[_E2EL] for request in requests], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        return None
    starts_ns.sort()
    ends_ns.sort()
    ended = np.searchsorted(ends_ns, starts_ns, side="right")
    in_flight = np.arange(1, len(starts_ns) + 1) - ended
    users = int(in_flight.max(initial=0))
    if len(starts_ns) < _LEAST_TURNS * users or not users:
        return None
    gaps_ns = np.diff(starts_ns[users:])
    if users > 1 and gaps_ns.std() < _LEAST_CV * gaps_ns.mean():
        # At a constant rate as many requests are in flight as in a closed loop.
        return None
    after = starts_ns[users:] - ends_ns[np.maximum(ended[users:] - 1, 0)]
    follows = (in_flight[users:] == users) & (after <= _AT_ONCE_NS) & (ended[users:] > 0)
    return users if follows.mean() >= _NEARLY_ALL else None


def _records(file: TraceFile) -> Iterator[dict[str, Any]]:
    for element in elements(file):
        if not is_aiperf(element.value):
            remedy = "is not a request record of AIPerf; fetch the file again"
            raise TraceError(file.path, element.line, "row", shown(element.value), remedy)
        yield element.value


def _is_warmup(record: Mapping[str, Any]) -> bool:
    return record["metadata"].get("benchmark_phase") == "warmup"


def _request(file: TraceFile, row: int, record: Mapping[str, Any]) -> Request:
    metadata, metrics = record["metadata"], record.get("metrics")
    if not isinstance(metrics, dict):
        raise TraceError(
            file.path, row, "metrics", None, "is missing; give profile_export.jsonl, not its raw export", "row"
        )
    fields = {_START: metadata[_START]}
    for name, unit in _UNITS.items():
        metric = metrics.get(name)
        if metric is None:
            continue
        if not isinstance(metric, dict) or metric.get("unit") != unit:
            raise TraceError(
                file.path, row, name, shown(metric), f"must be a value in {unit}; fetch the file again", "row"
            )
        fields[name] = metric.get("value")
    return Request(row, fields, bool(record.get("error")) or metadata.get("was_cancelled") is True)
