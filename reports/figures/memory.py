"""Bars of memory in bytes: the KV cache under several allocators, and all of a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import fsum

import plotly.graph_objects as go

from ...sim.metrics.views import SLOT_CATEGORIES
from ..style.labels import Numbers, Row
from ..style.look import blank, fill, hatched
from ..style.palette import INK, MEMORY, MUTED, Hue

_LEAST_LABELLED_PCT = 4.0
#: Parts of the KV cache in bytes: pages are padded, and where each kind of layer has pages of its own, free ones may be of
#: another kind.
KV_DEFINITIONS = {bucket: (category.label, category.definition) for bucket, category in SLOT_CATEGORIES.items()} | {
    "page_padding": ("page padding", "bytes of a page that no layer of its group uses"),
    "stranded": ("stranded", "slots that are free, but only for another kind of layer"),
}
#: Height of a bar, and of what is above and below the bars, in pixels.
_BAR, _FRAME = 24, 150


def kv_bytes(rows: Sequence[Row], load: str) -> go.Figure:
    """Horizontal stacked bars, one per server and allocator, in percent of the KV cache's bytes.

    Rows have ``server``, ``allocator``, ``fits`` and percentages by the names in ``MEMORY``.
    """
    parts = [name for name in MEMORY if any(name in row for row in rows)]
    names = [(row["server"], f"{row['allocator']}, fits {row['fits']:,.0f}") for row in rows]
    subtitle = (
        "Percent of the bytes of the KV cache, mean over the steps in which requests wait; the same sequences for all."
        " Beyond 100 %: bytes of these sequences for which the allocator has no page."
    )
    return stacked_shares(
        f"KV cache by allocator: {load}",
        subtitle,
        names,
        [[row[part] for part in parts] for row in rows],
        {part: MEMORY[part] for part in parts},
        kv_definitions(parts),
    )


def hbm(rows: Sequence[Row]) -> go.Figure:
    """Horizontal stacked bars, one per server and load, in percent of a GPU's memory.

    Rows have ``server``, ``load``, ``memory_gib`` and GiB by the names in ``MEMORY``.
    """
    parts = [name for name in MEMORY if any(name in row for row in rows)]
    names = [(f"{row['server']}, {row['memory_gib']:.0f} GiB", row["load"]) for row in rows]
    shares = [[100 * row[part] / row["memory_gib"] for part in parts] for row in rows]
    hues = {part: MEMORY[part] for part in parts}
    title = "Every byte of a GPU under vLLM"
    return stacked_shares(title, "Percent of the memory of one GPU.", names, shares, hues, kv_definitions(parts))


def kv_definitions(parts: Iterable[str]) -> list[tuple[str, str]]:
    """Label and definition of those parts that are of the KV cache."""
    return [KV_DEFINITIONS[part] for part in parts if part in KV_DEFINITIONS]


def stacked_shares(
    title: str,
    subtitle: str,
    names: Sequence[tuple[str, str]],
    values: Sequence[Sequence[float]],
    hues: Mapping[str, Hue],
    definitions: Sequence[tuple[str, str]],
) -> go.Figure:
    """One bar for each pair of names, in percent; those with the same first name stand together.

    Args:
        values: Of each bar, in the order of ``hues``, which has the parts of a bar.
    """
    labels = [part.replace("_", " ") for part in hues]
    columns = ["", "", *(f"{label}, %" for label in labels)]
    numbers: Numbers = {"columns": columns, "rows": [[*pair, *row] for pair, row in zip(names, values, strict=True)]}
    places = _places(names)
    height = _FRAME + round(_BAR * (places[-1] + 1)) if places else _FRAME
    figure = blank(title, subtitle, height, numbers, definitions=definitions)
    for at, (hue, label) in enumerate(zip(hues.values(), labels, strict=True)):
        mine = [row[at] for row in values]
        figure.add_bar(
            name=label,
            orientation="h",
            x=mine,
            y=places,
            width=0.86,
            text=[f"{value:.0f}" if value >= _LEAST_LABELLED_PCT else "" for value in mine],
            textfont={"color": hue.text, "size": 11},
            marker=fill(hue) | {"pattern": hatched(hue)},
            customdata=[", ".join(pair) for pair in names],
            hovertemplate="%{customdata}: %{x:.1f} % " + f"{label}<extra></extra>",
        )
    most = max((fsum(row) for row in values), default=100)
    if most > 100.5:
        figure.add_vline(x=100, line={"color": INK, "width": 1, "dash": "dot"})
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_traces(textangle=0, textposition="inside", insidetextanchor="middle")
    figure.update_xaxes(range=[0, max(100.5, most)], ticksuffix=" %", dtick=20)
    figure.update_yaxes(
        range=[places[-1] + 0.6 if places else 1, -0.6], showgrid=False, tickfont={"color": INK, "size": 12}
    )
    return figure.update_yaxes(tickvals=places, ticktext=_ticks(names))


def _places(names: Sequence[tuple[str, str]]) -> list[float]:
    """A gap before each new first name."""
    places: list[float] = []
    for at, pair in enumerate(names):
        new = at > 0 and pair[0] != names[at - 1][0]
        places.append(0.0 if not places else places[-1] + (1.6 if new else 1.0))
    return places


def _ticks(names: Sequence[tuple[str, str]]) -> list[str]:
    """The first name at its first bar only."""
    shown: Mapping[int, str] = {at: pair[0] for at, pair in enumerate(names) if not at or pair[0] != names[at - 1][0]}
    return [
        f"{shown[at]}{' · ' * bool(pair[1])}" * (at in shown)
        + f"<span style='color:{MUTED};font-size:11px'>{pair[1]}</span>"
        if at in shown
        else f"<span style='color:{MUTED};font-size:11px'>{pair[1]}</span>"
        for at, pair in enumerate(names)
    ]
