"""Text Generation Inference: decoding pauses for a prefill only if enough requests wait."""

from __future__ import annotations

from math import floor

import numpy as np

from ..memory import Memory
from ..memory.accounting.kv_groups import PageGroups
from ..memory.contiguous.contiguous import ContiguousTransaction
from ..memory.paged.reserved import ReservedMemory
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .base import Policy, Source, blocks_of
from .options import TgiOptions
from .server import Limits, Pool


class Tgi(Policy[Memory, ContiguousTransaction]):
    """Text Generation Inference.

    Source: huggingface/text-generation-inference at 1d0847a90, ``backends/v3/src/backend.rs``, ``batching_task``, and ``queue.rs``.

    The queue is considered before every decode step, except the one after a batch that was taken while others ran. A
    batch is taken only if at least ``waiting_served_ratio`` times as many requests wait *and* fit as are running, or if
    none was taken for ``max_waiting_tokens`` decode steps. Decoding then pauses, and the new batch is prefilled alone.
    The blocks of prompt + ``max_tokens`` - 1 tokens are allocated at admission, and no sequence is preempted.
    """

    name = "tgi"
    source = Source("TGI 1d0847a90", "source", "2026-11-29: prefix caching is left out")
    system = "Text Generation Inference"
    options_type = TgiOptions
    options: TgiOptions
    reads_max_tokens = True
    default_max_num_seqs = 128
    default_max_num_batched_tokens = 4096

    def __init__(self, limits: Limits, options: TgiOptions | None = None, groups: PageGroups | None = None) -> None:
        super().__init__(limits, options, groups)
        # Decode step at the last prefill: the difference to now counts those since.
        self._prefill_step = 0
        # Whether that prefill paused running sequences.
        self._has_paused = False

    def memory(self, pool: Pool) -> ReservedMemory:
        return ReservedMemory(pool.num_blocks, pool.block_size, pool.ids)

    def schedule(self, state: State, transaction: ContiguousTransaction) -> StepPlan:
        """A batch that prefills, or a step that decodes."""
        if not state.waiting:
            return CARRY_ON
        if self._has_paused and state.decode_step == self._prefill_step:
            # The paused sequences decode before the queue is looked at again.
            return StepPlan(valid_until_horizon=False)
        minimum = self._minimum(state)
        batch = self._batch(state, transaction) if len(state.waiting) >= minimum else []
        if len(batch) < max(1, minimum):
            return StepPlan(stops_at_arrival=len(state.waiting) < minimum)
        self._prefill_step, self._has_paused = state.decode_step, state.batch_size > 0
        for sequence in batch:
            transaction.reserve(self._reserved_tokens(sequence))
        tokens = sum(sequence.start_tokens for sequence in batch)
        return StepPlan(admitted=tuple(batch), prefill_tokens=tokens, valid_until_horizon=False, prefill_only=True)

    def _minimum(self, state: State) -> int:
        """Minimum number of requests of a new batch."""
        waited = 1 + state.decode_step - self._prefill_step
        if not state.batch_size or waited >= self.options.max_waiting_tokens:
            return 0
        return floor(state.batch_size * self.options.waiting_served_ratio)

    def _batch(self, state: State, transaction: ContiguousTransaction) -> list[Sequence]:
        """The requests at the head of the queue that fit."""
        limits, free = self.limits, transaction.free_slots
        batch: list[Sequence] = []
        tokens = 0
        for sequence in state.waiting:
            tokens += sequence.start_tokens
            free -= transaction.memory.slots_of(self._reserved_tokens(sequence))
            too_long = batch and tokens > limits.max_num_batched_tokens
            if too_long or free < 0 or state.batch_size + len(batch) == limits.max_num_seqs:
                break
            batch.append(sequence)
        return batch

    def _reserved_tokens(self, sequence: Sequence) -> int:
        """Tokens for which the sequence reserves blocks (R in the ledger's definitions)."""
        return min(sequence.prompt_tokens + sequence.max_tokens - 1, self.limits.max_model_len)

    def horizon(self, state: State, memory: Memory, limit: int) -> int:
        """While a request waits: steps until a batch of any size is taken."""
        if not state.waiting:
            return limit
        left = self._prefill_step + self.options.max_waiting_tokens - 1 - state.decode_step
        return left if left > 0 else limit

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        most = self.limits.max_model_len - workload.prompt_tokens
        declared = most if workload.max_tokens is None else workload.max_tokens
        return blocks_of(np.minimum(workload.prompt_tokens + declared - 1, self.limits.max_model_len), block_size)
