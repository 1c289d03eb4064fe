"""TensorRT-LLM's two capacity policies for in-flight batching.

Source: NVIDIA/TensorRT-LLM at 02a10fed0, ``cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp``: ``GuaranteedNoEvictScheduler::impl`` and
``MaxUtilizationScheduler::operator()``. Left out: reuse of blocks (``beneficialToSkip``), chunks of contexts, several micro-batches.
"""

from __future__ import annotations

import numpy as np

from ..memory.paged.paged import PagedMemory
from ..memory.paged.transaction import PagedTransaction
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .base import Policy, Source, blocks_of
from .server import Pool

_LEFT_OUT = "2026-11-29: reuse of blocks and chunks of contexts are left out"


class TrtllmNoEvict(Policy[PagedMemory, PagedTransaction]):
    """TensorRT-LLM's ``GUARANTEED_NO_EVICT``: a sequence that is admitted is never paused or preempted.

    Prompts and decodes share a step; blocks are allocated on demand. Waiting sequences are admitted in order while the
    pool can hold all running sequences and the new one *at their completion* (prompt + ``max_tokens``).
    """

    name = "trtllm-no-evict"
    source = Source("TensorRT-LLM 02a10fed0", "source", _LEFT_OUT)
    system = "TensorRT-LLM"
    preempted_first = True
    reads_max_tokens = True
    default_max_num_batched_tokens = 8192

    def memory(self, pool: Pool) -> PagedMemory:
        return PagedMemory(pool.num_blocks, pool.block_size, pool.host_blocks, pool.ids)

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """Running sequences decode; waiting ones are admitted up to the first that does not fit."""
        if not state.waiting:
            return CARRY_ON
        return self._admit(state, transaction)

    def _admit(self, state: State, transaction: PagedTransaction) -> StepPlan:
        limits, running = self.limits, state.batch_size
        left = self._blocks_left(state, transaction)
        admitted: list[Sequence] = []
        tokens, budget = 0, limits.max_num_batched_tokens - running
        for sequence in state.waiting:
            prefill = sequence.start_tokens
            left -= transaction.blocks_of(self._requested_tokens(sequence))
            if left < 0 or running == limits.max_num_seqs:
                return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens, stops_at_arrival=False)
            if running and prefill > budget:
                # Those admitted now cost only a token in the next step; else nothing changes until a finish.
                return StepPlan(
                    admitted=tuple(admitted),
                    prefill_tokens=tokens,
                    valid_until_horizon=not admitted,
                    stops_at_arrival=False,
                )
            running += 1
            tokens += prefill
            budget -= prefill
            admitted.append(sequence)
        return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens)

    def _blocks_left(self, state: State, transaction: PagedTransaction) -> int:
        """Blocks that remain free when all running sequences complete."""
        taken = sum(transaction.blocks_of(self._requested_tokens(sequence)) for sequence in state.running)
        return transaction.memory.num_blocks - taken

    def _requested_tokens(self, sequence: Sequence) -> int:
        """Tokens that an admission requires blocks for."""
        return min(sequence.prompt_tokens + sequence.max_tokens, self.limits.max_model_len)

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """The pool can hold every sequence to its end: only finishes and arrivals change the decision."""
        return limit

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        declared = self.limits.max_model_len if workload.max_tokens is None else workload.max_tokens
        return blocks_of(np.minimum(workload.prompt_tokens + declared, self.limits.max_model_len), block_size)


class TrtllmMaxUtil(TrtllmNoEvict):
    """MAX_UTILIZATION: an admission requires only the blocks of the next step.

    If running sequences find too few blocks, the last one started is paused (recompute) and goes to the front of the
    queue; no sequence is admitted in that step.
    """

    name = "trtllm-max-util"
    source = Source("TensorRT-LLM 02a10fed0", "source", _LEFT_OUT)
    reads_max_tokens = False

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """Running sequences decode or are paused; if none is paused, waiting ones are admitted."""
        paused = self._victims(state, transaction)
        if paused:
            return StepPlan(preempted=paused, valid_until_horizon=False, stops_at_arrival=False)
        return super().schedule(state, transaction)

    def _victims(self, state: State, transaction: PagedTransaction) -> tuple[Sequence, ...]:
        """The last running sequences, as many as must be paused for the others to find their blocks."""
        free, need, paused = transaction.free, transaction.need, []
        kept = list(state.running) if need > free else []
        while need > free:
            victim = kept.pop()
            need -= transaction.needs_block(victim, state.decode_step)
            free += transaction.blocks_of(victim.held_tokens(state.decode_step))
            paused.append(victim)
        return tuple(paused)

    def _blocks_left(self, state: State, transaction: PagedTransaction) -> int:
        return transaction.free - transaction.need

    def _requested_tokens(self, sequence: Sequence) -> int:
        return sequence.start_tokens

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Steps until running sequences need more blocks than are free."""
        return memory.steps_with(state, memory.free, limit)

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        # The last token is never stored.
        return blocks_of(workload.prompt_tokens + workload.output_tokens - 1, block_size)
