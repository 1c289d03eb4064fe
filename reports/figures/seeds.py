"""Spread over seeds: mean and range beside the published value."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ..style.labels import Row, comparison_data, comparison_numbers, definitions_of, metric_label, series_of
from ..style.look import blank, note
from ..style.palette import INK, PAPER, PARTS


def seeds(rows: Sequence[Row]) -> go.Figure:
    """Mean (dot) and range (line) over seeds of each value, with the published value as an upright tick.

    Rows are those of a comparison, in percent of the KV pool; ``simulated`` is the mean over seeds and ``minimum``
    and ``maximum`` its range.
    """
    names = series_of(rows)
    places = _places(rows)
    figure = blank(
        "Range over seeds",
        "Percent of all KV slots. The upright tick is the published value, where there is one.",
        110 + 24 * (len(rows) + len(names)),
        comparison_numbers(rows),
        comparison_data(rows),
        definitions_of(rows),
    )
    # Published first: the dot is then drawn over the tick, and both remain visible where they agree.
    _published(figure, rows, places)
    _ranges(figure, rows, places)
    for name in names:
        top = min(places[key] for key in places if key[0] == name)
        note(figure, f"<b>{name}</b>", x=0, xanchor="left", y=top - 1, yanchor="middle", bgcolor=PAPER)
    figure.update_xaxes(range=[-1.5, 101.5], ticksuffix=" %", dtick=20)
    figure.update_yaxes(
        range=[len(rows) + len(names) - 0.4, -0.6],
        tickvals=list(places.values()),
        ticktext=[metric_label(metric) for _, metric in places],
    )
    return figure


def _places(rows: Sequence[Row]) -> dict[tuple[str, str], int]:
    # One line per value, from the top; each series leaves a line for its heading.
    places: dict[tuple[str, str], int] = {}
    for group, name in enumerate(series_of(rows), start=1):
        for row in rows:
            if row["series"] == name:
                places[name, row["metric"]] = len(places) + group
    return places


def _ranges(figure: go.Figure, rows: Sequence[Row], places: dict[tuple[str, str], int]) -> None:
    hue = PARTS["token_states"].light
    figure.add_scatter(
        name="mean and range over seeds",
        mode="markers",
        x=[row["simulated"] for row in rows],
        y=[places[row["series"], row["metric"]] for row in rows],
        customdata=[[row["series"], metric_label(row["metric"]), row["minimum"], row["maximum"]] for row in rows],
        error_x={
            "array": [row["maximum"] - row["simulated"] for row in rows],
            "arrayminus": [row["simulated"] - row["minimum"] for row in rows],
            "color": hue,
            "thickness": 3,
            "width": 0,
        },
        marker={"color": hue, "size": 9, "line": {"color": PAPER, "width": 1}},
        hovertemplate="%{customdata[0]}, %{customdata[1]}: mean %{x:.1f} %, seeds %{customdata[2]:.1f} to "
        "%{customdata[3]:.1f} %<extra></extra>",
    )


def _published(figure: go.Figure, rows: Sequence[Row], places: dict[tuple[str, str], int]) -> None:
    known = [row for row in rows if row["published"] is not None]
    figure.add_scatter(
        name="published",
        mode="markers",
        x=[row["published"] for row in known],
        y=[places[row["series"], row["metric"]] for row in known],
        customdata=[[row["series"], metric_label(row["metric"])] for row in known],
        marker={"symbol": "line-ns", "size": 18, "line": {"color": INK, "width": 2.5}, "color": INK},
        hovertemplate="%{customdata[0]}, %{customdata[1]}: published %{x:.1f} %<extra></extra>",
    )
