"""The page of ``fragmeter traces stats --out``."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...reports.figures import figures
from ...reports.page.page import Section, write_page
from ...sim.types import ticks
from ...sim.types.optional import not_none
from ...traces import Trace

_SHARES, _BINS = np.linspace(0, 1, 101), 120


def write_trace_page(trace: Trace, found: dict[str, Any], path: str | PathLike[str]) -> Path:
    """Write what a trace is like as a page, and say where it lies.

    Args:
        found: Its ``stats``.
    """
    sections = [Section("Lengths", figures=[figures.lengths(length_rows(trace))], rows=_table(found))]
    if found["duration_s"] is not None:
        text = (
            f"{found['request_rate']:,.3f} requests/s over {found['duration_s']:,.1f} s. The gaps' coefficient of"
            f" variation is {found['gap_cv']:.2f}; it is 1 of a Poisson process."
        )
        sections.append(Section("Arrivals", text, [figures.arrivals(arrival_rows(trace))]))
    if found["reuse"] is not None:
        text = (
            f"{found['reuse']['share']:.1%} of the prompts' tokens are a prefix that was seen before, by"
            f" {found['reuse']['by']}: so much an endless prefix cache would hit."
        )
        sections.append(Section("Reuse", text))
    return write_page(path, f"Trace {trace.name}", f"{len(trace):,} requests.", sections)


def length_rows(trace: Trace) -> list[dict[str, float]]:
    """Quantiles of prompts and outputs, a row a percent."""
    both = (trace.prompt_tokens, trace.output_tokens)
    columns = [np.quantile(lengths, _SHARES, method="inverted_cdf") for lengths in both]
    return [
        {"share": float(share), "prompt": int(prompt), "output": int(output)}
        for share, prompt, output in zip(_SHARES, *columns, strict=True)
    ]


def arrival_rows(trace: Trace) -> list[dict[str, float]]:
    """Requests a second in so many spans of equal length."""
    times_s = not_none(trace.arrival_ticks) / ticks.PER_SECOND
    counts, edges = np.histogram(times_s, bins=_BINS)
    return [
        {"start_s": float(start), "end_s": float(end), "requests_per_s": float(count / (end - start))}
        for count, start, end in zip(counts, edges, edges[1:])
    ]


def _table(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The percentiles of the lengths, a row a statistic."""
    fields = ("prompt_tokens", "output_tokens", "total_tokens")
    return [
        {"": statistic} | {field.removesuffix("_tokens").capitalize(): found[field][statistic] for field in fields}
        for statistic in found["prompt_tokens"]
    ]
