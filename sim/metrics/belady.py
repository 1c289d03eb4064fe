"""The most hits of any order of eviction, where it is known what is asked for and when: Belady's MIN.

A block that is asked for twice lies between both times,

    used                  asked for again
    |---- kept, or not ----|

and the second time is a hit if it was kept all the time. At each moment at most as many blocks are kept as there is room for. Each
such span is one hit, so the best choice drops, whenever there are too many, the one with the last end; for intervals of weight 1 and
a capacity that varies it is optimal. A block that is not kept at all is one whose span is dropped where it starts. Of spans with the
same end it is left open which go: along a chain of blocks the deeper ones, as who asks for a block asks for those before it.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..types.sums import distinct


class Spans(NamedTuple):
    """Spans between two moments, which count from 0; int64 [spans].

    Attributes:
        start, end: Moments, ``start`` before ``end``.
        blocks: How many blocks have this span.
    """

    start: np.ndarray
    end: np.ndarray
    blocks: np.ndarray


class Kept(NamedTuple):
    """The best choice.

    Attributes:
        hits: Blocks that are kept to each end, where there are any.
        missing: How much more room would keep all.
    """

    hits: dict[int, int]
    missing: int


def most_kept(room: np.ndarray, spans: Spans) -> Kept:
    """The most blocks that can be kept to the ends of their spans.

    Args:
        room: Blocks that can be kept from each moment to the next, int64.
    """
    # What is kept changes at both ends of spans: between them only the least room counts.
    edges = distinct(np.concatenate([spans.start, spans.end]))
    if not len(edges):
        return Kept({}, 0)
    least = np.minimum.reduceat(room, edges)
    wanted = np.zeros(len(edges), dtype=np.int64)
    np.add.at(wanted, np.searchsorted(edges, spans.start), spans.blocks)
    np.add.at(wanted, np.searchsorted(edges, spans.end), -spans.blocks)
    missing = max(0, int((np.cumsum(wanted) - least).max()))
    order = np.argsort(spans.start, kind="stable")
    starts, ends, blocks = spans.start[order], spans.end[order].tolist(), spans.blocks[order].tolist()
    bounds = np.searchsorted(starts, np.append(edges, edges[-1] + 1)).tolist()
    hits: dict[int, int] = {}
    # Blocks that are kept to each end, and the ends by the last first.
    kept: dict[int, int] = {}
    last: list[int] = []
    held = 0
    for moment, most, (first, stop) in zip(edges.tolist(), least.tolist(), pairwise(bounds), strict=True):
        here = kept.pop(moment, 0)
        if here:
            hits[moment] = here
            held -= here
        for at in range(first, stop):
            end = ends[at]
            if end in kept:
                kept[end] += blocks[at]
            else:
                kept[end] = blocks[at]
                heappush(last, -end)
            held += blocks[at]
        while held > most:
            end = -last[0]
            gone = min(held - most, kept.get(end, 0))
            held -= gone
            if gone == kept.get(end, 0):
                heappop(last)
                kept.pop(end, None)
            else:
                kept[end] -= gone
    return Kept(hits, missing)
