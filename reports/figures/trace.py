"""Lengths and arrivals of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Any

import plotly.graph_objects as go

from ..style.labels import Numbers
from ..style.look import blank, fill, log_axis
from ..style.palette import BUCKETS

Row = dict[str, Any]
_HUES = {"prompt": BUCKETS["live"], "output": BUCKETS["over_estimate"], "reused": BUCKETS["reserved"]}


def lengths(rows: Sequence[Row]) -> go.Figure:
    """The share of requests up to a number of tokens, one line each for prompts and outputs.

    Rows are ``{"share", "prompt", "output"}``, by ascending share, from 0 to 1.
    """
    columns = ["Share of requests", "Prompt tokens", "Output tokens"]
    numbers: Numbers = {"columns": columns, "rows": [list(row.values()) for row in rows]}
    figure = blank("Lengths of requests", "Share of requests with at most so many tokens.", 340, numbers)
    for name in ("prompt", "output"):
        figure.add_scatter(
            name=name,
            mode="lines",
            x=[row[name] for row in rows],
            y=[row["share"] for row in rows],
            line={"color": _HUES[name].light, "width": 2, "dash": "solid" if name == "prompt" else "dash"},
            hovertemplate="%{x:,d} tokens",
        )
    values = [row[name] for row in rows for name in ("prompt", "output")]
    figure.update_xaxes(title_text="tokens", **log_axis(max(1, min(values)), max(values)))
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02], nticks=6)
    return figure


def arrivals(rows: Sequence[Row]) -> go.Figure:
    """Requests per second over time.

    Rows are ``{"start_s", "end_s", "requests_per_s"}``, one after the other.
    """
    numbers: Numbers = {"columns": ["From (s)", "To (s)", "Requests/s"], "rows": [list(row.values()) for row in rows]}
    width_s = rows[0]["end_s"] - rows[0]["start_s"]
    mean = fsum(row["requests_per_s"] for row in rows) * width_s / len(rows)
    subtitle = f"Requests a second, counted over {width_s:,.3g} s each: {mean:,.1f} requests on average."
    figure = blank("Arrivals over time", subtitle, 300, numbers)
    figure.add_bar(
        x=[(row["start_s"] + row["end_s"]) / 2 for row in rows],
        y=[row["requests_per_s"] for row in rows],
        width=width_s,
        marker=fill(_HUES["prompt"]),
        hovertemplate="%{y:,.3g} requests/s<extra></extra>",
    )
    figure.update_xaxes(title_text="time", ticksuffix=" s", showgrid=False)
    figure.update_yaxes(title_text="requests/s", rangemode="tozero", nticks=6)
    return figure
