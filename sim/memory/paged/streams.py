"""A pool that is divided in advance: every slot of the server owns a stream of cells, as llama.cpp's split KV cache.

    |<- stream 0 ->|<- stream 1 ->| ... |<- stream n - 1 ->|<- blocks that are left over ->|

A stream holds one sequence at a time. It is taken whole with the first chunk of a prefill, and freed at the finish.
"""

from __future__ import annotations

from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.ledger import Meter
from ..contiguous.contiguous import ContiguousTransaction, Grant
from .reserved import ReservedMemory


class StreamTransaction(ContiguousTransaction):
    """Streams that a step takes. See ``Transaction``."""

    __slots__ = ()
    memory: StreamMemory

    def take_stream(self) -> None:
        """Reserve an idle stream for the sequence that is admitted, or prefilled in chunks, next."""
        self.reserve(self.memory.stream_tokens)


class StreamMemory(ReservedMemory):
    """Equal streams of whole blocks, with prefills in chunks. See ``Memory``.

    Args:
        streams: Number of streams.

    Attributes:
        stream_tokens: Cells of a stream.
    """

    def __init__(self, num_blocks: int, block_size: int, streams: int, ids: bool = False) -> None:
        super().__init__(num_blocks, block_size, ids)
        self.stream_tokens = num_blocks // streams * block_size
        #: Computed tokens of each sequence in a chunked prefill.
        self._prefills: dict[Sequence, int] = {}

    def transaction(self, decode_step: int) -> StreamTransaction:
        """See ``ContiguousMemory``."""
        self._transaction = taken = StreamTransaction(self)
        return taken

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """Count a chunk; the first one takes the step's next reservation."""
        if sequence not in self._prefills:
            tokens, slots, start = self._transaction.places.popleft()
            sequence.grant = Grant(tokens, slots, 0, start)
            self._count(sequence, 1)
            if self.tables:
                self.tables.hold(sequence, slots)
        self._prefills[sequence] = sequence.computed_tokens

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """As ``ContiguousMemory.admit``; a sequence with a chunked prefill keeps its stream."""
        if self._prefills.pop(sequence, None) is not None:
            grant = sequence.grant
            self._count(sequence, -1)
            self._transaction.places.appendleft((grant.tokens, grant.slots, grant.start))
        super().admit(sequence, decode_step, padded_tokens, past)

    def _count(self, sequence: Sequence, sign: int) -> None:
        """Add the stream of a chunked prefill to the levels, or subtract it."""
        self.used_slots += sign * sequence.grant.slots
        self._target += sign * self._final(sequence)
        self._asked += sign * self._requested_slots(sequence)

    def advance(self, state: State, steps: int) -> Meter:
        """See ``ContiguousMemory``: the computed tokens of chunked prefills are live, too."""
        live, *others = super().advance(state, steps)
        return live + sum(self._prefills.values()), *others
