"""The layout that all figures share, and the empty figure that they start from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import plotly.graph_objects as go

from ...sim.output import frames as pd
from .labels import Numbers
from .palette import GRID, INK, MUTED, PAPER, Hue

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

#: With more ticks on a logarithmic axis, only the powers of ten have one.
_MOST_LOG_TICKS = 11

_AXIS = {
    "automargin": True,
    "fixedrange": True,
    "gridcolor": GRID,
    "linecolor": GRID,
    "separatethousands": True,
    "ticklabelstandoff": 4,
    "tickfont": {"size": 12, "color": MUTED},
    "title": {"font": {"size": 12, "color": MUTED}, "standoff": 8},
    "zeroline": False,
}
_TITLE = {"x": 0, "xref": "paper", "font": {"size": 17}, "automargin": True, "yref": "container", "y": 0.98}
_LEGEND = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "font": {"size": 12}}


@cache
def _template() -> go.layout.Template:
    # Not at import: plotly takes long to validate it, and many commands draw nothing.
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 13, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "margin": {"l": 8, "r": 24, "t": 12, "b": 8},
            "title": _TITLE,
            "legend": _LEGEND,
            "hoverlabel": {"bgcolor": PAPER, "bordercolor": GRID, "font": {"color": INK, "family": FONT, "size": 12}},
            "dragmode": False,
            "uniformtext": {"mode": "hide", "minsize": 10},
            "xaxis": _AXIS,
            "yaxis": _AXIS,
        }
    )


def blank(
    title: str,
    subtitle: str,
    height: int,
    numbers: Numbers,
    data: Numbers | None = None,
    definitions: Sequence[tuple[str, str]] = (),
) -> go.Figure:
    """An empty figure in the project's layout, ``height`` pixels high and as wide as its container.

    ``numbers`` is the table of the figure's values. It is stored in ``layout.meta["numbers"]``, and a page prints it as
    text below the picture. If it is an excerpt or a summary, ``data`` has all drawn values. It is stored in
    ``layout.meta["data"]``, and a page makes a CSV file of it. ``definitions`` are labels of the legend, each with one line that
    defines it; a page prints them below the picture.
    """
    heading = {"text": title, "subtitle": {"text": subtitle, "font": {"size": 13, "color": MUTED}}}
    meta: dict[str, Any] = {"numbers": numbers} | ({} if data is None else {"data": data})
    if definitions:
        meta["definitions"] = [list(pair) for pair in definitions]
    return go.Figure(layout={"template": _template(), "title": heading, "height": height, "meta": meta})


def data_of(figure: go.Figure) -> pd.DataFrame:
    """All values that a figure of ``reports.figures.figures`` draws, one row per mark: the content of its page's CSV file."""
    meta = figure.layout.meta
    content = meta.get("data", meta["numbers"])
    return pd.DataFrame(content["rows"], columns=content["columns"])


def log_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2 and 5 times the powers of ten, labelled with the whole value.

    Args:
        low, high: Least and largest drawn value, above 0.
    """
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    # One tick beyond each end; those between are as many as fit.
    shown = [tick for tick in ticks if low / 2.5 < tick < high * 2.5]
    decades = [tick for tick in shown if f"{tick:e}".startswith("1")]
    chosen = shown if len(shown) <= _MOST_LOG_TICKS else decades
    return {"type": "log", "tickvals": chosen, "ticktext": [f"{tick:,g}" for tick in chosen]}


def fill(hue: Hue) -> dict[str, Any]:
    """A bar's marker in a palette colour, with a hairline between neighbours."""
    return {"color": hue.light, "line": {"color": PAPER, "width": 1}}


def hatched(hue: Hue) -> dict[str, Any]:
    """A hatching over a palette colour, for ``marker.pattern`` or ``fillpattern``; empty for a plain hue."""
    if not hue.hatch:
        return {}
    lines = {"shape": hue.hatch, "fgcolor": PAPER, "size": 7, "solidity": 0.25}
    return {**lines, "bgcolor": hue.light, "fillmode": "overlay"}


def note(figure: go.Figure, text: str, **place: object) -> None:
    """Add a line of text without an arrow; ``place`` has the attributes of a plotly annotation."""
    figure.add_annotation(text=text, showarrow=False, **place)
