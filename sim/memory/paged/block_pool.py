"""Physical blocks with reference counts, as a paged engine hands them out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...types.errors import Overdrawn, SimulationFault


class BlockPool:
    """Fixed-size blocks with real ids; the last one freed is the first one taken.

    A block's reference count is the number of table entries that name it (invariant 2). Nearly all
    blocks are named once, so only further references are counted one by one: a table that shares
    nothing comes and goes as a whole.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Ids that came back, the last one on top, and below them all from ``_fresh`` on, which were never taken. These
        # are not listed: a pool costs what is taken of it.
        self._free_ids: list[int] = []
        self._fresh = 0
        self._taken: set[int] = set()
        # References beyond the first, of blocks that are shared.
        self._further: dict[int, int] = {}

    def shuffle(self, random: np.random.Generator) -> None:
        """Hand out those that are free now in a random order."""
        self._free_ids, self._fresh = list(self.free_ids), self.num_blocks
        random.shuffle(self._free_ids)

    @property
    def num_free(self) -> int:
        return len(self._free_ids) + self.num_blocks - self._fresh

    @property
    def free_ids(self) -> tuple[int, ...]:
        """Free block ids, the next one to be taken last."""
        return (*range(self.num_blocks - 1, self._fresh - 1, -1), *self._free_ids)

    @property
    def reference_counts(self) -> list[int]:
        """Table entries that name each block."""
        return [(block in self._taken) + self._further.get(block, 0) for block in range(self.num_blocks)]

    def is_shared(self, block: int) -> bool:
        """Whether more than one table entry names ``block``: a writer must copy it first."""
        return block in self._further

    def take(self) -> int:
        """A free block, referenced once.

        Raises:
            Overdrawn: No block is free; the policy must have seen to that.
        """
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """``count`` blocks, as ``take`` would give them one after the other."""
        if count > self.num_free:
            raise Overdrawn(f"{count} blocks are taken and {self.num_free} are free")
        if count == 0:
            return []
        blocks = self._free_ids[: -count - 1 : -1]
        del self._free_ids[-count:]
        if missing := count - len(blocks):
            blocks += range(self._fresh, self._fresh + missing)
            self._fresh += missing
        self._taken.update(blocks)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One table more names each of ``blocks``."""
        if not self._taken.issuperset(blocks):
            free = next(block for block in blocks if block not in self._taken)
            raise SimulationFault(f"block {free} is shared while it is free")
        further = self._further
        for block in blocks:
            further[block] = further.get(block, 0) + 1

    def release(self, blocks: list[int]) -> None:
        """One table less names each of ``blocks``; those that no table names are free again."""
        last = self._drop_further(blocks) if self._further else blocks
        left = len(self._taken) - len(last)
        self._taken.difference_update(last)
        self._free_ids.extend(last)
        if len(self._taken) != left:
            raise SimulationFault(self._complaint(last))

    def _complaint(self, released: list[int]) -> str:
        if len(set(released)) < len(released):
            return "a block is released twice by one table"
        free = next(block for block in released if block >= self._fresh or self._free_ids.count(block) > 1)
        return f"block {free} is released while it is free"

    def _drop_further(self, blocks: list[int]) -> list[int]:
        """Take back one reference of each block; the blocks of which it was the only one."""
        further, last = self._further, []
        for block in blocks:
            count = further.get(block)
            if count is None:
                last.append(block)
            elif count == 1:
                del further[block]
            else:
                further[block] = count - 1
        return last


class BlockQueue(BlockPool):
    """As ``BlockPool``, but the block that is free for longest is the first one taken, as in vLLM before 0.24.

    Of the blocks that a table gives back at once, the last one leads.
    """

    @property
    def free_ids(self) -> tuple[int, ...]:
        """See ``BlockPool``."""
        return (*reversed(self._free_ids), *range(self.num_blocks - 1, self._fresh - 1, -1))

    def take_many(self, count: int) -> list[int]:
        """See ``BlockPool``."""
        if count > self.num_free:
            raise Overdrawn(f"{count} blocks are taken and {self.num_free} are free")
        fresh = min(count, self.num_blocks - self._fresh)
        blocks = [*range(self._fresh, self._fresh + fresh), *self._free_ids[: count - fresh]]
        self._fresh += fresh
        del self._free_ids[: count - fresh]
        self._taken.update(blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """See ``BlockPool``."""
        super().release(blocks[::-1])


def block_pool(num_blocks: int, last_first: bool) -> BlockPool:
    """A pool of which the last block freed is the first one taken, or the last one."""
    return BlockPool(num_blocks) if last_first else BlockQueue(num_blocks)
