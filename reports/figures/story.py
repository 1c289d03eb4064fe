"""Textbook pictures of batching: sequences by iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from ..style.labels import Row, series_of
from ..style.look import blank, fill
from ..style.palette import STATES

_CELL_PX = 30
_LEFT_PX, _RIGHT_PX = 36, 6
_WORDS = {
    "prefill": ("prefill", "P"),
    "decode": ("decode", "D"),
    "finished_hold": ("ended but still held", "H"),
    "waiting": ("waiting", "W"),
}


def story(rows: Sequence[Row], title: str) -> go.Figure:
    """A grid of sequences (down) by iterations (across); the colour and letter of a cell show the state of the sequence.

    Rows are ``{"sequence", "iteration", "state"}`` with a state of ``palette.STATES``; a sequence has at most one state
    in an iteration. The figure is a few hundred pixels wide, independent of the page's width.
    """
    names = series_of(rows, "sequence")
    iterations = range(min(row["iteration"] for row in rows), max(row["iteration"] for row in rows) + 1)
    by_state = {state: [row for row in rows if row["state"] == state] for state in STATES}
    key = ", ".join(f"{letter} {words}" for state, (words, letter) in _WORDS.items() if by_state[state])
    figure = blank(title, f"{key}.", 64 + _CELL_PX * len(names), _numbers(rows, names))
    figure.add_traces([_cells(mine, state, names) for state, mine in by_state.items() if mine])
    figure.update_layout(barmode="overlay", bargap=0.06, showlegend=False)
    figure.update_layout(width=_LEFT_PX + _CELL_PX * len(iterations) + _RIGHT_PX)
    figure.update_layout(margin={"l": _LEFT_PX, "r": _RIGHT_PX})
    figure.update_xaxes(range=[iterations[0] - 0.5, iterations[-1] + 0.5], tickvals=list(iterations))
    figure.update_xaxes(title_text="iteration", showgrid=False)
    figure.update_yaxes(range=[len(names) - 0.5, -0.5], tickvals=list(range(len(names))), ticktext=names)
    figure.update_yaxes(showgrid=False)
    return figure


def _cells(rows: list[Row], state: str, names: list[str]) -> go.Bar:
    words, letter = _WORDS[state]
    return go.Bar(
        name=words,
        orientation="h",
        base=[row["iteration"] - 0.47 for row in rows],
        x=[0.94] * len(rows),
        y=[names.index(row["sequence"]) for row in rows],
        customdata=[[row["sequence"], row["iteration"]] for row in rows],
        text=[letter] * len(rows),
        textposition="inside",
        insidetextanchor="middle",
        textfont={"color": STATES[state].text, "size": 12},
        marker=fill(STATES[state]),
        hovertemplate="%{customdata[0]}, iteration %{customdata[1]}: " + words + "<extra></extra>",
    )


def _numbers(rows: Sequence[Row], names: list[str]) -> dict[str, Any]:
    iterations = sorted({row["iteration"] for row in rows})
    cells = {(row["sequence"], row["iteration"]): _WORDS[row["state"]][0] for row in rows}
    lines = [[name, *(cells.get((name, iteration)) for iteration in iterations)] for name in names]
    return {"columns": ["Sequence", *(str(iteration) for iteration in iterations)], "rows": lines}
