"""Colours, dashes and symbols that distinguish the lines and points of several runs."""

from __future__ import annotations

from .palette import BUCKETS, MUTED

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
