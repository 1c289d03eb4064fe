"""Repeated reads: the decodes of a step read a slot once for every block table that names its block.

    tables that decode      [0 2 5]  [0 2 6]  [0 7]         block 0 is read three times, block 2 twice
    an idle table           [0 2 8]                         prefills, or is stalled: it reads nothing as a decode
    repeated                block 0: 2, block 2: 1          entries of decoding tables beyond the first of each block

Pools count the entries beyond the first of all tables. Of a block in r tables, k of them idle, these are r - 1, and those of decodes
are max(0, r - k - 1). The difference is min(k, r - 1), so that only the few idle tables are gone through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Piece = TypeVar("Piece", bound=Hashable)


def idle_repeats(
    entries: Iterable[Piece], references: Callable[[Piece], int], size: Callable[[Piece], int] = lambda _: 1
) -> int:
    """What the tables that do not decode add to the repeated entries of all tables.

    Args:
        entries: What these tables name: blocks, or pieces of several blocks that are named together.
        references: Tables that name a piece, idle ones included.
        size: Blocks, or slots, of a piece.
    """
    return sum(min(count, references(piece) - 1) * size(piece) for piece, count in Counter(entries).items())
