"""The waste table as a picture: one pool, a bar for every policy."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ..style.labels import VIEWS, Numbers, Row
from ..style.look import blank, fill
from ..style.palette import BUCKETS, INK, MUTED, PARTS

_TITLES = {
    "paper": ("Where the KV pool goes, policy by policy: the paper's view", "External & others holds free slots too."),
    "popular": (
        "Where the KV pool goes, policy by policy: the popular view",
        "Reservation includes what is reserved for an output that never comes; free slots are no waste.",
    ),
    "buckets": (
        "Where the KV pool goes, policy by policy: every bucket",
        "Every slot is in exactly one of the nine.",
    ),
}
_HUES = PARTS | BUCKETS
_LEAST_LABELLED_PCT = 3.0


def waste(rows: Sequence[Row], view: str = "paper") -> go.Figure:
    """Horizontal stacked bars, one a policy, in percent of all KV slots, in the ``paper`` or the
    ``popular`` view, or by ``buckets``.

    Rows carry ``policy``, ``batched_requests``, ``output_tokens_per_s`` and the percentages of
    ``labels.VIEWS[view]``, which add up to 100.
    """
    title, subtitle = _TITLES[view]
    subtitle = f"Percent of all KV slots, mean over iterations. {subtitle}"
    figure = blank(title, subtitle, 100 + 46 * len(rows), waste_numbers(rows, view))
    for key, (label, part) in VIEWS[view].items():
        hue = _HUES[part]
        values = [row[key] for row in rows]
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


def waste_numbers(rows: Sequence[Row], view: str) -> Numbers:
    """The rows as a table: a line a policy, the view's percentages, throughput and batch size."""
    heads = [f"{label.capitalize()}, %" for label, _ in VIEWS[view].values()]
    keys = ["policy", *VIEWS[view], "output_tokens_per_s", "batched_requests"]
    columns = ["Policy", *heads, "Output tokens/s", "Batched requests"]
    return {"columns": columns, "rows": [[row[key] for key in keys] for row in rows]}
