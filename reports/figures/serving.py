"""Batch and throughput over time, one colour per run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from ...sim.output import frames as pd
from ..style.labels import Numbers
from ..style.look import blank
from ..style.palette import colour

Tables = Mapping[str, "pd.DataFrame"]
"""What ``reports.data.over_time.over_time`` says of each run, by its name; no table is empty."""


def batch_over_time(tables: Tables) -> go.Figure:
    """Running sequences (solid) and waiting requests (dotted), each point the mean over a span of time."""
    rows = [_batch_row(name, table) for name, table in tables.items()]
    data = _data(tables, ("running", "waiting"))
    figure = blank("Sequences running, requests waiting", _subtitle(tables), 340, _table(rows), data)
    return _drawn(figure, tables, {"running": "solid", "waiting": "dot"}, "sequences or requests")


def throughput_over_time(tables: Tables, kind: str = "output") -> go.Figure:
    """Tokens/s, each point the mean over a span of time.

    Args:
        kind: ``output``, or ``prompt`` for the tokens of prefills.
    """
    column = f"{kind}_tokens"
    paces = {name: table.assign(**{column: table[column] / _spans_s(table)}) for name, table in tables.items()}
    rows = [_throughput_row(name, table[column], paces[name]) for name, table in tables.items()]
    more = "" if kind == "output" else " Recomputed tokens count again, cached tokens do not."
    title = f"{kind.capitalize()} tokens/s"
    figure = blank(title, f"{_subtitle(tables)}{more}", 280, _table(rows), _data(paces, (column,)))
    return _drawn(figure, paces, {column: "solid"}, "tokens/s")


def _drawn(figure: go.Figure, tables: Tables, kinds: Mapping[str, str], unit: str) -> go.Figure:
    for place, (name, table) in enumerate(tables.items()):
        for column, dash in kinds.items():
            figure.add_trace(_line(place, name, table, column, dash, unit))
    figure.update_layout(hovermode="closest", dragmode="zoom", legend_traceorder="normal", showlegend=True)
    figure.update_xaxes(
        title_text="time", ticksuffix=" s", tickformat=",", fixedrange=False, showgrid=False, hoverformat=",.2f"
    )
    figure.update_yaxes(title_text=unit, tickformat=",", rangemode="tozero", nticks=6)
    return figure


def _line(place: int, name: str, table: pd.DataFrame, column: str, dash: str, unit: str) -> go.Scatter:
    label = name if column.endswith("_tokens") else f"{name}, {column}"
    return go.Scatter(
        name=label,
        mode="lines",
        x=[*table["start_s"].round(6), round(table["end_s"].iloc[-1], 6)],
        y=[*table[column].round(4), round(table[column].iloc[-1], 4)],
        line={"shape": "hv", "color": colour(place), "width": 1.5, "dash": dash},
        hovertemplate=f"{label}<br>%{{x}}: %{{y:,.1f}} {unit}<extra></extra>",
    )


def _spans_s(table: pd.DataFrame) -> pd.Series:
    return table["end_s"] - table["start_s"]


def _subtitle(tables: Tables) -> str:
    spans = [f"{_spans_s(table).iloc[0]:,.3g} s" for table in tables.values()]
    return f"Means over spans of {' and '.join(dict.fromkeys(spans))}."


def _batch_row(name: str, table: pd.DataFrame) -> dict[str, Any]:
    spans_s = _spans_s(table).to_numpy()
    row: dict[str, Any] = {"Run": name}
    for kind in ("running", "waiting"):
        row[f"{kind.capitalize()}, mean"] = float(table[kind].to_numpy() @ spans_s / spans_s.sum())
        row[f"{kind.capitalize()}, most of a span"] = float(table[kind].max())
    return row


def _throughput_row(name: str, tokens: pd.Series, pace: pd.DataFrame) -> dict[str, Any]:
    total = float(tokens.sum())
    return {
        "Run": name,
        "Tokens": round(total),
        "Tokens/s, mean": total / float(pace["end_s"].iloc[-1]),
        "Tokens/s, most of a span": float(pace[tokens.name].max()),
    }


def _data(tables: Tables, columns: tuple[str, ...]) -> Numbers:
    headings = [column.replace("_tokens", " tokens/s").capitalize() for column in columns]
    rows = [
        [name, *span]
        for name, table in tables.items()
        for span in zip(*(table[column].tolist() for column in ("start_s", "end_s", *columns)))
    ]
    return {"columns": ["Run", "Start (s)", "End (s)", *headings], "rows": rows}


def _table(rows: list[dict[str, Any]]) -> Numbers:
    return {"columns": list(rows[0]), "rows": [list(row.values()) for row in rows]}
