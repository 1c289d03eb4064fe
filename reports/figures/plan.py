"""Price of a token against the output speed of a user, for the candidates of a capacity plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from ..data.pareto_front import rings, unbeaten
from ..style.look import blank
from ..style.palette import PAPER, colour, symbol

Row = dict[str, Any]


def pareto(rows: Sequence[Row], currency: str) -> go.Figure:
    """One line per candidate, over shares of its recommended rate; points to the right and below are better.

    Rows are ``{"candidate", "request_rate", "tokens_per_s_per_user", "cost_per_million_tokens", "recommended"}``, with
    the candidates in the order of their rank. The first six have colours; points of the Pareto front are ringed.
    """
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    columns = ["Candidate", "Requests/s a replica", "Tokens/s per user", f"{currency} per million tokens"]
    fields = ("candidate", "request_rate", "tokens_per_s_per_user", "cost_per_million_tokens")
    figure = blank(
        "Cost per token and output speed per user",
        "Each line: one candidate at 25, 50, 75 and 100 % (large) of its recommended rate. Right and below is better;"
        " points of the Pareto front are ringed.",
        460,
        {"columns": columns, "rows": [[row[name] for name in fields] for row in rows]},
    )
    points = [(row["tokens_per_s_per_user"], row["cost_per_million_tokens"]) for row in rows]
    front = [point for point, best in zip(points, unbeaten([(speed, -cost) for speed, cost in points])) if best]
    figure.add_trace(rings(*zip(*front)))
    for place, name in enumerate(names):
        figure.add_trace(_line([row for row in rows if row["candidate"] == name], name, place))
    figure.update_xaxes(title_text="tokens/s a user sees (1 / median TPOT)", rangemode="tozero")
    figure.update_yaxes(title_text=f"{currency} per million tokens, prompts and outputs", rangemode="tozero")
    return figure


def _line(rows: Sequence[Row], name: str, place: int) -> go.Scatter:
    return go.Scatter(
        name=name,
        mode="lines+markers",
        x=[row["tokens_per_s_per_user"] for row in rows],
        y=[row["cost_per_million_tokens"] for row in rows],
        customdata=[[row["request_rate"]] for row in rows],
        line={"color": colour(place), "width": 2},
        marker={
            "symbol": symbol(place),
            "size": [12 if row["recommended"] else 7 for row in rows],
            "line": {"color": PAPER, "width": 1},
        },
        hovertemplate="%{customdata[0]:.3g} requests/s: %{x:.1f} tokens/s a user, %{y:.3g} per million"
        f"<extra>{name}</extra>",
    )
