"""Physical blocks with reference counts, as a paged engine hands them out."""

from __future__ import annotations

from ..errors import SimulationFault


class BlockPool:
    """Fixed-size blocks with real ids; the last one freed is the first one taken.

    A block's reference count is the number of table entries that name it (invariant 2).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reference_counts = [0] * num_blocks
        self._free_ids = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free_ids)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """Free block ids, the next one to be taken last."""
        return tuple(self._free_ids)

    def take(self) -> int:
        """A free block, referenced once.

        Raises:
            SimulationFault: No block is free; the policy must have seen to that.
        """
        if not self._free_ids:
            raise SimulationFault("a block is taken from an empty pool")
        block = self._free_ids.pop()
        self.reference_counts[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """``count`` blocks, as ``take`` would give them one after the other."""
        if count > len(self._free_ids):
            raise SimulationFault(f"{count} blocks are taken and {len(self._free_ids)} are free")
        if count == 0:
            return []
        blocks = self._free_ids[: -count - 1 : -1]
        del self._free_ids[-count:]
        for block in blocks:
            self.reference_counts[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more table names ``block``."""
        if not self.reference_counts[block]:
            raise SimulationFault(f"block {block} is shared while it is free")
        self.reference_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One table less names each of ``blocks``; those that nobody names are free again."""
        counts, free_ids = self.reference_counts, self._free_ids
        for block in blocks:
            count = counts[block] - 1
            if count < 0:
                raise SimulationFault(f"block {block} is released while it is free")
            counts[block] = count
            if not count:
                free_ids.append(block)
