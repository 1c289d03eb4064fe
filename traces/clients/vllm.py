"""``vllm bench serve --save-result``: one JSON object, with ``--save-detailed`` with a list per quantity.

    {"date": ..., "request_rate": 4.0, ..., "input_lens": [...], "output_lens": [...], "start_times": [...],
     "ttfts": [...], "itls": [[...], ...], "errors": ["", ...]}

``start_times`` are seconds of a clock with an arbitrary origin; releases before vLLM #32667 do not write them.
``ttfts`` and ``itls`` are in seconds and start when the client sends a request, after its own ``--max-concurrency``
limit. An answer ends with its last gap. Requests with an error or without output count as failed.

Without lists there are ``completed``, ``total_input_tokens``, ``total_output_tokens``, ``duration``, throughputs, and ``mean_``,
``median_``, ``std_`` and percentiles (``p99_``) of ``ttft_ms``, ``tpot_ms``, ``itl_ms`` and ``e2el_ms``, as far as
``--percentile-metrics`` names them.

``ignore_eos`` is sent with ``--ignore-eos``, and by the data sets ``random`` and ``random-mm`` (to an OpenAI backend) and
``timed_trace``. The file states neither, unless ``--metadata dataset_name=random`` or ``ignore_eos=true`` does. It is also taken as
sent if two answers or more, all of them, have one length: only a limit ends all answers there.

Source: vllm-project/vllm, vllm/benchmarks/serve.py (0.33) and pull request 32667.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from ...sim.types.errors import TraceError
from ..parsing.form import ZERO, Form, lengths
from ..parsing.table import shown
from ..parsing.times import clock
from .load import client_load
from .result import BenchmarkResult, Client, Latency, Request, in_order
from .summary import OUTPUTS, REQUESTS, TOKENS, BenchmarkSummary, Fields, Statistics, known

PROMPT, OUTPUT, TTFTS, GAPS, ERRORS = "input_lens", "output_lens", "ttfts", "itls", "errors"
_START = "start_times"
#: Data sets with which the client sends ``ignore_eos`` by itself (0.33, ``serve.py``, lines 2183 to 2199).
IGNORING_DATA = ("random", "random-mm", "timed_trace")
VLLM = Client(
    Form(
        "vllm bench serve",
        {_START: clock("s", doubted=False)},
        lengths(PROMPT, OUTPUT),
        content={},
        failures=ZERO,
    ),
    ttft=Latency(TTFTS, 1),
    e2el=None,
    gaps=Latency(GAPS, 1),
    streaming="--save-detailed, streaming",
)


def read_vllm(path: str | PathLike[str], document: Mapping[str, Any]) -> BenchmarkResult | BenchmarkSummary:
    """The requests of a result; its summary if it has no details.

    Raises:
        TraceError: The result has lists of different lengths, or a value that cannot be.
    """
    if has_no_lists(document):
        return replace(summary_of(VLLM.form.title, path, document, document), ignores_eos=_ignores_eos(document, ()))
    columns = (_START, TTFTS, GAPS, ERRORS)
    rows = per_request(path, document, columns, "is missing; run vllm bench serve with --save-result --save-detailed")
    return BenchmarkResult(VLLM, path, in_order(rows, _START), document, _ignores_eos(document, rows))


def _ignores_eos(document: Mapping[str, Any], requests: Sequence[Request]) -> bool:
    """Whether the client sent ``ignore_eos``, by what ``--metadata`` states of it or by the lengths of the answers."""
    stated = document.get("ignore_eos")
    if stated is not None:
        return str(stated).lower() in ("true", "1")
    if (data := document.get("dataset_name")) is not None:
        return data in IGNORING_DATA
    answers = [request.fields[OUTPUT] for request in requests if not request.failed]
    return len(answers) > 1 and all(answer == answers[0] for answer in answers)


def has_no_lists(document: Mapping[str, Any]) -> bool:
    """Whether a result was saved without details."""
    return PROMPT not in document and OUTPUT not in document and "total_input_tokens" in document


def summary_of(
    title: str,
    path: str | PathLike[str],
    document: Mapping[str, Any],
    about: Mapping[str, Any],
    e2el: str = "e2el",
    tokens: str = TOKENS,
) -> BenchmarkSummary:
    """The summary in a result without details.

    Args:
        about: The load, as of ``BenchmarkResult``.
        e2el, tokens: Names of the end-to-end latency and of the throughput of all tokens.

    Raises:
        TraceError: No request was answered, or a value is no number.
    """
    fields = Fields(path, document)
    answered = fields.needed("completed", remedy="are no answered requests; give another result")
    remedy = "tells no length; run the client with --save-detailed or --output-details"
    prompts, outputs = (fields.needed(name, remedy=remedy) for name in ("total_input_tokens", "total_output_tokens"))
    latencies = {name: fields.statistics(after=f"_{name}_ms") for name in ("ttft", "tpot", "itl")}
    latencies["e2el"] = fields.statistics(after=f"_{e2el}_ms")
    sent = fields.count("num_prompts")
    return BenchmarkSummary(
        title,
        path,
        requests=int(answered),
        failed=max(0, int(fields.number("failed") or (sent or answered) - answered)),
        prompts=Statistics(prompts / answered),
        outputs=Statistics(outputs / answered),
        latencies={name: of.times(1e-3) for name, of in latencies.items() if of},
        throughputs=known(
            **{REQUESTS: fields.number(REQUESTS), OUTPUTS: fields.number(OUTPUTS), TOKENS: fields.number(tokens)}
        ),
        load=client_load(path, about),
    )


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
