"""Policies for KV groups: layers with a window share the pool with other layers.

They decide as those of the same name, by pages of all groups, except for

- victims: sequences give pages back as their windows move on, each before it takes its own, so the ones that
  find no page are known only by going through them in order;
- how long a decision holds: pages that come back may serve the head of the queue, before a sequence finishes.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from ..memory.accounting.kv_groups import PageGroups
from ..memory.paged.hybrid import HybridMemory
from ..memory.paged.paged import PagedMemory, PagedTransaction
from ..types.sequence import Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .base import Limits, Policy, Pool, blocks_of
from .options import KvGroupOptions
from .vllm_sosp23 import Victims, VllmSosp23
from .vllm_v0 import VllmV0


class OverGroups(Policy):
    """What they share.

    Attributes:
        groups: The KV groups of the pool.
    """

    limits: Limits
    groups: PageGroups
    #: Whether waiting sequences are looked at before the running ones give pages back in a step.
    admits_first = False

    def __init__(
        self, limits: Limits, options: KvGroupOptions | None = None, groups: PageGroups = PageGroups()
    ) -> None:
        super().__init__(limits, options, groups)
        self.groups = groups

    def memory(self, pool: Pool) -> PagedMemory:
        return HybridMemory(pool.num_blocks - self.null_blocks, pool.block_size, self.groups, pool.ids)

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Up to the step in which a sequence could find no page, and to that in which the head could find its own."""
        limit = min(limit, self._until_the_head_fits(state, memory, limit))
        return max(1, min(limit, memory.steps_with(state, memory.free - self._asked(), limit)))

    def _until_the_head_fits(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Steps in which the head of the queue finds too few pages."""
        if not state.waiting or state.batch_size == self.limits.max_num_seqs:
            return limit
        if memory.cache_log:
            # What it finds, and what others leave, may change with every step.
            return 1
        blocks = -(-state.waiting[0].start_tokens // memory.block_size)
        step = memory.step_that_frees(state.decode_step, memory.groups.wanted_blocks(blocks) + self._watermark())
        if step is None:
            return limit
        if self.admits_first:
            return step
        # Pages that were there in this step already were not what it lacked.
        return limit if step == 1 else step - 1

    def _asked(self) -> int:
        """Pages that must be free for a running sequence in addition to those that it takes."""
        return self.groups.number

    def _watermark(self) -> int:
        return self.limits.watermark_blocks

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """As an admission of all that the request ever knows, as a preemption may make it, asks for."""
        # The last token is never stored.
        blocks = blocks_of(workload.prompt_tokens + workload.output_tokens - 1, block_size)
        groups = self.groups
        windows = groups.sliding * np.minimum(blocks, groups.most_prompt_blocks)
        # In the step that goes on from a state at the end of a block both are there.
        return groups.full * blocks + windows + groups.states * np.minimum(blocks, 2 if groups.states_by_block else 1)


def _victims(
    order: Iterable[Sequence], decodes: int, transaction: PagedTransaction, asked: int | None = None
) -> tuple[Sequence, ...]:
    """The victims, last ones first, that leave the others enough pages.

    Args:
        order: The running sequences; those after the first ``decodes`` of them do not decode.
        asked: Pages that must be free when a sequence takes its own; None where those that it takes suffice.
    """
    transaction.grow_tables(0)
    kept, victims, place = list(order), [], 0
    while place < min(decodes, len(kept)):
        taken = transaction.needed(kept[place], 1)
        while transaction.free < (taken if asked is None else asked) and len(kept) > place:
            victims.append(kept.pop())
            transaction.preempt(victims[-1])
        if place < len(kept):
            transaction.take(kept[place], 1, taken)
        place += 1
    transaction.end_of_running()
    return tuple(victims)


class HybridVllmSosp23(OverGroups, VllmSosp23):
    """vLLM of SOSP'23, had it had KV groups: a sequence asks for a free page in each of them, and there is no host."""

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """See ``VllmSosp23``; one by one where some sequences do not find their pages before others come back."""
        if state.batch_size and transaction.free - transaction.takes < transaction.groups:
            return self._under_pressure(state, transaction)
        return super().schedule(state, transaction)

    def _make_room(self, state: State, transaction: PagedTransaction) -> Victims:
        order = sorted(state.running, key=attrgetter("order"))
        preempted = _victims(order, len(order), transaction, transaction.groups)
        return preempted, ()


class HybridVllmV0(HybridVllmSosp23, VllmV0):
    """vLLM 0.x, had it had KV groups, as ``HybridVllmSosp23``."""

    admits_first = True

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """See ``VllmV0``."""
        if state.waiting:
            admitted, tokens = self._prompts(state, transaction)
            if admitted:
                return StepPlan(admitted=admitted, prefill_tokens=tokens, steady=False, pauses=True)
        return super().schedule(state, transaction)
