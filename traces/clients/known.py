"""Recognition of benchmark results: finds the client that wrote a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ...sim.types.errors import TraceError
from ...sim.types.user_files import json_value
from ..parsing.files import TraceFile
from ..parsing.json_values import elements
from .aiperf import is_aiperf, is_aiperf_summary, read_aiperf, summary_of_aiperf
from .guidellm import is_guidellm, read_guidellm
from .inference_perf import is_inference_perf, read_inference_perf
from .inference_perf_summary import is_inference_perf_summary, summary_of_inference_perf
from .inferencex import is_inferencex, summary_of_inferencex
from .result import BenchmarkResult
from .sglang import is_sglang, read_sglang
from .summary import BenchmarkSummary
from .vllm import is_vllm, read_vllm

#: Keys that each result has near its beginning (one of them is enough), and the number of bytes to search.
_MARKS = re.compile(
    rb'"(input_lens|request_throughput|sharegpt_output_len|benchmarks|request_start_ns|experiments|aiperf_version'
    rb'|load_summary|tput_per_gpu)"\s*:'
)
_HEAD_BYTES = 2**16
_NO_LENGTHS = "is a file of genai-perf, which does not write token counts; give AIPerf's profile_export.jsonl"

#: What recognises an object, and reads it.
_READERS: tuple[tuple[Callable[..., bool], Callable[..., BenchmarkResult | BenchmarkSummary]], ...] = (
    (is_aiperf_summary, summary_of_aiperf),
    (is_sglang, read_sglang),
    (is_vllm, read_vllm),
    (is_guidellm, read_guidellm),
    (is_inference_perf_summary, summary_of_inference_perf),
    (is_inferencex, summary_of_inferencex),
)


def benchmark_result(file: TraceFile) -> BenchmarkResult | BenchmarkSummary | None:
    """The benchmark result in a file, or its summary if it has no list of requests; None if the file is not one.

    Raises:
        TraceError: The result is of a known client, but is unreadable or incomplete.
    """
    head = file.head().lstrip()[:_HEAD_BYTES]
    marks = set(_MARKS.findall(head))
    if head.startswith(b"[") and b'"start_time"' in head:
        first = next(elements(file), None)
        return read_inference_perf(file) if first is not None and is_inference_perf(first.value) else None
    if not head.startswith((b"{", b"[")) or not marks:
        return None
    if b"request_start_ns" in marks:
        first = next(elements(file), None)
        if first is not None and is_aiperf(first.value):
            return read_aiperf(file)
    if head.startswith(b"["):
        return _of_list(file) if b"tput_per_gpu" in marks else None
    document = _document(file)
    if "experiments" in document and "service_kind" in document:
        raise TraceError(file.path, None, None, None, _NO_LENGTHS)
    for known, read in _READERS:
        if known(document):
            return read(file.path, document)
    return None


def _of_list(file: TraceFile) -> BenchmarkSummary | None:
    """InferenceX's result in a list of one.

    Raises:
        TraceError: The list has several.
    """
    first, *others = (element.value for element in elements(file))
    if others:
        remedy = f"is a list of {1 + len(others):,} results; keep one, as by jq '.[0]' for the first"
        raise TraceError(file.path, None, None, None, remedy)
    return summary_of_inferencex(file.path, first) if isinstance(first, dict) and is_inferencex(first) else None


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json_value(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _document(file: TraceFile) -> dict[str, Any]:
    """The JSON object of a file; for JSON lines, the object of the first line.

    Raises:
        TraceError: The file has no object, or has several runs of a client.
    """
    text = file.whole()
    try:
        return json_value(text)
    except ValueError as error:
        complaint, line = "brackets too deep or numbers too long", None
        if isinstance(error, json.JSONDecodeError):
            complaint, line = error.msg, error.lineno
        elif isinstance(error, UnicodeDecodeError):
            complaint = "no UTF-8 text"
    first, *others = filter(None, text.splitlines())
    document = _object(first)
    if document is None:
        remedy = f"is not a readable benchmark result ({complaint}); give one JSON object"
        raise TraceError(file.path, line, None, None, remedy)
    if is_sglang(document) or is_vllm(document):
        remedy = f"has {1 + len(others)} results; keep one, as by sed -n 2p for the second"
        raise TraceError(file.path, None, None, None, remedy)
    return document
