"""Text Generation Inference: decoding pauses for a new batch, and a new batch waits until it is worth the pause.

The queue is looked at before each decode step, but not twice without one: a batch that joins others goes on to decode
with them. The queue must hold, and a batch must fit, ``waiting_served_ratio`` of the running sequences; after
``max_waiting_tokens`` decode steps any batch will do. All blocks that a request may ever fill are taken at admission.
"""

from __future__ import annotations

from math import floor

from .iteration import IterationSystem, known
from .model import Limits, Pool, Sequence, allowed_output_tokens


class Tgi(IterationSystem):
    """Prefill steps and decode steps; after a prefill that others waited for the next step decodes."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__(pool, limits)
        self.counter = 1
        self.has_just_joined = False

    def requested_tokens(self, sequence: Sequence) -> int:
        """R: prompt and allowed output but for its last token, the KV of which is never read."""
        allowed = sequence.request.prompt_tokens + allowed_output_tokens(sequence.request, self.limits) - 1
        return min(allowed, self.limits.max_model_len)

    def largest_tokens(self, sequence: Sequence) -> int:
        return self.requested_tokens(sequence)

    def decide(self) -> None:
        batch = [] if self.has_just_joined else self._next_batch()
        self.has_just_joined = bool(batch and self.running)
        if batch:
            self._prefill(batch)
        else:
            self._decode()

    def _prefill(self, batch: list[Sequence]) -> None:
        for sequence in batch:
            self.admit(known(sequence))
            self.grow(sequence, self.requested_tokens(sequence))
        self.counter = 1

    def _decode(self) -> None:
        for sequence in self.running:
            self.compute(sequence, 1)
        self.counter += 1

    def _minimum(self) -> int:
        """Sequences that a new batch must have."""
        if not self.running or self.counter >= self.limits.max_waiting_tokens:
            return 0
        return floor(len(self.running) * self.limits.waiting_served_ratio)

    def _next_batch(self) -> list[Sequence]:
        """The head of the queue as far as it fits; empty if that is less than the minimum."""
        batch: list[Sequence] = []
        tokens = blocks = 0
        for sequence in self.waiting:
            tokens += known(sequence)
            blocks += self.blocks_for(self.requested_tokens(sequence))
            # The first of a batch goes, however long; with it no other.
            if batch and tokens > self.limits.max_num_batched_tokens:
                break
            if blocks > len(self.free) or len(self.running) + len(batch) == self.max_num_seqs:
                break
            batch.append(sequence)
        return batch if len(batch) >= self._minimum() else []
