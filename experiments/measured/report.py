"""The requests of a report beside those of a real server: for a run of the same requests, or for ``validate --against``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...reports.data.declared import (
    MOST_NUMBER,
    Column,
    Damaged,
    Declaration,
    check_document,
    is_count,
    is_list,
    is_number,
    is_number_or_null,
    is_text,
    read_json,
)
from ...reports.data.results import Result
from ...reports.page.page import Section, write_page
from ...reports.page.serving_sections import Measured
from ...reports.page.serving_sections import measured as measured_section
from ...sim.metrics.result import served_times
from ...sim.output import frames as pd
from ...sim.types.errors import SettingError, UserError
from ...sim.types.optional import not_none
from ...sim.types.ticks import PER_US
from ...traces import read
from ...traces.readers.measured import measured_requests
from .evidence import recorded_text
from .replay import BenchmarkOfRequests, Served, scatter
from .run import OF_SUMMARY, REQUESTS, RESULT

_REMEDY = "make it again by validate --against --out"
#: Columns of a comparison that a page needs.
_DOCUMENT = {
    "settings": dict.fromkeys(("policy", "model", "gpu"), is_text),
    "benchmark": is_text,
    "requests": is_count,
    "error": is_number,
    "rows": is_list,
}
_ROW = {"metric": is_text, "simulated": is_number, "measured": is_number, "error": is_number_or_null}
_PAIRS = Declaration(
    {
        f"{side}_{metric}_ms": Column("number", most=MOST_NUMBER, nulls=metric == "tpot")
        for side in ("simulated", "measured")
        for metric in ("ttft", "tpot", "e2el")
    }
)
_TIMES_DIFFER = "The requests were sent at other times than the benchmark's and met another load; compare with care."


def read_measured(path: Path, results: Sequence[Result]) -> Measured:
    """The requests of each run beside those of a benchmark.

    Args:
        path: Result file of ``vllm bench serve --save-result --save-detailed``.

    Raises:
        UserError: The file cannot be read.
        SettingError: A run served other requests.
    """
    trace = read(path)
    benchmark = BenchmarkOfRequests(trace, measured_requests(path, trace))
    pairs, same_times = {}, True
    for result in results:
        requests = result.requests
        for name in ("prompt_tokens", "output_tokens"):
            if not np.array_equal(requests[name].to_numpy(), getattr(trace, name)):
                remedy = f"has other requests than {result.name}; run fragmeter simulate --trace {path} --out"
                raise SettingError("measured", str(path), remedy)
        pairs[result.name] = pd.DataFrame(scatter(benchmark, Served(served_times(requests))))
        same_times &= _sent_alike(requests["arrival_ticks"].to_numpy(), not_none(benchmark.arrivals.arrival_ticks))
    follows = same_times or benchmark.measured.max_concurrency is not None
    return Measured(pairs, "" if follows else _TIMES_DIFFER)


def _sent_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether requests were sent at the same times, relative to the first, up to the decimals of seconds."""
    late = one - one.min() - (other - other.min())
    return bool((abs(late) <= PER_US).all())


def is_against(folder: Path) -> bool:
    """Whether ``validate --against`` wrote the folder."""
    return (folder / RESULT).is_file()


def write_against_report(folder: Path, page: Path) -> dict[str, Any]:
    """Write the page for a folder of ``validate --against --out``; return its subject as data.

    Raises:
        UserError: The folder is damaged, or the page cannot be written.
    """
    try:
        document = read_json(folder / RESULT, _DOCUMENT)
        pairs = None if document.get(OF_SUMMARY) is True else _PAIRS.read(folder / REQUESTS)
        for place, row in enumerate(document["rows"]):
            check_document(row, _ROW, f"{RESULT}: rows.{place}")
    except OSError as error:
        raise UserError(f"{folder}: {Path(error.filename).name} cannot be read ({error.strerror}); {_REMEDY}") from None
    except Damaged as damaged:
        raise UserError(f"{folder}: holds a damaged comparison ({damaged}); {_REMEDY}") from None
    settings, rows = document["settings"], [_row(row) for row in document["rows"]]
    sections = [] if pairs is None else [measured_section(Measured({settings["policy"]: pairs}))]
    lead = (
        f"{settings['policy']}: {settings['model']} on {settings['gpu']}, {document['requests']:,} requests of"
        f" {document['benchmark']}. Over throughput, TTFT, TPOT, ITL and E2EL the error is {document['error']:.1%}."
        f"\n\n{recorded_text(settings)}"
    )
    sections.append(Section("All metrics", rows=rows))
    write_page(page, f"{document['benchmark']}: simulated against measured", lead, sections)
    return {"benchmark": document["benchmark"], "requests": document["requests"], "error": document["error"]}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    error = row["error"]
    return {
        "Metric": row["metric"],
        "Simulated": row["simulated"],
        "Measured": row["measured"],
        "Error (%)": None if error is None else 100 * error,
    }
