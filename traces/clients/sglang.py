"""SGLang's ``bench_serving --output-file FILE --output-details``: JSON lines, one line per run of the client.

    {"backend": "sglang-oai", "request_rate": 4.0, "max_concurrency": null, ..., "input_lens": [...], "output_lens": [...],
     "ttfts": [...], "itls": [[...], ...], "generated_texts": [...], "errors": ["", ...]}

The lists are the same as in ``vllm bench serve``, in sending order. There are no start times, so
arrivals are drawn at ``request_rate`` (``Infinity``: all at once; ``"trace"``: unknown). With ``--backend sglang`` the
gap between two chunks is divided among the tokens of the later chunk.

Source: sgl-project/sglang, python/sglang/benchmark/serving.py of 0.5.23 (bench_serving.py before); a run of that
release against a stub server made the sample in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

from .result import BenchmarkResult
from .vllm import ERRORS, GAPS, TTFTS, VLLM, per_request

SGLANG = replace(
    VLLM,
    form=replace(VLLM.form, title="SGLang bench_serving", clocks={}),
    streaming="--output-details and without --disable-stream",
)


def is_sglang(document: Mapping[str, Any]) -> bool:
    """Whether an object is a result, with or without details."""
    return {"total_output_tokens_retokenized", "request_rate"} <= document.keys()


def read_sglang(path: str | PathLike[str], document: Mapping[str, Any]) -> BenchmarkResult:
    """The requests of a run.

    Raises:
        TraceError: The result has no details, or lists of different lengths.
    """
    rows = per_request(path, document, (TTFTS, GAPS, ERRORS), "is missing; run bench_serving with --output-details")
    server = document.get("server_info")
    about = {
        "duration": document.get("duration"),
        "request_rate": None if document["request_rate"] == "trace" else document["request_rate"],
        "max_concurrency": document.get("max_concurrency"),
        "model_id": server.get("model_path") if isinstance(server, dict) else None,
    }
    return BenchmarkResult(SGLANG, path, rows, about)
