"""vLLM V1: schedules the running sequences one by one, then admits waiting sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import ClassVar

import numpy as np

from ..memory import Memory
from ..memory.accounting.drafts import Speculation
from ..memory.accounting.kv_groups import FULL, PageGroups
from ..memory.paged.cached import CachedMemory
from ..memory.paged.offload import OffloadedMemory
from ..memory.paged.paged import PagedMemory
from ..memory.paged.speculative import SpeculativeMemory, SpeculativeTransaction
from ..memory.paged.speculative_offload import SpeculativeOffloadedMemory
from ..memory.paged.transaction import PagedTransaction
from ..memory.prefix import FREE_QUEUES, Chains, FreeKVCacheBlockQueue
from ..spec.releases import LAST_ORDERED, free_queue, release
from ..spec.startup.capacity import capacity, capture_blocks, fits, longest_model_len
from ..spec.startup.launch import Launch, batch_defaults
from ..types.errors import SettingError
from ..types.sequence import Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .base import Source
from .options import Options, VllmServeOptions, VllmV1Options, minor_version
from .server import CONSUMER, PRODUCER, Limits, Pool, Server
from .token_budget import Chunk, TokenBudget
from .vllm_sosp23 import steps_until_head_fits

#: More steps than in any leap.
_FOR_EVER = 1 << 40
#: What a decode within its block computes, and the blocks that it takes.
_A_TOKEN = 1, 0


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
    source = Source("vLLM 0.33.0", "wheel", "2026-11-29: order in which a finish beside a connector frees blocks")
    system = "vLLM 0.33, V1"
    pipelines = True
    options_type: ClassVar[type[Options]] = VllmV1Options
    options: VllmV1Options
    preempted_first = True
    null_blocks = 1
    # With asynchronous scheduling a request that ends before its ``max_tokens`` computes a token more.
    reads_max_tokens = True
    caches_prefixes = caches_by_default = True
    default_enforce_eager = False
    defaults_source = "default of vllm serve 0.33"
    pool_source = "computed from the GPU memory as by vllm serve 0.33"
    serves_kv_groups = serves_states = serves_block_sizes = True
    #: The order in which free blocks are taken; None for that of the release.
    eviction_order: ClassVar[type[FreeKVCacheBlockQueue] | None] = None

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        super().__init__(limits, options, groups)
        chosen, self.schedules_ahead = self.options, self.options.schedules_ahead
        drafts = 0 if chosen.speculative is None else chosen.speculative.num_speculative_tokens
        connects = limits.kv_role is not None or chosen.offloading is not None
        drops = bool(chosen.speculative and chosen.speculative.hash_lookahead_tokens and connects)
        plain = groups or PageGroups(ahead=self.schedules_ahead)
        retained = chosen.prefix_cache_retention_interval
        # vLLM's connector that offloads blocks loads them, too.
        loads = limits.kv_role == CONSUMER or chosen.offloading is not None
        defers = loads and self.stages + self.schedules_ahead > 1
        self.groups = plain._replace(
            drafts=drafts, drops_block=drops, connects=connects, defers=defers, retention_tokens=retained
        )
        self._cap, self._longest_chunk = _ChunkCap(limits, chosen), limits.max_num_batched_tokens
        self._cadence = _Cadence(chosen.prefill_schedule_interval) if chosen.prefill_schedule_interval > 1 else None
        self.reserves_whole, self._release = chosen.scheduler_reserve_full_isl, chosen.vllm_release
        if chosen.max_num_active_seqs is not None:
            if chosen.max_num_active_seqs > limits.max_num_seqs:
                remedy = f"must be at most max_num_seqs = {limits.max_num_seqs}"
                raise SettingError("max_num_active_seqs", chosen.max_num_active_seqs, remedy)
            self.most_running = chosen.max_num_active_seqs
        # Prefills overlap, so that sequences take their blocks in turn.
        self._by_priority, self._entered = chosen.scheduling_policy == "priority", 0
        # Calls of ``schedule`` so far, which count a sequence's turn where stages work on batches of their own.
        self._calls = 0
        self._offloads = chosen.offloading is not None
        # Whether the KV of a prompt must be sent (``requires_kv_delivery``).
        self._delivers = limits.kv_role == PRODUCER
        # Waiting sequences with blocks, which they load or have loaded from the host.
        self._loads: Mapping[Sequence, int] = {}
        in_turn = self._cap.tokens > 0 or self._cadence is not None or self._offloads
        overlaps = in_turn or self._by_priority
        # Beside batches in flight sequences take their blocks one by one in any memory.
        in_turn = in_turn or (self._by_priority and self.stages == 1)
        self._is_plain = self.groups.kinds == (FULL,) and not in_turn
        self.splits_chunks = self.groups.states_by_block or overlaps
        self._speculative = found = chosen.speculative
        self._has_options = overlaps or not self._in_lockstep
        if found is not None:
            uniform = 1 + found.num_speculative_tokens
            if 0 < self._cap.tokens < uniform:
                remedy = (
                    f"vLLM pads a sequence to {uniform} tokens and then ends at an assertion; give at least {uniform}"
                )
                raise SettingError("long_prefill_token_threshold", self._cap.tokens, remedy)
            if limits.max_num_batched_tokens <= found.lookahead_tokens:
                remedy = f"must be more than the {found.lookahead_tokens} drafts of a sequence"
                raise SettingError("max_num_batched_tokens", limits.max_num_batched_tokens, remedy)
            self.splits_chunks, self.extra_slots = True, found.extra_slots

    @staticmethod
    def in_flight_tokens(limits: Limits, options: Options) -> int:
        """See ``Policy``; vLLM's ``max_concurrent_batches``: one a stage, and one more with asynchronous scheduling."""
        return (limits.stages + options.schedules_ahead) * limits.max_num_batched_tokens

    @classmethod
    def pool_size(
        cls, server: Server, options: Options, num_blocks: int | None, block_size: int | None
    ) -> tuple[int, int]:
        """See ``Policy``; the pool that ``vllm serve`` computes at its start (``spec.startup``).

        Raises:
            SettingError: vLLM would not start: the pool cannot hold one sequence of ``max_model_len``, or of one token, or has
                fewer blocks than sequences with states.
        """
        if num_blocks is not None:
            blocks, size = super().pool_size(server, options, num_blocks, block_size)
            return blocks, size * server.deployment.decode_context_parallel
        assert isinstance(options, VllmServeOptions)
        lengths, config = (0, server.max_model_len), server.layout.config if server.layout else None
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
            enable_prefix_caching=config is None or config.settings.enable_prefix_caching,
            export_tokens=config.export_tokens if config else None,
            speculative=options.speculative,
        )
        if not fits(launch):
            longest = longest_model_len(launch)
            if not longest:
                # No shorter sequence helps: weights, activations and graphs leave next to nothing.
                remedy = f"{server.model.name} leaves no KV blocks on {server.gpu.name}; use more or larger GPUs"
                raise SettingError("tensor_parallel", server.tensor_parallel, remedy)
            remedy = f"the KV cache holds a sequence of {longest} tokens; take a shorter one, or a larger GPU"
            raise SettingError("max_model_len", server.max_model_len, remedy)
        minor = server.deployment.vllm_minor or LAST_ORDERED
        states = capture_blocks(replace(launch, release=release((0, minor))))
        if states is not None and seqs > states:
            remedy = f"exceeds the {states} blocks for states, with which vLLM does not start; give at most {states}, or --enforce-eager"
            raise SettingError("max_num_seqs", seqs, remedy)
        return capacity(launch).num_blocks, launch.block_size * server.deployment.decode_context_parallel

    @classmethod
    def step_limits(
        cls, server: Server, pool: tuple[int, int], seqs: int | None, tokens: int | None
    ) -> tuple[int, int]:
        """Defaults of ``vllm serve`` by GPU memory (``EngineArgs._set_default_max_num_seqs_and_batched_tokens_args``)."""
        default_tokens, default_seqs = batch_defaults(server.gpu)
        budget = tokens or min(default_tokens, (seqs or default_seqs) * pool[1])
        return seqs or min(default_seqs, budget), budget

    def memory(self, pool: Pool) -> Memory:
        """See ``Policy``; blocks of one KV group with a prefix cache have a memory of their own, which is faster.

        Raises:
            SettingError: ``vllm_release`` has an order of its own for the model's layers.
        """
        usable, size = pool.num_blocks - self.null_blocks, pool.block_size
        if not self._in_lockstep:
            return self._speculative_memory(pool, usable)
        chains = self._chains(pool)
        if chains is not None and pool.offloaded is not None:
            return OffloadedMemory(
                usable,
                size,
                groups=self.groups,
                chains=chains,
                host=pool.offloaded,
                order=self._order(True),
                watermark_blocks=self.limits.watermark_blocks,
                reserves_whole=self.reserves_whole,
            )
        if chains is not None and self._is_plain:
            return CachedMemory(usable, size, chains, self._order(True), self.schedules_ahead)
        return PagedMemory(
            usable,
            size,
            ids=pool.ids,
            groups=self.groups,
            chains=chains,
            in_turn=not self._is_plain,
            order=self._order(chains is not None),
        )

    def _chains(self, pool: Pool, lookahead_tokens: int = 0) -> Chains | None:
        """Names of the contents of prompts, in a fleet with a shared tier those of all replicas; None where prefixes are not cached."""
        if pool.token_runs is None:
            return None
        fleet = None if pool.offloaded is None else pool.offloaded.fleet
        size = self.groups.hash_block_size(pool.block_size)
        return Chains(pool.token_runs, size, lookahead_tokens, None if fleet is None else fleet.chains)

    def _speculative_memory(self, pool: Pool, usable: int) -> SpeculativeMemory:
        size, config = pool.block_size, self._speculative
        drafts = None if config is None else Speculation(config, pool.seed)
        chains = self._chains(pool, 0 if config is None or self.groups.drops_block else config.hash_lookahead_tokens)
        length, order = self.limits.max_model_len, self._order(chains is not None)
        if chains is None or pool.offloaded is None:
            return SpeculativeMemory(usable, size, drafts, chains, length, order, self.groups)
        host = pool.offloaded, self.limits.watermark_blocks, self.reserves_whole
        return SpeculativeOffloadedMemory(usable, size, drafts, chains, *host, length, order, self.groups)

    def longest_tokens(self, workload: Workload) -> np.ndarray:
        """See ``Policy``; drafts, and the slots that a drafter looks ahead, are reserved up to ``max_model_len``."""
        stored = super().longest_tokens(workload)
        if self._speculative is None:
            return stored
        ahead = (1 + self.schedules_ahead) * self._speculative.num_speculative_tokens
        return np.minimum(stored + ahead + self._speculative.lookahead_tokens, self.limits.max_model_len)

    def _order(self, caching: bool) -> type[FreeKVCacheBlockQueue]:
        """The order in which free blocks are taken.

        Raises:
            SettingError: The release has an order of its own for these layers.
        """
        if self.eviction_order is not None:
            return self.eviction_order
        name = free_queue(minor_version(self._release), caching, self.groups.kinds == (FULL,))
        if name is None:
            remedy = "frees blocks of windows and states in an order of its own, which is not simulated; take another"
            raise SettingError("vllm_release", self._release, remedy)
        return FREE_QUEUES[name]

    def schedule(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """vLLM's ``Scheduler.schedule``: the running sequences, then the waiting ones, then the plan.

        Where every running sequence decodes one token, or is the last one and in its prefill, and all find their blocks, the
        order in which they take them decides nothing, and blocks are counted at once (``_fill``).
        """
        if self._has_options:
            self._begin(state, transaction)
        if self.stages > 1:
            self._calls += 1
            self.known_calls = self._calls - self.schedules_ahead
            self.passed.intersection_update(state.waiting)
        # A prefill that the step in flight computes is not preempted for its own next chunk.
        in_turn = self.splits_chunks or self.groups.defers
        alike = self._in_lockstep and not state.stalled and not (in_turn and state.prefilling)
        if alike and transaction.free >= transaction.takes:
            plan = self._fill(state, transaction, next(iter(state.prefilling), None))
        else:
            plan = self._one_by_one(state, transaction)
        if self.stages > 1:
            decodes = plan.stalls[1] if plan.stalls else ()
            for sequence in (*plan.admitted, *decodes, *(each for each, _ in plan.chunks)):
                sequence.next_decode_eligible_step = self._calls + self.stages
        return self._end(state, transaction, plan) if self._has_options else plan

    @property
    def _in_lockstep(self) -> bool:
        """Whether every running sequence decodes one token in every step."""
        return self._speculative is None and self.stages == 1

    def _begin(self, state: State, transaction: PagedTransaction) -> None:
        """What the options of the scheduler say of the coming step."""
        self._longest_chunk = self._cap.of(state)
        if self._cadence is not None:
            together = self.steps_together
            self._cadence.begin(state, None if together is None else together())
        if self._offloads:
            transfers = transaction.memory.transfers
            self._loads = {} if transfers is None else transfers.loaded
            self.sorts_loads = bool(self._loads)

    def _end(self, state: State, transaction: PagedTransaction, plan: StepPlan) -> StepPlan:
        """The plan of the step, with what the options add to it."""
        if self._cadence is not None:
            self._cadence.end(state, plan, len(self.passed))
        if self._by_priority and state.waiting and not plan.preempted:
            # A request that arrives may come before those that wait.
            entering = dict.fromkeys((*plan.admitted, *(each for each, _ in plan.chunks)))
            first = [each for each in entering if each not in state.prefilling]
            behind = (each for each in sorted(state.waiting, key=_BY_URGENCY) if each not in entering)
            plan = plan._replace(order=(*first, *behind), stops_at_arrival=True)
        if flush := transaction.end_decision(_computed(state, plan)):
            plan = plan._replace(flush_ticks=flush)
        if self._speculative is not None and isinstance(transaction, SpeculativeTransaction):
            plan = transaction.verifies(plan)
        return plan

    def _fill(self, state: State, transaction: PagedTransaction, partial: Sequence | None) -> StepPlan:
        if partial is not None or state.waiting:
            transaction.grow_tables(1)
        return super()._fill(state, transaction, partial)

    def _one_by_one(self, state: State, transaction: PagedTransaction) -> StepPlan:
        """vLLM's loop over the running sequences: each takes its blocks, or the last one is preempted."""
        transaction.grow_tables(0)
        kept = [*state.running, *state.prefilling, *state.stalled, *state.finished]
        kept.sort(key=_BY_ORDER)
        budget, place = self.limits.max_num_batched_tokens - self.extra_slots, 0
        preempted: list[Sequence] = []
        # Within a block of the only KV group a decode takes nothing, and gives nothing back.
        size = transaction.block_size if self._in_lockstep and transaction.memory.is_plain else 1
        running, before = state.running, state.decode_step - 1
        # Tokens of each scheduled sequence, and the blocks that it took for them, less those that it gave back.
        scheduled: dict[Sequence, tuple[int, int]] = {}
        while place < len(kept) and budget > 0:
            sequence = kept[place]
            if sequence in running and (before + sequence.lag) % size:
                scheduled[sequence] = _A_TOKEN
                budget -= 1
                place += 1
                continue
            tokens = self._next_tokens(sequence, state, budget, transaction)
            if tokens:
                given_back = -transaction.free
                needed = transaction.needed(sequence, tokens)
                given_back += transaction.free
                while transaction.free < needed and sequence in kept[place : place + 1]:
                    victim = self._victim(kept)
                    if self.groups.defers and _in_flight(victim, state, transaction):
                        break
                    if victim in scheduled:
                        more, taken = scheduled.pop(victim)
                        budget += more + self.extra_slots
                        transaction.free += taken
                    # Also one that computes nothing in this step, as its last token is in flight.
                    place -= kept.index(victim) < place
                    kept.remove(victim)
                    preempted.append(victim)
                    transaction.preempt(victim)
                if sequence not in kept[place : place + 1]:
                    if self._by_priority:
                        continue
                    break
                if transaction.free < needed:
                    transaction.pass_in_vain(sequence, tokens)
                    break
                free = transaction.free
                transaction.take(sequence, tokens, needed)
                scheduled[sequence] = tokens, free - transaction.free - given_back
                budget -= tokens + self.extra_slots
                if self._cadence is not None and sequence in state.prefilling:
                    self._cadence.prefills = True
            place += 1
        transaction.end_of_running(bool(kept), running.keys() - scheduled.keys())
        return self._plan(state, transaction, budget, kept, scheduled, tuple(preempted))

    def _victim(self, kept: list[Sequence]) -> Sequence:
        """The running sequence to preempt: the last one, or the least urgent one."""
        return max(kept, key=_BY_URGENCY) if self._by_priority else kept[-1]

    def _queue(self, state: State) -> Iterable[Sequence]:
        waiting: Iterable[Sequence] = state.waiting
        if not (self._by_priority or self._offloads or self.stages > 1):
            return waiting
        if self._by_priority:
            waiting = sorted(waiting, key=_BY_URGENCY)
        if self._loads:
            # Those with blocks, which load or have loaded, come first.
            waiting = sorted(waiting, key=lambda sequence: sequence not in self._loads)
        return self._numbered(waiting)

    def _numbered(self, queue: Iterable[Sequence]) -> Iterator[Sequence]:
        """The sequences of a queue; those that enter are ordered by that, not by arrival."""
        for sequence in queue:
            self._entered += 1
            sequence.order = self._entered
            yield sequence

    def _next_tokens(self, sequence: Sequence, state: State, budget: int, transaction: PagedTransaction) -> int:
        """Tokens that a running sequence computes in the step; none while the batch of its last token is in flight."""
        if sequence not in state.prefilling:
            if sequence.next_decode_eligible_step > self._calls:
                return 0
            if isinstance(transaction, SpeculativeTransaction) and sequence not in state.finished:
                return transaction.tokens_of(sequence, min(budget, self._longest_chunk))
            return int(sequence not in state.finished)
        if self._defers:
            return 0
        computed = sequence.computed_tokens
        return self._chunk(sequence, computed, min(sequence.start_tokens - computed, budget), transaction)

    @property
    def _defers(self) -> bool:
        """Whether the step computes no prompts because of ``prefill_schedule_interval``."""
        return self._cadence is not None and self._cadence.defers

    def _plan(
        self,
        state: State,
        transaction: PagedTransaction,
        budget: int,
        kept: list[Sequence],
        scheduled: Mapping[Sequence, tuple[int, int]],
        preempted: tuple[Sequence, ...],
    ) -> StepPlan:
        """Plan of the step, after the running sequences have taken their blocks."""
        stalls: tuple[Sequence, ...] = ()
        if len(scheduled) < len(kept):
            stalls = tuple(each for each in kept if each in state.running and each not in scheduled)
        resumes = tuple(each for each in scheduled if each in state.stalled) if state.stalled else ()
        prefills: list[Chunk] = []
        if state.prefilling:
            prefills = [(each, scheduled[each][0]) for each in scheduled if each in state.prefilling]
            for each in kept:
                if each in state.prefilling and each not in scheduled:
                    transaction.pass_over(each)
        ended = [(each, tokens) for each, tokens in prefills if each.computed_tokens + tokens == each.start_tokens]
        chunks = [chunk for chunk in prefills if chunk not in ended]
        if preempted:
            plan = StepPlan(
                admitted=tuple(each for each, _ in ended),
                prefill_tokens=sum(tokens for _, tokens in prefills),
                preempted=preempted,
                chunks=tuple(chunks),
                valid_until_horizon=False,
                stops_at_arrival=False,
            )
        else:
            plan = self._admit(state, transaction, budget, ended, chunks)
        if stalls or resumes or state.stalled or (state.prefilling and not self._defers):
            plan = plan._replace(valid_until_horizon=False, stalls=(stalls, resumes))
        if preempted and self._delivers:
            plan = plan._replace(taken_back=self._taken_back(preempted, state))
        return plan

    def _taken_back(self, preempted: tuple[Sequence, ...], state: State) -> tuple[Sequence, ...]:
        """Preempted sequences whose prompt a batch in flight ends: its blocks cannot be sent any more, so the token is dropped. What
        batches in flight compute of a preempted sequence is not waited for."""
        for sequence in preempted:
            sequence.next_decode_eligible_step = 0
        return tuple(each for each in preempted if each in state.finished or each in state.overrunning)

    def _chunk(self, sequence: Sequence, computed: int, tokens: int, transaction: PagedTransaction) -> int:
        """Chunks are no longer than ``long_prefill_token_threshold``. With states at the ends of blocks, they end on block
        boundaries (vLLM's ``_mamba_block_aligned_split``), and a prefill on the last one, unless its kernels export the state
        there from within the chunk."""
        if self._defers and sequence.start_tokens - computed > 1:
            return 0
        tokens = min(tokens, self._longest_chunk)
        if isinstance(transaction, SpeculativeTransaction):
            tokens = transaction.padded(sequence, computed, tokens)
        known, size = sequence.start_tokens, transaction.block_size
        prompt_end = sequence.prefill_end
        if not self.groups.states_by_block:
            return tokens
        end = computed + tokens
        if end < prompt_end:
            aligned = end // size * size
            if aligned > computed or size <= self._cap.least:
                end = aligned
        junction = transaction.junction(sequence)
        exports = end >= prompt_end and self.groups.exports(computed, prompt_end, prompt_end, size)
        stops = [
            -(-computed // size) * size,
            end if exports else self.groups.last_end(known, size) * size,
            computed + (junction - computed) // size * size if computed < junction < end else end,
        ]
        return max(0, min([stop for stop in stops if computed < stop < end], default=end) - computed)

    def horizon(self, state: State, memory: PagedMemory, limit: int) -> int:
        """Steps until the running sequences need more blocks than are free, or the head of the queue may find its blocks."""
        if not self._in_lockstep:
            # How far a step gets is drawn, or batches are in flight.
            return 1
        if self._cadence is not None:
            limit = min(limit, self._cadence.steps_deferred(state))
        if self._offloads:
            held_seqs = state.batch_size + len(state.stalled) + len(state.prefilling) + len(state.finished)
            asks = state.waiting and held_seqs < self.most_running
            # An eviction on the GPU lets a load begin that needs fewer blocks, unless those of all tokens must be free.
            if asks and (not self.reserves_whole or memory.may_admit(state.waiting[0], state.running)):
                return 1
            if memory.transfers is not None and not memory.transfers.is_settled():
                return 1
            return max(1, min(limit, memory.steps_with(state, memory.free, limit)))
        if state.waiting and not self.reserves_whole and (memory.cache_log or not self._is_plain):
            # Fewer blocks suffice for the head than those of its known tokens, also after evictions of what it found.
            return 1
        if self._is_plain:
            return super().horizon(state, memory, limit)
        if state.waiting and memory.cache and not memory.giving:
            return 1
        limit = steps_until_head_fits(state, memory, self.limits, limit)
        return max(1, min(limit, memory.steps_with(state, memory.free, limit)))


def _computed(state: State, plan: StepPlan) -> set[Sequence]:
    """The sequences that compute a token in a step."""
    stalls, resumes = plan.stalls or ((), ())
    computed = {*state.running, *resumes, *plan.admitted, *(sequence for sequence, _ in plan.chunks)}
    return computed.difference(stalls, plan.preempted)


def _in_flight(sequence: Sequence, state: State, transaction: PagedTransaction) -> bool:
    """Whether a batch in flight computes a sequence. With a connector vLLM preempts none of these, as a load could then write blocks
    that the batch still writes (``Scheduler._request_blocks_can_be_freed``)."""
    if sequence in state.prefilling or isinstance(transaction, SpeculativeTransaction):
        return transaction.is_in_flight(sequence)
    return sequence not in state.stalled


#: Order of the running sequences.
_BY_ORDER = attrgetter("order")
#: vLLM's order of requests with a priority: by that, then by arrival.
_BY_URGENCY = attrgetter("urgency")


class _ChunkCap:
    """Most tokens of one sequence in a step (``long_prefill_token_threshold``).

    Args:
        limits, options: Of the policy.

    Attributes:
        tokens: The threshold; 0 for none.
        least: Bound on a chunk, however few sequences there are: the threshold, or the budget.

    Raises:
        SettingError: As vLLM refuses it.
    """

    def __init__(self, limits: Limits, options: VllmV1Options) -> None:
        self.tokens = options.long_prefill_token_threshold
        if self.tokens > limits.max_model_len:
            remedy = f"must be at most max_model_len = {limits.max_model_len}"
            raise SettingError("long_prefill_token_threshold", self.tokens, remedy)
        self._budget, self._adaptive = limits.max_num_batched_tokens, options.long_prefill_token_threshold_adaptive
        self.least = min(self.tokens or self._budget, self._budget)

    def of(self, state: State) -> int:
        """The cap of a step. A sequence that is alone has none, as it delays no other."""
        sequences = state.batch_size + sum(map(len, (state.stalled, state.prefilling, state.finished, state.waiting)))
        if not self.tokens or sequences <= 1:
            return self._budget
        return max(self.tokens, self._budget // sequences) if self._adaptive else self.tokens


class _Cadence:
    """Defers prompts between steps that compute some (``prefill_schedule_interval``).

    Prompts are deferred until ``interval`` steps have passed since the last step that computed some, as long as a sequence
    decodes and no sequence was left waiting when prompts were last admitted. Engines that share experts count their steps
    together instead, and compute prompts in every ``interval``-th (``DPEngineCoreProc._should_throttle_prefills``).

    Attributes:
        defers: Whether the step that is decided computes no prompts.
        prefills: Whether a running sequence was to compute a part of its prompt in it, even if it was preempted then.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.defers = self.prefills = False
        # Steps that decode steps do not count: those without decodes.
        self._uncounted = 0
        # Number of the last step with a prompt, from 1; at first none is deferred.
        self._last = -interval
        self._left_some = False
        # Steps up to the next with prompts, of engines that count together.
        self._until_turn: int | None = None

    def _executed(self, state: State) -> int:
        """Number of steps so far that computed tokens, with decodes or without."""
        return state.decode_step + self._uncounted

    def begin(self, state: State, together: int | None) -> None:
        """A step is to be decided.

        Args:
            together: Steps before it, of engines that count them together.
        """
        self.prefills = False
        self._until_turn = None if together is None else -together % self._interval
        decodes = state.running or state.stalled or state.finished
        if self._until_turn is None:
            too_early = self._executed(state) + 1 - self._last < self._interval
        else:
            too_early = self._until_turn > 0
        self.defers = bool(decodes and too_early and not self._left_some)

    def end(self, state: State, plan: StepPlan, passed: int) -> None:
        """The step is decided.

        Args:
            passed: Sequences that wait and were passed over since they came; they are not left waiting for room.
        """
        decodes = state.batch_size - sum(sequence in state.running for sequence in plan.preempted) + len(plan.admitted)
        stalled, resumed = plan.stalls or ((), ())
        decodes += len(resumed) - len(stalled)
        executed = self._executed(state)
        # Sequences that compute a token in vain leave before the step, which decode steps then do not count either.
        stay = decodes - sum(each not in plan.preempted and each not in stalled for each in state.overrunning)
        if not stay and (decodes or plan.prefill_tokens):
            self._uncounted += 1
        begun = [each for each in plan.admitted if each not in state.prefilling]
        if self.prefills or plan.chunks or any(each.start_tokens - each.computed_tokens > 1 for each in begun):
            self._last = executed + bool(decodes or plan.prefill_tokens)
        if not plan.preempted and not self.defers:
            begun += (sequence for sequence, _ in plan.chunks if sequence not in state.prefilling)
            self._left_some = len(state.waiting) > len(begun) + passed

    def steps_deferred(self, state: State) -> int:
        """Steps, the coming one included, until prompts are computed again; a large number if none are deferred."""
        if not self.defers:
            return _FOR_EVER
        if self._until_turn is not None:
            return self._until_turn
        return max(1, self._last + self._interval - self._executed(state) - 1)
