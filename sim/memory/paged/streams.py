"""A pool that is divided in advance: every slot of the server owns a stream of cells, as llama.cpp's split KV cache.

    |<- stream 0 ->|<- stream 1 ->| ... |<- stream n - 1 ->|<- blocks that are left over ->|

A stream holds one sequence at a time. It is taken whole with the first chunk of a prefill, and given up at the finish. With
prefix caching it then keeps its tokens, until the next sequence that takes it begins.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...types.sequence import Grant, Sequence
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Meter
from ..contiguous.contiguous import ContiguousTransaction
from ..prefix.block_tables import BlockTables
from .reserved import ReservedMemory


class StreamTransaction(ContiguousTransaction):
    """Streams that a step takes. See ``Transaction``."""

    __slots__ = ()
    memory: StreamMemory

    def begin(self, sequence: Sequence, slot: int, found: int) -> None:
        """Reserve the stream of a slot for the sequence that is admitted, or prefilled in chunks, next.

        Args:
            found: The first tokens that the slot keeps and the sequence need not compute.
        """
        memory = self.memory
        self.reserve(memory.stream_tokens)
        memory.slots[sequence] = slot
        memory.kept.pop(slot, None)
        if memory.cache_log:
            sequence.computed_tokens = found
            memory.cache_log.look_up(sequence.index, sequence.start_tokens, found)

    def kept_tokens(self, slot: int) -> int:
        """Tokens that a slot keeps of its last request."""
        return self.memory.kept.get(slot, 0)


class StreamMemory(ReservedMemory):
    """Equal streams of whole blocks, with prefills in chunks. See ``Memory``.

    Args:
        streams: Number of streams.
        caches: Whether streams keep the tokens of a sequence that finished.

    Attributes:
        stream_tokens: Cells of a stream.
        slots: The slot of each sequence that has begun, which is the number of its stream.
        kept: Tokens that streams without such a sequence keep, by slot.
    """

    def __init__(self, num_blocks: int, block_size: int, streams: int, ids: bool, caches: bool) -> None:
        super().__init__(num_blocks, block_size, ids=False)
        self.stream_tokens = num_blocks // streams * block_size
        if ids:
            self.tables = BlockTables(num_blocks, 0, block_size)
            blocks = num_blocks // streams
            self.tables.kept = {slot: self.tables.pool.get_new_blocks(blocks) for slot in range(streams)}
        self.cache_log = self.cached_level = CacheLog(1) if caches else None
        self.slots: dict[Sequence, int] = {}
        self.kept: dict[int, int] = {}
        #: Computed tokens of each sequence in a chunked prefill.
        self._prefills: dict[Sequence, int] = {}

    def transaction(self, decode_step: int) -> StreamTransaction:
        self._transaction = taken = StreamTransaction(self)
        return taken

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """Count a chunk; the first one takes the step's next reservation."""
        if sequence not in self._prefills:
            tokens, slots, start = self._transaction.places.popleft()
            sequence.grant = Grant(tokens, slots, 0, start)
            self._count(sequence, 1)
            if self.tables:
                self.tables.begin(sequence, self.slots[sequence], self.num_blocks)
        self._prefills[sequence] = sequence.computed_tokens

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """As ``ContiguousMemory.admit``; a sequence with a chunked prefill keeps its stream."""
        if self._prefills.pop(sequence, None) is not None:
            grant = sequence.grant
            self._count(sequence, -1)
            self._transaction.places.appendleft((grant.tokens, grant.slots, grant.start))
        elif self.tables:
            self.tables.begin(sequence, self.slots[sequence], self.num_blocks)
        super().admit(sequence, decode_step, padded_tokens, past)

    def _count(self, sequence: Sequence, sign: int) -> None:
        """Add the stream of a chunked prefill to the levels, or subtract it."""
        self.used_slots += sign * sequence.grant.slots
        self._target += sign * self._final(sequence)
        self._asked += sign * self._requested_slots(sequence)

    def release(self, finished: Iterable[Sequence], decode_step: int) -> None:
        """See ``ContiguousMemory``; with prefix caching the streams keep what was computed."""
        finished = list(finished)
        if self.tables:
            for sequence in finished:
                self.tables.keep(sequence, self.slots[sequence])
        super().release(finished, decode_step)
        for sequence in finished:
            slot = self.slots.pop(sequence)
            if self.cached_level:
                self.kept[slot] = sequence.held_tokens(decode_step)
        if self.cached_level:
            self.cached_level.end_row(sum(self.kept.values()))

    def advance(self, state: State, steps: int) -> Meter:
        """See ``ContiguousMemory``: the computed tokens of chunked prefills are live, too."""
        if self.cached_level:
            self.cached_level.enter_row(sum(self.kept.values()))
        live, *others = super().advance(state, steps)
        return live + sum(self._prefills.values()), *others

    def cached_block_ids(self) -> np.ndarray:
        if self.tables is None:
            return super().cached_block_ids()
        streams, size = self.tables.kept, self.block_size
        kept = [streams[slot][: -(-tokens // size)] for slot, tokens in self.kept.items()]
        return np.array([block for blocks in kept for block in blocks], dtype=np.int64)
