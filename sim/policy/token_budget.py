"""Schedulers with one token budget per step for both prompts and decodes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values

from ..memory import Memory
from ..memory.accounting.kv_groups import PageGroups
from ..memory.paged.paged import PagedMemory
from ..memory.paged.transaction import PagedTransaction
from ..types.errors import SettingError
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from .base import Policy
from .options import Options
from .server import Limits, Pool

Chunk = tuple[Sequence, int]


class TokenBudget(Policy[PagedMemory, PagedTransaction]):
    """Every step decodes all running sequences and uses the remaining budget for prompts, first come first served.

    If there are too few blocks, the last running sequence is preempted (recompute). If no sequence was preempted, waiting
    sequences are admitted while the budget and ``max_num_seqs`` allow it and the blocks of the whole prompt are free; the last
    one may get only a chunk. Prompts use the budget in order, so at most one prefill, of the last running sequence,
    continues after a step. During a continued prefill, every step is decided separately; otherwise the policy leaps.
    """

    default_max_num_seqs = 256
    default_max_num_batched_tokens = 2048
    disaggregates = True
    #: Whether chunks may end before the end of the budget.
    splits_chunks = False
    #: Whether sequences that load their blocks come first in the queue.
    sorts_loads = False
    #: Tokens of the budget that a scheduled sequence takes beside those that it computes.
    extra_slots = 0
    #: Whether the blocks of all known tokens must be free at an admission, not only those of the first chunk.
    reserves_whole = True

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            remedy = f"must be at least max_num_seqs = {limits.max_num_seqs}"
            raise SettingError("max_num_batched_tokens", limits.max_num_batched_tokens, remedy)
        super().__init__(limits, options, groups)
        #: Sequences that may run at once.
        self.most_running = limits.max_num_seqs
        #: Calls of ``schedule`` up to which a sequence's turn says that its last token is known, with batches in flight.
        self.known_calls = 0
        #: Sequences that wait, and were passed over since they came as they wait for a copy, or for a token in flight.
        self.passed: set[Sequence] = set()

    def memory(self, pool: Pool) -> Memory:
        return PagedMemory(pool.num_blocks, pool.block_size, ids=pool.ids)

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """Schedule the running sequences, the prefill in progress, and the waiting sequences."""
        partial = next(iter(state.prefilling), None)
        preempted = self._victims(state, transaction, partial)
        if preempted:
            return StepPlan(preempted=preempted, valid_until_horizon=False, stops_at_arrival=False)
        return self._fill(state, transaction, partial)

    def _fill(self, state: State, transaction: PagedTransaction, partial: Sequence | None) -> StepPlan:
        """Decode all running sequences; use the remaining budget for the prefill in progress and waiting sequences."""
        if partial is None and not state.waiting:
            return CARRY_ON
        transaction.take_for_running()
        budget = self.limits.max_num_batched_tokens - state.batch_size
        if partial is not None:
            return self._continue_prefill(state, transaction, budget, partial)
        return self._admit(state, transaction, budget)

    def _victims(self, state: State, transaction: PagedTransaction, partial: Sequence | None) -> tuple[Sequence, ...]:
        """The last running sequences that must be preempted so that the other decodes find their blocks."""
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
                free += transaction.memory.held_blocks(partial, state.decode_step)
                preempted.append(partial)
                partial = None
                continue
            need -= own
            free += transaction.memory.held_blocks(kept[-1], state.decode_step)
            preempted.append(kept.pop())
        return tuple(preempted)

    def _suffices(self, free: int, need: int, last_need: int) -> bool:
        """Whether ``free`` blocks suffice for the decodes, which need ``need``; the last sequence needs ``last_need``."""
        return need <= free

    def _continue_prefill(
        self, state: State, transaction: PagedTransaction, budget: int, partial: Sequence
    ) -> StepPlan:
        """Continue the prefill within the budget, or preempt it for the decodes."""
        tokens = min(partial.start_tokens - partial.computed_tokens, budget)
        blocks = transaction.chunk_blocks(partial, tokens)
        if blocks > transaction.free:
            transaction.preempt(partial)
            return StepPlan(preempted=(partial,), valid_until_horizon=False, stops_at_arrival=False)
        transaction.free -= blocks
        transaction.extend(partial, partial.computed_tokens + tokens)
        if partial.computed_tokens + tokens < partial.start_tokens:
            return StepPlan(prefill_tokens=tokens, valid_until_horizon=False, chunks=((partial, tokens),))
        return self._admit(state, transaction, budget - tokens, ((partial, tokens),))

    def _admit(
        self,
        state: State,
        transaction: PagedTransaction,
        budget: int,
        ended: Values[Chunk] = (),
        chunks: Values[Chunk] = (),
    ) -> StepPlan:
        """Admit waiting sequences. Each must leave the watermark free unless no sequence runs.

        Args:
            ended, chunks: Prefills that end in this step, and prefills that continue, with their tokens.
        """
        stops_at_arrival, valid_until_horizon, tokens = True, True, 0
        admitted: list[Sequence] = []
        going_on = list(chunks)
        if ended or chunks:
            valid_until_horizon, tokens = not chunks, sum(tokens for _, tokens in (*ended, *chunks))
            admitted += (sequence for sequence, _ in ended)
        held_seqs = state.batch_size + len(state.stalled) + len(state.prefilling) + len(state.finished)
        free_seqs = self.most_running - held_seqs
        passed: list[Sequence] = []
        watermark = self.limits.watermark_blocks
        for sequence in self._queue(state):
            if budget <= 0:
                # If this step also computed prompts, the next step has more budget for this one.
                valid_until_horizon, stops_at_arrival = valid_until_horizon and not tokens, False
                break
            if not free_seqs:
                stops_at_arrival = False
                break
            in_flight = sequence.next_decode_eligible_step > self.known_calls
            known = None if in_flight else transaction.look_up(sequence)
            if known is None:
                passed.append(sequence)
                continue
            left = sequence.start_tokens - known
            now = left if left < budget else budget
            if self.splits_chunks:
                now = self._chunk(sequence, known, now, transaction)
                if now > budget:
                    now = 0
            blocks = transaction.lacking(sequence, now)
            later = transaction.beyond(sequence, known + now) if left > now else 0
            required = blocks if self.reserves_whole else blocks - later
            spare = watermark and watermark * bool(held_seqs or admitted or going_on)
            if not now or transaction.free - required < spare:
                stops_at_arrival = False
                break
            free_seqs -= 1
            transaction.enter(sequence, now, blocks - later)
            self.passed.discard(sequence)
            tokens += now
            budget -= now + self.extra_slots
            if left > now:
                going_on.append((sequence, now))
                valid_until_horizon = False
            else:
                admitted.append(sequence)
        self.passed.update(passed)
        return StepPlan(
            admitted=tuple(admitted),
            prefill_tokens=tokens,
            valid_until_horizon=valid_until_horizon,
            stops_at_arrival=stops_at_arrival,
            chunks=tuple(going_on),
            order=_behind(state, admitted, going_on, passed) if passed or self.sorts_loads else (),
        )

    def _queue(self, state: State) -> Iterable[Sequence]:
        """The waiting sequences in the order of their admission."""
        return state.waiting

    def _chunk(self, sequence: Sequence, computed: int, tokens: int, transaction: PagedTransaction) -> int:
        """Number of the next ``tokens`` of a prefill that a step computes after ``computed``; see ``splits_chunks``."""
        return tokens

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Steps until the running sequences need more blocks than are free, or publish a block that the head may hit."""
        steps = memory.steps_with(state, memory.free, limit)
        return memory.steps_before_admission(state, steps) if state.waiting else steps


def _behind(
    state: State, admitted: Iterable[Sequence], chunks: Iterable[Chunk], passed: Iterable[Sequence]
) -> tuple[Sequence, ...]:
    """The queue: those that leave it, those that wait for a copy, and the others behind them."""
    leaving = [*admitted, *(sequence for sequence, _ in chunks)]
    first = dict.fromkeys((*(sequence for sequence in leaving if sequence not in state.prefilling), *passed))
    return (*first, *(sequence for sequence in state.waiting if sequence not in first))
