"""vLLM's scheduler as described by the SOSP'23 paper and its artifact."""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar

from ..memory.paged.paged import PagedMemory
from ..memory.paged.transaction import PagedTransaction
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from .base import Policy, Source
from .options import Options, VllmV0Options
from .server import Limits, Pool

_arrival = attrgetter("order")
#: Preempted sequences: those to recompute, and those to swap out.
Victims = tuple[tuple[Sequence, ...], tuple[Sequence, ...]]


class VllmSosp23(Policy[PagedMemory, PagedTransaction]):
    """First come, first served over paged memory, with all-or-nothing preemption.

    Each step has three phases:

    1. Running sequences, by arrival: while fewer blocks are free than the group has sequences (one, here), the last
       arrival is preempted, in the last resort the group itself. It waits and is recomputed, or its blocks are swapped
       out. Then the group appends its slots.
    2. If no sequence was swapped out, swapped sequences return while that leaves the watermark free.
    3. If no sequence is swapped, waiting sequences are admitted while that leaves the watermark free, within the
       budgets of tokens and sequences, and only if they arrived before every group preempted in this step.

    Prompts and decodes share the step. Choices that the sources leave open: the watermark is waived when nothing runs; a
    sequence is recomputed instead of swapped if the host pool is full, or if the empty pool could not take it back with
    its next slot.

    With KV groups, which the paper does not have, a sequence requires a free block in each group. It gives back the blocks
    before its windows before it takes blocks, and what its next token needs is swapped out.
    """

    name = "vllm-sosp23"
    source = Source("SOSP'23, its artifact", "paper, source")
    system = "vLLM, SOSP'23"
    options_type: ClassVar[type[Options]] = VllmV0Options
    options: VllmV0Options
    serves_kv_groups = True
    #: Whether a step checks waiting sequences before the running ones give blocks back.
    admits_first: ClassVar[bool] = False
    default_max_num_seqs = 2048
    default_max_num_batched_tokens = 2560

    def memory(self, pool: Pool) -> PagedMemory:
        return PagedMemory(pool.num_blocks, pool.block_size, pool.host_blocks, pool.ids, self.groups)

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """The three phases; the first is trivial if enough blocks are free for every sequence."""
        if transaction.free - transaction.takes < transaction.groups and state.batch_size:
            return self._under_pressure(state, transaction)
        transaction.free -= transaction.need
        if state.swapped:
            return self._swap_in_and_admit(state, transaction, ())
        return self._admit(state, transaction, state.batch_size, (), ()) if state.waiting else CARRY_ON

    def _under_pressure(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """The three phases if the pool has too few free blocks."""
        preempted, swapped_out = self._make_room(state, transaction)
        if swapped_out:
            return StepPlan(
                preempted=preempted, swapped_out=swapped_out, valid_until_horizon=False, stops_at_arrival=False
            )
        return self._swap_in_and_admit(state, transaction, preempted)

    def _swap_in_and_admit(
        self, state: State, transaction: PagedTransaction, preempted: tuple[Sequence, ...]
    ) -> StepPlan:
        """Phases 2 and 3, after a phase 1 without swapping."""
        running = state.batch_size - len(preempted)
        swapped_in = self._swap_in(state, transaction, running)
        if len(swapped_in) < len(state.swapped):
            return StepPlan(
                preempted=preempted, swapped_in=swapped_in, valid_until_horizon=not preempted, stops_at_arrival=False
            )
        return self._admit(state, transaction, running + len(swapped_in), preempted, swapped_in)

    def _make_room(self, state: State, transaction: PagedTransaction) -> Victims:
        """Phase 1 if the pool has too few free blocks: the sequences to recompute and to swap out, last arrivals first.

        In order of arrival every sequence must find a free block. The last one finds the fewest, after all others took
        theirs. So the last sequences are preempted until the last remaining one finds a free block.
        """
        kept = sorted(state.running, key=_arrival)
        if transaction.memory.giving:
            return self._make_room_in_order(kept, transaction)
        preempted: list[Sequence] = []
        swapped_out: list[Sequence] = []
        need, host_free = transaction.need, transaction.memory.host_free
        while kept:
            own = transaction.needs_block(kept[-1], state.decode_step)
            if transaction.free > need - own:
                break
            victim = kept.pop()
            need -= own
            blocks = transaction.blocks_of(victim.held_tokens(state.decode_step))
            transaction.free += blocks
            if self._swaps(blocks, host_free, transaction.memory.num_blocks):
                host_free -= blocks
                swapped_out.append(victim)
            else:
                preempted.append(victim)
        transaction.free -= need
        return tuple(preempted), tuple(swapped_out)

    def _make_room_in_order(self, kept: list[Sequence], transaction: PagedTransaction) -> Victims:
        """As ``_make_room``, where sequences give blocks back: what one gives is free for those after it, so only a pass
        over all of them in order finds the ones without a block."""
        memory, preempted, swapped_out, place = transaction.memory, list[Sequence](), list[Sequence](), 0
        host_free = memory.host_free
        transaction.grow_tables(0)
        while place < len(kept):
            taken = transaction.needed(kept[place], 1)
            while transaction.free < transaction.groups and len(kept) > place:
                victim = kept.pop()
                blocks = memory.pages_for(victim.held_tokens(transaction.decode_step))
                if self._swaps(blocks, host_free, memory.num_blocks - memory.growing + 1):
                    host_free -= blocks
                    swapped_out.append(victim)
                    transaction.swap_out(victim)
                else:
                    preempted.append(victim)
                    transaction.preempt(victim)
            if place < len(kept):
                transaction.take(kept[place], 1, taken)
            place += 1
        transaction.end_of_running(bool(kept))
        return tuple(preempted), tuple(swapped_out)

    def _swaps(self, blocks: int, host_free: int, num_blocks: int) -> bool:
        """Whether to swap: the host has room, and the empty pool could take the blocks back plus one."""
        return self.options.preemption_mode == "swap" and blocks <= host_free and blocks < num_blocks

    def _swap_in(self, state: State, transaction: PagedTransaction, running: int) -> tuple[Sequence, ...]:
        """Phase 2: the head of the swapped queue returns if its blocks and one more fit."""
        back: list[Sequence] = []
        groups = transaction.groups
        for sequence in state.swapped:
            tokens = sequence.start_tokens - 1
            blocks = transaction.memory.pages_for(tokens)
            watermark = self.limits.watermark_blocks if running else 0
            if transaction.free - blocks - groups < watermark or running == self.limits.max_num_seqs:
                break
            transaction.free -= blocks + groups * (tokens % transaction.block_size == 0)
            running += 1
            back.append(sequence)
        return tuple(back)

    def _admit(
        self,
        state: State,
        transaction: PagedTransaction,
        running: int,
        preempted: tuple[Sequence, ...],
        swapped_in: tuple[Sequence, ...],
    ) -> StepPlan:
        """Phase 3: admissions; returns the plan of the step."""
        limits, size, groups, free = self.limits, transaction.block_size, transaction.groups, transaction.free
        admitted: list[Sequence] = []
        # Each running sequence computes one token.
        tokens, budget = 0, limits.max_num_batched_tokens - running
        valid_until_horizon, stops_at_arrival = not preempted, True
        for sequence in state.waiting:
            if preempted and sequence.order > preempted[-1].order:
                break
            prefill = sequence.start_tokens
            free += -prefill // size * groups
            if free < (limits.watermark_blocks if running else 0) or running == limits.max_num_seqs:
                stops_at_arrival = False
                break
            if running and prefill > budget:
                # Sequences admitted now cost one token each in the next step; otherwise nothing changes until a finish.
                valid_until_horizon, stops_at_arrival = valid_until_horizon and not admitted, False
                break
            running += 1
            tokens += prefill
            budget -= prefill
            admitted.append(sequence)
        return StepPlan(
            admitted=tuple(admitted),
            prefill_tokens=tokens,
            preempted=preempted,
            swapped_in=swapped_in,
            valid_until_horizon=valid_until_horizon,
            stops_at_arrival=stops_at_arrival,
        )

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Steps until a running sequence could find no free block, or until the head of a queue may find its blocks."""
        if memory.is_plain:
            return max(1, memory.steps_with(state, memory.free - 1, limit))
        limit = steps_until_head_fits(state, memory, self.limits, limit, self.admits_first)
        return max(1, min(limit, memory.steps_with(state, memory.free - memory.growing, limit)))


def steps_until_head_fits(
    state: State, memory: PagedMemory, limits: Limits, limit: int, admits_first: bool = False
) -> int:
    """Steps, at most ``limit``, in which the first swapped or waiting sequence finds too few blocks, although running
    sequences give blocks back.

    Args:
        admits_first: Whether a step checks the head before the running sequences give blocks back.
    """
    if state.batch_size == limits.max_num_seqs or not memory.giving:
        return limit
    if state.swapped:
        wanted = memory.pages_for(state.swapped[0].start_tokens - 1) + memory.growing
    elif state.waiting:
        if memory.cache_log:
            # Its cached prefix and the free blocks may change with every step.
            return 1
        head = state.waiting[0]
        wanted = memory.blocks_beside(head.computed_tokens, head.start_tokens)
    else:
        return limit
    step = memory.step_that_frees(state.decode_step, wanted + limits.watermark_blocks)
    if step is None:
        return limit
    if admits_first and not state.swapped:
        return step
    # If the blocks were already free in this step, the head waits for another reason.
    return limit if step == 1 else step - 1
