"""Sensitivity of the results to the fitted scale of the step time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from ...sim.types.optional import not_none
from ..style.labels import PARAMETERS, Numbers, Row, definitions_of, is_percent, metric_label, parameter_of, series_of
from ..style.look import blank, note
from ..style.palette import GRID, INK, MUTED, Hue
from .comparison import FIG2_PARTS

_SYMBOLS = ("circle", "square", "diamond", "triangle-up")
_WITHIN_POINTS = 0.5


def scale_sensitivity(rows: Sequence[Row], fitted_scale: float | None = None) -> go.Figure:
    """Each Fig 2 value against the step-time scale s, as its distance from the published value in points.

    Rows are ``{"scale", "series", "metric", "simulated", "published"}``, values in percent of the KV pool. Each series
    has a panel, each metric a line. Values that are not published have no line; the figure's numbers include them. The
    band is half a point either way; an upright line marks ``fitted_scale``.
    """
    known = [row for row in rows if row["published"] is not None and row["metric"] in FIG2_PARTS]
    names = series_of(known)
    fitted = "" if fitted_scale is None else f" Dotted: the fitted s\u00a0=\u00a0{fitted_scale:.2f}."
    figure = blank(
        "Fig 2 by step-time scale s",
        f"Simulated minus published, in points of the KV pool. Grey band: within {_WITHIN_POINTS} points.{fitted}",
        120 + 190 * -(-len(names) // 2),
        sensitivity_numbers(rows),
        definitions=definitions_of(rows),
    )
    figure.set_subplots(-(-len(names) // 2), 2, shared_yaxes="all", horizontal_spacing=0.06, vertical_spacing=0.17)
    for at, name in enumerate(names):
        cell = {"row": at // 2 + 1, "col": at % 2 + 1}
        _panel(figure, [row for row in known if row["series"] == name], cell)
        _furnish(figure, name, fitted_scale, cell)
    # The legend leaves a line for the names of the upper panels.
    figure.update_layout(legend_y=1 + 26 / (190 * -(-len(names) // 2)))
    figure.update_xaxes(tickformat=".2f", showgrid=False, nticks=5)
    figure.update_xaxes(title_text="scale s", row=-(-len(names) // 2))
    figure.update_yaxes(nticks=6, zeroline=True, zerolinecolor=MUTED, zerolinewidth=1, tickformat="+.1f")
    return figure


def _panel(figure: go.Figure, rows: list[Row], cell: dict[str, int]) -> None:
    for (metric, hue), symbol in zip(FIG2_PARTS.items(), _SYMBOLS):
        mine = [row for row in rows if row["metric"] == metric]
        if mine:
            figure.add_trace(_line(mine, metric, hue, symbol, first=cell == {"row": 1, "col": 1}), **cell)


def _line(rows: list[Row], metric: str, hue: Hue, symbol: str, first: bool) -> go.Scatter:
    return go.Scatter(
        name=metric_label(metric),
        legendgroup=metric,
        showlegend=first,
        mode="lines+markers",
        x=[row["scale"] for row in rows],
        y=[row["simulated"] - row["published"] for row in rows],
        customdata=[[row["series"], row["simulated"], row["published"]] for row in rows],
        line={"color": hue.light, "width": 2},
        marker={"symbol": symbol, "size": 7},
        hovertemplate="%{customdata[0]}, s = %{x:.2f}: %{customdata[1]:.1f} % "
        + metric_label(metric)
        + ", published %{customdata[2]:.1f} %<extra></extra>",
    )


def _furnish(figure: go.Figure, name: str, fitted_scale: float | None, cell: dict[str, int]) -> None:
    band = {"fillcolor": GRID, "opacity": 0.6, "line_width": 0, "layer": "below"}
    figure.add_hrect(y0=-_WITHIN_POINTS, y1=_WITHIN_POINTS, **band, **cell)
    place = {"x": 0, "xref": "x domain", "xanchor": "left", "y": 1.01, "yref": "y domain", "yanchor": "bottom"}
    note(figure, f"<b>{name}</b>", **place, **cell)
    if fitted_scale is not None:
        figure.add_vline(x=fitted_scale, line={"color": INK, "width": 1, "dash": "dot"}, **cell)


def sensitivity_numbers(rows: Sequence[Row]) -> Numbers:
    """Values at several settings of a parameter, as a table: one line per value, one column per setting."""
    key = not_none(parameter_of(rows))
    settings = sorted({row[key] for row in rows})
    at_x = any(row.get("x") is not None for row in rows)
    lines: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        name = metric_label(row["metric"]) + (", %" if is_percent(row["metric"]) else "")
        start = [row["series"], name, *([row["x"]] if at_x else []), row["published"]]
        line = lines.setdefault((row["series"], row["metric"], row.get("x")), [*start, *[None] * len(settings)])
        line[len(start) + settings.index(row[key])] = row["simulated"]
    columns = ["Series", "Value", *(["At"] if at_x else []), "Published"]
    columns += [f"{PARAMETERS[key][0]} = {setting:.2f}" for setting in settings]
    return {"columns": columns, "rows": list(lines.values())}
