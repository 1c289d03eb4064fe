"""Logs of requests, as gateways and tracing tools export them: a start, the usage of tokens, and much else.

    LiteLLM, spend logs and standard logging payloads, also within {"data": [...]} of its interface; CSV of its table:
        {"startTime": "2025-04-21T10:00:00+00:00", "prompt_tokens": 100, "completion_tokens": 20, "session_id": ..., ...}
    Langfuse, observations, also within {"data": [...]} or the {"observations": [...]} of a trace:
        {"type": "GENERATION", "startTime": "2025-06-26T06:16:19.504Z", "promptTokens": 13, "usageDetails": {"input": 13, ...}, ...}
    OpenTelemetry, spans of a file exporter, and of the consoles of SDKs; vLLM's own have ``gen_ai.usage.prompt_tokens``:
        {"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "1763847600000000000", "attributes": [{"key":
         "gen_ai.usage.input_tokens", "value": {"intValue": "1200"}}, ...]}]}]}]}
    Jaeger, the JSON of a trace:
        {"data": [{"spans": [{"startTime": 1763847600000000, "tags": [{"key": "gen_ai.usage.prompt_tokens", "value": 1200}]}]}]}

A log is written when requests end: its rows are out of order, and are sorted. Requests without tokens count as failed. Spans and
observations that are no call of a model are none: those without usage, and those of agents and tools, which sum up the calls within.
Langfuse counts cached tokens apart from ``usageDetails.input``: they are added, as Anthropic's.

Sources: BerriAI/litellm, schema.prisma (``LiteLLM_SpendLogs``); langfuse/langfuse, GET /api/public/observations; OpenTelemetry's
specification of OTLP JSON and of gen_ai spans; vllm-project/vllm, vllm/tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..parsing.form import SECONDS, SESSION, Form
from ..parsing.jsonl_format import sessions, value_at
from ..parsing.nested import Nested
from ..parsing.times import clock
from .own import OWN

Record = dict[str, Any]
#: Lists that hold records, or further lists of them.
_LISTS = ("resourceSpans", "batches", "scopeSpans", "instrumentationLibrarySpans", "spans", "data", "observations")
_WITHIN = (
    *("", "usage.", "gen_ai.usage.", "attributes.gen_ai.usage."),
    *("response.body.usage.", "result.message.usage."),
)
_PROMPTS = (
    *(f"{within}{name}" for within in _WITHIN for name in ("prompt_tokens", "input_tokens")),
    *("promptTokens", "usage.input", "usageDetails.input", "usage_details.input"),
)
_OUTPUTS = (
    *(f"{within}{name}" for within in _WITHIN for name in ("completion_tokens", "output_tokens")),
    *("completionTokens", "usage.output", "usageDetails.output", "usage_details.output"),
)
#: Tokens of a prompt that some programs count apart, beside the others.
_APART = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_cached_tokens")
_APART_FROM = (
    *("input_tokens", "usage.input_tokens", "response.body.usage.input_tokens", "result.message.usage.input_tokens"),
    *("usageDetails.input", "usage_details.input"),
)
_NANOSECONDS, _STARTS = "startTimeUnixNano", ("startTime", "start_time")
#: Operations of spans that sum up the calls within them, or call no model.
_NO_CALLS = ("invoke_agent", "create_agent", "execute_tool", "embeddings")
_SESSIONS = (SESSION, "sessionId", "gen_ai.conversation.id", "attributes.gen_ai.conversation.id")
LOG = Form(
    "request log",
    dict.fromkeys(_STARTS, SECONDS) | {_NANOSECONDS: clock("ns", doubted=False)},
    {
        "prompt_tokens": tuple(name for name in _PROMPTS if "." not in name),
        "output_tokens": tuple(name for name in _OUTPUTS if "." not in name),
    },
    content={SESSION: sessions},
    failures=frozenset({0, None}),
)


def is_table_of_log(names: Iterable[str]) -> bool:
    """Whether the columns of a table are those of a log."""
    return all(any(name in names for name in wanted) for wanted in (LOG.clocks, *LOG.names.values()))


def _is_log(record: Record) -> bool:
    """Whether a value is a record of a log, or holds such."""
    inner = _lists(record)
    if inner:
        return any(_is_log(entry) for each in inner for entry in each)
    has_start = any(name in record for name in LOG.clocks) and not any(name in record for name in OWN.clocks)
    return has_start and (_is_span(record) or _has_usage(record))


def _has_usage(record: Record) -> bool:
    return all(any(value_at(record, name) is not None for name in names) for names in (_PROMPTS, _OUTPUTS))


def _lists(record: Record) -> list[list[Any]]:
    """The lists in a record that hold records; none in a record with tokens of its own."""
    found = [record[name] for name in _LISTS if isinstance(record.get(name), list)]
    found = [each for each in found if each and all(isinstance(inner, dict) for inner in each)]
    return [] if not found or _has_usage(record) else found


def _is_span(record: Record) -> bool:
    """Whether a record is a span or an observation, which need not be a call of a model."""
    return any(name in record for name in ("spanId", "spanID", "attributes", "tags", "traceId", "trace_id"))


def _requests(record: Record) -> Iterator[Record]:
    """The calls of a model in a record."""
    inner = _lists(record)
    if inner:
        for each in inner:
            for entry in each:
                yield from _requests(entry)
        return
    flat = record | _attributes(record)
    if not _is_span(record) or _is_call(flat):
        yield _request(flat)


def _attributes(record: Record) -> Record:
    """Attributes of a span by their keys, as OpenTelemetry's and Jaeger's JSON have them."""
    found = {}
    for name in ("attributes", "tags"):
        entries = record.get(name)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("key"), str):
                found[entry["key"]] = _value(entry.get("value"))
    return found


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items()), ("", None))
    return int(inner) if kind == "intValue" and isinstance(inner, str) and inner.isdecimal() else inner


def _is_call(flat: Record) -> bool:
    kind = flat.get("type", "GENERATION")
    operation = _first(flat, ("gen_ai.operation.name", "attributes.gen_ai.operation.name"))
    return kind in ("GENERATION", None) and operation not in _NO_CALLS and _has_usage(flat)


def _request(flat: Record) -> Record:
    start = next((name for name in LOG.clocks if flat.get(name) is not None), _STARTS[0])
    return tokens_of(flat) | {start: flat.get(start), SESSION: _first(flat, _SESSIONS)}


def tokens_of(record: Record) -> Record:
    """The lengths of a request under the names of a log, wherever its record has them; None where it has none."""
    place = next((name for name in _PROMPTS if value_at(record, name) is not None), "")
    prompt = value_at(record, place)
    if place in _APART_FROM:
        within = place[: place.rfind(".") + 1]
        apart = [value_at(record, f"{within}{name}") for name in _APART]
        prompt = _sum([prompt, *(tokens for tokens in apart if tokens is not None)])
    return {"prompt_tokens": prompt, "completion_tokens": _first(record, _OUTPUTS)}


def _sum(tokens: list[Any]) -> Any:
    """The sum of numbers; else the first value that is none, for the check to refuse."""
    return next((each for each in tokens if type(each) is not int), None) or sum(each for each in tokens)


def _first(flat: Record, names: Iterable[str]) -> Any:
    return next((value for name in names if (value := value_at(flat, name)) is not None), None)


def _opener() -> Callable[[Record], Iterator[Record]]:
    return _requests


LOGS = Nested(LOG, _is_log, _opener)
