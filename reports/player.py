"""What a page needs to play block maps: pictures, and beside them what the pixels leave out.

The picture says of each block what it is; who holds it, with how many tokens and references, lies in *planes*: integers
[rows, columns], deflated and written as base64, which the page's script inflates. In a long run hardly a request is
there for two columns, so that its number would not be short: a plane says which of the requests of its column it is.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..sim.blocks import NOBODY, BlockMap
from ..sim.ticks import PER_SECOND
from .block_palette import KIND_LABELS, KINDS, SHADES, palette
from .fig_blocks import block_map, request_of
from .look import note

#: Of the longest run: so much shorter ones leave room to say when they were done.
_MUCH_SOONER = 0.8
#: Arrays of JavaScript, the smallest first, and what they hold.
_ARRAYS = {"Uint8Array": (0, 2**8 - 1), "Uint16Array": (0, 2**16 - 1), "Int32Array": (-(2**31), 2**31 - 1)}
_DTYPES = {"Uint8Array": "<u1", "Uint16Array": "<u2", "Int32Array": "<i4"}


@dataclass(frozen=True, eq=False)
class PlayedMap:
    """A map beside others that run on the same clock.

    Attributes:
        name: What its run is called.
        found: What was recorded.
        requests: int64 [sequences], the request of each sequence.
    """

    name: str
    found: BlockMap
    requests: np.ndarray

    def figure(self) -> go.Figure:
        """The picture; the page itself follows the pointer."""
        return block_map(self.found, self.name, self.requests, follows=False)

    def data(self) -> dict[str, Any]:
        """What the script reads."""
        found = self.found
        request = request_of(found, self.requests)
        first = np.searchsorted(self.requests, np.arange(len(self.requests)))
        sample = np.where(found.sequence == NOBODY, 0, found.sequence - first[self.requests[found.sequence]])
        holders = [np.unique(column, return_inverse=True) for column in request]
        place = np.stack([each for _, each in holders])
        planes = {"holder": place, "sample": sample, "live": found.live_slots, "references": found.references}
        return {
            "name": self.name,
            "rows": len(found.block_ids),
            "columns": found.num_columns,
            "block_size": found.meta["block_size"],
            "end_s": found.meta["end_ticks"] / PER_SECOND,
            "block_ids": packed(found.block_ids),
            "start_s": (found.start_ticks / PER_SECOND).tolist(),
            "planes": {name: packed(plane.T) for name, plane in planes.items()},
            "requests": packed(np.concatenate([names for names, _ in holders])),
            "first_requests": packed(np.cumsum([0, *(len(names) for names, _ in holders)])),
            "census": packed(found.census_slots),
            "largest_free": packed(found.largest_free_blocks),
            "preemptions": packed(np.searchsorted(found.preempted_ticks, found.at_ticks, side="right")),
        }


def packed(values: np.ndarray) -> dict[str, str]:
    """Integers, deflated, in base64, and the kind of JavaScript array that holds them."""
    lowest, highest = (int(bound) for bound in (values.min(initial=0), values.max(initial=0)))
    kind = next(kind for kind, (least, most) in _ARRAYS.items() if least <= lowest and highest <= most)
    content = np.ascontiguousarray(values, dtype=_DTYPES[kind]).tobytes()
    return {"kind": kind, "text": base64.b64encode(zlib.compress(content)).decode("ascii")}


class Player:
    """Block maps of one or several runs, side by side, on one clock (a ``page.Widget``)."""

    kind = "player"

    def __init__(self, maps: Sequence[PlayedMap]) -> None:
        self.figures = [played.figure() for played in maps]
        self.data = [played.data() for played in maps]
        longest_s = max(played["end_s"] for played in self.data)
        for figure, played in zip(self.figures, self.data, strict=True):
            # Legends of one and of two lines leave the maps side by side at one height.
            figure.update_layout(margin_t=58)
            figure.update_xaxes(range=[0, longest_s])
            if played["end_s"] < _MUCH_SOONER * longest_s:
                told = f"all served<br>after {played['end_s']:,.0f} s"
                note(figure, told, x=played["end_s"], y=0.5, yref="paper", xanchor="left", xshift=12, align="left")
        self.constants = {"block_colours": json.dumps(_colours())}


def _colours() -> dict[str, Any]:
    """What pixels mean, and their colours in both schemes."""
    return {
        "shades": SHADES,
        "kinds": list(KINDS),
        "labels": [KIND_LABELS[kind] for kind in KINDS],
        "light": palette(),
        "dark": palette(is_dark=True),
    }
