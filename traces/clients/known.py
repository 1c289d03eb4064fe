"""Readers of benchmark results, by the client that wrote a file (``sim.types.signatures``)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ...sim.types.errors import TraceError
from ...sim.types.file_head import FileHead
from ...sim.types.signatures import TRACES
from ...sim.types.user_files import json_value
from ..parsing.files import TraceFile
from ..parsing.json_values import elements
from .aiperf import read_aiperf, summary_of_aiperf
from .guidellm import read_guidellm
from .inference_perf import INFERENCE_PERF, is_inference_perf, read_inference_perf
from .inference_perf_summary import summary_of_inference_perf
from .inferencex import summary_of_inferencex
from .result import BenchmarkResult
from .sglang import read_sglang
from .summary import BenchmarkSummary
from .vllm import read_vllm

#: Readers of files with a JSON value for each request, by the form of the signature.
_OF_FILES: dict[str, Callable[[TraceFile], BenchmarkResult]] = {
    "AIPerf": read_aiperf,
    INFERENCE_PERF.form.title: read_inference_perf,
}
#: Readers of one JSON object.
_OF_OBJECTS: dict[str, Callable[..., BenchmarkResult | BenchmarkSummary]] = {
    "AIPerf, a summary": summary_of_aiperf,
    "SGLang bench_serving": read_sglang,
    "vllm bench serve": read_vllm,
    "GuideLLM": read_guidellm,
    "inference-perf, a summary": summary_of_inference_perf,
    "InferenceX": summary_of_inferencex,
}


def benchmark_result(file: TraceFile) -> BenchmarkResult | BenchmarkSummary | None:
    """The benchmark result in a file, or its summary if it has no list of requests; None if the file is not one.

    Raises:
        TraceError: The result is of a known client, but is unreadable or incomplete.
    """
    head = FileHead(file.head(), file.bare_name)
    form = next((each.form for each in TRACES if "benchmark" in each.read_as and each.mark.fits(head)), None)
    if form is None:
        return None
    # A long prompt may hide the other keys of its request from the mark.
    if form == INFERENCE_PERF.form.title and not is_inference_perf(next(elements(file)).value):
        return None
    return _OF_FILES[form](file) if form in _OF_FILES else _OF_OBJECTS[form](file.path, _document(file))


def _document(file: TraceFile) -> dict[str, Any]:
    """The JSON object of a file, also as the only element of an array, or as the only line.

    Raises:
        TraceError: The file has no object, or has several.
    """
    text = file.whole()
    try:
        value = json_value(text)
    except ValueError as error:
        complaint, line = "brackets too deep or numbers too long", None
        if isinstance(error, json.JSONDecodeError):
            complaint, line = error.msg, error.lineno
        elif isinstance(error, UnicodeDecodeError):
            complaint = "no UTF-8 text"
        first, *others = filter(None, text.splitlines())
        if _is_object(first):
            remedy = f"has {1 + len(others)} results; keep one, as by sed -n 2p for the second"
        else:
            remedy = f"is not a readable benchmark result ({complaint}); give one JSON object"
        raise TraceError(file.path, None if _is_object(first) else line, None, None, remedy) from None
    if isinstance(value, list):
        first, *others = (element.value for element in elements(file))
        if others:
            remedy = f"is a list of {1 + len(others):,} results; keep one, as by jq '.[0]' for the first"
            raise TraceError(file.path, None, None, None, remedy)
        value = first
    return dict(value)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json_value(text), dict)
    except ValueError:
        return False
