"""AIPerf's ``profile_export.jsonl``: one line per request, in the order in which answers ended.

    {"metadata": {"request_start_ns": 1763847600000000000, "benchmark_phase": "profiling", "was_cancelled": false, ...},
     "metrics": {"input_sequence_length": {"value": 128, "unit": "tokens"}, "time_to_first_token": {"value": 50.0, "unit":
     "ms"}, "request_latency": ..., "inter_chunk_latency": {"value": [10.0, ...], "unit": "ms"}, ...}, "error": {...}}

The export does not say how requests were sent: ``closed_loop`` finds out.

Metrics that a request does not have are missing or null. Requests of the warm-up are left out. Requests with an error
and cancelled requests count as failed. ``profile_export_raw.jsonl`` has no lengths.

``profile_export_aiperf.json`` has statistics only, as did genai-perf's export, which it mimics:

    {"request_count": {"unit": "requests", "avg": 10.0}, "input_sequence_length": {"unit": "tokens", "avg": 256.0, "std": 0.0,
     "min": ..., "p50": ..., ...}, "time_to_first_token": {"unit": "ms", ...}, "benchmark_duration": {"unit": "sec", ...},
     "input_config": {"endpoint": {"model_names": [...]}, "loadgen": {"concurrency": 4, "request_rate": ...}}}

Its ``inter_token_latency`` is a mean of each request: vLLM's TPOT. Later releases state the load in ``input_config.phases``, a list of
``{"type": "concurrency", "concurrency": 4}`` or ``{"type": "poisson", "rate": 3.0}``, and the model in ``models.items``.

Source: ai-dynamo/aiperf, releases 0.3.0, 0.6.0 and 0.13.0: common/models/record_models.py,
post_processors/record_export_jsonl_writer.py, metrics/metric_dicts.py, common/models/export_models.py,
metrics/types/inter_token_latency_metric.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

from ...sim.types.errors import TraceError
from ..parsing.files import TraceFile
from ..parsing.form import ZERO, Form, lengths
from ..parsing.json_values import elements
from ..parsing.table import shown
from ..parsing.times import clock
from .closed_loop import users
from .load import EVEN, client_load
from .result import BenchmarkResult, Client, Latency, Request, in_order
from .summary import OUTPUTS, REQUESTS, TOKENS, BenchmarkSummary, Fields, Statistics, known

_PROMPT, _OUTPUT, _START = "input_sequence_length", "output_sequence_length", "request_start_ns"
_TTFT, _E2EL, _GAPS = "time_to_first_token", "request_latency", "inter_chunk_latency"
#: The unit in which each metric is exported.
_UNITS = {_PROMPT: "tokens", _OUTPUT: "tokens", _TTFT: "ms", _E2EL: "ms", _GAPS: "ms"}
#: Seconds in the units of a summary.
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
_LATENCIES = {"ttft": _TTFT, "tpot": "inter_token_latency", "e2el": _E2EL}
_THROUGHPUTS = {REQUESTS: REQUESTS, OUTPUTS: "output_token_throughput", TOKENS: "total_token_throughput"}
AIPERF = Client(
    Form(
        "AIPerf",
        {_START: clock("ns", doubted=False)},
        lengths(_PROMPT, _OUTPUT),
        content={},
        failures=ZERO,
    ),
    ttft=Latency(_TTFT, 1e-3),
    e2el=Latency(_E2EL, 1e-3),
    gaps=Latency(_GAPS, 1e-3),
    streaming="--streaming",
)


def is_aiperf(value: Any) -> bool:
    """Whether a JSON value is a record of the per-request export or of the raw export."""
    return isinstance(value, dict) and isinstance(value.get("metadata"), dict) and _START in value["metadata"]


def read_aiperf(file: TraceFile) -> BenchmarkResult:
    """The requests of an export.

    Raises:
        TraceError: A line is not a request record, or the export has no lengths.
    """
    records = enumerate(_records(file), 1)
    requests = [_request(file, row, record) for row, record in records if not _is_warmup(record)]
    answered = [request.fields for request in requests if not request.failed]
    return BenchmarkResult(AIPERF, file.path, in_order(requests, _START), {"max_concurrency": _users(answered)})


def summary_of_aiperf(path: str | PathLike[str], document: Mapping[str, Any]) -> BenchmarkSummary:
    """The summary in a statistics export of AIPerf or genai-perf.

    Raises:
        TraceError: The export has no lengths, or a value is no number.
    """
    fields = Fields(path, document)
    remedy = "is missing or 0; fetch the file again"
    throughput, seconds = fields.part(REQUESTS).number("avg"), _duration_s(fields)
    counted = throughput * seconds if throughput and seconds else None
    requests = counted if "request_count" not in document and counted else None
    if requests is None:
        requests = fields.part("request_count").needed("avg", remedy=remedy)
    lengths = {name: fields.part(name).statistics() for name in (_PROMPT, _OUTPUT)}
    for name, of in lengths.items():
        if of.mean is None:
            raise fields.part(name).error("avg", None, "is missing; run AIPerf with token counts")
    return BenchmarkSummary(
        "AIPerf",
        path,
        requests=round(requests),
        failed=int(fields.part("error_request_count").number("avg") or 0),
        prompts=lengths[_PROMPT],
        outputs=lengths[_OUTPUT],
        latencies={name: of for name, tag in _LATENCIES.items() if (of := _seconds(fields.part(tag)))},
        throughputs=known(**{name: fields.part(tag).number("avg") for name, tag in _THROUGHPUTS.items()}),
        load=client_load(path, {"duration": seconds, **_sent(document.get("input_config"))}),
    )


def _seconds(metric: Fields) -> Statistics:
    """A latency in seconds.

    Raises:
        TraceError: Its unit is not one of time.
    """
    found, unit = metric.statistics(), metric.value("unit")
    if not found:
        return found
    if not isinstance(unit, str) or unit not in _SECONDS:
        raise metric.error("unit", unit, f"must be one of {', '.join(_SECONDS)}; fetch the file again")
    return found.times(_SECONDS[unit])


def _duration_s(fields: Fields) -> float | None:
    return _seconds(fields.part("benchmark_duration")).mean or None


def _sent(config: Any) -> dict[str, Any]:
    """The load and the model by the options of a run; what they do not state is missing."""
    options = config if isinstance(config, dict) else {}
    phases = options.get("phases")
    loads = [options.get("loadgen"), _stimulus(options), *(phases if isinstance(phases, list) else ())]
    named = [each for each in loads if isinstance(each, dict) and "warmup" not in (each.get("name"), each.get("kind"))]
    load = named[-1] if named else {}
    kind = load.get("type") or load.get("request_rate_mode") or load.get("arrival_pattern")
    models, endpoint = options.get("models"), options.get("endpoint")
    names = [endpoint.get("model_names")] if isinstance(endpoint, dict) else []
    names += [models.get("items") if isinstance(models, dict) else models, options.get("model_names")]
    first = next((each[0] for each in names if isinstance(each, list) and each), None)
    return {
        "request_rate": load.get("request_rate", load.get("rate")),
        "burstiness": EVEN if kind == "constant" else load.get("smoothness"),
        "max_concurrency": load.get("concurrency"),
        "model_id": first.get("name") if isinstance(first, dict) else first,
    }


def _stimulus(options: Mapping[str, Any]) -> Any:
    """The load of genai-perf."""
    inner = options.get("perf_analyzer")
    return inner.get("stimulus") if isinstance(inner, dict) else None


def _users(requests: Sequence[Mapping[str, Any]]) -> int | None:
    try:
        starts_s = [request[_START] / 1e9 for request in requests]
        return users(
            starts_s, [start_s + request[_E2EL] / 1e3 for start_s, request in zip(starts_s, requests, strict=True)]
        )
    except (KeyError, TypeError, OverflowError):
        return None


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
