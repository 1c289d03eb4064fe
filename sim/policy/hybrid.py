"""Policies for KV groups: layers with a window share the pool with other layers.

They decide like the policies with the same names, with pages of all groups instead of blocks, except for

- victims: each sequence releases the pages before its window before it takes pages, so only a pass over the
  sequences in order finds the ones without a page;
- horizons: released pages may suffice for the head of the queue before a sequence finishes.
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
    """Base class of policies for KV groups.

    Attributes:
        groups: The KV groups of the pool.
    """

    limits: Limits
    groups: PageGroups
    #: Whether a step checks waiting sequences before the running sequences release pages.
    admits_first = False

    def __init__(
        self, limits: Limits, options: KvGroupOptions | None = None, groups: PageGroups = PageGroups()
    ) -> None:
        super().__init__(limits, options, groups)
        self.groups = groups

    def memory(self, pool: Pool) -> PagedMemory:
        return HybridMemory(pool.num_blocks - self.null_blocks, pool.block_size, self.groups, pool.ids)

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Steps until a sequence may find no page, or until the head of the queue may find its pages."""
        limit = min(limit, self._until_the_head_fits(state, memory, limit))
        return max(1, min(limit, memory.steps_with(state, memory.free - self._asked(), limit)))

    def _until_the_head_fits(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Number of steps in which the head of the queue finds too few pages."""
        if not state.waiting or state.batch_size == self.limits.max_num_seqs:
            return limit
        if memory.cache_log:
            # Its cached prefix and the free pages may change with every step.
            return 1
        blocks = -(-state.waiting[0].start_tokens // memory.block_size)
        step = memory.step_that_frees(state.decode_step, memory.groups.wanted_blocks(blocks) + self._watermark())
        if step is None:
            return limit
        if self.admits_first:
            return step
        # If the pages were already free in this step, the head waits for another reason.
        return limit if step == 1 else step - 1

    def _asked(self) -> int:
        """Pages that must be free for a running sequence in addition to the pages that it takes."""
        return self.groups.number

    def _watermark(self) -> int:
        return self.limits.watermark_blocks

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """See ``Policy``: the pages for an admission with all tokens of a request, which a preemption may cause."""
        # The last token is never stored.
        blocks = blocks_of(workload.prompt_tokens + workload.output_tokens - 1, block_size)
        groups = self.groups
        windows = groups.sliding * np.minimum(blocks, groups.most_prompt_blocks)
        # A step that continues from a state at the end of a block holds that state and the new one.
        return groups.full * blocks + windows + groups.states * np.minimum(blocks, 2 if groups.states_by_block else 1)


def _victims(
    order: Iterable[Sequence], decodes: int, transaction: PagedTransaction, asked: int | None = None
) -> tuple[Sequence, ...]:
    """Victims, the last ones first, so that the other sequences find their pages.

    Args:
        order: The running sequences; only the first ``decodes`` of them decode.
        asked: Pages that must be free when a sequence takes pages; None is the number that it takes.
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
    """vLLM of SOSP'23 with hypothetical KV groups: a sequence requires a free page in each group; no swap space."""

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """See ``VllmSosp23``; one by one if some sequences may not find pages before others release some."""
        if state.batch_size and transaction.free - transaction.takes < transaction.groups:
            return self._under_pressure(state, transaction)
        return super().schedule(state, transaction)

    def _make_room(self, state: State, transaction: PagedTransaction) -> Victims:
        order = sorted(state.running, key=attrgetter("order"))
        preempted = _victims(order, len(order), transaction, transaction.groups)
        return preempted, ()


class HybridVllmV0(HybridVllmSosp23, VllmV0):
    """vLLM 0.x with hypothetical KV groups, as in ``HybridVllmSosp23``."""

    admits_first = True

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """See ``VllmV0``."""
        if state.waiting:
            admitted, tokens = self._prompts(state, transaction)
            if admitted:
                return StepPlan(admitted=admitted, prefill_tokens=tokens, steady=False, pauses=True)
        return super().schedule(state, transaction)
