"""What a page needs to play block maps: pictures, and beside them what the pixels leave out.

The picture says of each block what it is; who holds it, with how many tokens and references, lies in *planes*: int32
[rows, columns], deflated and written as base64, which the page's script inflates.
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
        planes = {"request": request, "sample": sample, "live": found.live_slots, "references": found.references}
        return {
            "name": self.name,
            "rows": len(found.block_ids),
            "columns": found.num_columns,
            "block_size": found.meta["block_size"],
            "end_s": found.meta["end_ticks"] / PER_SECOND,
            "block_ids": packed(found.block_ids),
            "start_s": (found.start_ticks / PER_SECOND).round(6).tolist(),
            "planes": {name: packed(plane.T) for name, plane in planes.items()},
            "census": packed(found.census_slots),
            "largest_free": packed(found.largest_free_blocks),
            "preemptions": packed(np.searchsorted(found.preempted_ticks, found.at_ticks, side="right")),
        }


def packed(values: np.ndarray) -> str:
    """Integers as int32, deflated, in base64."""
    content = np.ascontiguousarray(values, dtype="<i4").tobytes()
    return base64.b64encode(zlib.compress(content, 9)).decode("ascii")


class Player:
    """Block maps of one or several runs, side by side, on one clock (a ``page.Widget``)."""

    kind = "player"

    def __init__(self, maps: Sequence[PlayedMap]) -> None:
        self.figures = [played.figure() for played in maps]
        self.data = [played.data() for played in maps]
        end_s = max(played["end_s"] for played in self.data)
        for figure in self.figures:
            figure.update_xaxes(range=[0, end_s])
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
