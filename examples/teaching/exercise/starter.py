"""Exercise: write the allocator. Fill the six gaps, then run: python check.py

The allocator hands out the blocks of a pool, keeps a block table for each sequence, and counts references. No gap needs
more than six lines. Lessons 1 to 4 and ``fragmeter story samples`` show what it has to do; ``check.py`` says what is missing.
At the end it replays runs of the simulator on your allocator: every table must be the simulator's, step by step.
"""

from __future__ import annotations


class Allocator:
    """Blocks of a pool, block tables, and reference counts.

    Attributes:
        block_size: Slots of a block; a slot holds one token.
        free: Free blocks. The last one is the next to be taken.
        references: For each block the number of table entries that name it.
        tables: For each sequence its block table: the physical block of logical block 0, 1, 2, ...
        tokens: For each sequence the tokens in its slots.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks))[::-1]
        self.references = [0] * num_blocks
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}

    def take(self) -> int:
        """A free block, which has one reference from now on.

        Raises:
            MemoryError: No block is free.
        """
        raise NotImplementedError("gap 1")

    def drop(self, block: int) -> None:
        """One table less names the block. A block that no table names is free again, and the next to be taken."""
        raise NotImplementedError("gap 2")

    def admit(self, sequence: str, prompt_tokens: int) -> None:
        """A new sequence takes as many blocks as its prompt needs, and no more.

        Raises:
            MemoryError: Too few blocks are free; then nothing has changed.
        """
        raise NotImplementedError("gap 3")

    def append(self, sequence: str) -> tuple[int, int] | None:
        """Make a slot ready for one more token.

        A full table takes a new block. If another table names the last block too, the sequence takes a new block in its
        place, and the caller copies the contents (copy on write). Else nothing has to be done.

        Returns:
            The block to copy from and the one to copy to, or None.
        """
        raise NotImplementedError("gap 4")

    def fork(self, parent: str, child: str) -> None:
        """The child begins with all tokens of the parent and shares all of its blocks."""
        raise NotImplementedError("gap 5")

    def release(self, sequence: str) -> None:
        """The sequence is done: its table names its blocks no more, the first logical block first."""
        raise NotImplementedError("gap 6")
