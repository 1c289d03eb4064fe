"""Published and simulated values of any figure: bars for single values, curves for values along an axis."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from ..style.labels import Row, comparison_data, comparison_numbers, has_range, metric_label, number, series_of, unit
from ..style.look import blank, log_axis
from ..style.palette import BUCKETS, MUTED, PAPER, REFERENCE, Hue
from .comparison import Comparison, side_by_side

_TITLE = "Published and simulated"
#: One colour per series, in this order; neighbours differ in lightness.
_HUES: tuple[Hue, ...] = tuple(
    BUCKETS[name] for name in ("live", "over_estimate", "cached", "finished_hold", "round_up")
)
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")
#: Ratios of the largest to the smallest value above which an axis is logarithmic.
_LOG_FROM = 30
#: Most values along an axis that have tick labels of their own.
_MOST_TICKS = 16


def bars(comparison: Comparison) -> go.Figure:
    """A published and a simulated bar for each published value; all have one unit."""
    rows = [row for row in comparison["rows"] if row["published"] is not None]
    metrics = series_of(rows, "metric")
    title = _TITLE if len(metrics) > 1 else f"{_TITLE}: {metric_label(metrics[0])}"
    tables = comparison_numbers(comparison["rows"]), comparison_data(comparison["rows"])
    figure = blank(title, f"{comparison['workload']}.", 96 + 50 * len(rows), *tables)
    figure.update_xaxes(title_text=unit(metrics[0]))
    if len(metrics) > 1:
        rows = [row | {"series": f"{row['series']}, {metric_label(row['metric'])}"} for row in rows]
    return side_by_side(figure, rows)


def curves(comparison: Comparison) -> go.Figure:
    """Values along ``x`` of the first row's metric: dotted for published, solid for simulated, one colour per series.

    The comparison may name x under ``x_is``.
    """
    metric = comparison["rows"][0]["metric"]
    rows = [row for row in comparison["rows"] if row["metric"] == metric and row["x"] is not None]
    tables = comparison_numbers(comparison["rows"]), comparison_data(comparison["rows"])
    dotted = "Hollow marks and dotted lines: published."
    figure = blank(f"{_TITLE}: {metric_label(metric)}", f"{comparison['workload']}. {dotted}", 420, *tables)
    by_series = {name: [row for row in rows if row["series"] == name] for name in series_of(rows)}
    published = [_known(mine) for mine in by_series.values()]
    places = [[(row["x"], row["published"]) for row in known] for known in published]
    # Several models of one measured curve.
    shared = len(places) > 1 and bool(places[0]) and places.count(places[0]) == len(places)
    if shared:
        figure.add_trace(_curve(published[0], "published", REFERENCE, "circle", "published"))
    for (name, mine), hue, symbol in zip(by_series.items(), _HUES, _SYMBOLS, strict=False):
        if not shared:
            # The legend has each colour once.
            figure.add_trace(_curve(_known(mine), "published", hue, symbol, f"{name}, published", showlegend=False))
        figure.add_trace(_curve(mine, "simulated", hue, symbol, name))
    _axes(figure, rows, metric)
    figure.update_xaxes(title_text=comparison.get("x_is", ""))
    return figure


def with_limit(figure: go.Figure, limit: float, name: str) -> go.Figure:
    """The figure of ``curves`` with a horizontal line at ``limit``, which has a tick."""
    ends = [
        min(min(trace.x) for trace in figure.data if len(trace.x)),
        max(max(trace.x) for trace in figure.data if len(trace.x)),
    ]
    line = {"color": MUTED, "width": 1.5, "dash": "dash"}
    figure.add_trace(go.Scatter(name=name, mode="lines", x=ends, y=[limit, limit], line=line, hoverinfo="skip"))
    ticks = figure.layout.yaxis.tickvals
    if ticks is not None and limit not in ticks:
        figure.update_yaxes(tickvals=[*ticks, limit], ticktext=[*figure.layout.yaxis.ticktext, f"{limit:g}"])
    return figure


def _known(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["published"] is not None]


def _curve(rows: list[Row], side: str, hue: Hue, symbol: str, name: str, showlegend: bool = True) -> go.Scatter:
    published = side == "published"
    return go.Scatter(
        name=name,
        showlegend=showlegend,
        mode="lines+markers",
        x=[row["x"] for row in rows],
        y=[row[side] for row in rows],
        customdata=[[number(row["metric"], row[side]), unit(row["metric"])] for row in rows],
        line={"color": hue.light, "width": 2, "dash": "dot" if published else "solid"},
        marker={"symbol": symbol, "size": 8, "color": PAPER if published else hue.light}
        | {"line": {"color": hue.light, "width": 1.5}},
        error_y=_range(rows, hue) if not published and has_range(rows) else None,
        hovertemplate=f"{name}, at %{{x:,g}}: %{{customdata[0]}} %{{customdata[1]}}<extra></extra>",
    )


def _range(rows: list[Row], hue: Hue) -> dict[str, Any]:
    spans = [(row["simulated"], row.get("minimum"), row.get("maximum")) for row in rows]
    return {
        "array": [0 if high is None else high - at for at, _, high in spans],
        "arrayminus": [0 if low is None else at - low for at, low, _ in spans],
        "color": hue.light,
        "thickness": 1,
        "width": 3,
    }


def _axes(figure: go.Figure, rows: list[Row], metric: str) -> None:
    at = sorted({row["x"] for row in rows})
    values = [row[side] for row in rows for side in ("published", "simulated") if row[side] is not None]
    if at[0] > 0 and at[-1] / at[0] > _LOG_FROM:
        few = {"type": "log", "tickvals": at, "ticktext": [f"{x:g}" for x in at]}
        figure.update_xaxes(few if len(at) <= _MOST_TICKS else log_axis(at[0], at[-1]))
    figure.update_yaxes(title_text=unit(metric))
    if min(values) > 0 and max(values) / min(values) > _LOG_FROM:
        figure.update_yaxes(log_axis(min(values), max(values)))
    else:
        figure.update_yaxes(rangemode="tozero")
