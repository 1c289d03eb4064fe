"""A scheduler of your own: shortest prompt first, over paged memory, without preemption.

PYTHONPATH=examples/extending fragmeter simulate --policy shortest_prompt:ShortestPromptFirst --max-wait-steps 200
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from fragmeter.sim.memory import PagedMemory
from fragmeter.sim.policy import Options, Policy, Pool
from fragmeter.sim.types.sequence import CARRY_ON, StepPlan


@dataclass(frozen=True, kw_only=True)
class ShortestPromptOptions(Options):
    max_wait_steps: Annotated[
        int, Field(ge=1, description="Steps after which a waiting request goes first, whatever its length.")
    ] = 1000


class ShortestPromptFirst(Policy):
    """Admits the shortest prompt once its whole output is sure to fit, so that nothing is ever preempted."""

    name = "shortest-prompt"
    system = "example"
    options_type = ShortestPromptOptions
    reads_max_tokens = True

    def __init__(self, limits, options=None, groups=None):
        super().__init__(limits, options, groups)
        self._seen_at = {}  # decode step at which a waiting sequence was first seen

    def memory(self, pool: Pool) -> PagedMemory:
        return PagedMemory(pool.num_blocks, pool.block_size, ids=pool.ids)

    def schedule(self, state, transaction):
        """Admit requests that have waited too long, and then the shortest prompts."""
        if not state.waiting:
            return CARRY_ON
        for sequence in state.waiting:
            self._seen_at.setdefault(sequence, state.decode_step)
        overdue = state.decode_step - self.options.max_wait_steps
        queue = sorted(state.waiting, key=lambda s: (self._seen_at[s] > overdue, s.start_tokens, s.order))
        promised = sum(self._final_blocks(sequence, transaction) for sequence in state.running)
        free, tokens, admitted = transaction.memory.num_blocks - promised, 0, []
        for sequence in queue:
            free -= self._final_blocks(sequence, transaction)
            budget = self.limits.max_num_batched_tokens - state.batch_size - tokens
            full = state.batch_size + len(admitted) == self.limits.max_num_seqs
            if free < 0 or full or sequence.start_tokens > budget:
                break
            tokens += sequence.start_tokens
            admitted.append(self._leave(sequence))
        # ``order`` is the queue with the admitted sequences first. One real step: the queue's order may change.
        return StepPlan(admitted=tuple(admitted), prefill_tokens=tokens, order=tuple(queue), valid_until_horizon=False)

    def _leave(self, sequence):
        del self._seen_at[sequence]
        return sequence

    def _final_blocks(self, sequence, transaction):
        tokens = min(sequence.prompt_tokens + sequence.max_tokens, self.limits.max_model_len)
        return transaction.blocks_of(tokens)

    def horizon(self, state, memory, limit):
        return limit  # blocks never run out

    def smallest_pool_blocks(self, workload, block_size):
        most = self.limits.max_model_len
        tokens = np.minimum(
            workload.prompt_tokens + (most if workload.max_tokens is None else workload.max_tokens), most
        )
        return -(-tokens // block_size)
