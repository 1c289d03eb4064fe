"""Published and simulated values of the paper's Figs 2, 13a and 15."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import plotly.graph_objects as go

from ...sim.metrics.views import PAPER_VIEW
from ..style.labels import (
    Row,
    comparison_data,
    comparison_numbers,
    difference,
    has_range,
    is_percent,
    metric_label,
    number,
    series_of,
    signed,
    unit,
)
from ..style.look import blank, fill, note
from ..style.palette import BUCKETS, INK, MUTED, PAPER, PARTS, REFERENCE, Hue

Comparison = dict[str, Any]
"""``{"figure", "workload", "rows"}`` with rows ``{"series", "metric", "x", "published", "how", "simulated", "error"}``;
a row may also carry ``minimum`` and ``maximum`` (range over seeds) and ``fitted`` (true where the model was fitted)."""

SIDES = ("published", "simulated")
#: Rows of a group of Fig 2: its heading, and a bar a side.
_GROUP = 3.0
FIG2_PARTS: dict[str, Hue] = {f"{key}_pct": PARTS[key] for key in PAPER_VIEW.categories}
_LEAST_LABELLED_PCT = 3.0


def fig2(comparison: Comparison) -> go.Figure:
    """SOSP'23 Fig 2: contents of the KV pool in percent, a published and a simulated bar for each series.

    Bars are stacked from token states to external & others. If the paper prints only part of a bar, the rest is drawn
    as "not published".
    """
    rows = comparison["rows"]
    names = series_of(rows)
    figure = blank(
        "Use of the KV pool, published and simulated",
        f"Percent of all KV slots in {PAPER_VIEW.title}, mean over iterations. {comparison['workload']}.",
        118 + 74 * len(names),
        comparison_numbers(rows),
        comparison_data(rows),
        PAPER_VIEW.definitions(),
    )
    for metric, hue in FIG2_PARTS.items():
        figure.add_trace(_part([row for row in rows if row["metric"] == metric], metric, hue, names))
    figure.add_trace(_remainder(rows, names))
    for at, name in enumerate(names):
        note(figure, _heading(name, rows), x=0, xanchor="left", y=_GROUP * at, yanchor="middle", bgcolor=PAPER)
    return _stacked(figure, names)


def _position(names: list[str], name: str, side: str) -> float:
    return _GROUP * names.index(name) + 0.95 + 0.94 * SIDES.index(side)


def _part(rows: list[Row], metric: str, hue: Hue, names: list[str]) -> go.Bar:
    bars = [(row["series"], side, row[side]) for row in rows for side in SIDES if row[side] is not None]
    return go.Bar(
        name=metric_label(metric),
        orientation="h",
        x=[value for *_, value in bars],
        y=[_position(names, name, side) for name, side, _ in bars],
        customdata=[[name, side] for name, side, _ in bars],
        text=[number(metric, value) if value >= _LEAST_LABELLED_PCT else "" for *_, value in bars],
        textfont={"color": hue.text, "size": 12},
        marker=fill(hue),
        hovertemplate="%{customdata[0]}, %{customdata[1]}: %{x:.1f} % " + metric_label(metric) + "<extra></extra>",
    )


def _remainder(rows: list[Row], names: list[str]) -> go.Bar:
    rest = dict(_unpublished(rows))
    return go.Bar(
        name="not published",
        orientation="h",
        x=list(rest.values()),
        y=[_position(names, name, "published") for name in rest],
        customdata=[[name, "published"] for name in rest],
        showlegend=bool(rest),
        marker={
            "color": PAPER,
            "line": {"color": MUTED, "width": 1},
            "pattern": {"shape": "/", "fgcolor": MUTED, "bgcolor": PAPER, "size": 5, "solidity": 0.2},
        },
        hovertemplate="%{customdata[0]}: %{x:.1f} % not published in detail<extra></extra>",
    )


def _unpublished(rows: list[Row]) -> Iterator[tuple[str, float]]:
    for name in series_of(rows):
        printed = [row["published"] for row in rows if row["series"] == name and row["metric"] in FIG2_PARTS]
        if None in printed:
            yield name, 100.0 - sum(value for value in printed if value is not None)


def _heading(name: str, rows: list[Row]) -> str:
    errors = [row["error"] for row in rows if row["series"] == name and row.get("error") is not None]
    largest = max(errors, key=abs, default=None)
    error = "" if largest is None else f"   largest error {signed(largest)} points"
    return f"<b>{name}</b><span style='color:{MUTED}'>{error}</span>"


def _stacked(figure: go.Figure, names: list[str]) -> go.Figure:
    figure.update_layout(barmode="stack", bargap=0.08, legend_traceorder="normal")
    figure.update_traces(textangle=0, textposition="inside", insidetextanchor="middle", width=0.86)
    figure.update_xaxes(range=[0, 100.5], ticksuffix=" %", dtick=20)
    ticks = [(name, side) for name in names for side in SIDES]
    figure.update_yaxes(
        range=[_GROUP * len(names) - 0.5, -0.6],
        tickvals=[_position(names, name, side) for name, side in ticks],
        ticktext=[side for _, side in ticks],
        showgrid=False,
    )
    return figure


def fig13a(comparison: Comparison) -> go.Figure:
    """SOSP'23 Fig 13a: mean number of batched requests, published beside simulated, by series.

    If rows have ``minimum`` and ``maximum``, the simulated bar shows the range over seeds.
    """
    rows = [row for row in comparison["rows"] if row["metric"] == "batched_requests"]
    figure = blank(
        "Requests in a batch, published and simulated",
        f"Mean number of batched requests over iterations. {comparison['workload']}.",
        96 + 62 * len(rows),
        comparison_numbers(rows),
        comparison_data(rows),
    )
    figure.update_xaxes(title_text="requests")
    return side_by_side(figure, rows)


def fig15(comparison: Comparison) -> go.Figure:
    """SOSP'23 Fig 15: percent of the blocks that sharing saves, published beside simulated.

    Each series is a group with a heading, and has a pair of bars for each number of sequences (``x``). Rows of a formula
    have no bars; the figure's numbers include them.
    """
    rows = [row for row in comparison["rows"] if row["how"] != "formula"]
    figure = blank(
        "Memory saved by sharing, published and simulated",
        "Percent of the blocks that sequences would hold if they shared none, mean over iterations, by sequences a request.",
        96 + 40 * len(rows) + 32 * len(series_of(rows)),
        comparison_numbers(comparison["rows"]),
        comparison_data(comparison["rows"]),
    )
    figure.update_xaxes(ticksuffix=" %")
    return side_by_side(figure, rows, grouped=True)


#: Height of a group's heading, in lanes.
_GROUP_HEADING = 0.8


def side_by_side(figure: go.Figure, rows: list[Row], grouped: bool = False) -> go.Figure:
    """A published and a simulated bar for each row.

    Args:
        grouped: Whether each series has a heading and its lanes are named by ``x``; by default lanes have whole names.
    """
    starts = [at for at, row in enumerate(rows) if not at or row["series"] != rows[at - 1]["series"]] if grouped else []
    lanes = [at + _GROUP_HEADING * sum(start <= at for start in starts) for at in range(len(rows))]
    for start in starts:
        heading = {"x": 0, "y": lanes[start] - 0.5, "xanchor": "left", "yanchor": "bottom", "bgcolor": PAPER}
        note(figure, _group_name(rows[start]["series"]), **heading)
    for side, hue in zip(SIDES, (REFERENCE, BUCKETS["live"]), strict=True):
        figure.add_trace(_bars(rows, lanes, side, hue))
        for lane, row in zip(lanes, rows, strict=True):
            if row[side] is not None:
                place = {"x": _end(row, side), "y": _lane(lane, side), "xanchor": "left", "xshift": 4}
                note(figure, number(row["metric"], row[side]), **place, font={"size": 12})
    figure.update_layout(barmode="overlay", legend_traceorder="normal", showlegend=True)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(
        range=[lanes[-1] + 0.5, -0.5],
        tickvals=lanes,
        ticktext=[_lane_name(row, f"{row['x']:g}" if grouped else _value_name(row)) for row in rows],
        tickfont={"color": INK, "size": 13},
        showgrid=False,
    )
    return figure


def _group_name(series: str) -> str:
    """A name with its first two parts in bold; a third one in smaller letters, which fit a narrow window."""
    first, second, third = (*series.split(", ", 2), "", "")[:3]
    name = ", ".join(filter(None, (first, second)))
    return f"<b>{name}</b>" + (f"<span style='color:{MUTED};font-size:11px'> {third}</span>" if third else "")


def _lane(at: float, side: str) -> float:
    return at + (0.4 * SIDES.index(side) - 0.2)


def _end(row: Row, side: str) -> float:
    whisker = row.get("maximum") if side == "simulated" else None
    return row[side] if whisker is None else max(row[side], whisker)


def _bars(rows: list[Row], lanes: list[float], side: str, hue: Hue) -> go.Bar:
    bars = [(at, row) for at, row in zip(lanes, rows, strict=True) if row[side] is not None]
    return go.Bar(
        name=side,
        orientation="h",
        x=[row[side] for _, row in bars],
        y=[_lane(at, side) for at, _ in bars],
        width=0.38,
        customdata=[[_value_name(row), f"{number(row['metric'], row[side])} {_unit(row)}"] for _, row in bars],
        error_x=_range([row for _, row in bars]) if side == "simulated" and has_range(rows) else None,
        marker=fill(hue),
        hovertemplate="%{customdata[0]}, " + side + ": %{customdata[1]}<extra></extra>",
    )


def _value_name(row: Row) -> str:
    return row["series"] if row.get("x") is None else f"{row['series']}, {row['x']:g}"


def _unit(row: Row) -> str:
    return "%" if is_percent(row["metric"]) else unit(row["metric"])


def _lane_name(row: Row, name: str) -> str:
    error = difference(row) if row.get("error") is not None else ""
    note_text = ", ".join(filter(None, [error, "fitted" if row.get("fitted") else ""]))
    return f"{name}<br><span style='color:{MUTED};font-size:11px'>{note_text}</span>" if note_text else name


def _range(rows: list[Row]) -> dict[str, Any]:
    return {
        "array": [row["maximum"] - row["simulated"] for row in rows],
        "arrayminus": [row["simulated"] - row["minimum"] for row in rows],
        "color": INK,
        "thickness": 1.5,
        "width": 4,
    }
