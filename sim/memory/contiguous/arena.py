"""Arenas: allocators of contiguous runs of blocks.

Three ways to place a request for b blocks, so that external fragmentation can be compared:

    buddy       a chunk of the next power of two, from the smallest aligned free chunk (``buddy``)
    first-fit   the lowest b blocks of the first free run of at least b blocks
    best-fit    the lowest b blocks of the shortest free run of at least b blocks; ties go to the first

The last two store the free runs by address. An allocation takes the lower end of a run. A freed piece merges with
adjacent free runs, so free runs never touch. Neither rounds the size of a request: their only waste is free
runs that are too short for the waiting sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from ...types.errors import SimulationFault
from .buddy import MAX_CHUNK_BLOCKS, BuddyArena


class Arena(Protocol):
    """Allocates contiguous pieces of ``num_blocks`` blocks."""

    num_blocks: int

    @staticmethod
    def piece_blocks(blocks: int) -> int:
        """Blocks of the piece that a request for ``blocks`` takes; pass this number to ``fits`` and ``allocate``."""

    def fits(self, blocks: int) -> bool:
        """Whether a piece of ``blocks`` can be allocated."""

    def allocate(self, blocks: int) -> int:
        """First block of a new piece of ``blocks``; SimulationFault if none fits."""

    def free(self, start: int, blocks: int) -> None:
        """Free a piece; SimulationFault if a part of it is already free."""

    def free_blocks_below(self, blocks: int) -> int:
        """Free blocks in pieces too small for ``blocks``: stranded for a request of that size."""

    def free_pieces(self) -> list[tuple[int, int]]:
        """Free pieces that can be allocated, as (start, length), by address."""

    def free_runs(self) -> list[tuple[int, int]]:
        """Maximal runs of free blocks as (start, length), by address."""


class FirstFitArena:
    """Takes the lower end of the first free run that is long enough."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Two lists side by side, so that starts can be bisected: of free runs by address, in blocks.
        self._starts, self.lengths = ([0], [num_blocks]) if num_blocks else ([], [])

    @staticmethod
    def piece_blocks(blocks: int) -> int:
        """The requested number: pieces are not rounded."""
        return blocks

    def fits(self, blocks: int) -> bool:
        """Whether a free run has at least ``blocks``."""
        return max(self.lengths, default=0) >= blocks

    def allocate(self, blocks: int) -> int:
        """Start of a new piece of ``blocks``, the lower end of the chosen run.

        Raises:
            SimulationFault: None is long enough; ask ``fits`` first.
        """
        place = self.choose(blocks)
        if place is None:
            raise SimulationFault(f"no free run holds {blocks} blocks")
        start = self._starts[place]
        if self.lengths[place] == blocks:
            del self._starts[place], self.lengths[place]
        else:
            self._starts[place] += blocks
            self.lengths[place] -= blocks
        return start

    def choose(self, blocks: int) -> int | None:
        """Index of the free run to allocate from, in order of addresses; None if none is long enough."""
        return next((place for place, length in enumerate(self.lengths) if length >= blocks), None)

    def free(self, start: int, blocks: int) -> None:
        """Free a piece and merge it with adjacent free runs.

        Raises:
            SimulationFault: A part of it is already free, or outside the pool.
        """
        starts, lengths = self._starts, self.lengths
        place, end = bisect_right(starts, start), start + blocks
        end_below = starts[place - 1] + lengths[place - 1] if place else 0
        start_above = starts[place] if place < len(starts) else self.num_blocks
        if start < end_below or end > start_above:
            raise SimulationFault(f"{blocks} blocks at {start} are freed twice, or lie outside the pool")
        joins_below, joins_above = bool(place) and end_below == start, place < len(starts) and start_above == end
        if joins_above:
            blocks += lengths[place]
            del starts[place], lengths[place]
        if joins_below:
            lengths[place - 1] += blocks
        else:
            starts.insert(place, start)
            lengths.insert(place, blocks)

    def free_blocks_below(self, blocks: int) -> int:
        """Free blocks in runs too short for ``blocks``."""
        return sum(length for length in self.lengths if length < blocks)

    def free_pieces(self) -> list[tuple[int, int]]:
        """The free runs."""
        return self.free_runs()

    def free_runs(self) -> list[tuple[int, int]]:
        """Maximal runs of free blocks as (start, length), by address."""
        return list(zip(self._starts, self.lengths, strict=True))


class BestFitArena(FirstFitArena):
    """Takes the lower end of the shortest free run that is long enough."""

    def choose(self, blocks: int) -> int | None:
        fitting = [(length, place) for place, length in enumerate(self.lengths) if length >= blocks]
        return min(fitting)[1] if fitting else None


def arena(name: str, num_blocks: int, longest_blocks: int) -> Arena:
    """The arena with this name ("buddy", "first-fit", "best-fit") over a pool.

    Args:
        longest_blocks: Blocks of the largest piece that will be requested. A buddy arena has chunks of at least
            128, which as blocks of 16 hold the artifact's 2,048 tokens.
    """
    if name == "buddy":
        return BuddyArena(num_blocks, max(MAX_CHUNK_BLOCKS, BuddyArena.piece_blocks(longest_blocks)))
    return {"first-fit": FirstFitArena, "best-fit": BestFitArena}[name](num_blocks)
