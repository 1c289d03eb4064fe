"""LightLLM: admission by an estimate of the peak memory use of all running sequences."""

from __future__ import annotations

from itertools import accumulate
from math import ceil

import numpy as np

from ..memory.paged.paged import PagedMemory
from ..memory.paged.transaction import PagedTransaction
from ..types.sequence import Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .base import Source, blocks_of
from .options import LightLLMOptions
from .trtllm import TrtllmMaxUtil

#: Steps of a decision that only a finish or an arrival changes.
FOREVER = 1 << 62


class LightLLM(TrtllmMaxUtil):
    """LightLLM's TokenAttention: blocks of one token, admission by the estimated peak.

    Source: ModelTC/lightllm at 051a2bcf8, ``lightllm/server/router/req_queue/continues_batch/impl.py``, ``_can_add_new_req``.

    Sort the sequences by the tokens left to generate, most first. When the i-th of them finishes, the memory in use is
    ``left_i * i + held_1 + ... + held_i``. Waiting sequences are admitted in order while the largest of these sums stays
    within the pool. If running sequences need more slots than are free, because outputs were longer than
    estimated, the last one is paused.

    The estimate rises and falls from step to step. The largest sum above is that of any set of sequences, because all that
    have as much left only add to it. So a waiting sequence remains refused at least as long as the sum of the set that
    refused it exceeds the pool, and a leap spans these steps.
    """

    name = "lightllm"
    source = Source(
        "LightLLM 051a2bcf8",
        "source",
        "2026-11-30: a peak equal to the pool is admitted here; its prefix cache is left out",
    )
    system = "LightLLM"
    options_type = LightLLMOptions
    options: LightLLMOptions
    reads_max_tokens = True
    default_max_num_seqs = 1000
    default_block_size = 1
    #: Steps, the decided one included, in which memory refuses the first waiting sequence whatever the others do.
    _refused_steps = FOREVER

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Steps until running sequences need more slots than are free, or the first waiting sequence may fit."""
        steps = super().horizon(state, memory, limit)
        return min(steps, self._refused_steps) if state.waiting else steps

    def _admit(self, state: State, transaction: PagedTransaction) -> StepPlan:
        limits, running, decode_step = self.limits, state.batch_size, state.decode_step
        peaks = [(self._left(s, decode_step - s.start_step), s.held_tokens(decode_step) + 1) for s in state.running]
        admitted: list[Sequence] = []
        tokens, budget = 0, limits.max_num_batched_tokens - running
        free = transaction.free - transaction.need
        self._refused_steps = FOREVER
        for sequence in state.waiting:
            prefill = sequence.start_tokens
            if running == limits.max_num_seqs:
                return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens, stops_at_arrival=False)
            if running and prefill > budget:
                return StepPlan(
                    admitted=tuple(admitted),
                    prefill_tokens=tokens,
                    valid_until_horizon=not admitted,
                    stops_at_arrival=False,
                )
            new = self._left(sequence, 0), prefill
            # With larger blocks what fits in slots may not fit in blocks, which only a finish returns.
            free -= transaction.blocks_of(prefill)
            if free < 0:
                return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens, stops_at_arrival=False)
            refused = _steps_above(peaks, new, transaction.memory.capacity_slots)
            if refused:
                self._refused_steps = refused
                return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens, stops_at_arrival=False)
            peaks.append(new)
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


def _steps_above(running: list[tuple[int, int]], new: tuple[int, int], capacity: int) -> int:
    """Steps in which the peak of the running sequences and a new one is above the pool's slots at least.

    0 if the peak is not above it, ``FOREVER`` if only a finish lowers it.

    Args:
        running, new: (left to generate, held) of each sequence. In a step each running one loses one of the former and gains
            one of the latter; the new one waits.
    """
    ordered = sorted([*running, new], reverse=True)
    held = accumulate(slots for _, slots in ordered)
    sums = [left * number + so_far for number, ((left, _), so_far) in enumerate(zip(ordered, held, strict=True), 1)]
    peak = max(sums)
    if peak <= capacity:
        return 0
    last = sums.index(peak)
    place = ordered.index(new)
    if place > last or last == 0:
        # Without the new sequence the sum never falls.
        return FOREVER
    # The fewest steps left of a running sequence among the first.
    left = ordered[last - (place == last)][0]
    # The sum grows with each running sequence until one has less left than the new one, then falls by one a step.
    rising = max(0, left - new[0])
    steps = rising + peak + rising * last - capacity
    return steps if steps <= left else FOREVER
