"""Simulated against measured latencies: one point per request, on the diagonal if both agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from ...sim.output import frames as pd
from ..style.labels import Numbers
from ..style.look import blank
from ..style.palette import GRID, INK, PAPER, colour, symbol

#: Requests drawn per run; the numbers cover all requests.
MOST_POINTS = 1_000
#: Half the width of the band, as a share of the measured value.
BAND = 0.1
#: Ratio of the largest to the smallest value above which the axes are logarithmic; the band is straight on both scales.
_LOG_FROM = 30
#: Margin beyond the outermost points, as a factor.
_ROOM = 1.15
_SIDE_PX = 470


def simulated_against_measured(
    metric: str, runs: Mapping[str, pd.DataFrame], title: str | None = None, counted: str = "Requests"
) -> go.Figure:
    """A latency of each request: measured to the right, simulated upwards, in a band of 10 % around the diagonal.

    Of more than ``MOST_POINTS`` requests some are drawn, evenly chosen by the measured value.

    Args:
        metric: A latency of a request: ttft, tpot or e2el; or another time.
        runs: By the name of each run, columns ``simulated_<metric>_ms`` and ``measured_<metric>_ms``, one row per
            request; a request with neither, or with a measured 0, is left out.
        title: Title; by default the metric in capitals, "simulated against measured".
        counted: What has such a time, as the heading of a column.
    """
    pairs = {name: _pairs(metric, table) for name, table in runs.items()}
    found = {name: agreement(metric, table) for name, table in runs.items()}
    title = f"{metric.upper()}, simulated against measured" if title is None else title
    drawn = {name: _some(*each) for name, each in pairs.items()}
    figure = blank(title, _subtitle(found), _SIDE_PX, _numbers(found, counted), _data(drawn))
    both = np.concatenate([values for each in pairs.values() for values in each])
    lowest, highest = float(both.min(initial=np.inf)), float(both.max(initial=0))
    log = 0 < lowest and highest / lowest > _LOG_FROM
    ends = np.array([min(lowest, highest) / _ROOM, highest * _ROOM])
    figure.add_traces([*_band(ends), _diagonal(ends)])
    for place, (name, (simulated, measured)) in enumerate(drawn.items()):
        figure.add_trace(_points(place, f"{name}: {found[name].inside_pct:.1f} %", simulated, measured))
    limits = np.log10(ends).tolist() if log else ends.tolist()
    kind = {"type": "log", "dtick": 1} if log else {}
    figure.update_layout(width=_SIDE_PX, hovermode="closest", legend_traceorder="normal")
    figure.update_xaxes(title_text="measured, ms", range=limits, tickformat=",", **kind)
    figure.update_yaxes(title_text="simulated, ms", range=limits, tickformat=",", **kind)
    return figure


class Agreement(NamedTuple):
    """Agreement of simulated with measured latencies, request by request.

    Attributes:
        requests: Number of requests known on both sides.
        inside_pct: Percent of them within 10 % of the measured value.
        median_pct: Median error, in percent of the measured value.
        median_size_pct: Median absolute error, in percent of the measured value.
    """

    requests: int
    inside_pct: float
    median_pct: float
    median_size_pct: float


def agreement(metric: str, table: pd.DataFrame) -> Agreement:
    """Agreement of a latency, request by request; NaN if no request is known on both sides."""
    simulated, measured = _pairs(metric, table)
    if not len(measured):
        return Agreement(0, np.nan, np.nan, np.nan)
    error_pct = 100 * (simulated / measured - 1)
    inside_pct = float(100 * (abs(error_pct) <= 100 * BAND).mean())
    return Agreement(len(error_pct), inside_pct, float(np.median(error_pct)), float(np.median(abs(error_pct))))


def _pairs(metric: str, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    simulated, measured = (table[f"{side}_{metric}_ms"].to_numpy(np.float64) for side in ("simulated", "measured"))
    known = (measured > 0) & ~np.isnan(simulated)
    return simulated[known], measured[known]


def _band(ends: np.ndarray) -> list[go.Scatter]:
    style = {"mode": "lines", "x": ends, "hoverinfo": "skip", "line": {"width": 0, "color": GRID}}
    return [
        go.Scatter(y=ends * (1 - BAND), showlegend=False, **style),
        go.Scatter(y=ends * (1 + BAND), fill="tonexty", fillcolor=GRID, name=f"within {100 * BAND:.0f} %", **style),
    ]


def _diagonal(ends: np.ndarray) -> go.Scatter:
    line = {"width": 1, "color": INK}
    return go.Scatter(name="as measured", mode="lines", x=ends, y=ends, line=line, hoverinfo="skip")


def _some(simulated: np.ndarray, measured: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most ``MOST_POINTS`` requests, evenly chosen by the measured value, with the smallest and the largest."""
    places = np.linspace(0, max(0, len(measured) - 1), min(len(measured), MOST_POINTS)).round().astype(int)
    chosen = np.argsort(measured, kind="stable")[places]
    return simulated[chosen], measured[chosen]


def _points(place: int, name: str, simulated: np.ndarray, measured: np.ndarray) -> go.Scatter:
    return go.Scatter(
        name=name,
        mode="markers",
        x=measured,
        y=simulated,
        marker={
            "symbol": symbol(place),
            "size": 7,
            "color": colour(place),
            "opacity": 0.75,
            "line": {"color": PAPER, "width": 0.5},
        },
        hovertemplate=f"{name}<br>measured %{{x:,.2f}} ms, simulated %{{y:,.2f}} ms<extra></extra>",
    )


def _numbers(found: Mapping[str, Agreement], counted: str) -> Numbers:
    columns = ["Run", counted, f"Within {100 * BAND:.0f} % (%)", "Median error (%)", "Median size of the error (%)"]
    return {"columns": columns, "rows": [[name, *each] for name, each in found.items()]}


def _data(drawn: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Numbers:
    rows = [[name, x, y] for name, pairs in drawn.items() for y, x in zip(*(values.tolist() for values in pairs))]
    return {"columns": ["Run", "Measured (ms)", "Simulated (ms)"], "rows": rows}


def _subtitle(found: Mapping[str, Agreement]) -> str:
    some = any(each.requests > MOST_POINTS for each in found.values())
    return f"Drawn: {MOST_POINTS:,} of each run, evenly chosen." if some else ""
