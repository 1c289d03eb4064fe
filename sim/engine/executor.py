"""Carries out the plan of a step, in this order:

    preempt, swap out and swap in sequences       blocks move between device and host
    replace the queue                             if the policy sorted it
    stall and resume sequences
    fork siblings
    admit sequences, continue chunked prefills    blocks are allocated
    copy shared blocks before they are written

Blocks, queues and the ledger change at the start of the step. The tokens that the step computes and the blocks that
it moves determine its duration.
"""

from __future__ import annotations

from collections import deque

from ..cost.base import StepCost, draft_ticks, effective_context, saved_ticks
from ..memory import Memory
from ..memory.accounting.ledger import COMPLETE, RECOMPUTE, SWAP, Ledger
from ..types.sequence import LayeredLoad, Sequence, StepPlan
from ..types.state import State
from ..types.sums import causal_pairs

#: A step that changes the running sequences: its ticks, prefill tokens and ticks of moves, and ``valid_until_horizon`` and
#: ``stops_at_arrival`` of its plan. None: the decision stays the same.
Begun = tuple[int, int, int, bool, bool]
FirstStep = Begun | None


class Executor:
    """Carries out plans.

    Args:
        state: Queues and running sequences.
        memory: Allocates and frees blocks.
        cost: Step times.
        ledger: Records residencies, chunks, copies and swaps.
        in_flight: Whether batches are in flight: a sequence that is preempted then waits for its last token.
    """

    def __init__(self, state: State, memory: Memory, cost: StepCost, ledger: Ledger, in_flight: bool = False) -> None:
        self._state, self._memory, self._cost, self._ledger = state, memory, cost, ledger
        self._in_flight = in_flight
        self._effective, self._saved = effective_context(cost), saved_ticks(cost)

    def carry_out(self, plan: StepPlan, now: int) -> FirstStep:
        """Apply a plan to blocks, queues and the ledger.

        Returns:
            Ticks and tokens of the step. 0 ticks means that it computes and moves nothing.
        """
        state = self._state
        decode_step, pairs, moves = state.decode_step, 0, plan.flush_ticks
        if plan.preempted or plan.swapped_out or plan.swapped_in:
            moves += self._displace(plan.preempted, plan.swapped_out, plan.swapped_in, plan.taken_back, now)
        if plan.order:
            state.waiting = deque(plan.order)
        if plan.stalls:
            self._stall(*plan.stalls, now)
        if plan.forked:
            self._fork(plan.forked, now)
        # Decoding sequences: all except those that end their prefill in this step.
        decodes = 0 if plan.prefill_only else state.batch_size
        context = decodes * decode_step + state.lag_sum
        if plan.prefill_only:
            # The admitted sequences count as started in the last step that decoded.
            decode_step -= 1
        if plan.admitted:
            pairs = self._start(plan.admitted, plan.padded_tokens, decode_step, plan.prefill_only, now)
        if plan.chunks:
            pairs += self._prefill(plan.chunks, decode_step, now)
        if state.shares:
            moves += self._copy(now, not plan.prefill_only)
        prefill = plan.prefill_tokens
        if decodes or prefill:
            read = context = context if decodes else 0
            if decodes and self._effective is not None:
                read = self._effective(context, self._memory.repeated_slots(plan.admitted))
            work = decodes, read, prefill, pairs
            ticks = self._cost.step_ticks(*work) if plan.drafts is None else self._verify_ticks(plan, context, *work)
            if decodes and prefill and self._saved is not None and plan.drafts is None:
                ticks -= self._saved(decodes, context, self._memory.repeated_slots(plan.admitted))
            if plan.load is not None:
                moves += self._wait_for(plan.load, ticks, now)
            return moves + ticks, prefill, moves, plan.valid_until_horizon, plan.stops_at_arrival
        return moves, 0, moves, False, plan.stops_at_arrival

    def _wait_for(self, load: LayeredLoad, step_ticks: int, now: int) -> int:
        """Ticks by which a load prolongs a step."""
        wait, transfers = load.wait(step_ticks), self._memory.transfers
        if transfers is not None:
            transfers.note_wait(now, wait)
        return wait

    def _verify_ticks(self, plan: StepPlan, context: int, decodes: int, read: int, prefill: int, pairs: int) -> int:
        """Ticks of a step that verifies drafts, and of the drafts for the next step.

        A sequence with drafts is as many rows as it computes tokens, which read its keys and values once. The drafter is taken to
        read all of its own from memory.

        Args:
            context, read: Sum of the contexts, and what the target is priced with of them.
        """
        drafts = sum((plan.drafts or {}).values())
        rows = decodes + drafts, context + drafts, prefill, pairs
        sampled = decodes + len(plan.admitted), context + sum(sequence.start_tokens for sequence in plan.admitted)
        ticks = self._cost.step_ticks(rows[0], read + drafts, prefill, pairs)
        return ticks + draft_ticks(self._cost, rows, sampled)

    def _displace(
        self,
        preempted: tuple[Sequence, ...],
        swapped_out: tuple[Sequence, ...],
        swapped_in: tuple[Sequence, ...],
        taken_back: tuple[Sequence, ...],
        now: int,
    ) -> int:
        """Preempt, swap out and swap in; returns the ticks of moving their blocks."""
        state, memory, ledger, decode_step = self._state, self._memory, self._ledger, self._state.decode_step
        if preempted or swapped_out:
            memory.evict(preempted, swapped_out, decode_step)
            back = []
            for sequence in taken_back:
                state.take_back(sequence)
            for sequence in preempted:
                # A finished sequence that is preempted does not return to the queue.
                over = state.forget(sequence)
                ledger.evict(sequence, COMPLETE if over else RECOMPUTE, decode_step, now)
                if not over or self._in_flight:
                    back.append(sequence)
            for sequence in swapped_out:
                ledger.evict(sequence, SWAP, decode_step, now)
            state.preempt(tuple(back), swapped_out)
            for sequence in taken_back:
                # The slot of the last known token was computed, too.
                sequence.lost_tokens += 1
        for sequence in swapped_in:
            state.swapped.popleft()
            memory.swap_in(sequence, decode_step)
            state.start(sequence, decode_step)
            ledger.open(sequence, decode_step, now)
        if swapped_out or swapped_in:
            ledger.swap(memory.host_blocks - memory.host_free, now)
        return self._swap_ticks(swapped_out, swapped_in)

    def _start(self, admitted: tuple[Sequence, ...], padded: int, decode_step: int, past: bool, now: int) -> int:
        """Admit sequences that end their prefill in this step; returns the (query, key) pairs that it computes."""
        state, memory, ledger, pairs = self._state, self._memory, self._ledger, 0
        for sequence in admitted:
            if state.prefilling and sequence in state.prefilling:
                del state.prefilling[sequence]
            else:
                state.waiting.popleft()
            memory.admit(sequence, decode_step, padded, past)
            state.start(sequence, decode_step, padded)
            ledger.open(sequence, decode_step, now)
            pairs += causal_pairs(padded or sequence.start_tokens)
            if sequence.computed_tokens:
                pairs -= causal_pairs(sequence.computed_tokens)
        return pairs

    def _prefill(self, chunks: tuple[tuple[Sequence, int], ...], decode_step: int, now: int) -> int:
        """Compute chunks of prefills that continue after this step; returns the (query, key) pairs of this step."""
        pairs = 0
        for sequence, tokens in chunks:
            self._ledger.chunk(sequence, tokens, now)
            pairs -= causal_pairs(sequence.computed_tokens)
            self._state.prefill(sequence, tokens)
            self._memory.prefill(sequence, decode_step)
            pairs += causal_pairs(sequence.computed_tokens)
        return pairs

    def _fork(self, siblings: tuple[Sequence, ...], now: int) -> None:
        """Start the decoding of forked siblings."""
        state, memory, decode_step = self._state, self._memory, self._state.decode_step
        for sibling in siblings:
            state.fork(sibling, decode_step)
            memory.admit(sibling, decode_step)
            self._ledger.open(sibling, decode_step, now)

    def _copy(self, now: int, decodes: bool) -> int:
        """Ticks of the copies at the start of the coming step."""
        slots = self._memory.copied_slots(decodes)
        if not slots:
            return 0
        ticks = self._cost.copy_ticks(slots)
        self._ledger.copy(slots, ticks, now)
        return ticks

    def _stall(self, stalled: tuple[Sequence, ...], resumed: tuple[Sequence, ...], now: int) -> None:
        """Stall sequences, which keep their blocks, and resume others."""
        state, memory, ledger, decode_step = self._state, self._memory, self._ledger, self._state.decode_step
        for sequence in stalled:
            if state.forget(sequence):
                memory.stall(sequence, decode_step, finished=True)
                state.finished[sequence] = None
                continue
            ledger.stall(sequence, decode_step, now)
            memory.stall(sequence, decode_step)
            state.stall(sequence)
        for sequence in resumed:
            del state.stalled[sequence]
            memory.admit(sequence, decode_step)
            if sequence in state.overrunning:
                state.overrun(sequence, decode_step)
                continue
            state.start(sequence, decode_step)
            ledger.open(sequence, decode_step, now)

    def _swap_ticks(self, swapped_out: tuple[Sequence, ...], swapped_in: tuple[Sequence, ...]) -> int:
        """Ticks of moving their blocks to the host and back."""
        cost, memory = self._cost, self._memory
        out = cost.swap_out_ticks(memory.swapped_blocks(swapped_out)) if swapped_out else 0
        return out + (cost.swap_in_ticks(memory.swapped_blocks(swapped_in)) if swapped_in else 0)
