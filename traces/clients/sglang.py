"""SGLang's ``bench_serving --output-file FILE --output-details``: JSON lines, one line per run of the client.

    {"backend": "sglang-oai", "request_rate": 4.0, "max_concurrency": null, ..., "input_lens": [...], "output_lens": [...],
     "ttfts": [...], "itls": [[...], ...], "generated_texts": [...], "errors": ["", ...]}

The lists are the same as in ``vllm bench serve``, in sending order. There are no start times, so
arrivals are drawn at ``request_rate`` (``Infinity``: all at once; ``"trace"``: unknown). With ``--backend sglang`` the
gap between two chunks is divided among the tokens of the later chunk.

Without ``--output-details`` the statistics are those of ``vllm bench serve``, with ``e2e_latency_ms`` and ``total_throughput``. The
lengths of ``--dataset-name random`` are uniform from ``random_range_ratio`` times ``random_input_len`` to ``random_input_len``, and
outputs alike.

The client sends ``ignore_eos`` to every backend (TensorRT-LLM gets a minimum length) unless it is started with ``--disable-ignore-eos``. The
file does not state that flag: it is taken as not given, unless an answer is shorter than any that ``random`` asks for.

Source: sgl-project/sglang, python/sglang/benchmark/serving.py of 0.5.23 (bench_serving.py before); a run of that
release against a stub server made the sample in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from .result import BenchmarkResult, Request
from .summary import BenchmarkSummary, Fields, Statistics
from .vllm import ERRORS, GAPS, OUTPUT, TTFTS, VLLM, has_no_lists, per_request, summary_of

SGLANG = replace(
    VLLM,
    form=replace(VLLM.form, title="SGLang bench_serving", clocks={}),
    streaming="--output-details and without --disable-stream",
)


def read_sglang(path: str | PathLike[str], document: Mapping[str, Any]) -> BenchmarkResult | BenchmarkSummary:
    """The requests of a run; its summary if it has no details.

    Raises:
        TraceError: The result has lists of different lengths, or a value that cannot be.
    """
    about = _about(document)
    if has_no_lists(document):
        found = summary_of(SGLANG.form.title, path, document, about, "e2e_latency", "total_throughput")
        fields = Fields(path, document)
        return replace(
            found,
            prompts=_drawn(fields, found.prompts, "random_input_len"),
            outputs=_drawn(fields, found.outputs, "random_output_len"),
            ignores_eos=True,
        )
    rows = per_request(path, document, (TTFTS, GAPS, ERRORS), "is missing; run bench_serving with --output-details")
    return BenchmarkResult(SGLANG, path, rows, about, _ignores_eos(Fields(path, document), rows))


def _ignores_eos(fields: Fields, requests: Sequence[Request]) -> bool:
    """Whether no answer contradicts the client's default, which is to send ``ignore_eos``."""
    drawn = _range(fields, "random_output_len")
    answers = [request.fields[OUTPUT] for request in requests if not request.failed]
    return drawn is None or all(type(answer) is not int or not 0 < answer < drawn[0] for answer in answers)


def _drawn(fields: Fields, of: Statistics, name: str) -> Statistics:
    """Lengths with the range from which the data set ``random`` draws them, if their mean is within it."""
    drawn = _range(fields, name)
    if drawn is None or of.mean is None:
        return of
    least, longest = drawn
    return replace(of, percentiles={0.0: float(least), 100.0: longest}) if least <= of.mean <= longest else of


def _range(fields: Fields, name: str) -> tuple[int, float] | None:
    """The least and the greatest length that the data set ``random`` draws; None for another data set."""
    ratio, longest = fields.number("random_range_ratio"), fields.number(name)
    if fields.text("dataset_name") != "random" or ratio is None or not longest:
        return None
    return max(1, int(longest * min(ratio, 1.0))), longest


def _about(document: Mapping[str, Any]) -> dict[str, Any]:
    server = document.get("server_info")
    return {
        "duration": document.get("duration"),
        "request_rate": None if document["request_rate"] == "trace" else document["request_rate"],
        "max_concurrency": document.get("max_concurrency"),
        "backend": document.get("backend"),
        "model_id": server.get("model_path") if isinstance(server, dict) else None,
    }
