"""Slots of the KV cache one by one: what each group of slots holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from ...sim.metrics.views import SLOTS_VIEW, Category
from ..style.labels import Numbers
from ..style.look import blank, fill
from ..style.palette import BUCKETS, INK, PAPER, Hue

#: What a slot may be in, and its colour: a bucket of the ledger, or ``FREE_TOO_FEW`` in place of free.
FREE_TOO_FEW = "free_too_few"
_HUES: dict[str, Hue] = BUCKETS | {FREE_TOO_FEW: BUCKETS["stranded"]}
_CATEGORIES = SLOTS_VIEW.categories | {
    FREE_TOO_FEW: Category("free, too few", ("free",), "that are free, and too few for the request that waits")
}
_COLUMNS, _CELL_PX, _GAP_ROWS = 128, 10, 2


class _Run(NamedTuple):
    """Slots side by side in one row of the picture, which hold the same."""

    kind: str
    row: int
    column: int
    slots: int


def slot_grid(title: str, subtitle: str, groups: Mapping[str, Sequence[tuple[str, int]]]) -> go.Figure:
    """A square for each slot, 128 in a row; a group begins a new row.

    Args:
        groups: By name, in which a <br> ends a line: what the group's slots hold, and how many of them, in order.
    """
    runs: list[_Run] = []
    first_rows, rows = {}, 0
    for name, parts in groups.items():
        rows += _GAP_ROWS
        first_rows[name] = rows
        runs += _runs(parts, rows)
        rows = runs[-1].row + 1
    kinds = [kind for kind in _CATEGORIES if any(run.kind == kind for run in runs)]
    defined = [(_CATEGORIES[kind].label, _CATEGORIES[kind].definition) for kind in kinds]
    figure = blank(title, subtitle, 60 + _CELL_PX * rows, _numbers(groups), definitions=defined)
    for kind in kinds:
        figure.add_trace(_squares([run for run in runs if run.kind == kind], _CATEGORIES[kind].label, _HUES[kind]))
    for column in range(1, _COLUMNS):
        figure.add_shape(
            type="line",
            x0=column,
            x1=column,
            y0=-0.5,
            y1=rows - 0.5,
            layer="above",
            line={"color": PAPER, "width": 0.7},
        )
    figure.update_layout(barmode="overlay", showlegend=True, legend_traceorder="normal")
    figure.update_xaxes(showticklabels=False, showgrid=False, range=[0, _COLUMNS])
    labels = {
        "tickvals": list(first_rows.values()),
        "ticktext": list(first_rows),
        "tickfont": {"color": INK, "size": 12},
    }
    figure.update_yaxes(showgrid=False, range=[rows - 0.4, -0.6], **labels)
    return figure


def _runs(parts: Sequence[tuple[str, int]], row: int) -> Iterator[_Run]:
    """The parts of a group from this row on, divided where a row ends."""
    column = 0
    for kind, slots in parts:
        while slots:
            fitting = min(slots, _COLUMNS - column)
            yield _Run(kind, row, column, fitting)
            slots, column = slots - fitting, column + fitting
            if column == _COLUMNS:
                row, column = row + 1, 0


def _squares(runs: Sequence[_Run], words: str, hue: Hue) -> go.Bar:
    return go.Bar(
        name=words,
        orientation="h",
        base=[run.column for run in runs],
        x=[run.slots for run in runs],
        y=[run.row for run in runs],
        width=0.9,
        marker=fill(hue),
        hovertemplate=words + "<extra></extra>",
    )


def _numbers(groups: Mapping[str, Sequence[tuple[str, int]]]) -> Numbers:
    rows = [
        [name.replace("<br>", " "), _CATEGORIES[kind].label, count]
        for name, parts in groups.items()
        for kind, count in parts
    ]
    return {"columns": ["Slots of", "Contents", "Slots"], "rows": rows}
