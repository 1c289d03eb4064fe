"""DeepSpeed-FastGen (Dynamic SplitFuse): steps of a fixed number of tokens, filled with parts of prompts."""

from __future__ import annotations

from ..memory.paged.transaction import PagedTransaction
from ..types.sequence import CARRY_ON, NOT_DECODING, Sequence, StepPlan
from ..types.state import State
from .base import Source
from .options import Options
from .token_budget import TokenBudget


class FastGen(TokenBudget):
    """DeepSpeed-FastGen's Dynamic SplitFuse (microsoft/DeepSpeed-MII at 041a2161c, ``mii/batching/ragged_batching.py``,
    ``_do_schedule_requests``).

    Decodes come first; a decode that needs a block while none is free is skipped and keeps its blocks. The rest of the
    budget goes to prompts, split to fill it: the prefill in progress, as far as blocks are free, then waiting
    sequences, each if the blocks of its whole prompt are free. If no sequence can compute anything, the last running
    sequence is preempted (recompute).

    It leaps while all sequences decode and find a block; a step that skips a sequence is not part of a leap.
    """

    name = "fastgen"
    source = Source("DeepSpeed-MII 041a2161c", "source", "2026-11-29: a deadlock resets all sequences; here the last")
    system = "DeepSpeed-FastGen"
    options_type = Options
    default_max_num_seqs = 256
    default_max_num_batched_tokens = 768
    null_blocks = 0
    caches_prefixes = False
    disaggregates = False

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """Decodes, then the prefill in progress, then waiting sequences."""
        if transaction.need > transaction.free or state.stalled:
            return self._with_skips(state, transaction)
        transaction.free -= transaction.need
        return self._prompts(state, transaction, self.limits.max_num_batched_tokens - state.batch_size)

    def _prompts(self, state: State, transaction: PagedTransaction, budget: int) -> StepPlan:
        partial = next(iter(state.prefilling), None)
        if partial is None:
            return self._admit(state, transaction, budget) if state.waiting else CARRY_ON
        held, size = transaction.memory.partial[partial].blocks, transaction.block_size
        room = (held + transaction.free) * size - partial.computed_tokens
        left = partial.start_tokens - partial.computed_tokens
        tokens = min(left, budget, room)
        transaction.free -= transaction.blocks_of(partial.computed_tokens + tokens) - held
        if tokens < left:
            return StepPlan(prefill_tokens=tokens, valid_until_horizon=False, chunks=((partial, tokens),))
        return self._admit(state, transaction, budget - tokens, ((partial, tokens),))

    def _with_skips(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """A step that skips decodes, or resumes skipped ones."""
        free, size = transaction.free, transaction.block_size
        skipped: list[Sequence] = []
        resumed: list[Sequence] = []
        in_order = sorted([*state.running, *state.stalled], key=lambda sequence: sequence.order)
        for sequence in in_order:
            stands = sequence.start_step == NOT_DECODING
            held = sequence.computed_tokens if stands else sequence.held_tokens(state.decode_step)
            if held % size == 0 and not free:
                skipped.append(sequence)
                continue
            free -= held % size == 0
            if stands:
                resumed.append(sequence)
        transaction.free = free
        decodes = len(in_order) - len(skipped)
        plan = self._prompts(state, transaction, self.limits.max_num_batched_tokens - decodes)
        newly = tuple(sequence for sequence in skipped if sequence.start_step != NOT_DECODING)
        if decodes or plan.prefill_tokens:
            return plan._replace(valid_until_horizon=False, stalls=(newly, tuple(resumed)))
        last = max([*in_order, *state.prefilling], key=lambda sequence: sequence.order)
        others = tuple(sequence for sequence in newly if sequence is not last)
        return StepPlan(preempted=(last,), valid_until_horizon=False, stalls=(others, ()))
