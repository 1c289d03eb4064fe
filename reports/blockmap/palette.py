"""The colours of the block map: used slots are cool, waste is warm, and every request has its own shade.

A pixel's palette index gives the state of the block, and the shade of the request that holds it:

    held      index = kind * SHADES + shade       live, reserved, over_estimate, block_tail, round_up, finished_hold
              shade = request * _STRIDE modulo SHADES, so that consecutive requests differ
    others    one index each, after those         stranded, cached, free, and free since a preemption

Without shades the index is the kind. In the light and in the dark form each index has a colour of its own, so that a
program can read a picture back.
"""

from __future__ import annotations

from colorsys import hls_to_rgb

import numpy as np

from ...sim.memory.accounting.buckets import BUCKETS, DECLARED, NOT_HELD, Hls
from ...sim.recording.blocks import NO_SEQUENCE

SHADES = 12
KINDS: tuple[str, ...] = (*BUCKETS, "given_up")
"""What a block can be, by its number in a recorded map."""

KIND_LABELS: dict[str, str] = {bucket: DECLARED[bucket].label for bucket in BUCKETS} | {
    "given_up": "free since a preemption"
}
_HELD_KINDS = KINDS.index(NOT_HELD[0])
#: Coprime to SHADES, so that consecutive requests are far apart.
_STRIDE = 5

#: Hue in degrees, lightness and saturation in percent: of the light form, then of the dark one; and the range of hue
#: and lightness around these over the shades.
_BASE: dict[str, tuple[Hls, Hls, float, float]] = {bucket: DECLARED[bucket].on_map for bucket in BUCKETS} | {
    "given_up": ((346, 46, 84), (346, 46, 84), 0, 0)
}


def palette(is_dark: bool = False) -> list[str]:
    """A distinct colour for every index, as ``#rrggbb``."""
    held = [_colour(kind, shade, is_dark) for kind in KINDS[:_HELD_KINDS] for shade in range(SHADES)]
    return [*held, *plain_palette(is_dark)[_HELD_KINDS:]]


def plain_palette(is_dark: bool = False) -> list[str]:
    """A colour for every kind, as ``#rrggbb``; for kinds held by a request the base colour, which is not one of the shades."""
    return [_hex(*(_BASE[kind][1] if is_dark else _BASE[kind][0])) for kind in KINDS]


def legend_colour(kind: str) -> str:
    """The legend colour of a kind, in its light form."""
    return _hex(*_BASE[kind][0])


def legend_colours() -> dict[str, str]:
    """Map from the light form to the dark form of each ``legend_colour``."""
    return {legend_colour(kind): _hex(*_BASE[kind][1]) for kind in KINDS}


def indices(kind: np.ndarray, request: np.ndarray) -> np.ndarray:
    """The palette index of each pixel, uint8; ``request`` is ``NO_SEQUENCE`` for blocks without a request."""
    shade = np.where(request == NO_SEQUENCE, 0, request * _STRIDE % SHADES)
    own = kind.astype(np.int64)
    others = _HELD_KINDS * (SHADES - 1) + own
    return np.where(own < _HELD_KINDS, own * SHADES + shade, others).astype(np.uint8)


def _colour(kind: str, shade: int, is_dark: bool) -> str:
    light, dark, hue_width, lightness_width = _BASE[kind]
    hue, lightness, saturation = dark if is_dark else light
    # Six hues at two lightness levels, all shades distinct.
    step, level = divmod(shade, 2)
    hue += hue_width * (step / 2.5 - 1)
    lightness += lightness_width * (level * 2 - 1) * (0.75 + 0.05 * step)
    return _hex(hue, lightness, saturation)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    channels = hls_to_rgb(hue % 360 / 360, min(max(lightness, 0), 100) / 100, saturation / 100)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
