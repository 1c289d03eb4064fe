"""Paged memory that gives a sequence all the blocks it may ever need when it is admitted."""

from __future__ import annotations

from collections.abc import Iterable

from ...types.sequence import Sequence
from ..contiguous.contiguous import ContiguousMemory
from ..interface.memory import Placement
from ..prefix.block_tables import BlockTables


class ReservedMemory(ContiguousMemory):
    """Reserves, at admission, all blocks that a sequence may ever need, anywhere in the pool.

    Slots after the last token of the request are ``block_tail``.
    """

    def __init__(self, num_blocks: int, block_size: int, ids: bool) -> None:
        super().__init__(num_blocks, block_size)
        self.tables: BlockTables | None = BlockTables(num_blocks, 0, block_size) if ids else None

    @property
    def placement(self) -> Placement | None:
        """See ``Memory``: blocks lie anywhere."""
        return None

    def slots_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size) * self.block_size

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        super().admit(sequence, decode_step, padded_tokens, past)
        if self.tables:
            self.tables.hold(sequence, sequence.grant.slots)

    def release(self, finished: Iterable[Sequence], decode_step: int) -> None:
        super().release(finished, decode_step)
        if self.tables:
            for sequence in finished:
                self.tables.drop(sequence)
