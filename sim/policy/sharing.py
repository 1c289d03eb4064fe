"""vLLM's schedulers for groups of sequences: a group is admitted, preempted and swapped as a whole.

SOSP'23, sections 4.4 and 4.5. The rules are those of ``VllmSosp23``, and in addition:

    - A running group decodes while at least as many blocks are free as it has sequences, needed or not.
    - A group of several sequences is swapped out if the host has room for it and the pool could take it back.
      Otherwise it is recomputed, as a single sequence is.
    - Each sequence of a group counts towards ``max_num_seqs`` from the admission of the group on.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from ..memory.paged.counts import BlockCounts
from ..memory.paged.dialogue import DialogueMemory
from ..memory.paged.paged import PagedMemory
from ..memory.paged.sharing import SharingMemory
from ..memory.paged.transaction import PagedTransaction
from ..types.errors import SettingError
from ..types.sequence import CARRY_ON, Group, Sequence, StepPlan, leads, num_seqs_of, present
from ..types.state import State
from ..workload.workload import Workload
from .base import blocks_of
from .server import Pool
from .vllm_sosp23 import Victims, VllmSosp23
from .vllm_v0 import VllmV0

_arrival = attrgetter("order")


class _Sharing(VllmSosp23):
    """What both have in common: preemption, swapping in, admission."""

    def memory(self, pool: Pool) -> PagedMemory:
        if pool.dialogue is not None:
            return DialogueMemory(pool.num_blocks, pool.block_size, pool.dialogue)
        options, size = self.options, pool.block_size
        prefix = options.shared_prefix_tokens // size
        if prefix >= pool.num_blocks:
            remedy = f"fills {prefix} blocks, and the pool has {pool.num_blocks}; take a shorter one"
            raise SettingError("shared_prefix_tokens", options.shared_prefix_tokens, remedy)
        ids = pool.ids or options.use_beam_search
        return SharingMemory(pool.num_blocks, size, pool.host_blocks, ids, prefix)

    def _make_room(self, state: State, transaction: PagedTransaction) -> Victims:
        """Phase 1, group by group in the order of arrival; the last ones give way."""
        memory = transaction.memory
        memory.reserve_decodes(transaction.need)
        need = transaction.need + sum(len(group.siblings) for group in state.forking)
        if transaction.free - need >= _largest_group(state):
            transaction.free -= need
            return (), ()
        kept = [sequence for sequence in sorted(state.running, key=_arrival) if leads(sequence)]
        preempted: list[Sequence] = []
        swapped_out: list[Sequence] = []
        host_free, turn = memory.host_free, 0
        while turn < len(kept):
            leader = kept[turn]
            if transaction.free >= num_seqs_of(leader):
                transaction.free -= _need(leader, state, transaction)
                turn += 1
                continue
            victim = kept.pop()
            blocks = memory.held_blocks(victim, state.decode_step)
            transaction.free += blocks
            if self._goes_to_host(victim, blocks, host_free, memory):
                host_free -= blocks
                swapped_out += present(victim)
            else:
                # A sequence put at the front of the queue comes last.
                preempted += reversed(present(victim))
        return tuple(preempted), tuple(swapped_out)

    def _goes_to_host(self, victim: Sequence, blocks: int, host_free: int, memory: BlockCounts) -> bool:
        usable = memory.num_blocks - memory.prefix_blocks
        if num_seqs_of(victim) == 1:
            return self._swaps(blocks, host_free, usable)
        return blocks <= host_free and blocks + num_seqs_of(victim) <= usable

    def _swap_in(self, state: State, transaction: PagedTransaction, running: int) -> tuple[Sequence, ...]:
        """Phase 2: bring swapped-out requests back, each with all its sequences or not at all."""
        back: list[Sequence] = []
        memory = transaction.memory
        for leader in filter(leads, state.swapped):
            blocks, num_seqs = memory.needed_blocks(present(leader), 1), num_seqs_of(leader)
            watermark = self.limits.watermark_blocks if running else 0
            if transaction.free - blocks - num_seqs < watermark or self._full(running, num_seqs):
                break
            transaction.free -= blocks + _need_on_return(leader, memory)
            running += num_seqs
            back += present(leader)
        return tuple(back)

    def _admit(
        self,
        state: State,
        transaction: PagedTransaction,
        running: int,
        preempted: tuple[Sequence, ...],
        swapped_in: tuple[Sequence, ...],
    ) -> StepPlan:
        """Phase 3: admit waiting requests in the order of the queue, each with all its sequences or not at all."""
        limits, memory, free = self.limits, transaction.memory, transaction.free
        admitted: list[Sequence] = []
        tokens, budget = 0, limits.max_num_batched_tokens - running
        valid_until_horizon, stops_at_arrival = not preempted, True
        for leader in filter(leads, state.waiting):
            if preempted and leader.order > preempted[-1].order:
                break
            members, num_seqs = present(leader), num_seqs_of(leader)
            memory.look_up(leader, state.decode_step)
            prefill = _prefill_tokens(members)
            free -= memory.needed_blocks(members)
            if free < (limits.watermark_blocks if running else 0) or self._full(running, num_seqs):
                stops_at_arrival = False
                valid_until_horizon = valid_until_horizon and not memory.may_grow(leader, state.decode_step)
                break
            if running and prefill > budget:
                stops_at_arrival = False
                settled = not admitted and not memory.may_grow(leader, state.decode_step)
                valid_until_horizon = valid_until_horizon and settled
                break
            memory.promise(leader)
            running += num_seqs
            tokens += prefill
            budget -= prefill
            admitted += members
            # It forks in the next step.
            valid_until_horizon = valid_until_horizon and num_seqs == 1
        return StepPlan(
            admitted=tuple(admitted),
            prefill_tokens=tokens,
            preempted=preempted,
            swapped_in=swapped_in,
            valid_until_horizon=valid_until_horizon,
            stops_at_arrival=stops_at_arrival,
        )

    def _full(self, running: int, num_seqs: int) -> bool:
        """Whether so many more exceed ``max_num_seqs``; a larger group runs alone."""
        return running > 0 and running + num_seqs > self.limits.max_num_seqs

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Up to the step in which some group could find fewer free blocks than it has sequences."""
        return max(1, memory.steps_with(state, memory.free - _largest_group(state), limit))

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        shared = workload.prompt_tokens // block_size
        own = blocks_of(workload.prompt_tokens + workload.output_tokens - 1, block_size) - shared
        return shared + own * workload.num_sequences


class SharingSosp23(_Sharing):
    """``vllm-sosp23`` for requests of several sequences, or with a prefix that all share."""

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """The three phases; siblings begin in the step after their leader's prefill."""
        preempted, swapped_out = self._make_room(state, transaction)
        forked = _siblings(state, preempted + swapped_out)
        if swapped_out:
            return StepPlan(
                preempted=preempted,
                swapped_out=swapped_out,
                valid_until_horizon=False,
                stops_at_arrival=False,
                forked=forked,
            )
        running = state.batch_size - len(preempted) + len(forked)
        swapped_in = self._swap_in(state, transaction, running)
        forked += _siblings_back(swapped_in)
        if len(swapped_in) < len(state.swapped):
            return StepPlan(
                preempted=preempted,
                swapped_in=swapped_in,
                valid_until_horizon=not preempted,
                stops_at_arrival=False,
                forked=forked,
            )
        running = state.batch_size - len(preempted) + len(forked) + len(swapped_in)
        plan = self._admit(state, transaction, running, preempted, swapped_in)
        return _or_carry_on(plan._replace(forked=forked), state, transaction)


class SharingV0(_Sharing, VllmV0):
    """``vllm-v0`` for requests of several sequences, or with a prefix that all share."""

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """A prefill if there can be one, else a step that decodes, and in which siblings begin."""
        if state.waiting and not state.swapped:
            admitted, tokens = self._prompts(state, transaction)
            if admitted:
                return StepPlan(admitted=admitted, prefill_tokens=tokens, valid_until_horizon=False, prefill_only=True)
        preempted, swapped_out = self._make_room(state, transaction)
        forked = _siblings(state, preempted + swapped_out)
        if preempted or swapped_out:
            return StepPlan(
                preempted=preempted,
                swapped_out=swapped_out,
                valid_until_horizon=False,
                stops_at_arrival=False,
                forked=forked,
            )
        swapped_in = self._swap_in(state, transaction, state.batch_size + len(forked))
        forked += _siblings_back(swapped_in)
        may_grow = bool(state.waiting) and transaction.memory.may_grow(state.waiting[0], state.decode_step)
        waits_on = len(swapped_in) < len(state.swapped) or not (swapped_in or may_grow)
        plan = StepPlan(
            swapped_in=swapped_in,
            valid_until_horizon=waits_on,
            stops_at_arrival=not (state.waiting or state.swapped),
            forked=forked,
        )
        return _or_carry_on(plan, state, transaction)

    def _prompts(self, state: State, transaction: PagedTransaction) -> tuple[tuple[Sequence, ...], int]:
        limits, memory, free = self.limits, transaction.memory, transaction.free
        running = state.batch_size + sum(len(group.siblings) for group in state.forking)
        admitted: list[Sequence] = []
        tokens = 0
        for leader in filter(leads, state.waiting):
            members, num_seqs = present(leader), num_seqs_of(leader)
            memory.look_up(leader, state.decode_step)
            prefill = _prefill_tokens(members)
            free -= memory.needed_blocks(members)
            if free < (limits.watermark_blocks if running else 0) or self._full(running, num_seqs):
                break
            if admitted and tokens + prefill > limits.max_num_batched_tokens:
                break
            memory.promise(leader)
            running += num_seqs
            tokens += prefill
            admitted += members
        return tuple(admitted), tokens


def _largest_group(state: State) -> int:
    """Sequences of the largest group that runs."""
    groups = {sequence.group for sequence in state.running}
    return max((1 if group is None else len(group.members) for group in groups), default=0)


def _need(leader: Sequence, state: State, transaction: PagedTransaction) -> int:
    """Blocks that a running group takes in the coming step, copies included."""
    opens, group = transaction.needs_block(leader, state.decode_step), leader.group
    if group is None:
        return opens
    if group in state.forking:
        return len(group.members) if opens else len(group.siblings)
    return len(group.members) if opens else group.pending_copies


def _need_on_return(leader: Sequence, memory: BlockCounts) -> int:
    """Blocks that a group takes in the step in which it comes back, beside those that it brings."""
    opens, group = not (leader.start_tokens - 1) % memory.block_size, leader.group
    if group is None or opens:
        return opens * num_seqs_of(leader)
    return group.pending_copies if group.forked else len(group.siblings)


def _prefill_tokens(members: tuple[Sequence, ...]) -> int:
    return sum(member.start_tokens - member.computed_tokens for member in members)


def _siblings(state: State, victims: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
    """Sequences that begin in this step: siblings of prefilled leaders that are not preempted."""
    begin = (group for group in state.forking if group.leader not in victims)
    return tuple(sibling for group in begin for sibling in group.siblings)


def _siblings_back(swapped_in: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
    """Siblings of leaders that were swapped out before their group had forked."""
    groups: Iterator[Group | None] = (sequence.group for sequence in swapped_in)
    return tuple(sibling for group in groups if group is not None and not group.forked for sibling in group.siblings)


def _or_carry_on(plan: StepPlan, state: State, transaction: PagedTransaction) -> StepPlan:
    """``CARRY_ON`` where a plan comes to it; beams and copies need a plan in every step."""
    idle = not (plan.admitted or plan.swapped_in or plan.forked or plan.preempted or state.waiting or state.swapped)
    memory = transaction.memory
    return CARRY_ON if idle and not memory.searches and not memory.pending_copies else plan
