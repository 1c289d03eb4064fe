"""The buddy allocator that the SOSP'23 artifact uses for its Orca baselines.

The pool is divided greedily into aligned chunks of 128, 64, ... 1 blocks (983 = 7*128 + 64 + 16 + 4
+ 2 + 1). An allocation takes the smallest free chunk that fits, the last freed first, and splits it: the upper half
joins the free list until the size matches. A freed chunk merges with its buddy (start XOR size) while the buddy is
free and the size is below 128.
"""

from __future__ import annotations

from ...types.errors import SimulationFault

MAX_CHUNK_BLOCKS = 128


class BuddyArena:
    """Contiguous chunks of power-of-two size over ``num_blocks`` blocks.

    Free lists are dicts used as ordered sets: ``popitem`` takes the last one in, and a buddy is
    removed from the middle at constant cost.
    """

    def __init__(self, num_blocks: int, max_chunk_blocks: int = MAX_CHUNK_BLOCKS) -> None:
        self.num_blocks = num_blocks
        self.max_chunk_blocks = max_chunk_blocks
        self.free_lists: dict[int, dict[int, None]] = {}
        size, start = max_chunk_blocks, 0
        while size:
            self.free_lists[size] = {}
            while start + size <= num_blocks:
                self.free_lists[size][start] = None
                start += size
            size //= 2

    @staticmethod
    def piece_blocks(blocks: int) -> int:
        """Blocks of the chunk for a request of ``blocks``: the next power of two."""
        return 1 << (blocks - 1).bit_length()

    def fits(self, blocks: int) -> bool:
        """Whether a free chunk has at least ``blocks``."""
        for size, starts in self.free_lists.items():
            if size < blocks:
                return False
            if starts:
                return True
        return False

    def allocate(self, blocks: int) -> int:
        """Start of a new chunk of ``blocks`` (a power of two), split from the smallest free chunk that fits.

        Raises:
            SimulationFault: None fits; ask ``fits`` first.
        """
        size = blocks
        while size <= self.max_chunk_blocks and not self.free_lists[size]:
            size *= 2
        if size > self.max_chunk_blocks:
            raise SimulationFault(f"no free chunk holds {blocks} blocks")
        start, _ = self.free_lists[size].popitem()
        while size > blocks:
            size //= 2
            self.free_lists[size][start + size] = None
        return start

    def free(self, start: int, blocks: int) -> None:
        """Free a chunk and merge it with its buddies.

        Raises:
            SimulationFault: The chunk is free already.
        """
        if self._is_free(start, blocks):
            raise SimulationFault(f"chunk of {blocks} blocks at {start} is freed twice")
        while blocks < self.max_chunk_blocks and (start ^ blocks) in self.free_lists[blocks]:
            del self.free_lists[blocks][start ^ blocks]
            start &= ~blocks
            blocks *= 2
        self.free_lists[blocks][start] = None

    def _is_free(self, start: int, blocks: int) -> bool:
        """Whether the chunk is part of a free chunk."""
        for size, starts in self.free_lists.items():
            if size < blocks:
                return False
            if start & -size in starts:
                return True
        return False

    def free_blocks_below(self, blocks: int) -> int:
        """Free blocks in chunks smaller than ``blocks``: stranded for a request of that size."""
        free = 0
        for size, starts in self.free_lists.items():
            if size < blocks:
                free += size * len(starts)
        return free

    def free_pieces(self) -> list[tuple[int, int]]:
        """Free chunks as (start, blocks), by address."""
        return sorted((start, size) for size, starts in self.free_lists.items() for start in starts)

    def free_runs(self) -> list[tuple[int, int]]:
        """Maximal runs of free blocks as (start, length), by address, neighbours joined."""
        runs: list[tuple[int, int]] = []
        first = end = -1
        for start, size in self.free_pieces():
            if start == end:
                runs[-1] = first, start + size - first
            else:
                runs.append((start, size))
                first = start
            end = start + size
        return runs
