"""vLLM as the SOSP'23 paper and its artifact have it."""

from __future__ import annotations

import numpy as np

from ..memory.paged import PagedMemory, PagedTransaction
from ..sequence import CARRY_ON, Plan, Sequence
from ..state import State
from ..workload import Workload
from .base import AdmissionLimit, Limits, blocks_of


class VllmSosp23:
    """First come first served over paged memory, with all-or-nothing preemption.

    Each step, in three phases:

    1. Who runs, by arrival: while the free blocks are fewer than the sequences of the group (one,
       here), the last arrival is preempted, at worst the group itself. It goes back to waiting and
       is recomputed, or its blocks are swapped out. Then the slot is appended.
    2. If nothing was swapped out, the swapped come back while that leaves the watermark free.
    3. If nothing is swapped, the waiting are admitted while that leaves the watermark free, within
       the budgets of tokens and sequences, up to a group preempted in this step.

    Prompts and decodes share the step. Where the sources are silent: the watermark is waived when
    nothing runs; a full host pool means recompute, and so does a swapped sequence that even the
    empty pool cannot take back with its next slot.
    """

    name = "vllm-sosp23"
    leaves_together = False

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def schedule(self, state: State, transaction: PagedTransaction) -> Plan:
        need = transaction.need
        if transaction.free <= need and state.running:
            preempted, swapped_out = self._make_room(state, transaction)
        else:
            transaction.free -= need
            preempted = swapped_out = ()
            if not state.waiting and not state.swapped:
                return CARRY_ON
        running = len(state.running) - len(preempted) - len(swapped_out)
        limit = AdmissionLimit(self.limits, running)
        swapped_in = () if swapped_out else self._swap_in(state, transaction, limit)
        admitted, tokens, steady, wakes = (), 0, True, False
        if not swapped_out and len(swapped_in) == len(state.swapped):
            before = limit.tokens
            admitted, steady, wakes = self._admit(state, transaction, limit, preempted)
            tokens = limit.tokens - before
        return Plan(
            admitted=admitted,
            prefill_tokens=tokens,
            preempted=preempted,
            swapped_out=swapped_out,
            swapped_in=swapped_in,
            steady=steady and not (preempted or swapped_out),
            wakes=wakes,
        )

    def _make_room(self, state: State, transaction: PagedTransaction) -> tuple[tuple, tuple]:
        """Phase 1 where the pool runs dry: who gives way, last arrivals first, and how."""
        kept = sorted(state.running, key=lambda sequence: sequence.index)
        preempted: list[Sequence] = []
        swapped_out: list[Sequence] = []
        place = 0
        while place < len(kept):
            if transaction.free >= 1:
                transaction.free -= transaction.needs_block(kept[place], state.clock)
                place += 1
                continue
            victim = kept.pop()
            blocks = transaction.blocks_of(victim.held_tokens(state.clock))
            transaction.free += blocks
            if self._swaps(blocks, transaction):
                transaction.host_free -= blocks
                swapped_out.append(victim)
            else:
                preempted.append(victim)
        return tuple(preempted), tuple(swapped_out)

    def _swaps(self, blocks: int, transaction: PagedTransaction) -> bool:
        """Whether a victim's blocks go to the host: there is room, and they can come back."""
        return (
            self.limits.preemption_mode == "swap"
            and blocks <= transaction.host_free
            and blocks < transaction.memory.num_blocks
        )

    def _swap_in(self, state: State, transaction: PagedTransaction, limit: AdmissionLimit) -> tuple[Sequence, ...]:
        """Phase 2: the head of the swapped comes back if its blocks and a new one fit."""
        back: list[Sequence] = []
        for sequence in state.swapped:
            held = transaction.blocks_of(sequence.prefill_tokens)
            watermark = self.limits.watermark_blocks if limit.seqs else 0
            if transaction.free - held - 1 < watermark or not limit.seats_left():
                break
            transaction.free -= transaction.blocks_of(sequence.prefill_tokens + 1)
            limit.seqs += 1
            limit.tokens += 1
            back.append(sequence)
        return tuple(back)

    def _admit(
        self, state: State, transaction: PagedTransaction, limit: AdmissionLimit, preempted: tuple[Sequence, ...]
    ) -> tuple[tuple[Sequence, ...], bool, bool]:
        """Phase 3: who is admitted, whether that stays so, and whether an arrival could be."""
        admitted: list[Sequence] = []
        for sequence in state.waiting:
            if preempted and sequence.index > preempted[-1].index:
                break
            left = transaction.free - transaction.blocks_of(sequence.prefill_tokens)
            watermark = self.limits.watermark_blocks if limit.seqs else 0
            if left < watermark or not limit.seats_left():
                return tuple(admitted), True, False
            if not limit.within_budget(sequence):
                return tuple(admitted), False, False
            transaction.free = left
            limit.add(sequence)
            admitted.append(sequence)
        return tuple(admitted), True, not preempted

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Up to the step in which some running sequence could find no free block."""
        clock = state.clock + 1
        if memory.growth(clock, limit - 1) < memory.free:
            return limit
        return 1 + memory.steps_within(clock, memory.free - 1) if memory.free else 1

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        # The last token is never stored.
        return blocks_of(workload.prompt_tokens + workload.output_tokens - 1, block_size)
