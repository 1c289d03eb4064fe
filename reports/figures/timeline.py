"""The state of every request over time: queued, prefill, decode, preempted."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...sim.output import frames as pd
from ...sim.types.ticks import PER_SECOND
from ..style.labels import Numbers
from ..style.look import blank
from ..style.packing import packed
from ..style.palette import TIMELINE

MOST_REQUESTS = 2_000
_HEIGHT_PX = 460
_MOST_LINES = 25


def request_timeline(requests: pd.DataFrame, residencies: pd.DataFrame, title: str) -> go.Figure:
    """A line for each request from its arrival to its end, in the order of arrival from the top.

    Of a request with several sequences the first one is drawn. Of more than ``MOST_REQUESTS`` requests some are drawn,
    evenly chosen; ``layout.meta["closer"]`` then has all spans, from which a page draws those of the visible time
    range.

    Args:
        requests: ``requests.parquet``.
        residencies: ``residencies.parquet``.
    """
    spans = request_spans(requests, residencies)
    served = spans["request"].unique()
    drawn = served[np.unique(np.linspace(0, len(served) - 1, min(len(served), MOST_REQUESTS)).round().astype(int))]
    shown = spans[spans["request"].isin(drawn)]
    figure = blank(title, _subtitle(len(drawn), len(served)), _HEIGHT_PX, _numbers(spans), _data(shown))
    present = [state for state in TIMELINE if (spans["state"] == state).any()]
    if len(drawn) < len(served):
        figure.layout.meta["closer"] = closer(spans, present)
    width_px = min(8.0, max(1.2, 0.9 * (_HEIGHT_PX - 90) / max(1, len(drawn))))
    for state, hue in TIMELINE.items():
        own = shown[shown["state"] == state]
        if state in present:
            figure.add_scatter(
                name=state,
                x=_with_gaps(own["start_s"], own["end_s"]),
                y=_with_gaps(own["request"], own["request"]),
                mode="lines",
                line={"color": hue.light, "width": width_px, "simplify": False},
                hovertemplate="request %{y:,d} " + state + "<br>%{x:,.2f} s<extra></extra>",
            )
    legend = {"traceorder": "normal", "itemsizing": "constant"}
    figure.update_layout(dragmode="zoom", hovermode="closest", legend=legend)
    figure.update_xaxes(title_text="time", ticksuffix=" s", tickformat=",", fixedrange=False, showgrid=False)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(title_text="request", tickformat=",d", fixedrange=False, showgrid=False, autorange="reversed")
    return figure


def request_spans(requests: pd.DataFrame, residencies: pd.DataFrame) -> pd.DataFrame:
    """``request_spans_ticks`` in seconds: columns ``request``, ``state``, ``start_s``, ``end_s``."""
    spans = request_spans_ticks(requests, residencies)
    return pd.DataFrame(
        {
            "request": spans["request"],
            "state": spans["state"],
            "start_s": spans["start_ticks"] / PER_SECOND,
            "end_s": spans["end_ticks"] / PER_SECOND,
        }
    )


def request_spans_ticks(requests: pd.DataFrame, residencies: pd.DataFrame) -> pd.DataFrame:
    """The states of each request over time: columns ``request``, ``state``, ``start_ticks``, ``end_ticks``.

    States are the keys of ``palette.TIMELINE``. Spans of zero length are left out. A request that is stalled and then
    preempted counts as stalled until it runs again.
    """
    first = residencies.groupby("request")["sequence"].transform("min") == residencies["sequence"]
    own = residencies[first].sort_values(["request", "start_ticks"], kind="stable").reset_index(drop=True)
    before = own["request"].shift(fill_value=-1) == own["request"]
    arrival = requests["arrival_ticks"].to_numpy()[own["request"]]
    away_since = np.where(before, own["end_ticks"].shift(fill_value=0), arrival)
    why = np.where(before, own["ended"].astype(str).shift(fill_value=""), "queued")
    # A sequence that is swapped in, continues after a stall, or forks has nothing to prefill.
    computes = np.where(own["begun"].isin(("prefilled", "recomputed")), "prefill", "decode")
    parts = [
        (why, away_since, own["start_ticks"]),
        (computes, own["start_ticks"], own["first_token_ticks"]),
        ("decode", own["first_token_ticks"], own["end_ticks"]),
    ]
    spans = pd.concat(
        pd.DataFrame({"request": own["request"], "state": state, "start_ticks": start, "end_ticks": end})
        for state, start, end in parts
    )
    spans = spans[spans["end_ticks"] > spans["start_ticks"]]
    return spans.sort_values(["request", "start_ticks"], kind="stable").reset_index(drop=True)


def closer(spans: pd.DataFrame, states: list[str]) -> dict[str, Any]:
    """All spans for the page's script, to the millisecond, as packed integers.

    Each request has ``skip``, the difference of its number from that of the previous request; ``count``, its number of
    spans; and ``gap``, the difference of its first start from that of the previous request. Each span has ``state``, an
    index in ``states``, and ``length``. A span starts at the end of the previous one.

    Args:
        spans: Result of ``request_spans``, one request after the other.
    """
    first = np.flatnonzero(np.diff(spans["request"], prepend=-1))
    begin, end = ((spans[name] * 1000).round().astype(np.int64).to_numpy() for name in ("start_s", "end_s"))
    planes = {
        "skip": np.diff(spans["request"].to_numpy()[first], prepend=0),
        "count": np.diff(first, append=len(spans)),
        "gap": np.diff(begin[first], prepend=0),
        "state": pd.Categorical(spans["state"], states).codes,
        "length": end - begin,
    }
    return {"states": states, "most": MOST_REQUESTS} | {name: packed(plane) for name, plane in planes.items()}


def _with_gaps(start: pd.Series, end: pd.Series) -> np.ndarray:
    """Start, end, nothing, start, end, nothing, ..."""
    points = np.full((len(start), 3), np.nan)
    points[:, 0], points[:, 1] = start, end
    # Microseconds are finer than any pixel.
    return points.ravel().round(6)


def _subtitle(drawn: int, served: int) -> str:
    some = f" Drawn: {drawn:,} of {served:,} requests, evenly chosen; all of them where you zoom in far enough."
    some = "" if drawn == served else some
    return f"A line a request, in order of arrival.{some}"


def _data(spans: pd.DataFrame) -> Numbers:
    rows = [list(row) for row in spans.astype(object).itertuples(index=False)]
    return {"columns": ["Request", "State", "From (s)", "To (s)"], "rows": rows}


def _numbers(spans: pd.DataFrame) -> Numbers:
    """Time that requests spend in each state."""
    length = spans["end_s"] - spans["start_s"]
    rows = []
    for state in TIMELINE:
        own = spans["state"] == state
        if own.any():
            each = length[own].groupby(spans["request"][own]).sum()
            rows.append([state, int(own.sum()), len(each), float(each.mean()), float(each.max())])
    return {"columns": ["State", "Spans", "Requests", "Mean of those (s)", "Longest (s)"], "rows": rows}
