"""The waste bar: use of a KV pool's slots, one bar per run, as self-contained HTML and as text.

Unlike the plotly figures it needs no script and no style sheet, so it renders in every notebook viewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ...sim.metrics.views import PAPER_VIEW, UNUSED, WASTE, Category, amount
from ..style.labels import number
from ..style.palette import PAPER, PARTS

_LAST, _UNUSED = "external_and_others", "unused"
#: Pieces of a bar in their order, as keys of the palette: the paper's categories, the last in two pieces. Their signs in text.
_SIGNS = {"token_states": "█", "reservation": "▓", "internal": "▒", _LAST: "░", _UNUSED: "·"}
_TEXT_COLUMNS = 50
#: Sizes of the SVG: units per percent of width, height of a bar, and the percent below which a segment has no number.
_UNITS, _HEIGHT, _LEAST_PCT = 6, 24, 5.0


@dataclass(frozen=True)
class WasteBars:
    """Bars below each other, on one scale, in the paper's view.

    Attributes:
        labels: Label of each run.
        shares: Percent of the pool by the ledger's nine buckets, for each run.
    """

    labels: Sequence[str]
    shares: Sequence[Mapping[str, float]]

    def __str__(self) -> str:
        """One line per run: bar, token states and waste in percent; below them the signs, and a line for each name that defines it."""
        width = max(map(len, self.labels), default=0)
        lines = [
            f"{label:<{width}} {_text_bar(shares)} {_numbers(shares)}"
            for label, shares in zip(self.labels, self.shares, strict=True)
        ]
        signs = "  ".join(f"{''.join(_SIGNS[piece] for piece in pieces)} {each.label}" for pieces, each in _legend())
        defined = (each.defined for each in (*(each for _, each in _legend()), WASTE))
        legend = (f"{signs}: {PAPER_VIEW.title}, mean over iterations", *defined)
        return "\n".join([*lines, *(f"{'':<{width}} {text}" for text in legend)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """One self-contained block of HTML: an SVG and its numbers for each run, and a legend with definitions."""
        legend = [f"{''.join(map(_swatch, pieces))} {escape(each.defined)}" for pieces, each in _legend()]
        rows = "".join(
            f'<tr><td style="text-align:right">{escape(label)}</td><td>{_svg(label, shares)}</td>'
            f'<td style="text-align:right;white-space:nowrap">{_numbers(shares)}</td></tr>'
            for label, shares in zip(self.labels, self.shares, strict=True)
        )
        lines = "".join(f"<div>{line}</div>" for line in (*legend, escape(WASTE.defined)))
        caption = f"Percent of the KV pool, {PAPER_VIEW.title}, mean over iterations"
        return (
            f'<div><div style="font-size:small">{caption}</div><table style="border-collapse:collapse">{rows}</table>'
            f'<div style="font-size:small">{lines}</div></div>'
        )


def _legend() -> list[tuple[tuple[str, ...], Category]]:
    """The pieces of each category."""
    pieces = {_LAST: (_LAST, _UNUSED)}
    categories = [(pieces.get(key, (key,)), category) for key, category in PAPER_VIEW.categories.items()]
    return [*categories, ((_UNUSED,), UNUSED)]


def _swatch(piece: str) -> str:
    box = "display:inline-block;width:.8em;height:.8em;border:1px solid #8c959f"
    return f'<span style="{box};background:{PARTS[piece].light}"></span>'


def _numbers(shares: Mapping[str, float]) -> str:
    states = PAPER_VIEW.categories["token_states"]
    return f"{amount(shares, states):5.1f} % {states.label}, {amount(shares, WASTE):4.1f} % {WASTE.label}"


def _pieces(shares: Mapping[str, float]) -> dict[str, float]:
    """Percent of the pool by piece of a bar."""
    unused, groups = amount(shares, UNUSED), PAPER_VIEW.grouped(shares)
    return groups | {_LAST: groups[_LAST] - unused, _UNUSED: unused}


def _text_bar(shares: Mapping[str, float]) -> str:
    """A bar of ``_TEXT_COLUMNS`` signs; edges are rounded, so that all bars have the same length."""
    text, so_far = "", 0.0
    for piece, share in _pieces(shares).items():
        so_far += share
        text += _SIGNS[piece] * (round(so_far / 100 * _TEXT_COLUMNS) - len(text))
    return text


def _svg(label: str, shares: Mapping[str, float]) -> str:
    named = [(each.label, amount(shares, each)) for each in (*PAPER_VIEW.categories.values(), UNUSED)]
    texts = [f"{meaning} {number('_pct', share)} %" for meaning, share in named]
    parts, so_far = [], 0.0
    for (piece, share), text in zip(_pieces(shares).items(), texts, strict=True):
        hue = PARTS[piece]
        left, width = so_far * _UNITS, share * _UNITS
        so_far += share
        if not share:
            continue
        parts.append(
            f'<g><title>{escape(text)}</title><rect x="{left:.2f}" y="1" width="{width:.2f}" '
            f'height="{_HEIGHT - 2}" fill="{hue.light}" stroke="{PAPER}"/>'
        )
        # A number inside a piece is that of its category: the first of two pieces has none.
        if share >= _LEAST_PCT and text.endswith(f" {number('_pct', share)} %"):
            parts.append(
                f'<text x="{left + width / 2:.2f}" y="{_HEIGHT / 2}" fill="{hue.text}" font-size="12" '
                f'font-family="sans-serif" text-anchor="middle" dominant-baseline="central">{number("_pct", share)}</text>'
            )
        parts.append("</g>")
    summary = f"{label}: {', '.join(texts)}"
    size = f'width="{100 * _UNITS}" height="{_HEIGHT}" viewBox="0 0 {100 * _UNITS} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(summary)}">' + (
        "".join(parts) + "</svg>"
    )
