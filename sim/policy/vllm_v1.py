"""vLLM V1: one budget of tokens a step, for prompts and decodes alike."""

from __future__ import annotations

from typing import ClassVar

from ..memory.accounting.kv_groups import PageGroups
from ..memory.paged.cached import CachedMemory
from ..memory.paged.chunked import ChunkedMemory
from ..memory.paged.paged import PagedMemory, PagedTransaction
from ..memory.prefix import Chains
from ..types.errors import SettingError
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from .base import Limits, Policy, Pool
from .options import KvGroupOptions, Options


class VllmV1(Policy):
    """vLLM V1 (release 0.33, ``vllm/v1/core/sched/scheduler.py``), first come first served.

    There are no phases: every sequence catches up with the tokens it knows. The running come first,
    in order; where blocks are short the last running one is preempted (recompute) and goes to the
    front of the queue. If no sequence was preempted, waiting ones are admitted while budget and ``max_num_seqs``
    allow and the blocks of their whole prompt are free, the last one perhaps with a chunk. One
    block is vLLM's null block, there is no watermark.

    Prompts take the budget in order, so at most one prefill goes on after a step, that of the last
    running sequence. While one does, every step is decided anew; else it leaps.
    """

    name = "vllm-v1"
    system = "vLLM 0.33, V1"
    options_type: ClassVar[type[Options]] = KvGroupOptions
    preempted_first = True
    default_max_num_seqs = 256
    default_max_num_batched_tokens = 2048
    null_blocks = 1
    caches_prefixes = True
    disaggregates = True

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            remedy = f"must be at least max_num_seqs = {limits.max_num_seqs}"
            raise SettingError("max_num_batched_tokens", limits.max_num_batched_tokens, remedy)
        super().__init__(limits, options, groups)

    def memory(self, pool: Pool) -> PagedMemory:
        usable = pool.num_blocks - self.null_blocks
        if pool.token_runs is not None:
            return CachedMemory(usable, pool.block_size, Chains(pool.token_runs, pool.block_size), pool.ids)
        return ChunkedMemory(usable, pool.block_size, ids=pool.ids)

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """The running sequences, the prefill in progress, the waiting sequences."""
        partial = next(iter(state.prefilling), None)
        preempted = self._victims(state, transaction, partial)
        if preempted:
            return StepPlan(preempted=preempted, steady=False, wakes=False)
        transaction.free -= transaction.need
        budget = self.limits.max_num_batched_tokens - state.batch_size
        if partial is not None:
            return self._continue_prefill(state, transaction, budget, partial)
        return self._admit(state, transaction, budget, [], []) if state.waiting else CARRY_ON

    def _victims(self, state: State, transaction: PagedTransaction, partial: Sequence | None) -> tuple[Sequence, ...]:
        """The last running sequences, as many as must give way for the other decodes to find their blocks."""
        free, need = transaction.free, transaction.need
        if free > need:
            return ()
        preempted: list[Sequence] = []
        kept = list(state.running)
        while kept:
            own = transaction.needs_block(kept[-1], state.decode_step)
            if self._suffices(free, need, own):
                break
            if partial is not None:
                free += transaction.reclaimed(partial, state.decode_step)
                preempted.append(partial)
                partial = None
                continue
            need -= own
            free += transaction.reclaimed(kept[-1], state.decode_step)
            preempted.append(kept.pop())
        return tuple(preempted)

    def _suffices(self, free: int, need: int, last_need: int) -> bool:
        """Whether the decodes find their blocks, of which the last one needs ``last_need``."""
        return need <= free

    def _continue_prefill(
        self, state: State, transaction: PagedTransaction, budget: int, partial: Sequence
    ) -> StepPlan:
        """The prefill that goes on computes what the budget allows, or gives way to the decodes."""
        tokens = min(partial.start_tokens - partial.computed_tokens, budget)
        blocks = transaction.chunk_blocks(partial, tokens)
        if blocks > transaction.free:
            return StepPlan(preempted=(partial,), steady=False, wakes=False)
        transaction.free -= blocks
        transaction.extend(partial, partial.computed_tokens + tokens)
        if partial.computed_tokens + tokens < partial.start_tokens:
            return StepPlan(prefill_tokens=tokens, steady=False, chunks=((partial, tokens),))
        return self._admit(state, transaction, budget, [partial], [tokens])

    def _admit(
        self, state: State, transaction: PagedTransaction, budget: int, admitted: list[Sequence], tokens: list[int]
    ) -> StepPlan:
        """Admit waiting sequences; with the prefill that ended, if one did, and its tokens."""
        limits, free, wakes, steady = self.limits, transaction.free, True, True
        chunks: tuple[tuple[Sequence, int], ...] = ()
        free_seqs = limits.max_num_seqs - state.batch_size - len(state.stalled) - len(admitted)
        budget -= sum(tokens)
        for sequence in state.waiting:
            if not budget:
                # The next step has a budget again, if this one did more than decode.
                steady, wakes = not tokens, False
                break
            if not free_seqs or free - (blocks := transaction.lacking(sequence)) < self._spare(state, admitted):
                wakes = False
                break
            free_seqs -= 1
            left = sequence.start_tokens - transaction.enter(sequence, budget)
            tokens.append(min(left, budget))
            if left > budget:
                chunks, steady = ((sequence, budget),), False
                break
            free -= blocks
            budget -= left
            admitted.append(sequence)
        return StepPlan(admitted=tuple(admitted), prefill_tokens=sum(tokens), steady=steady, wakes=wakes, chunks=chunks)

    def _spare(self, state: State, admitted: list[Sequence]) -> int:
        """Blocks that an admission must leave free."""
        return 0

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Up to the step in which the running need more blocks than are free, or publish one that the head may hit."""
        steps = memory.steps_with(state, memory.free, limit)
        return memory.steps_unhelped(state, steps) if state.waiting else steps
