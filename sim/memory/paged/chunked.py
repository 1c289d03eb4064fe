"""Paged memory for prefills over several steps.

While its prefill goes on a sequence is no part of the lockstep: it holds the blocks of the tokens
computed so far, or of its whole prompt, and nothing of it grows but by chunks.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.ledger import METER, Meter
from .paged import PagedMemory


class ChunkedMemory(PagedMemory):
    """As ``PagedMemory``, with prefills in chunks.

    Args:
        whole_prompts: Whether the first chunk takes the blocks of the whole prompt.
    """

    meter: tuple[str, ...] = (*METER[:2], "prefill_tail")

    def __init__(
        self, num_blocks: int, block_size: int, host_blocks: int = 0, ids: bool = False, whole_prompts: bool = False
    ) -> None:
        super().__init__(num_blocks, block_size, host_blocks, ids)
        self._whole_prompts = whole_prompts

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """Blocks for the tokens of a prefill that goes on, those of the chunk in ``decode_step`` included."""
        tokens = sequence.start_tokens if self._whole_prompts else sequence.computed_tokens
        blocks = -(-tokens // self.block_size)
        self.free -= blocks - self.partial.get(sequence, 0)
        self.partial[sequence] = blocks
        if self.tables:
            self.tables.grow_until(decode_step + 1)
            self.tables.hold(sequence, tokens)

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``PagedMemory``; what the prefill held becomes part of it."""
        self.free += self.partial.pop(sequence, 0)
        super().admit(sequence, decode_step, padded_tokens, past)

    def stall(self, sequence: Sequence, decode_step: int) -> None:
        """A running sequence grows no more and keeps its blocks; nothing changes after ``hold_finished``."""
        if sequence in self.partial:
            return
        size, ahead = self.block_size, 1 - sequence.lag
        phase = ahead % size
        self._phases[phase] -= 1
        self._phases[phase + size] -= 1
        self.partial[sequence] = (decode_step - ahead - 1) // size + 1
        if self.tables:
            self.tables.grow_until(decode_step)
            self.tables.park(sequence, phase)

    def drop(self, sequence: Sequence, decode_step: int) -> None:
        """A stalled sequence, or one in a chunked prefill, gives up its blocks."""
        self.free += self.partial.pop(sequence)
        if self.tables:
            self.tables.grow_until(decode_step)
            self.tables.drop(sequence)

    def hold_finished(self, finished: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        for sequence in finished:
            self.stall(sequence, decode_step)

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        if self.tables:
            self.tables.grow_until(decode_step + 1)
        for sequence in leaving:
            if sequence in self.partial:
                self.drop(sequence, decode_step)
            else:
                self.release((sequence,), decode_step)

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``PagedMemory``; a prefill that goes on gives up its blocks too."""
        growing = tuple(sequence for sequence in preempted if sequence not in self.partial)
        for sequence in preempted:
            if sequence in self.partial:
                ChunkedMemory.drop(self, sequence, decode_step)
        super().evict(growing, swapped_out, decode_step)

    def advance(self, state: State, steps: int) -> Meter:
        """See ``PagedMemory``; with the tokens of the prefills that go on, and their block_tail."""
        live, held = super().advance(state, steps)
        tail = sum(max(0, blocks * self.block_size - s.target_tokens) for s, blocks in self.partial.items())
        return live + sum(s.computed_tokens for s in self.partial), held, tail
