"""The ledger over time: every slot of the pool, by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ...sim.metrics.views import SLOTS_VIEW
from ...sim.output import frames as pd
from ..style.labels import Numbers, metric_label
from ..style.look import blank, hatched, note
from ..style.palette import BUCKETS, INK, Hue

MOST_POINTS = 2_000
_MOST_LINES = 25


def ledger_over_time(
    table: pd.DataFrame | Mapping[str, object],
    title: str,
    watermark_slots: int = 0,
    end_s: float | None = None,
    layers: Mapping[str, Hue] = BUCKETS,
    definitions: Sequence[tuple[str, str]] | None = None,
) -> go.Figure:
    """The nine buckets, or other ``layers`` of the pool with ``definitions``, stacked over time, in slots, as steps, with its capacity.

    ``table`` has the column ``start_s`` (ascending, seconds) and a column of slots for each bucket. A row applies from
    its start to the start of the next row, the last one to ``end_s``. A table longer than ``MOST_POINTS`` is thinned to
    the current rows at evenly spaced times; rows are never averaged. Buckets that are always empty are named, not
    drawn. A policy that keeps at least ``watermark_slots`` free at admission has a line for the watermark.
    """
    whole = pd.DataFrame(table)
    drawn = whole.iloc[thin(whole["start_s"].to_numpy(), MOST_POINTS)]
    used = [bucket for bucket in layers if whole[bucket].any()]
    listed = whole.iloc[thin(whole["start_s"].to_numpy(), _MOST_LINES)]
    subtitle = _subtitle(len(drawn), len(whole), len(listed), [name for name in layers if name not in used])
    definitions = SLOTS_VIEW.definitions(used) if definitions is None else definitions
    figure = blank(title, subtitle, 380, _numbers(listed, used), _numbers(drawn, used), definitions)
    if end_s is not None:
        drawn = pd.concat([drawn, drawn.tail(1).assign(start_s=end_s)])
    for bucket in used:
        figure.add_trace(_layer(drawn, bucket, layers[bucket]))
    _capacity(figure, drawn, [*layers])
    if watermark_slots:
        _watermark(figure, drawn, watermark_slots)
    figure.update_layout(hovermode="x unified", dragmode="zoom", legend_traceorder="normal")
    figure.update_xaxes(title_text="time", ticksuffix=" s", fixedrange=False, showgrid=False, hoverformat=",.2f")
    figure.update_yaxes(title_text="KV slots", tickformat=",d", nticks=6)
    return figure


def thin(start_s: np.ndarray, most: int) -> np.ndarray:
    """Positions of at most ``most`` rows: the current rows at evenly spaced times, with the first and the last.

    ``start_s`` ascends. A short table is kept whole.
    """
    if len(start_s) <= most:
        return np.arange(len(start_s))
    times_s = np.linspace(start_s[0], start_s[-1], most)
    in_force = np.searchsorted(start_s, times_s, side="right") - 1
    in_force[0] = 0
    return np.unique(in_force)


def _subtitle(drawn: int, rows: int, listed: int, unused: list[str]) -> str:
    empty = [metric_label(bucket) for bucket in unused]
    parts = [f"Drawn: {drawn:,} of {rows:,} rows, those in force at evenly spaced times."] if drawn < rows else []
    parts += [f"Listed below: {listed} of {rows:,} rows, evenly spaced."] if listed < rows else []
    parts += [f"Empty at all times: {', '.join(empty)}."] if empty else []
    return " ".join(parts)


def _layer(table: pd.DataFrame, bucket: str, hue: Hue) -> go.Scatter:
    return go.Scatter(
        name=metric_label(bucket),
        x=table["start_s"].to_numpy(),
        y=table[bucket].to_numpy(),
        stackgroup="slots",
        mode="lines",
        line={"shape": "hv", "width": 0, "color": hue.light},
        fillcolor=hue.light,
        fillpattern=hatched(hue),
        hovertemplate="%{y:,d} slots",
    )


def _capacity(figure: go.Figure, table: pd.DataFrame, layers: list[str]) -> None:
    capacity_slots = table[layers].sum(axis=1).to_numpy()
    figure.add_scatter(
        name="capacity",
        x=table["start_s"].to_numpy(),
        y=capacity_slots,
        mode="lines",
        line={"shape": "hv", "width": 1.5, "color": INK},
        hoverinfo="skip",
        showlegend=False,
    )
    text = f"capacity {int(capacity_slots[0]):,} slots"
    end_s = table["start_s"].iloc[-1]
    note(figure, text, x=end_s, xanchor="right", y=capacity_slots[-1], yanchor="bottom", font={"size": 12})
    figure.update_yaxes(range=[0, 1.09 * capacity_slots.max()])


def _watermark(figure: go.Figure, table: pd.DataFrame, slots: int) -> None:
    start_s, most_slots = table["start_s"], int(table.iloc[0][list(BUCKETS)].sum()) - slots
    figure.add_scatter(
        name=f"watermark: {slots:,} slots below",
        x=[start_s.iloc[0], start_s.iloc[-1]],
        y=[most_slots, most_slots],
        mode="lines",
        line={"width": 1.5, "color": INK, "dash": "dot"},
        hoverinfo="skip",
    )


def _numbers(table: pd.DataFrame, used: list[str]) -> Numbers:
    rows = [list(row) for row in table[["start_s", *used]].astype(object).itertuples(index=False)]
    return {"columns": ["Time (s)", *(metric_label(bucket).capitalize() for bucket in used)], "rows": rows}
