"""LightLLM: admission by an estimate of the peak memory use of all running sequences."""

from __future__ import annotations

from itertools import accumulate
from math import ceil

import numpy as np

from ..memory.paged.transaction import PagedTransaction
from ..types.sequence import Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .base import blocks_of
from .options import LightLLMOptions
from .trtllm import TrtllmMaxUtil


class LightLLM(TrtllmMaxUtil):
    """LightLLM's TokenAttention (``req_queue.py``): blocks of one token, admission by the estimated peak.

    Sort the sequences by the tokens left to generate, most first. When the i-th of them finishes, the memory in use is
    ``left_i * i + held_1 + ... + held_i``. Waiting sequences are admitted in order while the largest of these sums stays
    within the pool. If running sequences need more slots than are free, because outputs were longer than
    estimated, the last one is paused.

    While a sequence waits for memory, every step is a decision: the estimate rises and falls from step to step.
    """

    name = "lightllm"
    system = "LightLLM"
    options_type = LightLLMOptions
    options: LightLLMOptions
    reads_max_tokens = True
    default_max_num_seqs = 1000
    default_block_size = 1

    def _admit(self, state: State, transaction: PagedTransaction) -> StepPlan:
        limits, running, decode_step = self.limits, state.batch_size, state.decode_step
        peaks = [(self._left(s, decode_step - s.start_step), s.held_tokens(decode_step) + 1) for s in state.running]
        admitted: list[Sequence] = []
        tokens, budget = 0, limits.max_num_batched_tokens - running
        free = transaction.free - transaction.need
        for sequence in state.waiting:
            prefill = sequence.start_tokens
            if running == limits.max_num_seqs:
                return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens, wakes=False)
            if running and prefill > budget:
                return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens, steady=not admitted, wakes=False)
            peaks.append((self._left(sequence, 0), prefill))
            # With larger blocks what fits in slots may not fit in blocks.
            free -= transaction.blocks_of(prefill)
            if free < 0 or _peak(peaks) > transaction.memory.capacity_slots:
                return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens, steady=False, wakes=False)
            running += 1
            tokens += prefill
            budget -= prefill
            admitted.append(sequence)
        return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens)

    def _left(self, sequence: Sequence, steps: int) -> int:
        """Tokens that the sequence is estimated to generate after this step, the first ``steps`` since its
        admission being over."""
        estimate = ceil(sequence.max_tokens * self.options.output_estimate)
        return max(0, estimate - sequence.generated_tokens - 1 - steps)

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        # Alone, too, a request is held to its estimate.
        most = self.limits.max_model_len - workload.prompt_tokens
        declared = most if workload.max_tokens is None else workload.max_tokens
        outputs = np.maximum(np.ceil(declared * self.options.output_estimate).astype(np.int64), workload.output_tokens)
        return blocks_of(workload.prompt_tokens + outputs - 1, block_size)


def _peak(sequences: list[tuple[int, int]]) -> int:
    """Maximum number of slots in use at once, given (left to generate, held) of each sequence."""
    ordered = sorted(sequences, reverse=True)
    held = accumulate(slots for _, slots in ordered)
    return max(left * number + so_far for number, ((left, _), so_far) in enumerate(zip(ordered, held, strict=True), 1))
