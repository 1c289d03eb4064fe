"""Free blocks, and the longest run of them, over time: the classical index of external fragmentation."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from ...sim.memory import BUCKETS
from ...sim.recording.blocks import BlockMap
from ...sim.types.ticks import PER_SECOND
from ..style.labels import Numbers
from ..style.look import blank, fill
from ..style.palette import BUCKETS as HUES
from ..style.palette import INK

_MOST_LINES = 25
_FREE, _STRANDED = BUCKETS.index("free"), BUCKETS.index("stranded")


def largest_free_run(found: BlockMap, title: str) -> go.Figure:
    """All free blocks over time, stranded ones included, and the longest contiguous run of them."""
    size, time_s = found.meta["block_size"], found.at_ticks / PER_SECOND
    free = found.census_slots[:, [_FREE, _STRANDED]].sum(axis=1) / size
    index = 1 - found.largest_free_blocks.sum() / max(1, free.sum())
    subtitle = f"Of what is free, {100 * index:.0f} % lies outside the longest run, over the whole run."
    all_moments = _numbers(time_s, free, found.largest_free_blocks)
    figure = blank(title, subtitle, 300, _excerpt(all_moments), all_moments)
    for name, blocks, hue in (
        ("free blocks", free, HUES["free"]),
        ("longest run", found.largest_free_blocks, HUES["live"]),
    ):
        figure.add_scatter(
            name=name,
            x=time_s,
            y=blocks,
            mode="lines",
            fill="tozeroy",
            fillcolor=hue.light,
            line={"shape": "hvh", "width": 1, "color": INK if name == "free blocks" else hue.light},
            hovertemplate="%{y:,.0f} blocks",
        )
    figure.update_layout(hovermode="x unified", dragmode="zoom")
    figure.update_xaxes(title_text="time", ticksuffix=" s", tickformat=",", fixedrange=False, showgrid=False)
    figure.update_xaxes(hoverformat=",.2f")
    figure.update_yaxes(title_text="blocks", rangemode="tozero", nticks=6)
    return figure


def free_run_histogram(found: BlockMap, title: str) -> go.Figure:
    """Number of runs of free blocks by length, mean over the recorded moments."""
    mean = found.free_runs.mean(axis=0)
    longest = int(np.flatnonzero(mean).max(initial=0))
    names = ["1", *(f"{1 << power:,}\u2013{(2 << power) - 1:,}" for power in range(1, longest + 1))]
    rows = [[name, float(count)] for name, count in zip(names, mean.tolist())]
    numbers: Numbers = {"columns": ["Blocks in a run", "Runs at a time, mean"], "rows": rows}
    subtitle = f"Runs of free blocks by their length, mean over {found.num_columns:,} moments."
    figure = blank(title, subtitle, 300, numbers)
    figure.add_bar(
        x=names,
        y=mean[: longest + 1],
        marker=fill(HUES["live"]),
        hovertemplate="%{y:,.2f} runs of %{x} blocks<extra></extra>",
    )
    figure.update_layout(bargap=0.15, showlegend=False)
    figure.update_xaxes(title_text="blocks in a run", type="category", showgrid=False)
    figure.update_yaxes(title_text="runs at a time", rangemode="tozero", nticks=6)
    return figure


def _numbers(time_s: np.ndarray, free: np.ndarray, longest: np.ndarray) -> Numbers:
    rows = [list(row) for row in zip(time_s.tolist(), free.tolist(), longest.tolist(), strict=True)]
    return {"columns": ["Time (s)", "Free blocks", "Longest run (blocks)"], "rows": rows}


def _excerpt(numbers: Numbers) -> Numbers:
    """Some of the rows, evenly spaced."""
    rows = numbers["rows"]
    few = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MOST_LINES)).round().astype(int))
    return numbers | {"rows": [rows[at] for at in few]}
