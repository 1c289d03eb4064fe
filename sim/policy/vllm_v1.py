"""vLLM V1: schedules the running sequences one by one, then admits waiting sequences."""

from __future__ import annotations

from typing import Any, ClassVar

from ..memory.accounting.kv_groups import FULL, PageGroups
from ..memory.paged.cached import CachedMemory
from ..memory.paged.paged import PagedMemory
from ..memory.paged.transaction import PagedTransaction
from ..memory.prefix import Chains
from ..spec.launch import Launch, batch_defaults, capacity, fits, longest_model_len
from ..types.errors import SettingError
from ..types.sequence import Sequence, StepPlan
from ..types.state import State
from .base import Limits, Pool, Server
from .options import Options, VllmV1Options
from .token_budget import TokenBudget


class VllmV1(TokenBudget):
    """vLLM V1 (release 0.33, ``vllm/v1/core/sched/scheduler.py``), first come first served.

    There are no phases: a step computes the uncomputed tokens of each sequence, within the budget. Running sequences come
    first, in order of arrival. A sequence without enough free blocks preempts the last running sequence, possibly itself
    (recompute); the preempted sequence goes to the front of the queue. If no sequence was preempted, waiting sequences are
    admitted (``TokenBudget``); they must leave the watermark free. One block is vLLM's null block.

    If the free blocks suffice for all decoding sequences, and at most the last running sequence is in its prefill, the result
    does not depend on the order, and blocks are only counted. Otherwise, sequences are scheduled one by one. The same applies
    to states at the ends of blocks: their chunks end on block boundaries and leave a part of the budget to other sequences
    (``mamba_cache_mode`` align).
    """

    name = "vllm-v1"
    system = "vLLM 0.33, V1"
    options_type: ClassVar[type[Options]] = VllmV1Options
    preempted_first = True
    null_blocks = 1
    # With asynchronous scheduling a request that ends before its ``max_tokens`` computes a token more.
    reads_max_tokens = True
    caches_prefixes = caches_by_default = True
    default_enforce_eager = False
    defaults_source = "default of vllm serve 0.33"
    pool_source = "computed from the GPU memory as by vllm serve 0.33"
    serves_kv_groups = serves_states = True

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        super().__init__(limits, options, groups)
        self.schedules_ahead = isinstance(options, VllmV1Options) and options.async_scheduling
        self._is_plain = self.groups.kinds == (FULL,)
        self.aligns_chunks = self.groups.states_by_block

    @staticmethod
    def in_flight_tokens(limits: Limits, options: Any) -> int:
        """See ``Policy``; with asynchronous scheduling two steps are in flight."""
        return (1 + options.async_scheduling) * limits.max_num_batched_tokens

    @classmethod
    def pool_size(
        cls, server: Server, options: VllmV1Options, num_blocks: int | None, block_size: int | None
    ) -> tuple[int, int]:
        """See ``Policy``; the pool that ``vllm serve`` computes at its start (``spec.launch``).

        Raises:
            SettingError: vLLM would not start, as the pool cannot hold one sequence of ``max_model_len``.
        """
        if num_blocks is not None or server.model.mixer:
            return super().pool_size(server, options, num_blocks, block_size)
        lengths = 0, server.max_model_len
        seqs, tokens = cls.step_limits(server, lengths, server.max_num_seqs, server.max_num_batched_tokens)
        launch = Launch(
            model=server.model,
            gpu=server.gpu,
            max_model_len=server.max_model_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            tensor_parallel=server.tensor_parallel,
            deployment=server.deployment,
            gpu_memory_utilization=options.gpu_memory_utilization,
            block_size=block_size or cls.default_block_size,
            hybrid=server.layout is not None,
        )
        if not fits(launch):
            longest = longest_model_len(launch)
            remedy = f"the KV cache holds a sequence of {longest} tokens; take a shorter one, or a larger GPU"
            raise SettingError("max_model_len", server.max_model_len, remedy)
        return capacity(launch).num_blocks, launch.block_size

    @classmethod
    def step_limits(
        cls, server: Server, pool: tuple[int, int], seqs: int | None, tokens: int | None
    ) -> tuple[int, int]:
        """Defaults of ``vllm serve`` by GPU memory (``EngineArgs._set_default_max_num_seqs_and_batched_tokens_args``)."""
        default_tokens, default_seqs = batch_defaults(server.gpu)
        budget = tokens or min(default_tokens, (seqs or default_seqs) * pool[1])
        return seqs or min(default_seqs, budget), budget

    def memory(self, pool: Pool) -> PagedMemory:
        usable, size = pool.num_blocks - self.null_blocks, pool.block_size
        chains = None if pool.token_runs is None else Chains(pool.token_runs, size)
        if chains is not None and self._is_plain:
            return CachedMemory(usable, size, chains, pool.ids, unnamed_first=True, ahead=self.schedules_ahead)
        return PagedMemory(usable, size, ids=pool.ids, groups=self.groups, chains=chains)

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """Schedule the running sequences, then the waiting sequences."""
        in_order = not state.stalled and not (state.prefilling and self.aligns_chunks)
        if in_order and transaction.free >= transaction.takes:
            return self._fill(state, transaction, next(iter(state.prefilling), None))
        if not in_order or not self._is_plain or state.finished:
            return self._one_by_one(state, transaction)
        if transaction.memory.cache_log is None and transaction.memory.tables is None:
            # Blocks without ids and contents only need counting.
            return super().schedule(state, transaction)
        return self._schedule_in_order(state, transaction)

    def _schedule_in_order(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """As ``_one_by_one``, for too few blocks and sequences that keep every token: skips sequences that need no new
        block."""
        transaction.grow_tables(0)
        before, size = state.decode_step - 1, transaction.block_size
        opens = [place for place, sequence in enumerate(state.running) if not (before + sequence.lag) % size]
        kept = [*state.running, *state.prefilling]
        preempted: list[Sequence] = []
        for place in opens:
            while not transaction.free and len(kept) > place:
                preempted.append(kept.pop())
                transaction.preempt(preempted[-1])
            if place >= len(kept):
                break
            transaction.take(kept[place], 1, 1)
        transaction.end_of_running()
        return StepPlan(preempted=tuple(preempted), steady=False, wakes=False)

    def _fill(self, state: State, transaction: PagedTransaction, partial: Sequence | None) -> StepPlan:
        """See ``TokenBudget``."""
        if partial is not None or state.waiting:
            transaction.grow_tables(1)
        return super()._fill(state, transaction, partial)

    def _one_by_one(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """vLLM's loop over the running sequences: each takes its blocks, or the last one is preempted."""
        transaction.grow_tables(0)
        kept = [*state.running, *state.prefilling, *state.stalled, *state.finished]
        kept.sort(key=lambda sequence: sequence.order)
        budget, place = self.limits.max_num_batched_tokens, 0
        preempted: list[Sequence] = []
        scheduled: list[tuple[Sequence, int]] = []
        while place < len(kept) and budget:
            sequence = kept[place]
            tokens = self._next_tokens(sequence, state, budget, transaction)
            if tokens:
                needed = transaction.needed(sequence, tokens)
                while transaction.free < needed and len(kept) > place:
                    preempted.append(kept.pop())
                    transaction.preempt(preempted[-1])
                if place == len(kept):
                    break
                transaction.take(sequence, tokens, needed)
                scheduled.append((sequence, tokens))
                budget -= tokens
            place += 1
        transaction.end_of_running()
        return self._plan(state, transaction, budget, kept, scheduled, tuple(preempted))

    def _next_tokens(self, sequence: Sequence, state: State, budget: int, transaction: PagedTransaction) -> int:
        """Tokens that a running sequence computes in the step."""
        if sequence not in state.prefilling:
            return int(sequence not in state.finished)
        computed = sequence.computed_tokens
        return self._chunk(sequence, computed, min(sequence.start_tokens - computed, budget), transaction)

    def _plan(
        self,
        state: State,
        transaction: PagedTransaction,
        budget: int,
        kept: list[Sequence],
        scheduled: list[tuple[Sequence, int]],
        preempted: tuple[Sequence, ...],
    ) -> StepPlan:
        """Plan of the step, after the running sequences have taken their blocks."""
        computes = dict(scheduled)
        stalls = tuple(each for each in kept if each in state.running and each not in computes)
        resumes = tuple(each for each in kept if each in state.stalled and each in computes)
        for each in kept:
            if each in state.prefilling and each not in computes:
                transaction.pass_over(each)
        prefills = [(each, tokens) for each, tokens in scheduled if each in state.prefilling]
        ended = [(each, tokens) for each, tokens in prefills if each.computed_tokens + tokens == each.start_tokens]
        chunks = [chunk for chunk in prefills if chunk not in ended]
        if preempted:
            plan = StepPlan(
                admitted=tuple(each for each, _ in ended),
                prefill_tokens=sum(tokens for _, tokens in prefills),
                preempted=preempted,
                chunks=tuple(chunks),
                steady=False,
                wakes=False,
            )
        else:
            plan = self._admit(state, transaction, budget, ended, chunks)
        if stalls or resumes or state.stalled or state.prefilling:
            plan = plan._replace(steady=False, stalls=(stalls, resumes))
        return plan

    def _chunk(self, sequence: Sequence, computed: int, tokens: int, transaction: PagedTransaction) -> int:
        """With states at the ends of blocks, chunks end on block boundaries (vLLM's ``_mamba_block_aligned_split``)."""
        known, size = sequence.start_tokens, transaction.block_size
        prompt_end = max(sequence.prompt_tokens, known - 1)
        if not self.aligns_chunks or computed >= prompt_end:
            return tokens
        end = computed + tokens
        if end < prompt_end:
            aligned = end // size * size
            if aligned > computed or size <= self.limits.max_num_batched_tokens:
                end = aligned
        junction = transaction.junction(sequence)
        stops = [
            -(-computed // size) * size,
            (known - 1) // size * size,
            computed + (junction - computed) // size * size if computed < junction < end else end,
        ]
        return max(0, min([stop for stop in stops if computed < stop < end], default=end) - computed)

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Steps until the running sequences need more blocks than are free, or the head of the queue may find its blocks."""
        if self._is_plain:
            return super().horizon(state, memory, limit)
        limit = self.steps_until_head_fits(state, memory, limit)
        return max(1, min(limit, memory.steps_with(state, memory.free, limit)))
