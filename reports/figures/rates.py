"""The points of a sweep: metrics against the request rate, and output speed of a user against that of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...sim.output import frames as pd
from ..data.pareto_front import rings, unbeaten
from ..style.labels import Numbers
from ..style.look import blank, log_axis
from ..style.palette import MUTED, PAPER, colour, dash, symbol

#: Ratio of the largest to the smallest value above which an axis is logarithmic.
_LOG_FROM = 30
_FAINT = 0.35
_BAND_TEXT = "A pale band: lines lie on each other."
#: Values that differ by less lie on each other in a picture, as a share.
_SAME = 0.01
#: Lines over a line by which its band is wider, at most.
_MOST_WIDER = 3


def against_rate(points: pd.DataFrame, metric: str, title: str, unit: str) -> go.Figure:
    """A quantity against the request rate, one line per series; several seeds give their mean, with the range.

    Args:
        points: Columns ``series``, ``request_rate`` (finite) and ``metric``, one row per point.
        metric: The drawn column; for a column in requests/s, the requested rate is drawn as well.
    """
    spread = points.groupby(["series", "request_rate"], sort=False)[metric].agg(["mean", "min", "max", "size"])
    seeds = int(spread["size"].max())
    figure = blank(title, "", 400, _numbers(spread, unit))
    words = [f"Mean and range over {seeds} points each."] if seeds > 1 else []
    if unit == "requests/s":
        figure.add_trace(_request_rate_line(points["request_rate"].max()))
    # A series has one colour in every picture of a page, also where it shares a line with another.
    places = list(dict.fromkeys(spread.index.get_level_values("series")))
    lines = [(" = ".join(names), spread.loc[names[0]].sort_index()) for names in _equal(spread)]
    for at, (name, rows) in enumerate(lines):
        place = places.index(name.split(" = ")[0])
        # Where later lines run through the same points, they would hide this one.
        above = sum((_meets(rows, other) for _, other in lines[at + 1 :]), np.zeros(len(rows), int))
        if above.any():
            words.append(_BAND_TEXT)
            figure.add_trace(_halo(place, rows["mean"].where(above > 0), min(_MOST_WIDER, above.max())))
        figure.add_trace(_line(place, name, rows, unit))
    figure.update_layout(title_subtitle_text=" ".join(dict.fromkeys(words)))
    values = spread[["min", "max"]]
    # Beside the requested rate, a rate is drawn from 0.
    log = unit != "requests/s" and values["min"].min() > 0 and values["max"].max() / values["min"].min() > _LOG_FROM
    figure.update_layout(hovermode="closest", legend_traceorder="normal")
    figure.update_xaxes(title_text="request rate (requests/s)", rangemode="tozero")
    kind = log_axis(values["min"].min(), values["max"].max()) if log else {"rangemode": "tozero"}
    figure.update_yaxes(title_text=unit, tickformat=",", **kind)
    return figure


def _equal(spread: pd.DataFrame) -> list[list[str]]:
    """Series with the same values together: one line, as the others would lie under it."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name in dict.fromkeys(spread.index.get_level_values("series")):
        rows = spread.loc[name].sort_index()
        found.setdefault((tuple(rows.index), tuple(rows.to_numpy().ravel().tolist())), []).append(name)
    return list(found.values())


def _meets(rows: pd.DataFrame, other: pd.DataFrame) -> np.ndarray:
    """Of each point of a line, whether another line runs through it."""
    return np.isclose(rows["mean"], other["mean"].reindex(rows.index), rtol=_SAME, atol=0)


def _halo(place: int, values: pd.Series, lines: int) -> go.Scatter:
    """A pale band of a line, which is seen on both sides of so many lines over it."""
    hue = colour(place)
    return go.Scatter(
        mode="lines+markers",
        x=values.index.to_numpy(),
        y=values.to_numpy(),
        line={"color": hue, "width": 4 + 4 * lines},
        marker={"symbol": symbol(place), "size": 10 + 6 * lines, "color": hue, "opacity": 1},
        opacity=_FAINT,
        showlegend=False,
        hoverinfo="skip",
    )


def _request_rate_line(highest: float) -> go.Scatter:
    line = {"color": MUTED, "width": 1, "dash": "dot"}
    return go.Scatter(name="request rate", mode="lines", x=[0, highest], y=[0, highest], line=line, hoverinfo="skip")


def _line(place: int, name: str, rows: pd.DataFrame, unit: str) -> go.Scatter:
    above, below = (rows["max"] - rows["mean"]).to_numpy(), (rows["mean"] - rows["min"]).to_numpy()
    return go.Scatter(
        name=name,
        mode="lines+markers",
        x=rows.index.to_numpy(),
        y=rows["mean"].to_numpy(),
        line={"color": colour(place), "width": 2, "dash": dash(place)},
        marker={"symbol": symbol(place), "size": 8, "line": {"color": PAPER, "width": 1}},
        error_y={"array": above, "arrayminus": below, "color": colour(place), "thickness": 1, "width": 3},
        hovertemplate=f"{name}<br>at %{{x:,.3~g}} requests/s: %{{y:,.4~g}} {unit}<extra></extra>",
    )


def _numbers(spread: pd.DataFrame, unit: str) -> Numbers:
    rows = [[*at, float(row["mean"]), float(row["min"]), float(row["max"])] for at, row in spread.iterrows()]
    return {"columns": ["Series", "Request rate (requests/s)", f"Mean ({unit})", "Least", "Most"], "rows": rows}


def throughput_pareto(points: pd.DataFrame) -> go.Figure:
    """Output tokens/s of a GPU against those of a user; points of the Pareto front are ringed.

    Args:
        points: Columns ``series``, ``request_rate``, ``tokens_per_s_per_user`` and ``tokens_per_s_per_gpu``, one row
            per point.
    """
    ordered = points.sort_values("request_rate", kind="stable")
    places = list(zip(ordered["tokens_per_s_per_user"], ordered["tokens_per_s_per_gpu"]))
    best = pd.Series(unbeaten(places), index=ordered.index)
    figure = blank(
        "Throughput per GPU and output speed per user",
        "Right and above is better; points of the Pareto front are ringed, all others are faint. A line joins the"
        " rates of a series.",
        440,
        _pareto_numbers(ordered, best),
    )
    front = ordered[best].sort_values("tokens_per_s_per_user")
    figure.add_trace(rings(front["tokens_per_s_per_user"].to_numpy(), front["tokens_per_s_per_gpu"].to_numpy()))
    for place, name in enumerate(dict.fromkeys(points["series"])):
        own = ordered[ordered["series"] == name]
        figure.add_trace(_choices(place, name, own, best[own.index].tolist()))
    figure.update_layout(hovermode="closest", legend_traceorder="normal")
    figure.update_xaxes(title_text="output tokens/s that a user sees (1 / median TPOT)")
    figure.update_yaxes(title_text="output tokens/s of a GPU", rangemode="tozero", tickformat=",")
    return figure


def _choices(place: int, name: str, rows: pd.DataFrame, best: Sequence[bool]) -> go.Scatter:
    return go.Scatter(
        name=name,
        mode="lines+markers",
        x=rows["tokens_per_s_per_user"].to_numpy(),
        y=rows["tokens_per_s_per_gpu"].to_numpy(),
        customdata=rows[["request_rate"]].to_numpy(),
        line={"color": colour(place), "width": 1, "dash": dash(place)},
        marker={
            "symbol": symbol(place),
            "size": 9,
            "opacity": [1.0 if each else _FAINT for each in best],
            "line": {"color": PAPER, "width": 1},
        },
        hovertemplate=f"{name}<br>at %{{customdata[0]:,.3~g}} requests/s:"
        " %{x:,.1f} tokens/s a user, %{y:,.0f} a GPU<extra></extra>",
    )


def _pareto_numbers(rows: pd.DataFrame, best: pd.Series) -> Numbers:
    columns = ["Series", "Request rate (requests/s)", "Tokens/s per user", "Tokens/s per GPU", "On the Pareto front"]
    fields = ("series", "request_rate", "tokens_per_s_per_user", "tokens_per_s_per_gpu")
    cells = zip(*(rows[name].tolist() for name in fields), best.tolist())
    return {"columns": columns, "rows": [[*row[:-1], "yes" if row[-1] else "no"] for row in cells]}
