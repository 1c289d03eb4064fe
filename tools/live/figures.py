"""Figures of a live server beside the simulator: waste by bucket, and the pool and its queue over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fragmeter.reports.style.labels import Numbers, metric_label
from fragmeter.reports.style.look import blank, fill, hatched
from fragmeter.reports.style.palette import BUCKETS, INK, colour
from fragmeter.sim.metrics.views import SLOTS_VIEW
from fragmeter.sim.recording.probe import ProbedStep
from fragmeter.sim.runs.growth import growth_moments
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.ticks import PER_SECOND

#: Spans of time over which both sides are averaged, and moments of each.
SPANS, _MOMENTS_A_SPAN = 300, 8
SIDES = ("measured", "simulated")
_NS_PER_S = 1e9
_NOT_IN_USE = ("free", "cached")


@dataclass(frozen=True, eq=False)
class OverTime:
    """What a server did over time, from the start of its first step.

    Attributes:
        end_s: End of its last step.
        at_s: float64 [points], seconds, ascending.
        values: By name of a quantity float64 [points]: ``blocks`` and ``tokens`` in percent of the pool, ``running`` and
            ``waiting`` in requests.
        held: Whether a value holds until the next point; values between two points are on a line otherwise.
    """

    end_s: float
    at_s: np.ndarray
    values: Mapping[str, np.ndarray]
    held: bool

    def means(self, spans_s: np.ndarray) -> dict[str, np.ndarray]:
        """The mean of each quantity over spans of time, from evenly spaced moments of each.

        Args:
            spans_s: float64 [spans + 1], where spans begin and end.
        """
        inside = (np.arange(_MOMENTS_A_SPAN) + 0.5) / _MOMENTS_A_SPAN
        moments_s = spans_s[:-1, None] + np.diff(spans_s)[:, None] * inside
        return {
            name: values.reshape(moments_s.shape).mean(axis=1) for name, values in self.at(moments_s.ravel()).items()
        }

    def at(self, moments_s: np.ndarray) -> dict[str, np.ndarray]:
        """Each quantity at some moments; 0 after the end."""
        if self.held:
            place = np.searchsorted(self.at_s, moments_s, side="right") - 1
            found = {name: values[place] for name, values in self.values.items()}
        else:
            found = {name: np.interp(moments_s, self.at_s, values) for name, values in self.values.items()}
        return {name: np.where(moments_s < self.end_s, values, 0.0) for name, values in found.items()}


def measured_over_time(steps: Sequence[ProbedStep]) -> OverTime:
    """The steps of a load. The last one ends it and is not counted."""
    begin_ns = np.array([step.begin_ns for step in steps])
    at_s = (begin_ns - begin_ns[0]) / _NS_PER_S
    own = steps[:-1]
    capacity = sum(own[0].buckets.values())
    used = [capacity - sum(step.buckets[bucket] for bucket in _NOT_IN_USE) for step in own]
    values = {
        "blocks": 100 * np.array(used) / capacity,
        "tokens": 100 * np.array([step.buckets["live"] for step in own]) / capacity,
        "running": np.array([float(len(step.tokens)) for step in own]),
        "waiting": np.array([float(step.waiting) for step in own]),
    }
    return OverTime(float(at_s[-1]), at_s[:-1], values, held=True)


def simulated_over_time(run: Run) -> OverTime:
    """A simulated run. Between the first and the last step of a leap its blocks and tokens grow along a line."""
    log, levels = run.log, run.accounts.at_rows()
    rows, capacity = log.rows, log.capacity_slots
    used = capacity - sum(levels[bucket] for bucket in _NOT_IN_USE)
    grown = {
        "blocks": 100 * growth_moments(log)[0] * log.block_size / capacity,
        "tokens": 100 * rows["growing"] * np.maximum(rows["steps"] - 1, 0) / capacity,
    }
    first = {"blocks": 100 * used / capacity, "tokens": 100 * levels["live"] / capacity}
    first |= {name: rows[column].astype(float) for name, column in (("running", "batch_size"), ("waiting", "waiting"))}
    # Rows in which requests only arrive take no time.
    real = rows["ticks"] > 0
    start = rows["start_ticks"][real]
    end = start + rows["ticks"][real]
    # After a row before an idle span, and before the next row, there is nothing.
    idle = np.flatnonzero(end[:-1] < start[1:])
    places = np.repeat(2 * idle + 2, 2)
    at = np.insert(
        np.stack([start, end], axis=1).ravel(), places, np.stack([end[idle], start[idle + 1]], axis=1).ravel()
    )
    values = {}
    for name, level in first.items():
        both = np.stack([level, level + grown.get(name, 0)], axis=1)[real].ravel()
        values[name] = np.insert(both, places, 0)
    return OverTime((int(end[-1]) - int(start[0])) / PER_SECOND, (at - start[0]) / PER_SECOND, values, held=False)


def kv_use(name: str, sides: Sequence[OverTime], gauge: Sequence[tuple[float, float]]) -> go.Figure:
    """Share of the pool in blocks held, and in tokens, over time: measured and simulated.

    Args:
        name: Name of the load.
        sides: Measured, and simulated.
        gauge: Of each scrape of ``/metrics`` the seconds since the first step, and percent of the pool in use.
    """
    figure = _over_time(f"KV use of {name}", {"blocks": "blocks held", "tokens": "tokens"}, sides, "% of the pool")
    if gauge:
        figure.add_scatter(
            name="vllm:kv_cache_usage_perc",
            mode="markers",
            x=[round(at, 3) for at, _ in gauge],
            y=[round(value, 3) for _, value in gauge],
            marker={"symbol": "circle-open", "size": 6, "color": INK},
            hovertemplate="gauge of the server<br>%{x:,.2f} s: %{y:,.1f} % of the pool<extra></extra>",
        )
    return figure


def queue(name: str, sides: Sequence[OverTime]) -> go.Figure:
    """Requests that a step computes, and requests in the queue, over time: measured and simulated."""
    return _over_time(f"Requests of {name}", {"running": "running", "waiting": "waiting"}, sides, "requests")


def _over_time(title: str, names: Mapping[str, str], sides: Sequence[OverTime], unit: str) -> go.Figure:
    end_s = max(side.end_s for side in sides)
    spans_s = np.linspace(0, end_s, SPANS + 1)
    drawn = [side.means(spans_s) for side in sides]
    subtitle = f"Means over spans of {end_s / SPANS:,.2g} s."
    figure = blank(title, subtitle, 360, _summary(names, sides, drawn), _drawn_numbers(names, spans_s, drawn))
    for place, (side, values) in enumerate(zip(SIDES, drawn, strict=True)):
        for (name, label), dash in zip(names.items(), ("solid", "dot")):
            figure.add_scatter(
                name=f"{label}, {side}",
                mode="lines",
                x=spans_s.round(3),
                y=[*values[name].round(3), round(float(values[name][-1]), 3)],
                line={"color": colour(place), "width": 1.5, "dash": dash, "shape": "hv"},
                hovertemplate=f"{label}, {side}<br>%{{x:,.2f}} s: %{{y:,.1f}} {unit}<extra></extra>",
            )
    figure.update_layout(hovermode="closest", dragmode="zoom", legend_traceorder="normal")
    figure.update_xaxes(title_text="time", ticksuffix=" s", tickformat=",", fixedrange=False, showgrid=False)
    figure.update_xaxes(range=[0, end_s])
    figure.update_yaxes(title_text=unit, tickformat=",", rangemode="tozero", nticks=6)
    return figure


def _summary(names: Mapping[str, str], sides: Sequence[OverTime], drawn: Sequence[Mapping[str, np.ndarray]]) -> Numbers:
    rows = []
    for name, label in names.items():
        values = [each[name] for each in drawn]
        rows.append(
            [label.capitalize(), *(float(each.mean()) for each in values), *(float(each.max()) for each in values)]
        )
    rows.append(["Seconds", *(side.end_s for side in sides), None, None])
    columns = ["Quantity", *(f"{side.capitalize()}, {what}" for what in ("mean", "most of a span") for side in SIDES)]
    return {"columns": columns, "rows": rows}


def _drawn_numbers(names: Mapping[str, str], spans_s: np.ndarray, drawn: Sequence[Mapping[str, np.ndarray]]) -> Numbers:
    columns = [spans_s[:-1], spans_s[1:], *(values[name] for name in names for values in drawn)]
    heads = [f"{label.capitalize()}, {side}" for label in names.values() for side in SIDES]
    return {
        "columns": ["Start (s)", "End (s)", *heads],
        "rows": [list(row) for row in np.stack(columns, axis=1).round(4).tolist()],
    }


def waste_of_both(decisions: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Mean share of the pool in each bucket over time: a bar for each server, and one for its replay in the simulator.

    Args:
        decisions: Rows of ``results["decisions"]``.
    """
    bars = [
        (
            f"{row['session']} {row['repetition']}, {side}",
            {name: 100 * pair[place] for name, pair in row["waste"].items()},
        )
        for row in decisions
        for place, side in enumerate(("server", "ledger"))
    ]
    used = [bucket for bucket in BUCKETS if any(shares.get(bucket) for _, shares in bars)]
    columns = ["Session", *(f"{metric_label(bucket).capitalize()}, %" for bucket in used)]
    rows = [[label, *(round(shares.get(bucket, 0.0), 4) for bucket in used)] for label, shares in bars]
    subtitle = "Percent of the slots of the pool, mean over the time of the server's steps."
    numbers: Numbers = {"columns": columns, "rows": rows}
    definitions = SLOTS_VIEW.definitions(used)
    figure = blank(
        "Slots of the server and of the ledger", subtitle, 150 + 28 * len(bars), numbers, definitions=definitions
    )
    for bucket in used:
        hue = BUCKETS[bucket]
        shares = [each.get(bucket, 0.0) for _, each in bars]
        figure.add_bar(
            name=metric_label(bucket),
            orientation="h",
            x=shares,
            y=[label for label, _ in bars],
            marker=fill(hue) | {"pattern": hatched(hue)},
            text=[f"{share:.1f}" if share >= 4 else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": hue.text, "size": 12},
            hovertemplate="%{y}: " + metric_label(bucket) + " %{x:.3f} %<extra></extra>",
        )
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_xaxes(range=[0, 100], ticksuffix=" %")
    figure.update_yaxes(autorange="reversed", showgrid=False, tickfont={"color": INK, "size": 12})
    return figure
