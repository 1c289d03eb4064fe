"""inference-perf's ``per_request_lifecycle_metrics.json``: an array with one object per request.

    [{"start_time": 8123.5, "end_time": 8125.1, "request": "{...}", "response": "...", "info": {"request_metrics": {"text":
      {"input_tokens": 128}}, "response_metrics": {"output_tokens": 3, "output_token_times": [8123.6, 8123.7, 8123.8], ...},
      "input_tokens": 128, ...}, "error": null}, ...]

All times are seconds of one clock with an arbitrary origin. Releases before 0.3 have ``input_tokens``, ``output_tokens`` and
``output_token_times`` in ``info`` itself. ``output_token_times`` is empty unless answers are streamed. Requests with an error
count as failed. The file does not say how requests were sent; a closed loop is found as in AIPerf's.

Source: kubernetes-sigs/inference-perf, inference_perf/apis/base.py and inference_perf/reportgen/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...sim.types.errors import TraceError
from ...sim.types.user_files import json_value
from ..parsing.files import TraceFile
from ..parsing.form import ZERO, Form, lengths
from ..parsing.json_values import elements
from ..parsing.jsonl_format import value_at
from ..parsing.table import shown
from ..parsing.times import clock
from .closed_loop import users
from .result import BenchmarkResult, Client, Latency, Request, in_order

_START, _END, _TIMES = "start_time", "end_time", "output_token_times"
_TTFT, _E2EL = f"{_TIMES}[0] - {_START}", f"{_END} - {_START}"
_PROMPT, _OUTPUT = "input_tokens", "output_tokens"
#: Where a file has each value, in this order of preference.
_PLACES = {
    _PROMPT: ("info.request_metrics.text.input_tokens", "info.input_tokens"),
    _OUTPUT: ("info.response_metrics.output_tokens", "info.output_tokens"),
    _TIMES: (
        "info.response_metrics.output_token_times",
        "info.output_token_times",
        "info.response_metrics.chunk_times",
    ),
}
#: Larger than any time, in seconds.
_MOST_S = 2.0**63
INFERENCE_PERF = Client(
    Form(
        "inference-perf",
        {_START: clock("s", doubted=False)},
        lengths(_PROMPT, _OUTPUT),
        content={},
        failures=ZERO,
    ),
    ttft=Latency(_TTFT, 1),
    e2el=Latency(_E2EL, 1),
    gaps=Latency(_TIMES, 1),
    streaming="api.streaming: true",
)


def is_inference_perf(value: Any) -> bool:
    """Whether a JSON value is a record of the per-request report."""
    return isinstance(value, dict) and {_START, _END, "request", "info"} <= value.keys()


def read_inference_perf(file: TraceFile) -> BenchmarkResult:
    """The requests of a report.

    Raises:
        TraceError: An element is not a record, or has times that are no numbers.
    """
    requests: list[Request] = []
    model: str | None = None
    for row, record in enumerate(_records(file), 1):
        requests.append(_request(file, row, record))
        model = model or _model(record)
    answered = [request.fields for request in requests if not request.failed]
    ends = [{**fields, "end": fields[_START] + fields[_E2EL]} for fields in answered if _E2EL in fields]
    loop = (
        users([each[_START] for each in ends], [each["end"] for each in ends]) if len(ends) == len(answered) else None
    )
    about = {"max_concurrency": loop, "model_id": model}
    return BenchmarkResult(INFERENCE_PERF, file.path, in_order(requests, _START), about)


def _records(file: TraceFile) -> Iterator[dict[str, Any]]:
    for element in elements(file):
        if not is_inference_perf(element.value):
            remedy = "is not a request record of inference-perf; fetch the file again"
            raise TraceError(file.path, element.line, "row", shown(element.value), remedy)
        yield element.value


def _request(file: TraceFile, row: int, record: Mapping[str, Any]) -> Request:
    found = {name: _first(record, places) for name, places in _PLACES.items()}
    times, start, end = found.pop(_TIMES), record[_START], record[_END]
    fields = {_START: start} | found
    if record.get("error") or record["info"] is None:
        return Request(row, fields, failed=True)
    for name, value in ((_START, start), (_END, end)):
        if not _is_time(value):
            raise TraceError(file.path, row, name, shown(value), "must be a time in seconds; correct or drop it", "row")
    if times:
        if not isinstance(times, list) or not all(map(_is_time, times)):
            raise TraceError(file.path, row, _TIMES, shown(times), "must be a list of times; correct or drop it", "row")
        gaps = [later - time for time, later in zip(times, times[1:], strict=False)]
        fields |= {_TTFT: times[0] - start, _TIMES: gaps}
    return Request(row, fields | {_E2EL: end - start}, failed=False)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST_S


def _first(record: Mapping[str, Any], places: tuple[str, ...]) -> Any:
    """The first value that is there, and not an empty list; None without one."""
    return next((value for place in places if (value := value_at(dict(record), place)) not in (None, [])), None)


def _model(record: Mapping[str, Any]) -> str | None:
    try:
        body = json_value(record["request"])
    except (TypeError, ValueError):
        return None
    return body["model"] if isinstance(body, dict) and isinstance(body.get("model"), str) else None
