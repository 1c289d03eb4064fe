"""The look that every figure shares, and the empty figure they all start from."""

from __future__ import annotations

from functools import cache
from typing import Any

import plotly.graph_objects as go

from ...sim.output import frames as pd
from .labels import Numbers
from .palette import GRID, INK, MUTED, PAPER, Hue

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

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
    # Not while modules load: plotly takes long to check it, and many a command draws nothing.
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 13, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
            "title": _TITLE,
            "legend": _LEGEND,
            "hoverlabel": {"bgcolor": PAPER, "bordercolor": GRID, "font": {"color": INK, "family": FONT, "size": 12}},
            "dragmode": False,
            "uniformtext": {"mode": "hide", "minsize": 10},
            "xaxis": _AXIS,
            "yaxis": _AXIS,
        }
    )


def blank(title: str, subtitle: str, height: int, numbers: Numbers, data: Numbers | None = None) -> go.Figure:
    """An empty figure in the house's look, ``height`` pixels high and as wide as its place.

    ``numbers`` is what the figure shows, as a table; it travels in ``layout.meta["numbers"]``, so that a page can
    print it as text below the picture. Where that is an excerpt or a digest, ``data`` is all that is drawn; it travels
    in ``layout.meta["data"]``, from which a page makes a CSV file.
    """
    heading = {"text": title, "subtitle": {"text": subtitle, "font": {"size": 13, "color": MUTED}}}
    meta = {"numbers": numbers} | ({} if data is None else {"data": data})
    return go.Figure(layout={"template": _template(), "title": heading, "height": height, "meta": meta})


def data_of(figure: go.Figure) -> pd.DataFrame:
    """All that a figure of ``reports.figures.figures`` draws, a row a mark: what its page saves as CSV."""
    meta = figure.layout.meta
    content = meta.get("data", meta["numbers"])
    return pd.DataFrame(content["rows"], columns=content["columns"])


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
    """Adds a line of text without an arrow; ``place`` are the attributes of a plotly annotation."""
    figure.add_annotation(text=text, showarrow=False, **place)
