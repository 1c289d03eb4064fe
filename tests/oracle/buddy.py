"""A buddy arena over block positions."""

from __future__ import annotations

MAX_CHUNK_BLOCKS = 128


class BuddyArena:
    """Free chunks in one list a size, last in first out; a chunk is its first block, the size is the list's."""

    def __init__(self, num_blocks: int) -> None:
        self.free: dict[int, list[int]] = {}
        start, size = 0, MAX_CHUNK_BLOCKS
        while size >= 1:
            self.free[size] = []
            while num_blocks - start >= size:
                self.free[size].append(start)
                start += size
            size //= 2
        self.largest_blocks = max((size for size, starts in self.free.items() if starts), default=0)

    def allocate(self, blocks: int) -> int:
        """The first block of a chunk of ``blocks`` (a power of two); ValueError if no free chunk is large enough."""
        size = min(size for size, starts in self.free.items() if size >= blocks and starts)
        start = self.free[size].pop()
        while size > blocks:
            size //= 2
            self.free[size].append(start + size)
        return start

    def release(self, start: int, blocks: int) -> None:
        """Take a chunk back, merged with its buddy for as long as that is free."""
        while blocks < MAX_CHUNK_BLOCKS and start ^ blocks in self.free[blocks]:
            buddy = start ^ blocks
            self.free[blocks].remove(buddy)
            start = min(start, buddy)
            blocks *= 2
        self.free[blocks].append(start)

    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Free chunks as (first block, blocks), by address."""
        return tuple(sorted((start, size) for size, starts in self.free.items() for start in starts))
