"""The candidates of a capacity plan: cost, and cost against the output speed of a user."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from ..data.pareto_front import rings, unbeaten
from ..style.look import blank, fill
from ..style.palette import INK, PAPER, PARTS, colour, symbol

Row = dict[str, Any]
#: Signs of a line of a candidate's name.
_NAME_SIGNS = 26


def pareto(rows: Sequence[Row], currency: str) -> go.Figure:
    """One line per candidate, over shares of its recommended rate; points to the right and below are better.

    Rows are ``{"candidate", "request_rate", "tokens_per_s_per_user", "cost_per_million_tokens", "is_bound", "recommended"}``,
    with the candidates in the order of their rank; the costs of one are lower bounds, or not. The first six have colours; points
    of the Pareto front are ringed.
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
        own = [row for row in rows if row["candidate"] == name]
        figure.add_trace(_line(own, _wrapped(f"{name}{' (lower bound)' * own[0]['is_bound']}"), place))
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


def cost_bars(rows: Sequence[Row], unit: str) -> go.Figure:
    """One bar per candidate: its cost, with an interval.

    Rows are ``{"candidate", "cost", "lowest", "highest"}``, in the order of their rank. A cost without a ``highest`` is a lower
    bound; its bar is hatched.

    Args:
        unit: Of the cost, such as USD per hour.
    """
    fields = ("candidate", "cost", "lowest", "highest")
    wrapped = [_wrapped(row["candidate"]) for row in rows]
    are_bounds = [row["highest"] is None for row in rows]
    figure = blank(
        "Cost of each candidate",
        f"{unit}; lines: the interval that the seeds leave open."
        + " Hatched: a lower bound, because the runs are bursts." * any(are_bounds),
        130 + sum(max(30, 16 * (1 + name.count("<br>"))) for name in wrapped),
        {
            "columns": ["Candidate", unit, "At least", "At most"],
            "rows": [[row[name] for name in fields] for row in rows],
        },
    )
    costs = [row["cost"] for row in rows]
    figure.add_bar(
        orientation="h",
        x=costs,
        y=[row["candidate"] for row in rows],
        marker=fill(PARTS["token_states"]) | (_hatching(are_bounds) if any(are_bounds) else {}),
        error_x={
            "array": [0.0 if row["highest"] is None else row["highest"] - row["cost"] for row in rows],
            "arrayminus": [row["cost"] - row["lowest"] for row in rows],
            "color": INK,
            "thickness": 2,
            # Without caps an interval of no width draws nothing.
            "width": 0,
        },
        customdata=["at least " * is_bound for is_bound in are_bounds],
        hovertemplate=f"%{{y}}: %{{customdata}}%{{x:,.3g}} {unit}<extra></extra>",
    )
    figure.update_xaxes(title_text=unit, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", tickvals=[row["candidate"] for row in rows], ticktext=wrapped)
    return figure


def _wrapped(name: str) -> str:
    """A candidate's name in lines that leave room for bars on a narrow page."""
    return "<br>".join(wrap(name, _NAME_SIGNS))


def _hatching(which: Sequence[bool]) -> dict[str, Any]:
    """A hatching of some bars; the others keep their fill."""
    shape = ["/" if each else "" for each in which]
    return {"pattern": {"shape": shape, "fgcolor": PAPER, "size": 8, "solidity": 0.3, "fillmode": "overlay"}}
