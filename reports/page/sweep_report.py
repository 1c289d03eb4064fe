"""The report of a sweep: goodput and latency of each series by request rate, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from ...sim.metrics.registry import METRICS
from ...sim.output import frames as pd
from ..figures.rates import against_rate, throughput_pareto
from ..style.palette import COLOURED
from .page import Section, page_title, write_page

#: Points in the list.
MOST_LISTED = 200
_LISTED = {
    "series": "Series",
    "request_rate": "Request rate (requests/s)",
    "seed": "Seed",
    "request_throughput": "Requests/s done",
    "request_goodput": "Goodput (requests/s)",
    **{path: METRICS[path].title for path in ("p99_ttft_ms", "p99_tpot_ms")},
    "load": "Load",
    "near_saturation": "Mean TTFT with steps 5 % shorter and longer (ms)",
    "tokens_per_s_per_user": "Tokens/s per user",
    "tokens_per_s_per_gpu": "Tokens/s per GPU",
}
_LATENCIES = {"p99_ttft_ms": "TTFT that 99 % of the requests stay below", "p99_tpot_ms": "TPOT that 99 % stay below"}


@dataclass(frozen=True, eq=False)
class Sweep:
    """The points of a sweep that were run.

    Attributes:
        name: Its title.
        points: One row per point: ``series``, ``request_rate`` (inf for all at once, NaN if none was set), ``seed``,
            ``request_throughput``, ``p99_ttft_ms``, ``p99_tpot_ms``, ``tokens_per_s_per_user`` and
            ``tokens_per_s_per_gpu``; ``request_goodput`` if objectives were given; ``load``, the class of the load; and
            ``near_saturation``, a range as text, if the sweep has one.
        axes: The settings in which the series differ.
        objectives: As given to the sweep, or empty.
        failed: Points that could not be run.
        step_times: What the step times of the points rest on, a line each.
    """

    name: str
    points: pd.DataFrame
    axes: Sequence[str]
    objectives: str
    failed: int
    step_times: Sequence[str] = ()


def write_sweep_report(path: str | PathLike[str], sweep: Sweep) -> Path:
    """Write the page to ``path``, and return the path.

    Raises:
        UserError: It cannot be written.
    """
    sections = [_rates(sweep), _pareto(sweep), _list(sweep)]
    return write_page(path, page_title("Sweep", sweep.name), _lead(sweep), sections)


def _lead(sweep: Sweep) -> str:
    series = sweep.points["series"].nunique()
    by = f", by {', '.join(name.replace('_', ' ') for name in sweep.axes)}" if sweep.axes else ""
    failed = f" {sweep.failed:,} more could not be run; the column error says why." if sweep.failed else ""
    many = f" The first {COLOURED} series have colours." if series > COLOURED else ""
    points = f"{len(sweep.points):,} points in {series:,} series{by}.{failed}{many}"
    return "\n\n".join((points, *sweep.step_times))


def _rates(sweep: Sweep) -> Section:
    points, title = sweep.points[np.isfinite(sweep.points["request_rate"])], "Goodput and latency against the rate"
    if points["request_rate"].nunique() < 2:
        text = (
            "No two points differ in the request rate, so nothing is drawn against it;"
            " fragmeter sweep --grid request_rate=1:8:1 runs several."
        )
        return Section(title, text)
    figures = [_goodput(points, sweep.objectives)]
    figures += [against_rate(points, name, label, "ms") for name, label in _LATENCIES.items()]
    text = (
        "Where a line bends, the replica is full: a higher rate only makes requests wait. Throughput is counted up to"
        " the last response, so runs of few requests stay below their request rate."
    )
    if not sweep.objectives:
        text += " No objectives were given, so goodput is not known; sweep --goodput ttft:500 tpot:50 counts it."
    return Section(title, text, figures)


def _goodput(points: pd.DataFrame, objectives: str) -> go.Figure:
    if not objectives:
        return against_rate(points, "request_throughput", "Requests/s that are done", "requests/s")
    return against_rate(points, "request_goodput", f"Goodput: requests/s that meet {objectives} (ms)", "requests/s")


def _pareto(sweep: Sweep) -> Section:
    points, title = sweep.points[np.isfinite(sweep.points["tokens_per_s_per_user"])], "Throughput against speed"
    if points.empty:
        return Section(title, "No point has an output of more than one token, so there is no speed per user.")
    text = "Larger batches give more tokens a GPU, and each user fewer: the Pareto front shows the trade-off."
    return Section(title, text, [throughput_pareto(points)])


def _list(sweep: Sweep) -> Section:
    shown = [name for name in _LISTED if name in sweep.points]
    cells = sweep.points[shown].head(MOST_LISTED).itertuples(index=False)
    rows = [dict(zip((_LISTED[name] for name in shown), row, strict=True)) for row in cells]
    more = len(sweep.points) - len(rows)
    return Section("The points", f"And {more:,} more in sweep.parquet." if more else "", rows=rows)
