"""The Pareto front of points in two quantities."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import plotly.graph_objects as go

from ..style.palette import INK, PAPER


def unbeaten(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each point is on the Pareto front: no other point is at least as good in both quantities and better in one.

    Larger is better in both.
    """
    front, best = set(), -inf
    # A beaten point is beaten by one with more of the first quantity, or with as much of it and more of the second.
    for point in sorted(set(points), reverse=True):
        if point[1] > best:
            front.add(point)
            best = point[1]
    return [point in front for point in points]


def rings(x: Sequence[float], y: Sequence[float]) -> go.Scatter:
    """A ring around each of those points, drawn behind them."""
    return go.Scatter(
        name="beaten by none",
        mode="markers",
        x=x,
        y=y,
        marker={"size": 19, "color": PAPER, "line": {"color": INK, "width": 1}},
        hoverinfo="skip",
    )
