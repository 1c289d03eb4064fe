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
from typing import NamedTuple

import numpy as np


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
    edges = np.unique(np.concatenate([spans.start, spans.end]))
    if not len(edges):
        return Kept({}, 0)
    starting: dict[int, list[tuple[int, int]]] = {}
    for start, end, blocks in zip(*(column.tolist() for column in spans), strict=True):
        starting.setdefault(start, []).append((end, blocks))
    hits: dict[int, int] = {}
    # Blocks that are kept to each end, those with a span to it, and the ends by the last first.
    kept: dict[int, int] = {}
    ending: dict[int, int] = {}
    last: list[int] = []
    held = wanted = missing = 0
    for moment, least in zip(edges.tolist(), np.minimum.reduceat(room, edges).tolist(), strict=True):
        here = kept.pop(moment, 0)
        held, wanted = held - here, wanted - ending.pop(moment, 0)
        if here:
            hits[moment] = here
        for end, blocks in starting.get(moment, ()):
            if end not in kept:
                heappush(last, -end)
            kept[end] = kept.get(end, 0) + blocks
            ending[end] = ending.get(end, 0) + blocks
            held, wanted = held + blocks, wanted + blocks
        missing = max(missing, wanted - least)
        while held > least:
            end = -last[0]
            gone = min(held - least, kept.get(end, 0))
            held -= gone
            if gone == kept.get(end, 0):
                heappop(last)
                kept.pop(end, None)
            else:
                kept[end] -= gone
    return Kept(hits, missing)
