"""``vllm bench serve --save-result --save-detailed``: one JSON object with a list per quantity.

    {"date": ..., "request_rate": 4.0, ..., "input_lens": [...], "output_lens": [...], "start_times": [...],
     "ttfts": [...], "itls": [[...], ...], "errors": ["", ...]}

``start_times`` are seconds of a clock with an arbitrary origin; releases before vLLM #32667 do not write them.
``ttfts`` and ``itls`` are in seconds and start when the client sends a request, after its own ``--max-concurrency``
limit. An answer ends with its last gap. Requests with an error or without output count as failed.

Source: vllm-project/vllm, vllm/benchmarks/serve.py and pull request 32667.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from ...sim.types.errors import TraceError
from ..parsing.form import Form, lengths
from ..parsing.table import shown
from ..parsing.times import clock
from .result import BenchmarkResult, Client, Latency, Request, in_order

PROMPT, OUTPUT, TTFTS, GAPS, ERRORS = "input_lens", "output_lens", "ttfts", "itls", "errors"
_START = "start_times"
VLLM = Client(
    Form(
        "vllm bench serve",
        frozenset({PROMPT, OUTPUT}),
        {_START: clock("s", doubted=False)},
        lengths(PROMPT, OUTPUT),
        content={},
        failures=True,
    ),
    ttft=Latency(TTFTS, 1),
    e2el=None,
    gaps=Latency(GAPS, 1),
    streaming="--save-detailed, streaming",
)


def is_vllm(document: Mapping[str, Any]) -> bool:
    """Whether an object is a result, with or without details."""
    return PROMPT in document or {"request_throughput", "total_input_tokens"} <= document.keys()


def read_vllm(path: str | PathLike[str], document: Mapping[str, Any]) -> BenchmarkResult:
    """The requests of a result.

    Raises:
        TraceError: The result has no details, or lists of different lengths.
    """
    columns = (_START, TTFTS, GAPS, ERRORS)
    rows = per_request(path, document, columns, "is missing; run vllm bench serve with --save-result --save-detailed")
    return BenchmarkResult(VLLM, path, in_order(rows, _START), document)


def per_request(
    path: str | PathLike[str], document: Mapping[str, Any], optional: tuple[str, ...], missing: str
) -> list[Request]:
    """Convert one list per quantity into one record per request.

    Args:
        optional: Names of optional lists besides the lengths.
        missing: Remedy to show if there are no lengths.

    Raises:
        TraceError: There are no lengths, or a list does not have one value per request.
    """
    lists = {name: document[name] for name in (PROMPT, OUTPUT, *optional) if name in document}
    for name in (PROMPT, OUTPUT):
        if name not in lists:
            raise TraceError(path, None, name, None, missing)
    prompts = lists[PROMPT]
    for name, values in lists.items():
        if not isinstance(values, list) or not isinstance(prompts, list) or len(values) != len(prompts):
            remedy = "must be a list with a value for each request; fetch the file again"
            raise TraceError(path, None, name, shown(values), remedy)
    records = (dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))
    return [Request(row, record, bool(record.pop(ERRORS, None))) for row, record in enumerate(records, 1)]
