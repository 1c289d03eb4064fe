"""Sections on serving: latencies, batch and throughput, and the agreement with a real server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...sim.metrics.gaps import Gaps
from ...sim.metrics.objectives import Objectives
from ...sim.metrics.registry import LATENCIES, METRICS, OF_REQUESTS
from ...sim.metrics.requests import RequestTimes
from ...sim.metrics.result import served_times
from ...sim.output import frames as pd
from ..data.distribution import Distribution, of_gaps, of_values
from ..data.over_time import over_time
from ..data.results import Result
from ..figures.latency import latency_cdf
from ..figures.measured import BAND, agreement, simulated_against_measured
from ..figures.serving import batch_over_time, throughput_over_time
from .page import Section


def latencies(results: Sequence[Result], goal: Objectives | None = None) -> Section | None:
    """Every latency as a distribution, with the objectives of ``goal``; None if no request was served."""
    times = {result.name: served_times(result.requests) for result in results}
    found = {result.name: _distributions(result, times[result.name]) for result in results}
    met = {} if goal is None else {name: _met_pct(goal, each) for name, each in times.items() if len(each.index)}
    limits = {} if goal is None else goal.limits
    figures = []
    for metric in LATENCIES:
        runs = {name: each for name, own in found.items() if (each := own[metric]) is not None}
        if runs:
            shares = {name: own[metric] for name, own in met.items()} if metric in limits else None
            figures.append(latency_cdf(metric, runs, limits.get(metric), shares))
    if not figures:
        return None
    text = "From when a request is sent; percentiles are those of summary.json."
    if all(result.is_probed for result in results):
        text = "From when the API server gets a request."
    return Section("Latency", "\n\n".join([text, _goal_text(results, goal, met)]), figures)


def _distributions(result: Result, times: RequestTimes) -> dict[str, Distribution | None]:
    return {
        "ttft": of_values(times.ttft_ms),
        "tpot": of_values(times.tpot_ms),
        "itl": None if result.gaps is None else of_gaps(Gaps.of_table(result.gaps)),
        "e2el": of_values(times.e2el_ms),
    }


def _met_pct(goal: Objectives, times: RequestTimes) -> dict[str, float]:
    return {name: float(100 * each.mean()) for name, each in goal.met(times).items()}


def _goal_text(results: Sequence[Result], goal: Objectives | None, met: Mapping[str, Mapping[str, float]]) -> str:
    if goal is None:
        return "No objectives were given; fragmeter report --goodput ttft:500 tpot:50 draws them."
    goodput = METRICS["request_goodput"]
    sentences = [
        f"{result.name}: {met[result.name]['all']:.1f} % of the requests meet {goal} (ms), a goodput of"
        f" {goodput.text(result.summary['request_throughput'] * met[result.name]['all'] / 100)} requests/s."
        for result in results
        if result.name in met
    ]
    return " ".join(sentences)


def serving(results: Sequence[Result]) -> Section | None:
    """Batch and throughput over time; None if no step was run."""
    tables = {each.name: over_time(each.requests, each.residencies, each.steps) for each in results}
    tables = {name: table for name, table in tables.items() if len(table)}
    if not tables:
        return None
    text = (
        "A sequence runs from its first step to its last, or until it is preempted; a request waits while none of its"
        " sequences runs. The spans add up to the run: to all its tokens, and all its seconds."
    )
    paces = [throughput_over_time(tables, kind) for kind in ("output", "prompt")]
    return Section("Batch and throughput over time", text, [batch_over_time(tables), *paces])


class Measured(NamedTuple):
    """Simulated beside measured values, request by request.

    Attributes:
        pairs: By the name of each run, columns ``simulated_<metric>_ms`` and ``measured_<metric>_ms``.
        warning: The reason why the two are not comparable, if there is one.
    """

    pairs: Mapping[str, pd.DataFrame]
    warning: str = ""


def measured(found: Measured | None, probed: Sequence[str] = ()) -> Section:
    """Simulated beside measured values; a sentence if nothing was measured.

    Args:
        probed: Names of the runs that are recordings of live servers.
    """
    title = "Simulated against measured"
    if found is None and probed:
        text = f"{', '.join(probed)}: measured on a live server by fragmeter.probe."
        return Section(title, text)
    if found is None:
        text = (
            "No measurement was given: these numbers are simulated. fragmeter report --measured FILE compares them"
            " with the results of a real server from vllm bench serve --save-result --save-detailed."
        )
        return Section(title, text)
    figures = [simulated_against_measured(metric, found.pairs) for metric in OF_REQUESTS]
    agreements = [_agreement_text(name, table) for name, table in found.pairs.items()]
    text = "The same requests on both sides, each as its client sees it."
    return Section(title, "\n\n".join([text, *agreements, found.warning]), figures)


def _agreement_text(name: str, pairs: pd.DataFrame) -> str:
    parts = []
    for metric in OF_REQUESTS:
        near = agreement(metric, pairs)
        if near.requests:
            parts.append(
                f"{metric.upper()} of {near.inside_pct:.1f} % of {near.requests:,} requests is within"
                f" {100 * BAND:.0f} %, median error {near.median_pct:+.1f} %"
            )
    return f"{name}: {'; '.join(parts)}." if parts else ""
