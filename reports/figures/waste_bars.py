"""The waste bar: use of a KV pool's slots, one bar per run, as self-contained HTML and as text.

Unlike the plotly figures it needs no script and no style sheet, so it renders in every notebook viewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..style.labels import number
from ..style.palette import PAPER, PARTS

#: Groups of ``sim.metrics.views.HELD_VIEW``, in the order of the bar: label, part of the palette, sign in text.
GROUPS = {
    "live": ("live", "token_states", "█"),
    "reservation": ("reservation", "reservation", "▓"),
    "internal": ("internal fragmentation", "internal", "▒"),
    "external": ("external fragmentation", "external", "░"),
    "free": ("free and cached", "unused", "·"),
}
#: Groups of slots that are reserved or lost and hold no token.
WASTED = ("reservation", "internal", "external")
_TEXT_COLUMNS = 50
#: Sizes of the SVG: units per percent of width, height of a bar, and the percent below which a segment has no number.
_UNITS, _HEIGHT, _LEAST_PCT = 6, 24, 5.0


@dataclass(frozen=True)
class WasteBars:
    """Bars below each other, on one scale.

    Attributes:
        labels: Label of each run.
        shares: Percent of the pool by the names in ``GROUPS``, for each run.
    """

    labels: Sequence[str]
    shares: Sequence[Mapping[str, float]]

    def __str__(self) -> str:
        """One line per run: bar, live and waste in percent; and a line that explains the signs."""
        width = max(map(len, self.labels), default=0)
        lines = [
            f"{label:<{width}} {_text_bar(shares)} {shares['live']:5.1f} % live, {wasted(shares):4.1f} % waste"
            for label, shares in zip(self.labels, self.shares, strict=True)
        ]
        return "\n".join(
            [*lines, f"{'':<{width}} " + "  ".join(f"{sign} {label}" for label, _, sign in GROUPS.values())]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """One self-contained block of HTML: a legend, and an SVG and its numbers for each run."""
        legend = " ".join(
            f'<span style="white-space:nowrap;margin-right:1em"><span style="display:inline-block;width:.8em;height:.8em;'
            f'border:1px solid #8c959f;background:{PARTS[part].light}"></span> {escape(label)}</span>'
            for label, part, _ in GROUPS.values()
        )
        rows = "".join(
            f'<tr><td style="text-align:right">{escape(label)}</td><td>{_svg(label, shares)}</td>'
            f'<td style="text-align:right">{wasted(shares):.1f} % waste</td></tr>'
            for label, shares in zip(self.labels, self.shares, strict=True)
        )
        caption = "Percent of the KV pool, mean over iterations"
        return (
            f'<div><div style="font-size:small">{caption}: {legend}</div>'
            f'<table style="border-collapse:collapse">{rows}</table></div>'
        )


def wasted(shares: Mapping[str, float]) -> float:
    """Percent of the pool that is held without a token: reservation, internal and external fragmentation."""
    return sum(shares[group] for group in WASTED)


def _text_bar(shares: Mapping[str, float]) -> str:
    """A bar of ``_TEXT_COLUMNS`` signs; edges are rounded, so that all bars have the same length."""
    text, so_far = "", 0.0
    for group, (_, _, sign) in GROUPS.items():
        so_far += shares[group]
        text += sign * (round(so_far / 100 * _TEXT_COLUMNS) - len(text))
    return text


def _svg(label: str, shares: Mapping[str, float]) -> str:
    parts, so_far = [], 0.0
    for group, (meaning, part, _) in GROUPS.items():
        share, hue = shares[group], PARTS[part]
        left, width = so_far * _UNITS, share * _UNITS
        so_far += share
        if not share:
            continue
        percent = number("_pct", share)
        parts.append(
            f'<g><title>{escape(meaning)}: {percent} %</title><rect x="{left:.2f}" y="1" width="{width:.2f}" '
            f'height="{_HEIGHT - 2}" fill="{hue.light}" stroke="{PAPER}"/>'
        )
        if share >= _LEAST_PCT:
            parts.append(
                f'<text x="{left + width / 2:.2f}" y="{_HEIGHT / 2}" fill="{hue.text}" font-size="12" '
                f'font-family="sans-serif" text-anchor="middle" dominant-baseline="central">{percent}</text>'
            )
        parts.append("</g>")
    summary = ", ".join(f"{meaning} {shares[group]:.1f} %" for group, (meaning, _, _) in GROUPS.items())
    size = f'width="{100 * _UNITS}" height="{_HEIGHT}" viewBox="0 0 {100 * _UNITS} {_HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(f"{label}: {summary}")}">'
        + ("".join(parts) + "</svg>")
    )
