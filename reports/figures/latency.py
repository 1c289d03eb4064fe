"""Latencies as cumulative distributions, one line per run, with the objectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from ...sim.metrics.registry import LATENCIES
from ..data.distribution import LISTED, Distribution
from ..style.labels import Numbers
from ..style.look import blank
from ..style.palette import INK, PAPER, colour, dash, symbol

#: Percentiles that have a mark on the line.
_MARKED = (50, 99)
#: Ratio of the largest to the smallest value above which the axis is logarithmic.
_LOG_FROM = 30


def latency_cdf(
    metric: str,
    runs: Mapping[str, Distribution],
    limit_ms: float | None = None,
    met_pct: Mapping[str, float] | None = None,
) -> go.Figure:
    """The share of values up to x, one line per run; marks are at the median and the 99th percentile.

    Args:
        metric: One of ``LATENCIES``.
        runs: The latencies of each run by its name; at least one.
        limit_ms: The objective, drawn as a vertical line.
        met_pct: Share of each run's requests that meet it.
    """
    met = met_pct or {}
    title = f"{LATENCIES[metric].label}: {LATENCIES[metric].meaning}"
    figure = blank(title, _subtitle(metric, runs), 330, _numbers(runs, limit_ms, met), _data(runs))
    for place, (name, values) in enumerate(runs.items()):
        figure.add_traces(
            [_line(place, _run_label(name, met.get(name), limit_ms), values), _marks(place, name, values)]
        )
    if limit_ms is not None:
        figure.add_trace(_limit(limit_ms))
    lowest, highest = (pick(each.values_ms[at] for each in runs.values()) for pick, at in ((min, 0), (max, -1)))
    log = lowest > 0 and highest / lowest > _LOG_FROM
    figure.update_layout(hovermode="closest", dragmode="zoom", legend_traceorder="normal")
    kind = {"type": "log", "dtick": "D2"} if log else {"rangemode": "tozero"}
    figure.update_xaxes(title_text="ms", fixedrange=False, tickformat=",", **kind)
    figure.update_yaxes(title_text="no longer than that", ticksuffix=" %", range=[0, 102], dtick=20)
    return figure


def _subtitle(metric: str, runs: Mapping[str, Distribution]) -> str:
    unit = "gaps between tokens, of all requests together" if metric == "itl" else "requests"
    error = max(values.error_pct for values in runs.values())
    return f"Share of the {unit}; marked are the median and p99. Shares on a line are right to {error:.2g} %."


def _run_label(name: str, met_pct: float | None, limit_ms: float | None) -> str:
    return name if met_pct is None else f"{name}: {met_pct:.1f} % within {limit_ms:,g} ms"


def _line(place: int, name: str, values: Distribution) -> go.Scatter:
    return go.Scatter(
        name=name,
        mode="lines",
        x=values.values_ms.round(6),
        y=values.percents.round(4),
        line={"color": colour(place), "width": 2, "dash": dash(place), "simplify": False},
        hovertemplate=f"{name}<br>%{{y:.2f}} %: %{{x:,.3~f}} ms or less<extra></extra>",
    )


def _marks(place: int, name: str, values: Distribution) -> go.Scatter:
    return go.Scatter(
        name=f"{name}, median and p99",
        mode="markers",
        showlegend=False,
        x=[values.listed_ms[percent] for percent in _MARKED],
        y=list(_MARKED),
        marker={"symbol": symbol(place), "size": 8, "color": colour(place), "line": {"color": PAPER, "width": 1}},
        hovertemplate=f"{name}<br>p%{{y}}: %{{x:,.3~f}} ms<extra></extra>",
    )


def _limit(limit_ms: float) -> go.Scatter:
    return go.Scatter(
        name=f"objective: {limit_ms:,g} ms",
        mode="lines",
        x=[limit_ms, limit_ms],
        y=[0, 100],
        line={"color": INK, "width": 1.5, "dash": "dot"},
        hovertemplate="objective: %{x:,g} ms<extra></extra>",
    )


def _data(runs: Mapping[str, Distribution]) -> Numbers:
    points = {name: zip(each.percents.tolist(), each.values_ms.tolist()) for name, each in runs.items()}
    rows = [[name, *point] for name, own in points.items() for point in own]
    return {"columns": ["Run", "Share (%)", "No longer than (ms)"], "rows": rows}


def _numbers(runs: Mapping[str, Distribution], limit_ms: float | None, met_pct: Mapping[str, float]) -> Numbers:
    columns = ["Run", "Values", "Mean (ms)", *("Longest (ms)" if each == 100 else f"p{each} (ms)" for each in LISTED)]
    rows: list[list[Any]] = [
        [name, each.number, each.mean_ms, *(each.listed_ms[one] for one in LISTED)] for name, each in runs.items()
    ]
    if limit_ms is not None:
        columns += ["Objective (ms)", "Met by (% of requests)"]
        rows = [[*row, limit_ms, met_pct.get(row[0])] for row in rows]
    return {"columns": columns, "rows": rows}
