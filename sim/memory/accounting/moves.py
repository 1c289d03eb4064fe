"""Contents that change place: what block tables, and contiguous pieces, note for a recording."""

from __future__ import annotations


class Moves:
    """What moves before a step computes: swap outs first, then swap ins, then copies.

    Attributes:
        swap_outs: (device block, host block).
        swap_ins: (host block, device block).
        copies: (block, or first slot, that is copied; the one that is written; slots). None is written that another
            one is copied from.
    """

    __slots__ = ("copies", "swap_ins", "swap_outs")

    def __init__(self) -> None:
        self.swap_outs: list[tuple[int, int]] = []
        self.swap_ins: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int, int]] = []

    def clear(self) -> None:
        """They are done."""
        for moves in (self.swap_outs, self.swap_ins, self.copies):
            moves.clear()
