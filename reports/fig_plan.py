"""What a token costs against how fast a user sees it: the choices of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from .look import blank
from .palette import BUCKETS, INK, MUTED, PAPER

Row = dict[str, Any]
_HUES = [BUCKETS[name].light for name in ("live", "over_estimate", "cached", "finished_hold", "round_up", "reserved")]
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


def pareto(rows: Sequence[Row], currency: str) -> go.Figure:
    """A line a candidate, over shares of its recommended rate; those to the right and below are better.

    Rows are ``{"candidate", "request_rate", "tokens_per_s_per_user", "cost_per_million_tokens", "recommended"}``, the
    candidates in the order of their rank. The first six have colours; what no other point beats in both is ringed.
    """
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    columns = ["Candidate", "Requests/s a replica", "Tokens/s a user", f"{currency} per million tokens"]
    fields = ("candidate", "request_rate", "tokens_per_s_per_user", "cost_per_million_tokens")
    figure = blank(
        "What a token costs, and how fast a user sees it",
        "Each line: one candidate at 25, 50, 75 and 100 % (large) of its recommended rate. Right and below is better;"
        " ringed is what no other point beats in both.",
        460,
        {"columns": columns, "rows": [[row[name] for name in fields] for row in rows]},
    )
    front = [row for row in rows if not any(_beats(other, row) for other in rows)]
    figure.add_scatter(
        name="beaten by none",
        mode="markers",
        x=[row["tokens_per_s_per_user"] for row in front],
        y=[row["cost_per_million_tokens"] for row in front],
        marker={"size": 19, "color": PAPER, "line": {"color": INK, "width": 1}},
        hoverinfo="skip",
    )
    for place, name in enumerate(names):
        figure.add_trace(_line([row for row in rows if row["candidate"] == name], name, place))
    figure.update_xaxes(title_text="tokens/s a user sees (1 / median TPOT)", rangemode="tozero")
    figure.update_yaxes(title_text=f"{currency} per million tokens, prompts and outputs", rangemode="tozero")
    return figure


def _line(rows: Sequence[Row], name: str, place: int) -> go.Scatter:
    colour = _HUES[place] if place < len(_HUES) else MUTED
    return go.Scatter(
        name=name,
        mode="lines+markers",
        x=[row["tokens_per_s_per_user"] for row in rows],
        y=[row["cost_per_million_tokens"] for row in rows],
        customdata=[[row["request_rate"]] for row in rows],
        line={"color": colour, "width": 2},
        marker={
            "symbol": _SYMBOLS[place % len(_SYMBOLS)],
            "size": [12 if row["recommended"] else 7 for row in rows],
            "line": {"color": PAPER, "width": 1},
        },
        hovertemplate="%{customdata[0]:.3g} requests/s: %{x:.1f} tokens/s a user, %{y:.3g} per million"
        f"<extra>{name}</extra>",
    )


def _beats(one: Row, other: Row) -> bool:
    """Whether one is no worse in both, and better in one."""
    faster = one["tokens_per_s_per_user"] - other["tokens_per_s_per_user"]
    cheaper = other["cost_per_million_tokens"] - one["cost_per_million_tokens"]
    return faster >= 0 and cheaper >= 0 and faster + cheaper > 0
