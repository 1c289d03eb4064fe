"""A server over time: requests that run and wait above, use of the KV cache below; measured, and simulated beside it."""

from __future__ import annotations

import plotly.graph_objects as go

from ...sim.output import frames as pd
from ..style.labels import Numbers
from ..style.look import blank
from ..style.palette import BUCKETS, INK

#: Parts of the height of the two pictures.
_UPPER, _LOWER = [0.55, 1.0], [0.0, 0.42]
_SIDE_PX, _HEIGHT_PX = 470, 400
#: Room above the largest value, as a factor.
_ROOM = 1.05
_LINES = {
    "running": ("Running", BUCKETS["live"].light, "y", "solid"),
    "waiting": ("Waiting", BUCKETS["over_estimate"].light, "y", "dot"),
    "usage_pct": ("KV cache in use (%)", BUCKETS["cached"].light, "y2", "solid"),
}


def server_over_time(title: str, table: pd.DataFrame, most: float, turn_s: float | None = None) -> go.Figure:
    """Requests above, use of the KV cache below.

    Args:
        table: Columns ``time_s``, ``running`` and ``waiting`` (requests), and ``usage_pct`` (percent of the KV cache), if it is known.
        most: Requests up to which the vertical scale goes, for figures that stand beside each other.
        turn_s: Time of the turning point, drawn as a vertical line.
    """
    names = [name for name in _LINES if name in table]
    numbers: Numbers = {
        "columns": ["", "Mean", "Least", "Most"],
        "rows": [
            [_LINES[name][0], *(float(getattr(table[name], of)()) for of in ("mean", "min", "max"))] for name in names
        ],
    }
    data: Numbers = {
        "columns": ["Time (s)", *(_LINES[name][0] for name in names)],
        "rows": [list(row) for row in zip(table["time_s"].tolist(), *(table[name].tolist() for name in names))],
    }
    subtitle = "Above: requests. Below: percent of the KV cache."
    figure = blank(title, subtitle, _HEIGHT_PX, numbers, data)
    for name in names:
        label, tint, axis, dash = _LINES[name]
        figure.add_scatter(
            name=label,
            mode="lines",
            x=table["time_s"].round(3).tolist(),
            y=table[name].round(3).tolist(),
            yaxis=axis,
            line={"shape": "hv", "color": tint, "width": 2, "dash": dash},
            hovertemplate=f"{label} at %{{x:,.1f}} s: %{{y:,.4g}}<extra></extra>",
        )
    figure.update_layout(
        width=_SIDE_PX,
        yaxis={"domain": _UPPER, "title_text": "requests", "range": [0, max(1.0, _ROOM * most)], "nticks": 5},
        yaxis2={"domain": _LOWER, "title_text": "% of KV cache", "range": [0, 105], "nticks": 5, "anchor": "x"},
        xaxis={"anchor": "y2", "title_text": "time", "ticksuffix": " s", "tickformat": ",", "showgrid": False},
        showlegend=True,
    )
    for axis in ("y", "y2") if turn_s is not None else ():
        line = {"color": INK, "width": 1, "dash": "dash"}
        figure.add_shape(type="line", x0=turn_s, x1=turn_s, xref="x", y0=0, y1=1, yref=f"{axis} domain", line=line)
    return figure
