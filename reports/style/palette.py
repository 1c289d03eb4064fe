"""Every colour of the reports: safe for colour-blind readers, in a light and a dark form.

The nine buckets take the eight colours of Okabe and Ito ("Color Universal Design", 2008) plus a grey for free
slots. Colour is never alone: stacks keep one order, neighbours differ in lightness, and some buckets are hatched.

A figure is built with the light forms; ``DARK`` maps each of them to its dark form, so that a page can recolour a
finished figure without knowing its contents. Hence one light colour has one dark form.

The lines and points of several runs differ in colour, dash and symbol.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...sim.memory.accounting.buckets import BUCKETS as _NAMES
from ...sim.memory.accounting.buckets import DECLARED
from ...sim.memory.accounting.worths import WORTHS


@dataclass(frozen=True, slots=True)
class Hue:
    """A fill in its light and dark form, the colour of text on it (light form) and its hatching (plotly's name)."""

    light: str
    dark: str
    text: str
    hatch: str = ""


INK, PAPER, MUTED, GRID, LINK = "#1b1f24", "#ffffff", "#57606a", "#d5dbe1", "#0550ae"
BLACK_TEXT = "#0b0b0b"

BUCKETS: dict[str, Hue] = {bucket: Hue(*DECLARED[bucket].hue) for bucket in _NAMES}
"""The ledger's buckets, in the order in which they are stacked."""

WORTH_HUES: dict[str, Hue] = {name: Hue(*worth.hue, BLACK_TEXT) for name, worth in WORTHS.items()}
"""What cached slots were worth, in the order in which they are stacked."""

_BLUE, _SKY, _VERMILLION, _ORANGE, _PURPLE, _BLACK, _GREEN, _GREY = (
    BUCKETS[bucket]
    for bucket in ("live", "reserved", "over_estimate", "round_up", "finished_hold", "stranded", "cached", "free")
)

PARTS: dict[str, Hue] = {
    "token_states": _BLUE,
    "reservation": _SKY,
    "internal": _VERMILLION,
    "external_and_others": _ORANGE,
    "unused": _GREY,
}
"""The categories of the paper's view, and the part of the last that is unused; each has the colour of the bucket that is most
of it."""

STATES: dict[str, Hue] = {"prefill": _BLUE, "decode": _SKY, "finished_hold": _PURPLE, "waiting": _GREY}
"""What a sequence does in an iteration, in stories."""

GOOD, MIDDLING, BAD = _GREEN.light, _ORANGE.light, _VERMILLION.light
"""Grades of a comparison; a symbol always goes with them."""

REFERENCE = Hue("#8c959f", "#8b949e", BLACK_TEXT)
"""Published values, where they stand beside simulated ones."""

MEMORY: dict[str, Hue] = {
    "weights": REFERENCE,
    "activations": _ORANGE,
    "cuda_graphs": Hue(REFERENCE.light, REFERENCE.dark, BLACK_TEXT, hatch="x"),
    "outside_torch": Hue(_ORANGE.light, _ORANGE.dark, BLACK_TEXT, hatch="/"),
    "live": _BLUE,
    "state": _PURPLE,
    "reserved": _SKY,
    "block_tail": BUCKETS["block_tail"],
    "page_padding": _VERMILLION,
    "stranded": _BLACK,
    "cached": _GREEN,
    "free": _GREY,
    "never_used": Hue(_GREY.light, _GREY.dark, INK, hatch="/"),
}
"""A GPU's memory, in the order in which it is stacked: beside the KV cache, the KV cache in bytes, and the rest."""

TIERS: tuple[Hue, ...] = (_BLUE, _SKY, _GREEN, _ORANGE, _PURPLE, _GREY)
"""Of a prefix cache: the GPU, the host, the tiers behind it, and what none of them has."""

TIMELINE: dict[str, Hue] = {
    "queued": REFERENCE,
    "prefill": _BLUE,
    "decode": _SKY,
    "preempted": _VERMILLION,
    "swapped": _PURPLE,
    "stalled": _BLACK,
}
"""What a request does, over time."""

DARK: dict[str, str] = {
    INK: "#e6edf3",
    PAPER: "#0f1419",
    MUTED: "#9da7b1",
    GRID: "#343c45",
    LINK: "#79b8ff",
    REFERENCE.light: REFERENCE.dark,
    **{hue.light: hue.dark for hue in BUCKETS.values()},
}
"""Light form to dark form. Text on a coloured fill keeps its colour and is not listed."""


def dark(colour: str) -> str:
    """The dark form of a light colour; a colour without one is returned unchanged."""
    return DARK.get(colour, colour)


def mixed(colour: str, ground: str, share: float) -> str:
    """A share of one ``#rrggbb`` on another."""
    pairs = ((int(colour[at : at + 2], 16), int(ground[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(share * own + (1 - share) * below):02x}" for own, below in pairs)


_HUES = [BUCKETS[name].light for name in ("live", "over_estimate", "cached", "finished_hold", "round_up", "reserved")]
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
_DASHES = ("solid", "dash", "dashdot", "dot", "longdash", "longdashdot")
#: Series with colours of their own.
COLOURED = len(_HUES)


def colour(place: int) -> str:
    """The colour of a series by index, from 0; series after the sixth share a grey."""
    return _HUES[place] if place < COLOURED else MUTED


def symbol(place: int) -> str:
    """The marker of a series by index."""
    return _SYMBOLS[place % len(_SYMBOLS)]


def dash(place: int) -> str:
    """The dash of a series by index."""
    return _DASHES[place % len(_DASHES)]
