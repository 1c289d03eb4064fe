"""vLLM 0.x: each step either prefills or decodes."""

from __future__ import annotations

from ..memory.paged.transaction import PagedTransaction
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from .base import Source
from .vllm_sosp23 import VllmSosp23


class VllmV0(VllmSosp23):
    """First come, first served over paged memory; steps either prefill or decode.

    vLLM 0.2 to 0.6, ``Scheduler._schedule_default``. Unless a sequence is swapped out, waiting sequences are admitted
    first, within the budgets of tokens and sequences, while the watermark stays free. If one is admitted, the step
    prefills and no sequence decodes. Otherwise running sequences decode, with preemption and swapping as in
    ``VllmSosp23``.
    """

    name = "vllm-v0"
    source = Source("vLLM 0.2 to 0.6", "source")
    system = "vLLM 0.2 to 0.6"
    preempted_first = admits_first = True
    default_max_num_seqs = 256

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """A prefill if a sequence can be admitted, else a step that decodes."""
        if state.waiting and not state.swapped:
            admitted, tokens = self._prompts(state, transaction)
            if admitted:
                return StepPlan(admitted=admitted, prefill_tokens=tokens, valid_until_horizon=False, prefill_only=True)
        if transaction.free - transaction.takes < transaction.groups and state.batch_size:
            return self._under_pressure(state, transaction)
        transaction.free -= transaction.need
        return self._decode(state, transaction, ())

    def _decode(self, state: State, transaction: PagedTransaction, preempted: tuple[Sequence, ...]) -> StepPlan:
        """Running sequences decode; swapped sequences return unless one was preempted."""
        if preempted:
            return StepPlan(preempted=preempted, valid_until_horizon=False, stops_at_arrival=False)
        swapped_in = self._swap_in(state, transaction, state.batch_size)
        if not swapped_in and not state.swapped and not state.waiting:
            return CARRY_ON
        # With no sequence left on the host, waiting ones may be admitted in the next step.
        waits_on = len(swapped_in) < len(state.swapped) or not swapped_in
        return StepPlan(swapped_in=swapped_in, valid_until_horizon=waits_on, stops_at_arrival=False)

    _swap_in_and_admit = _decode

    def _prompts(self, state: State, transaction: PagedTransaction) -> tuple[tuple[Sequence, ...], int]:
        """The sequences to admit, and their tokens."""
        limits, free, running, tokens = self.limits, transaction.free, state.batch_size, 0
        admitted: list[Sequence] = []
        for sequence in state.waiting:
            prefill = sequence.start_tokens
            free -= transaction.blocks_of(prefill)
            if free < (limits.watermark_blocks if running else 0) or running == limits.max_num_seqs:
                break
            # A prompt longer than the budget goes alone.
            if admitted and tokens + prefill > limits.max_num_batched_tokens:
                break
            running += 1
            tokens += prefill
            admitted.append(sequence)
        return tuple(admitted), tokens
