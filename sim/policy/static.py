"""Static batching: the sequences of a batch start together, are padded to one length, and release memory together."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from ..memory import Memory
from ..memory.contiguous.contiguous import BatchMemory, ContiguousTransaction
from ..types.sequence import Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .base import Policy, Source, blocks_of
from .server import Pool, Server

_LET_IT_RUN = StepPlan(stops_at_arrival=False)
#: SOSP'23, section 6.1: FasterTransformer's batch size on ShareGPT, as large as its memory allows.
PAPER_BATCH = {"opt-13b": 5, "opt-66b": 2, "opt-175b": 24}


class StaticBatching(Policy[Memory, ContiguousTransaction]):
    """Naive static batching, as with a plain Hugging Face ``generate`` behind a queue.

    When the last batch has finished, up to ``max_num_seqs`` waiting sequences start together, first come, first served.
    Each reserves the longest prompt plus the longest allowed output of the batch, contiguous and padded, or the model's
    maximum if that is less and large enough for the padded sequences. The batch grows while the pool has room for these
    reservations. The first sequence of a batch reserves the whole pool if it asks for more.
    """

    name = "static"
    source = Source("naive generate", "definition")
    system = "naive static batches"
    leaves_together = True
    reads_max_tokens = True
    #: The number of sequences of the model's length that fit into the pool; padded batches have no token budget.
    default_max_num_seqs = None
    default_max_num_batched_tokens = 2560
    has_token_budget = False

    def memory(self, pool: Pool) -> BatchMemory:
        return BatchMemory(pool.num_blocks, pool.block_size)

    def schedule(self, state: State, transaction: ContiguousTransaction) -> StepPlan:
        """Admits the next batch when none runs."""
        if state.running:
            return _LET_IT_RUN
        batch: list[Sequence] = []
        for sequence in state.waiting:
            full = len(batch) == self.limits.max_num_seqs
            if full or (batch and not self.fits([*batch, sequence], transaction.free_slots)):
                break
            batch.append(sequence)
        if not batch:
            return StepPlan()
        tokens = min(self.reserved_tokens(batch), transaction.free_slots)
        for _ in batch:
            transaction.reserve(tokens)
        padded = max(sequence.prompt_tokens for sequence in batch)
        return StepPlan(
            admitted=tuple(batch), prefill_tokens=padded * len(batch), padded_tokens=padded, stops_at_arrival=False
        )

    def reserved_tokens(self, batch: Ordered[Sequence]) -> int:
        """Tokens that each sequence of the batch reserves."""
        longest_prompt = max(sequence.prompt_tokens for sequence in batch)
        longest_output = max(sequence.max_tokens for sequence in batch)
        # Padding comes on top of what the model's maximum allows.
        needed = longest_prompt + max(sequence.output_tokens for sequence in batch)
        return max(min(longest_prompt + longest_output, self.limits.max_model_len), needed)

    def fits(self, batch: Ordered[Sequence], pool_slots: int) -> bool:
        """Whether the pool has room for this batch."""
        return len(batch) * self.reserved_tokens(batch) <= pool_slots

    def horizon(self, state: State, memory: Memory, limit: int) -> int:
        return limit

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        return blocks_of(workload.prompt_tokens + workload.output_tokens, block_size)


class FasterTransformer(StaticBatching):
    """FasterTransformer as in the SOSP'23 paper.

    Static batches of at most B sequences (``max_num_seqs``; the paper sets B by model and data set, and the default is
    its value for ShareGPT). A batch stops growing where longest prompt + longest true output exceed 2,040 tokens, and runs
    for its longest output. A longer request runs alone.
    """

    name = "fastertransformer"
    source = Source("SOSP'23, section 6.1", "paper")
    system = "FasterTransformer, SOSP'23"
    max_batch_tokens = 2040

    @classmethod
    def default_seqs(cls, server: Server, longest_in_pool: int) -> int:
        return PAPER_BATCH.get(server.model.name) or super().default_seqs(server, longest_in_pool)

    def fits(self, batch: Ordered[Sequence], pool_slots: int) -> bool:
        longest_prompt = max(sequence.prompt_tokens for sequence in batch)
        longest_output = max(sequence.output_tokens for sequence in batch)
        return longest_prompt + longest_output <= self.max_batch_tokens and super().fits(batch, pool_slots)
