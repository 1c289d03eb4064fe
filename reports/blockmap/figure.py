"""The block map: every physical block of the pool over time, coloured by its contents and its request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from ...sim.memory import BUCKETS
from ...sim.recording.blocks import GIVEN_UP, NO_SEQUENCE, BlockMap
from ...sim.types.ticks import PER_SECOND
from ..style.labels import Numbers, counted
from ..style.look import blank
from ..style.palette import PAPER
from .palette import KIND_LABELS, KINDS, legend_colour
from .picture import Picture, data_uri, picture

HEIGHT_PX = 560
_MOST_LINES = 25
_MOST_MARKS = 400
#: Cells of the layer that follows the pointer.
_HOVER_ROWS, _HOVER_COLUMNS = 64, 128


class _Clock(NamedTuple):
    """The axis to the right: ticks of a unit, title, suffix of numbers, text at the pointer, and heading of a table."""

    unit_ticks: int
    title: str
    suffix: str
    hover: str
    heading: str


_SECONDS = _Clock(PER_SECOND, "time", " s", "%{x:,.2f} s", "Time (s)")
_STEPS = _Clock(1, "step", "", "step %{x:,.0f}", "Step")


def block_map(
    found: BlockMap,
    title: str,
    requests: np.ndarray | None = None,
    follows: bool = True,
    drawn: Picture | None = None,
    in_steps: bool = False,
) -> go.Figure:
    """The block map of ``found``: time to the right, block 0 on top, one pixel for each recorded block and moment.

    Args:
        requests: int64 [sequences], the request of each sequence; None if each sequence is a request of its own.
        follows: Whether hover text follows the pointer, on a layer thinned to some thousand cells; a page that reads
            the pixels back does not need it.
        drawn: The picture, if it is already made.
        in_steps: Whether a tick of the map is a step: the axis then counts steps.
    """
    clock = _STEPS if in_steps else _SECONDS
    holders = request_of(found, requests)
    drawn = picture(found, holders) if drawn is None else drawn
    listed = _numbers(found, _spread(found.num_columns, _MOST_LINES), clock)
    data = _numbers(found, range(found.num_columns), clock)
    figure = blank(title, _subtitle(found, drawn), HEIGHT_PX, listed, data)
    end, blocks = found.meta["end_ticks"] / clock.unit_ticks, int(found.block_ids[-1]) + 1
    figure.add_layout_image(
        source=data_uri(drawn.png),
        xref="x",
        yref="y",
        x=0,
        y=-0.5,
        sizex=end,
        sizey=blocks,
        sizing="stretch",
        layer="below",
    )
    _legend(figure, found)
    _preemptions(figure, found, requests, clock)
    if follows:
        _follow(figure, found, holders, clock)
    figure.update_layout(dragmode="zoom", hovermode="closest", legend_traceorder="normal")
    figure.update_xaxes(
        title_text=clock.title, ticksuffix=clock.suffix, tickformat=",", fixedrange=False, showgrid=False
    )
    figure.update_xaxes(range=[0, end])
    figure.update_yaxes(title_text="physical block", fixedrange=False, showgrid=False, range=[blocks - 0.5, -0.5])
    return figure


def request_of(found: BlockMap, requests: np.ndarray | None) -> np.ndarray:
    """The request that holds each block at each moment, or ``NO_SEQUENCE``; int64 [columns, rows]."""
    sequence = found.sequence.astype(np.int64)
    return sequence if requests is None else np.where(sequence == NO_SEQUENCE, NO_SEQUENCE, requests[sequence])


def _subtitle(found: BlockMap, drawn: Picture) -> str:
    blocks, rows = found.meta["num_blocks"], len(found.block_ids)
    sentences = [f"{blocks:,} blocks of {counted(found.meta['block_size'], 'slot')}, {found.num_columns:,} moments."]
    if rows < int(found.block_ids[-1]) + 1:
        sentences.append(f"Drawn: {rows:,} of the blocks, evenly spaced.")
    if found.meta["layout"] == "counted":
        sentences.append(
            "The policy counts slots without addresses: each piece is drawn in the lowest free range that holds it."
        )
    if len(drawn.columns) < found.num_columns:
        sentences.append(f"Drawn: {len(drawn.columns):,} of the moments, evenly spaced.")
    sentences.append("A block is what most of its slots are;")
    if drawn.is_shaded:
        sentences.append("each request has its own shade.")
    else:
        sentences.append(
            f"requests have no shades, as a block belongs to one for {drawn.residency_columns:.1f} moments (mean)."
        )
    return " ".join(sentences)


def _legend(figure: go.Figure, found: BlockMap) -> None:
    """A legend square for each kind of block that occurs; the squares are not data."""
    present = np.bincount(found.bucket.ravel(), minlength=len(KINDS))
    for number, kind in enumerate(KINDS):
        if present[number]:
            figure.add_scatter(
                name=KIND_LABELS[kind],
                x=[None],
                y=[None],
                mode="markers",
                marker={"symbol": "square", "size": 11, "color": legend_colour(kind)},
                hoverinfo="skip",
            )


def _preemptions(figure: go.Figure, found: BlockMap, requests: np.ndarray | None, clock: _Clock) -> None:
    """A mark on the upper edge for each preemption; evenly chosen ones if there are many."""
    count = len(found.preempted_ticks)
    if not count:
        return
    shown = np.unique(np.linspace(0, count - 1, min(count, _MOST_MARKS)).round().astype(int))
    sequence = found.preempted_sequence[shown]
    preempted = sequence if requests is None else requests[sequence]
    fate = np.where(found.preempted_swapped[shown] == 1, "to the host", "its blocks freed")
    figure.add_scatter(
        name=f"preemption ({count:,})" if count <= _MOST_MARKS else f"preemption ({len(shown):,} of {count:,} marked)",
        x=found.preempted_ticks[shown] / clock.unit_ticks,
        y=np.full(len(shown), -0.5),
        mode="markers",
        cliponaxis=False,
        customdata=np.column_stack([preempted.astype(str), fate]),
        marker={
            "symbol": "triangle-down",
            "size": 9,
            "color": legend_colour("given_up"),
            "line": {"color": PAPER, "width": 1},
        },
        hovertemplate=f"request %{{customdata[0]}} preempted, %{{customdata[1]}}<br>{clock.hover}<extra></extra>",
    )


def _follow(figure: go.Figure, found: BlockMap, holders: np.ndarray, clock: _Clock) -> None:
    """An invisible layer that shows the block under the pointer."""
    columns = _spread(found.num_columns, _HOVER_COLUMNS)
    rows = _spread(len(found.block_ids), _HOVER_ROWS)
    figure.add_heatmap(
        name="blocks",
        x=found.at_ticks[columns] / clock.unit_ticks,
        y=found.block_ids[rows],
        z=np.zeros((len(rows), len(columns)), dtype=np.int8),
        text=[[_hover_text(found, holders, column, row) for column in columns] for row in rows],
        opacity=0,
        showscale=False,
        hovertemplate=f"block %{{y}}, {clock.hover}<br>%{{text}}<extra></extra>",
    )


def _spread(count: int, most: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def _hover_text(found: BlockMap, holders: np.ndarray, column: int, row: int) -> str:
    """State, request, tokens and references of a block at a moment."""
    request, kind = int(holders[column, row]), KIND_LABELS[KINDS[found.bucket[column, row]]]
    if request == NO_SEQUENCE:
        return kind
    tokens, references = int(found.live_slots[column, row]), int(found.references[column, row])
    held = f"{tokens} of {found.meta['block_size']} slots hold tokens"
    return f"request {request}: {kind}<br>{held}, {references} reference{'' if references == 1 else 's'}"


def _numbers(found: BlockMap, columns: Iterable[int], clock: _Clock) -> Numbers:
    """The ledger at some of the moments, in percent of the pool, and the blocks freed by preemptions."""
    used = [place for place in range(len(BUCKETS)) if found.census_slots[:, place].any()]
    capacity = found.census_slots.sum(axis=1)
    given_up = (found.bucket == GIVEN_UP).mean(axis=1)
    rows = [
        [
            found.at_ticks[column] / clock.unit_ticks,
            *(100 * found.census_slots[column, place] / capacity[column] for place in used),
            100 * given_up[column],
            int(np.searchsorted(found.preempted_ticks, found.at_ticks[column], side="right")),
        ]
        for column in columns
    ]
    names = [f"{BUCKETS[place].replace('_', ' ').capitalize()}, %" for place in used]
    return {"columns": [clock.heading, *names, "Free since a preemption, %", "Preemptions so far"], "rows": rows}
