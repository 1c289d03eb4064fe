"""Bars of waste: the KV pool of each policy by use, and the cost of each kind of waste in requests/s."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ...sim.metrics.views import PAPER_VIEW, SLOTS_VIEW, View
from ..style.labels import Numbers, Row, metric_label, view_metrics
from ..style.look import blank, fill, hatched
from ..style.palette import BUCKETS, INK, MUTED, PARTS, REFERENCE

_ALL = "all"


def waste_cost(rows: Sequence[Row]) -> go.Figure:
    """Horizontal bars of the gain without each kind of waste, starting at 1: one group per side, one bar per bucket.

    Rows have ``side``, ``without`` (a bucket, ``all``, or another text for the row with nothing returned), ``gain``,
    ``request_throughput`` and ``share_pct``.
    """
    bars = [row for row in rows if row["without"] in (*BUCKETS, _ALL)]
    subtitle = "Requests/s with the slots of a bucket given back, over requests/s as it is; all requests come at once."
    used = [bucket for bucket in BUCKETS if any(row["without"] == bucket for row in bars)]
    title = f"Cost of each kind of waste: {SLOTS_VIEW.title}"
    figure = blank(title, subtitle, 130 + 28 * len(bars), _numbers(rows), definitions=SLOTS_VIEW.definitions(used))
    for bucket in (*BUCKETS, _ALL):
        mine = [(place, row) for place, row in enumerate(bars) if row["without"] == bucket]
        if not mine:
            continue
        hue = BUCKETS.get(bucket, REFERENCE)
        figure.add_bar(
            name=metric_label(bucket),
            orientation="h",
            base=1,
            x=[row["gain"] - 1 for _, row in mine],
            y=[place for place, _ in mine],
            width=0.8,
            marker=fill(hue) | {"pattern": hatched(hue)},
            text=[f"x {row['gain']:.2f}" for _, row in mine],
            textposition="outside",
            textfont={"color": INK, "size": 12},
            cliponaxis=False,
            customdata=[[row["side"], row["request_throughput"], row["share_pct"]] for _, row in mine],
            hovertemplate="%{customdata[0]} without " + bucket + ", %{customdata[2]:.1f} % of the pool:"
            " %{customdata[1]:.3f} requests/s<extra></extra>",
        )
    _axes(figure, bars)
    return figure


def _axes(figure: go.Figure, bars: Sequence[Row]) -> None:
    sides = list(dict.fromkeys(row["side"] for row in bars))
    middles = [[place for place, row in enumerate(bars) if row["side"] == side] for side in sides]
    most = max((row["gain"] for row in bars), default=1)
    figure.update_layout(barmode="overlay", legend_traceorder="normal")
    figure.update_xaxes(range=[1, 1 + 1.12 * max(most - 1, 0.1)], tickprefix="x ")
    figure.update_yaxes(range=[len(bars) - 0.4, -0.6], showgrid=False, tickfont={"color": INK, "size": 13})
    figure.update_yaxes(tickvals=[sum(places) / len(places) for places in middles], ticktext=sides)
    for places in middles[:-1]:
        figure.add_hline(y=places[-1] + 0.5, line={"color": REFERENCE.light, "width": 0.5})


def _numbers(rows: Sequence[Row]) -> Numbers:
    columns = ["", "Without", "Of the pool, %", "Requests/s", "Gain"]
    keys = ("share_pct", "request_throughput", "gain")
    lines = [[row["side"], metric_label(row["without"]), *(row[key] for key in keys)] for row in rows]
    return {"columns": columns, "rows": lines}


_HUES = PARTS | BUCKETS
_LEAST_LABELLED_PCT = 3.0


def waste(rows: Sequence[Row], view: View = PAPER_VIEW) -> go.Figure:
    """Horizontal stacked bars, one per policy, in percent of all KV slots.

    Rows have ``policy``, ``batched_requests``, ``output_tokens_per_s`` and the percentages of the view (``view_metrics``).
    """
    figure = blank(
        f"Use of the KV pool by policy: {view.title}",
        "Percent of all KV slots, mean over iterations.",
        100 + 46 * len(rows),
        waste_numbers(rows, view),
        definitions=view.definitions(),
    )
    for key, category in view.categories.items():
        hue, label = _HUES[key], category.label
        values = [row[f"{key}_pct"] for row in rows]
        figure.add_bar(
            name=label,
            orientation="h",
            x=values,
            y=list(range(len(rows))),
            customdata=[row["policy"] for row in rows],
            text=[f"{value:.1f}" if value >= _LEAST_LABELLED_PCT else "" for value in values],
            textfont={"color": hue.text, "size": 12},
            marker=fill(hue),
            hovertemplate="%{customdata}: %{x:.1f} % " + label + "<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.2, legend_traceorder="normal")
    figure.update_traces(textangle=0, textposition="inside", insidetextanchor="middle")
    figure.update_xaxes(range=[0, 100.5], ticksuffix=" %", dtick=20)
    figure.update_yaxes(range=[len(rows) - 0.45, -0.55], showgrid=False, tickfont={"color": INK, "size": 13})
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=[_name(row) for row in rows])
    return figure


def _name(row: Row) -> str:
    return f"{row['policy']}<br><span style='color:{MUTED};font-size:11px'>batch {row['batched_requests']:.1f}</span>"


def waste_numbers(rows: Sequence[Row], view: View) -> Numbers:
    """The rows as a table: one line per policy with the view's percentages, throughput and batch size."""
    heads = [f"{category.label.capitalize()}, %" for category in view.categories.values()]
    keys = ["policy", *view_metrics(view), "output_tokens_per_s", "batched_requests"]
    columns = ["Policy", *heads, "Output tokens/s", "Batched requests"]
    return {"columns": columns, "rows": [[row[key] for key in keys] for row in rows]}
