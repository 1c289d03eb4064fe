"""Data of a page's player of block maps: pictures, and planes with the values that pixels do not show.

The picture has the state of each block. *Planes* have its holder, tokens and references: integers [rows, columns],
deflated and in base64, which the page's script inflates. Planes have the columns of the picture and store
differences:

    holder        0 for the holder of the previous column, else 1 + the index of the request in its column
                  (a small number: few requests of a long run span two columns, and request numbers are long);
                  for a block that a preemption freed, its last holder
    live          tokens minus those of a full live block, or of an empty block
    references    references minus the holder's
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...sim.recording.blocks import GIVEN_UP, NO_SEQUENCE, BlockMap
from ...sim.types.ticks import PER_SECOND
from ..style.look import note
from ..style.packing import packed
from .figure import block_map, request_of
from .palette import KIND_LABELS, KINDS, SHADES, palette, plain_palette
from .picture import MOST_BYTES, Picture, picture

#: Of the longest run, so that shorter runs leave room to show when they finished.
_MUCH_SOONER = 0.8


@dataclass(frozen=True, eq=False)
class PlayedMap:
    """A map beside others on the same clock.

    Attributes:
        name: Name of its run.
        found: The recorded map.
        requests: int64 [sequences], the request of each sequence.
        most_bytes: Byte limit of its picture.
        in_steps: Whether a tick of the map is a step: steps then stand for seconds, on the page and in ``data``.
    """

    name: str
    found: BlockMap
    requests: np.ndarray
    most_bytes: int = MOST_BYTES
    in_steps: bool = False

    @cached_property
    def drawn(self) -> Picture:
        """The drawn picture of the map."""
        return picture(self.found, request_of(self.found, self.requests), self.most_bytes)

    def figure(self) -> go.Figure:
        """The figure; the page itself follows the pointer."""
        return block_map(self.found, self.name, self.requests, follows=False, drawn=self.drawn, in_steps=self.in_steps)

    def data(self) -> dict[str, Any]:
        """The data for the script."""
        found, columns = self.found, self.drawn.columns
        unit_ticks = 1 if self.in_steps else PER_SECOND
        request = self._holders()[columns]
        holders = [np.unique(column, return_inverse=True) for column in request]
        place = np.stack([each + 1 for _, each in holders])
        place[1:][request[1:] == request[:-1]] = 0
        planes = {
            "holder": place,
            "sample": self._samples()[columns],
            "live": (found.live_slots - (found.bucket == KINDS.index("live")) * found.meta["block_size"])[columns],
            "references": (found.references - (found.sequence != NO_SEQUENCE))[columns],
        }
        return {
            "name": self.name,
            "in_steps": self.in_steps,
            "rows": len(found.block_ids),
            "columns": len(columns),
            "block_size": found.meta["block_size"],
            "end_s": found.meta["end_ticks"] / unit_ticks,
            "block_ids": packed(found.block_ids),
            "start_s": (found.start_ticks[columns] / unit_ticks).tolist(),
            "planes": {name: packed(plane.T) for name, plane in planes.items()},
            "requests": packed(np.concatenate([names for names, _ in holders])),
            "first_requests": packed(np.cumsum([0, *(len(names) for names, _ in holders)])),
            "census": packed(found.census_slots[columns]),
            "largest_free": packed(found.largest_free_blocks[columns]),
            "preemptions": packed(np.searchsorted(found.preempted_ticks, found.at_ticks[columns], side="right")),
        }

    def _holders(self) -> np.ndarray:
        """The request that holds each block, or that lost it in a preemption, or ``NO_SEQUENCE``; int64 [columns, rows]."""
        requests = request_of(self.found, self.requests)
        last = np.full(requests.shape[1], NO_SEQUENCE)
        for held, kind in zip(requests, self.found.bucket, strict=True):
            last = np.where(held == NO_SEQUENCE, last, held)
            held[kind == GIVEN_UP] = last[kind == GIVEN_UP]
        return requests

    def _samples(self) -> np.ndarray:
        """Index, within its request, of the sequence that holds each block, from 0."""
        first = np.searchsorted(self.requests, np.arange(len(self.requests)))
        held = self.found.sequence
        return np.where(held == NO_SEQUENCE, 0, held - first[self.requests[held]])


class Player:
    """Block maps of one or several runs, side by side, on one clock: all in seconds, or all in steps (a ``page.Widget``)."""

    kind = "player"

    def __init__(self, maps: Sequence[PlayedMap]) -> None:
        self.figures = [played.figure() for played in maps]
        self.data = [played.data() for played in maps]
        longest_s = max(played["end_s"] for played in self.data)
        for figure, played in zip(self.figures, self.data, strict=True):
            figure.update_xaxes(range=[0, longest_s])
            if played["end_s"] < _MUCH_SOONER * longest_s:
                label = f"all served<br>after {played['end_s']:,.0f} s"
                note(figure, label, x=played["end_s"], y=0.5, yref="paper", xanchor="left", xshift=12, align="left")
        self.constants = {"block_colours": json.dumps(_colours())}


def _colours() -> dict[str, Any]:
    """Meanings and colours of pixels, in both colour schemes."""
    return {
        "shades": SHADES,
        "kinds": list(KINDS),
        "labels": KIND_LABELS,
        "light": palette() + plain_palette(),
        "dark": palette(is_dark=True) + plain_palette(is_dark=True),
    }
