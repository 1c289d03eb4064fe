"""A day of changing load: requests and replicas by hour, what requests get, and the bill of two fleets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from ..style.look import blank, fill
from ..style.palette import BUCKETS, INK, MUTED, PARTS

Row = dict[str, Any]

#: Parts of the height of a figure with two pictures, one above the other.
_UPPER, _LOWER = [0.57, 1.0], [0.0, 0.43]
#: Days that are shorter, in seconds, have minutes on their axis.
_HOURS_FROM_S = 2 * 3600
_HOUR_S, _MINUTE_S = 3600, 60
_REQUESTS, _REPLICAS, _MEAN, _PEAK = (BUCKETS[name].light for name in ("over_estimate", "live", "cached", "round_up"))


def day_fleet(steps: Sequence[Row], constant: int) -> go.Figure:
    """Requests/s above, and replicas below: those of each step, and the constant fleet.

    Rows are ``{"start_s", "end_s", "request_rate", "replicas"}``.
    """
    unit = _unit(steps)
    figure = blank(
        "Load and fleet over the day",
        "Above: requests/s. Below: replicas that take requests (solid), and the constant fleet (dashed).",
        420,
        {
            "columns": [f"From, {unit}", "Requests/s", "Replicas"],
            "rows": [[row["start_s"] / _seconds(unit), row["request_rate"], row["replicas"]] for row in steps],
        },
    )
    _line(figure, steps, [row["request_rate"] for row in steps], "requests/s", _REQUESTS, "y")
    _line(figure, steps, [row["replicas"] for row in steps], "replicas", _REPLICAS, "y2")
    _line(figure, steps, [constant] * len(steps), "constant fleet", MUTED, "y2", dash="dash")
    return _stacked(figure, unit, "requests/s", "replicas")


def day_service(steps: Sequence[Row], attainment: float) -> go.Figure:
    """The share of the requests that meet the objectives, above, and the use of the KV cache, below.

    Rows are ``{"start_s", "end_s", "attained", "attained_by_constant_fleet", "kv_cache_usage", "peak_kv_cache_usage"}``;
    shares of a step without requests are None.
    """
    unit = _unit(steps)
    columns = ("attained", "attained_by_constant_fleet", "kv_cache_usage", "peak_kv_cache_usage")
    figure = blank(
        "Attainment and KV cache over the day",
        f"Above: requests that meet the objectives; {attainment:.0%} are asked for (dotted). Below: use of the KV cache, mean and"
        " peak.",
        460,
        {
            "columns": [
                f"From, {unit}", "Meet objectives, %", "With the constant fleet, %", "KV in use, mean, %", "KV in use, peak, %",
            ],
            "rows": [[row["start_s"] / _seconds(unit), *(_percent(row[name]) for name in columns)] for row in steps],
        },
    )  # fmt: skip
    values = {name: [_percent(row[name]) for row in steps] for name in columns}
    _line(figure, steps, values["attained"], "following the load", _REPLICAS, "y")
    _line(figure, steps, values["attained_by_constant_fleet"], "constant fleet", MUTED, "y", dash="dash")
    _line(figure, steps, [100 * attainment] * len(steps), "asked for", INK, "y", dash="dot")
    _line(figure, steps, values["kv_cache_usage"], "KV cache, mean", _MEAN, "y2")
    _line(figure, steps, values["peak_kv_cache_usage"], "KV cache, peak", _PEAK, "y2", dash="dot")
    # Shares are near 100 %, and their differences count.
    return _stacked(figure, unit, "requests, %", "KV cache, %").update_layout(yaxis_rangemode="normal")


def day_cost(rows: Sequence[Row], currency: str) -> go.Figure:
    """A bar for the bill of each fleet; rows are ``{"fleet", "replica_hours", "price"}``."""
    figure = blank(
        "Cost of the day",
        f"{currency}; start-up times are paid for, and replicas that leave until they have drained.",
        150 + 30 * len(rows),
        {
            "columns": ["Fleet", "Replica-hours", currency],
            "rows": [[row[name] for name in ("fleet", "replica_hours", "price")] for row in rows],
        },
    )
    figure.add_bar(
        orientation="h",
        x=[row["price"] for row in rows],
        y=[row["fleet"] for row in rows],
        marker=fill(PARTS["token_states"]),
        hovertemplate=f"%{{y}}: %{{x:,.2f}} {currency}<extra></extra>",
    )
    figure.update_xaxes(title_text=currency, rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure


def _unit(steps: Sequence[Row]) -> str:
    return "h" if steps[-1]["end_s"] >= _HOURS_FROM_S else "min"


def _seconds(unit: str) -> int:
    return _HOUR_S if unit == "h" else _MINUTE_S


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _line(
    figure: go.Figure, steps: Sequence[Row], values: Sequence[float | None], name: str, tint: str, axis: str,
    dash: str = "solid",
) -> None:  # fmt: skip
    """A line with a level for each step, up to the end of the last one."""
    unit = _unit(steps)
    figure.add_trace(
        go.Scatter(
            name=name,
            mode="lines",
            x=[row["start_s"] / _seconds(unit) for row in steps] + [steps[-1]["end_s"] / _seconds(unit)],
            y=[*values, values[-1]],
            yaxis=axis,
            line={"shape": "hv", "color": tint, "width": 2, "dash": dash},
            hovertemplate=f"{name} from %{{x:,.4g}} {unit}: %{{y:,.4g}}<extra></extra>",
        )
    )


def _stacked(figure: go.Figure, unit: str, upper: str, lower: str) -> go.Figure:
    """Two pictures over one axis of time."""
    figure.update_layout(
        yaxis={"domain": _UPPER, "title_text": upper, "rangemode": "tozero", "nticks": 5},
        yaxis2={"domain": _LOWER, "title_text": lower, "rangemode": "tozero", "nticks": 5, "anchor": "x"},
        xaxis={"anchor": "y2", "title_text": "time of the day", "ticksuffix": f" {unit}", "showgrid": False},
        showlegend=True,
    )
    return figure
