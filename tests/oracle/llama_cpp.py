"""llama.cpp's server with a KV cache that is split per slot.

``slots`` is the server's array: the sequence in each. ``last_used`` orders their releases. A slot owns its blocks from the start.
"""

from __future__ import annotations

from .iteration import IterationSystem, known
from .model import Limits, Pool, Sequence


class LlamaCpp(IterationSystem):
    """Walks over the slots, as the server does, once for decodes and once for prompts."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__(pool, limits)
        if limits.max_num_seqs is None:
            self.max_num_seqs = max(1, pool.num_blocks // self.blocks_for(limits.max_model_len))
        each = pool.num_blocks // self.max_num_seqs
        self.owned = [list(range(slot * each, (slot + 1) * each)) for slot in range(self.max_num_seqs)]
        self.slots: list[Sequence | None] = [None] * self.max_num_seqs
        self.last_used = [-1] * self.max_num_seqs
        self.clock = 0

    def largest_tokens(self, sequence: Sequence) -> int:
        return sequence.final_tokens

    def refusal(self, sequence: Sequence) -> str | None:
        cells = len(self.owned[0]) * self.pool.block_size
        if self.largest_tokens(sequence) > cells:
            return f"needs {self.largest_tokens(sequence)} cells of a slot of {cells}"
        return None

    def requested_tokens(self, sequence: Sequence) -> int:
        return len(self.owned[0]) * self.pool.block_size

    def decide(self) -> None:
        for sequence in self.waiting:
            self._select_slot(sequence)
        budget = self.limits.max_num_batched_tokens
        for sequence in self.slots:
            if sequence in self.decoding:
                self.computes[sequence] = 1
                budget -= 1
        for slot, sequence in enumerate(self.slots):
            if sequence is not None and sequence not in self.decoding and budget > 0:
                if sequence in self.waiting:
                    self._begin(slot, sequence)
                self.computes[sequence] = min(known(sequence) - self.computed[sequence], budget)
                budget -= self.computes[sequence]

    def _select_slot(self, sequence: Sequence) -> None:
        """The server's loop for the least recently used: the last of those that are equally old."""
        best = None
        for slot, inside in enumerate(self.slots):
            if inside is sequence:
                return
            if inside is None and (best is None or self.last_used[slot] <= self.last_used[best]):
                best = slot
        if best is not None:
            self.slots[best] = sequence

    def _begin(self, slot: int, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.tables[sequence], self.computed[sequence] = self.owned[slot], 0
        self.free = [block for block in self.free if block not in self.owned[slot]]

    def complete(self, now_ticks: int) -> None:
        super().complete(now_ticks)
        for slot, sequence in enumerate(self.slots):
            if sequence is not None and sequence.done:
                self.clock += 1
                self.slots[slot], self.last_used[slot] = None, self.clock
