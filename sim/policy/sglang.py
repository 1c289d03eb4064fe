"""SGLang: requests are admitted by the length of their prefix in the radix tree, longest first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

import numpy as np

from ..memory.accounting.kv_groups import PageGroups
from ..memory.paged.radix_holdings import States, Windows
from ..memory.paged.radix_host import HostRadixMemory
from ..memory.paged.radix_memory import RadixMemory
from ..memory.paged.radix_slots import SlotRadixMemory
from ..memory.paged.radix_transaction import EVICTION_INTERVAL, RadixTransaction
from ..memory.prefix import RadixTree, first_tokens
from ..spec import GpuSpec, ModelSpec
from ..spec.startup.launch import Launch
from ..spec.startup.sglang import (
    ServerDefaults,
    fraction_of,
    max_running_requests,
    num_slots,
    page_size,
    server_defaults,
    slot_bytes,
    stage_memories,
)
from ..spec.startup.sglang_states import StatePool, num_states, serves_states, state_bytes, state_rules
from ..spec.startup.sglang_unified import BUDGET_ALIGNMENT, SharedBuffer, aligned
from ..types.errors import FragmeterError, MissingSetting, NotSimulated, SettingError
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from ..workload.content import Run
from ..workload.workload import Workload
from .base import Policy, Source, blocks_of
from .options import Options
from .server import Limits, Pool, Server, WindowPool
from .sglang_options import SGLangOptions
from .sglang_prefill import CLIP_MAX_NEW_TOKENS, NewTokenRatio, PrefillBatch

#: Above so many that wait, SGLang sorts no more; and so many prefixes are touched where it does not sort.
MOST_SORTED = 128
#: Looks at a queue that is not sorted from one in which its prefixes are touched to the next.
REFRESH_INTERVAL = 32
#: A request that finds at most so many tokens in the tree, and as many in another waiting request, is put off.
IN_BATCH_TOKENS = 32
#: In place of what was found: behind all others.
PUT_OFF = -1
#: Hits of a node at which it is written to the host.
THRESHOLDS = {"write_through": 1, "write_through_selective": 2}

Queue = Collection[Sequence]


class SGLang(Policy[RadixMemory, RadixTransaction]):
    """SGLang (release 0.5.23, ``managers/scheduler.py``, ``schedule_policy.py``) over a radix tree.

    A step either prefills or decodes; prefills come first. Waiting requests are sorted by the length of their prefix in
    the tree (``lpm``) or by arrival (``fcfs``). They are admitted while their own tokens and remaining outputs fit into
    the room, which is the sum of free and evictable slots. Of the outputs of running sequences a share is reserved, and all
    where they ignore the end of text. The share falls while no sequence is retracted. If it was too small, the sequences
    with the fewest generated tokens are retracted.

    The batch is full from a decision that found no room or no seat to the next one after a sequence has left it. It leaps
    while no request waits, and while the batch is full: no request uses the tree then, so all evictions within the leap are
    known. A leap ends before a decode without room. A prefill is a step of its own.

    With the overlap schedule (``event_loop_overlap``) a step is decided while the one before it runs. The decision does not know the
    tokens of that step, nor that sequences have finished in it: these keep their seats and slots, and decode in vain unless the length
    of their output told their end. A sequence that is retracted loses its token of the step in flight.
    """

    name = "sglang"
    source = Source(
        "SGLang 0.5.23", "wheel", "2026-11-30: share of the memory of multimodal models, pages by attention backend"
    )
    system = "SGLang 0.5.23"
    options_type = SGLangOptions
    options: SGLangOptions
    reads_max_tokens = True
    #: The least; larger pools have up to 4,096 (``max_running_requests``).
    default_max_num_seqs = 2048
    #: Of cards with 60 to 160 GiB.
    default_max_num_batched_tokens = 8192
    default_block_size = 1
    default_enforce_eager = False
    defaults_source = "default of SGLang 0.5.23"
    pool_source = "computed from the GPU memory as by SGLang 0.5.23"
    caches_prefixes = True
    serves_states = True

    def __init__(self, limits: Limits, options: SGLangOptions | None = None, groups: PageGroups | None = None) -> None:
        super().__init__(limits, options, groups)
        self._ratio = NewTokenRatio()
        # Departures at which the batch was found full; and times that nothing was to do, at the last decision.
        self._full_at: int | None = None
        self._idle_spans = 0
        # Looks at a queue that was not sorted.
        self._unsorted = 0
        chosen = self.options
        if chosen.enable_priority_scheduling and chosen.schedule_policy == "lpm":
            raise SettingError(
                "schedule_policy", "lpm", "enable_priority_scheduling orders fcfs or lof; use one of these"
            )
        self._preempts = chosen.enable_priority_scheduling and not chosen.disable_priority_preemption
        self._sign = 1 if chosen.schedule_low_priority_values_first else -1
        # By priority: in which order sequences joined the queue, for the last time; and tokens that a request was found to lack when it
        # was looked at last, before which SGLang knows of none.
        self._joined: dict[Sequence, int] = {}
        self._joins = 0
        # Overlap schedule: whether the step in flight decodes, or which prefills end in it.
        self.schedules_ahead = chosen.schedules_ahead
        self._decodes = False
        self._prefilled: frozenset[Sequence] = frozenset()
        self._lacked: dict[Sequence, int] = {}
        self._windows: Windows | None = None

    @classmethod
    def kv_dtype(cls, model: ModelSpec, gpu: GpuSpec, given: str) -> str:
        """See ``Policy``; fp8 of sparse latent attention from compute capability 10 on (``_dsa_kv_cache_dtype_default``)."""
        is_sparse = model.indexer is not None and model.latent is not None
        return super().kv_dtype(
            model, gpu, "fp8" if given == "auto" and is_sparse and (gpu.major or 0) >= 10 else given
        )

    @classmethod
    def pool_size(
        cls, server: Server, options: Options, num_blocks: int | None, block_size: int | None
    ) -> tuple[int, int]:
        """See ``Policy``; the slots that SGLang computes at its start (``spec.startup.sglang``).

        Raises:
            SettingError: The weights leave no slot, chunks are not whole pages, or there is nothing to share one buffer with.
        """
        assert isinstance(options, SGLangOptions)
        if options.enable_unified_memory and server.model.mixer is None and options.window_of(server.model) is None:
            remedy = f"is for models with windows or states in a pool of their own, and {server.model.name} has none; leave it out"
            raise SettingError("enable_unified_memory", True, remedy)
        strategy = options.mamba_radix_cache_strategy
        size = block_size or page_size(server.gpu, server.model, keeps=server.caches_prefixes, strategy=strategy)
        chunk = server.max_num_batched_tokens or _defaults(server).chunked_prefill_size
        if chunk % size:
            remedy = f"sglang's chunks are whole pages; give a multiple of block_size = {size}, or smaller blocks"
            raise SettingError("max_num_batched_tokens", chunk, remedy)
        if num_blocks is not None:
            return num_blocks, size
        launch, states = _launch(server), cls.state_pool(server, options, size)
        share = 1 if options.window_of(server.model) is None else options.swa_full_tokens_ratio
        # One more state, of the rows that fill up a graph's batch.
        of_states = 0 if states is None else (states.slots + 1) * _state_bytes(server, options)
        found = num_slots(launch, options.mem_fraction_static, share, of_states)
        if found < 1:
            raise _no_slots(server, options)
        return found // size, size

    @classmethod
    def serves_states_of(cls, shape: ModelSpec) -> bool:
        """See ``Policy``."""
        return serves_states(shape)

    @classmethod
    def window_pool(cls, server: Server, options: Options, num_blocks: int, block_size: int) -> WindowPool | None:
        """See ``Policy``.

        Raises:
            NotSimulated: A request alone may need more windows. SGLang starts with fewer, down to one window and a page
                (``validate_swa_pool_size``), and aborts such a request or never admits it.
        """
        assert isinstance(options, SGLangOptions)
        window, ratio = options.window_of(server.model), options.swa_full_tokens_ratio
        if window is None:
            return None
        blocks = int(num_blocks * block_size * ratio) // block_size
        bytes_of = slot_bytes(server.model, server.deployment.kv_dtype, server.tensor_parallel)
        if options.enable_unified_memory:
            buffer = _buffer_of_windows(server, options, bytes_of, (num_blocks, blocks), block_size)
            return WindowPool(window, blocks, bytes_of, buffer)
        # The window of its prefix, which it locks; its own; that of another node on the way; and what it has left since.
        least = 3 * window + 2 * EVICTION_INTERVAL + 4 * block_size
        if least > blocks * block_size:
            reason = f"leaves {blocks * block_size} slots for windows, and a request may need {least}"
            raise NotSimulated("swa_full_tokens_ratio", ratio, reason, "give more, or a larger pool")
        return WindowPool(window, blocks, bytes_of)

    @classmethod
    def state_pool(
        cls, server: Server, options: Options, block_size: int, num_blocks: int | None = None
    ) -> StatePool | None:
        """See ``Policy``; the states that SGLang computes at its start.

        Raises:
            SettingError: The weights leave no memory, or too few states for a request; or see ``state_rules``.
        """
        assert isinstance(options, SGLangOptions)
        if server.model.mixer is None:
            return None
        strategy, interval = options.mamba_radix_cache_strategy, options.mamba_track_interval
        keeps, overlaps = server.caches_prefixes, options.schedules_ahead
        rules = state_rules(server.model, block_size, strategy, interval, keeps=keeps, overlaps=overlaps)
        slots = options.max_mamba_cache_size or (0 if keeps else server.max_num_seqs or 0)
        if not slots:
            memories = stage_memories(_launch(server), options.mem_fraction_static)
            rest = min(memory.kv_cache_bytes for memory in memories)
            if rest <= 0:
                raise _no_slots(server, options)
            slots = num_states(rest, _state_bytes(server, options), options.mamba_full_memory_ratio)
        ranks = server.tensor_parallel
        of_slot, _ = slot_bytes(server.model, server.deployment.kv_dtype, ranks)
        # Both of all layers.
        of_state = state_bytes(server.model, ranks, 1, options.mamba_ssm_dtype)
        found = StatePool(slots, rules, (of_slot, of_state))
        if found.most_requests < 1:
            field = "mamba_full_memory_ratio" if options.max_mamba_cache_size is None else "max_mamba_cache_size"
            remedy = (
                f"leaves {max(slots, 0)} states on {server.gpu.name}, and a request of {server.model.name} may need"
            )
            remedy += f" {rules.of_request}; give more, or use more or larger GPUs"
            raise SettingError(field, getattr(options, field), remedy)
        if not options.enable_unified_memory or num_blocks is None:
            return found
        return found._replace(buffer=_buffer_of(server, options, found, num_blocks, block_size))

    @classmethod
    def step_limits(
        cls, server: Server, pool: tuple[int, int], seqs: int | None, tokens: int | None
    ) -> tuple[int, int]:
        """See ``Policy``; the chunk is chosen by card."""
        return max_running_requests(*pool, seqs), tokens or _defaults(server).chunked_prefill_size

    def memory(self, pool: Pool) -> RadixMemory:
        windows, states, ahead, size = None, None, self.schedules_ahead, pool.block_size
        if pool.windows:
            in_flight = self.limits.max_num_batched_tokens if ahead else 0
            windows = Windows(*pool.windows[:3], self.limits.max_num_batched_tokens, in_flight, pool.windows.buffer)
            self._windows = windows
        if pool.states:
            states = States(pool.states.slots, *pool.states.rules[:3], pool.states.slot_bytes, pool.states.buffer)
            self.admits_by_queue = pool.states.buffer is not None
        beside = size, ahead, windows, states
        if pool.offloaded is None:
            kind = SlotRadixMemory if pool.ids else RadixMemory
            found = kind(pool.num_blocks, pool.token_runs, pool.caches_prefixes, *beside)
        else:
            threshold = THRESHOLDS[self.options.hicache_write_policy]
            found = HostRadixMemory(pool.num_blocks, pool.offloaded, threshold, pool.token_runs, *beside)
        self._longest = found.max_output_tokens
        return found

    def expects_end(self, sequence: Sequence) -> bool:
        """See ``Policy``; the pool bounds an output, too."""
        return sequence.output_tokens == self._longest(sequence)

    def schedule(self, state: State, transaction: RadixTransaction) -> StepPlan:
        """A prefill if there can be one, else a step that decodes."""
        plan = self._plan(state, transaction)
        load = transaction.start_loading()
        return plan if load is None else plan._replace(load=load)

    def _plan(self, state: State, transaction: RadixTransaction) -> StepPlan:
        """As ``schedule``, without its loads."""
        if not self.schedules_ahead:
            return self._decide(state, transaction)
        if not self._decodes and not self._prefilled:
            # No step is in flight.
            transaction.process_results()
        plan = self._decide(state, transaction)
        lost = tuple(sequence for sequence in plan.preempted if self._is_in_flight(sequence))
        going_on = len(state.running) - sum(sequence in state.running for sequence in plan.preempted)
        self._decodes = going_on > 0 and not plan.prefill_only
        self._prefilled = frozenset(plan.admitted)
        return plan._replace(taken_back=lost) if lost else plan

    def _is_in_flight(self, sequence: Sequence) -> bool:
        """Whether the step that runs while the next one is decided computes a token of a running sequence."""
        return self._decodes or sequence in self._prefilled

    def _generated(self, state: State, transaction: RadixTransaction) -> dict[Sequence, int]:
        """Generated tokens of the batch, as far as they are known to the decision; in its order."""
        return {
            each: each.generated_tokens + state.decode_step - each.start_step - self._is_in_flight(each)
            for each in transaction.batch()
            if each in state.running or each in state.finished
        }

    def _decide(self, state: State, transaction: RadixTransaction) -> StepPlan:
        if state.idle_spans > self._idle_spans:
            self._idle_spans = state.idle_spans
            self._ratio.reset(transaction.decodes)
        if not _running(state) or self._full_at != transaction.departures:
            self._full_at = None
        queue: Queue = state.waiting
        if self._preempts:
            self._join(each for each in queue if each not in self._joined)
        preempted: tuple[Sequence, ...] = ()
        if state.prefilling or (queue and not self._is_full(state, transaction)):
            queue = self._in_order(queue, transaction)
            batch = self._prefill(state, transaction, queue)
            preempted = tuple(batch.preempted)
            if preempted:
                self._join(preempted)
                queue = (*queue, *preempted)
            if batch:
                return StepPlan(
                    tuple(batch.admitted),
                    batch.tokens,
                    preempted,
                    valid_until_horizon=False,
                    chunks=tuple(batch.chunks),
                    prefill_only=True,
                    order=_order(state, queue),
                )
        return self._decode(state, transaction, queue, preempted)

    def _join(self, sequences: Iterable[Sequence]) -> None:
        """They join the queue, in this order."""
        for sequence in sequences:
            self._joined[sequence] = self._joins
            self._joins += 1

    def _is_full(self, state: State, transaction: RadixTransaction) -> bool:
        """Whether the queue is not considered: it was in vain since the last sequence left, or there is no seat."""
        if self._preempts:
            return False
        if _running(state) >= self.limits.max_num_seqs:
            self._full_at = transaction.departures
        elif transaction.windows:
            # A batch without a seat left is looked at no more, one without room is.
            self._full_at = None
        return self._full_at is not None

    def _in_order(self, queue: Queue, transaction: RadixTransaction) -> Queue:
        """Waiting requests in the order of ``schedule_policy``; the queue itself, where it is not sorted."""
        chosen = self.options
        if chosen.schedule_policy == "lpm" and transaction.keeps and len(queue) <= MOST_SORTED:
            return self._by_prefix(queue, transaction)
        if chosen.schedule_policy == "lof":
            # Stable: the outputs first, then what counts more.
            queue = tuple(sorted(queue, key=transaction.max_output_tokens, reverse=True))
        if chosen.enable_priority_scheduling:
            queue = tuple(sorted(queue, key=self._urgency))
        if transaction.keeps:
            self._refresh(queue, transaction)
        return queue

    def _urgency(self, sequence: Sequence) -> int:
        """Lower first: the priority, or its negative where SGLang puts the higher first."""
        return sequence.urgency[0] * self._sign

    @staticmethod
    def _by_prefix(queue: Queue, transaction: RadixTransaction) -> Queue:
        """The longest prefix first; requests with a prefix that another one will compute come last."""
        found, others = {}, RadixTree()
        for sequence in queue:
            # The last known token has to be computed in any case.
            matched, on_device = transaction.match(sequence)
            found[sequence] = min(matched, sequence.start_tokens - 1)
            if on_device <= IN_BATCH_TOKENS and _follows(transaction.known(sequence), others):
                found[sequence] = PUT_OFF
        return tuple(sorted(queue, key=found.__getitem__, reverse=True))

    def _refresh(self, queue: Queue, transaction: RadixTransaction) -> None:
        """Touch the prefixes of those that wait, the first one last, so that it is evicted last."""
        if queue and not self._unsorted % REFRESH_INTERVAL:
            for sequence in reversed(tuple(islice(queue, MOST_SORTED))):
                transaction.match(sequence)
        self._unsorted += bool(queue)

    def _prefill(self, state: State, transaction: RadixTransaction, queue: Queue) -> PrefillBatch:
        """The prefills of a step; none where no request is admitted, as the batch is full."""
        ratio = self._ratio.at(transaction.decodes)
        batch = PrefillBatch(transaction, self.limits, self._generated(state, transaction), ratio)
        for sequence in state.prefilling:
            batch.continue_prefill(sequence)
        transaction.take_ahead(len(queue))
        for sequence in queue:
            if batch.is_spent:
                break
            if batch.seats >= self.limits.max_num_seqs:
                batch.is_full = True
            if batch.is_full and not (self._preempts and self._preempt_for(sequence, batch)):
                break
            if not batch.add(sequence):
                self._lacked[sequence] = batch.lacked
                break
            self._lacked.pop(sequence, None)
        transaction.take_ahead(0)
        # What a prefill beside no running sequence finds is forgotten, and one that leaves a prefill unfinished is looked at again.
        if batch.is_full and batch.running:
            self._full_at = transaction.departures
        if batch.chunks:
            self._full_at = None
        return batch

    def _preempt_for(self, sequence: Sequence, batch: PrefillBatch) -> bool:
        """Preempt the least urgent running sequences, the last to join first, for one that is more urgent by the threshold.

        Where room lacks, as many as have outputs to come for it: SGLang counts neither their own slots nor, before a request was looked
        at, its prompt.
        """
        lacking = self._lacked.get(sequence, 0) + batch.room_for_output(sequence)
        urgency, chosen = self._urgency(sequence), []
        for other in sorted(batch.reserved, key=lambda s: (-self._urgency(s), -self._joined[s])):
            if self._urgency(other) - urgency <= self.options.priority_scheduling_preemption_threshold:
                break
            chosen.append(other)
            lacking -= batch.reserved[other]
            if lacking <= 0:
                break
        if not chosen or lacking > 0:
            return False
        for other in [each for each in batch.reserved if each in chosen]:
            self._lacked[other] = other.start_tokens
            batch.preempt(other)
        # In SGLang the order of a set; here that of the choice.
        batch.preempted += chosen
        return True

    def _decode(
        self, state: State, transaction: RadixTransaction, queue: Queue, preempted: tuple[Sequence, ...]
    ) -> StepPlan:
        """Running sequences decode; some are retracted if the slots run out."""
        if not transaction.can_decode():
            if not state.finished.keys() <= set(preempted):
                # What these give back is free after this decision, which waits for it.
                return StepPlan(
                    preempted=preempted, valid_until_horizon=False, prefill_only=True, order=_order(state, queue)
                )
            plan = self._retract(state, transaction, queue, preempted)
            self._slide(state, transaction)
            return plan
        self._slide(state, transaction)
        if not state.waiting and not preempted:
            return CARRY_ON
        return StepPlan(
            preempted=preempted,
            valid_until_horizon=self._full_at is not None and not self._preempts,
            stops_at_arrival=False,
            order=_order(state, queue),
        )

    def _retract(
        self, state: State, transaction: RadixTransaction, queue: Queue, preempted: tuple[Sequence, ...]
    ) -> StepPlan:
        """Retract the sequences with the fewest generated tokens until the others find free slots."""
        transaction.make_free(transaction.begun())
        generated = self._generated(state, transaction)
        by_priority = self.options.retraction_policy == "priority"
        kept = sorted(
            generated,
            key=lambda s: (-self._urgency(s) if by_priority else 0, generated[s], -s.prompt_tokens),
            reverse=True,
        )
        retracted: list[Sequence] = []
        while len(kept) > 1:
            retracted.append(kept.pop())
            self._lacked[retracted[-1]] = retracted[-1].start_tokens
            transaction.retract(retracted[-1], len(kept))
            if transaction.make_free(transaction.begun(kept)):
                break
        if self._preempts:
            self._join(retracted)
        # The batch goes on in the order of the choice.
        transaction.reorder(kept)
        declared = sum(transaction.max_output_tokens(sequence) for sequence in kept)
        self._ratio.estimate(sum(generated[s] for s in kept), len(kept), declared, transaction.decodes)
        self._full_at = None
        return StepPlan(
            preempted=(*preempted, *retracted),
            valid_until_horizon=False,
            stops_at_arrival=False,
            order=(*queue, *retracted),
        )

    def _slide(self, state: State, transaction: RadixTransaction) -> None:
        """Windows that sequences which decode have left are free, before the step takes its slots; from their second decode on."""
        if transaction.windows is None:
            return
        generated = self._generated(state, transaction)
        for each in transaction.memory.decoding:
            if state.decode_step - each.start_step > 1:
                transaction.slide(each, each.prompt_tokens + generated[each] - 1)

    def stuck(self, waiting: int) -> FragmeterError:
        """See ``Policy``; SGLang looks at its queue in vain for ever, too."""
        reason, chunk = f"{waiting} request(s) wait for ever, as with SGLang", self.limits.max_num_batched_tokens
        if self._windows is None or self._windows.buffer is not None:
            return MissingSetting(
                "num_gpu_blocks_override", f"{reason}: the pool has no room for them; give a larger one"
            )
        reason += ": windows that a prefix locks leave no room for those of a chunk"
        remedy = f"give more, a larger pool, or less than max_num_batched_tokens = {chunk}"
        return SettingError("swa_full_tokens_ratio", self.options.swa_full_tokens_ratio, f"{reason}; {remedy}")

    def horizon(self, state: State, memory: RadixMemory, limit: int) -> int:
        """Up to the step for which there is no room."""
        if memory.windows is not None or not memory.is_settled:
            return 1
        return memory.phases.steps_within(state.decode_step, memory.room // memory.block_size)

    def slots_to_admit(self, workload: Workload, block_size: int, running: np.ndarray) -> np.ndarray:
        """See ``Policy``; also its output, and of the running ones what is reserved at least of theirs, of which half has been generated."""
        declared = self._declared(workload)
        to_come, left = (
            np.minimum(each, CLIP_MAX_NEW_TOKENS) for each in (declared, declared - workload.output_tokens / 2)
        )
        waits_for_all = False if workload.ignore_eos is None else workload.ignore_eos == 1
        reserved = float((left * np.where(waits_for_all, 1.0, NewTokenRatio.LEAST)).mean())
        return float((workload.prompt_tokens + to_come).mean()) + block_size + reserved * running

    def windows_to_admit(self, workload: Workload, block_size: int) -> int:
        """See ``Policy``; ``PrefillBatch.add`` asks for them."""
        if self._windows is None:
            return 0
        window, prompts = self._windows.tokens, workload.prompt_tokens
        beyond = np.maximum(0, np.minimum(prompts, self.limits.max_num_batched_tokens) - window)
        return round(float((beyond + np.minimum(prompts + self._declared(workload), window)).mean())) + block_size

    def _declared(self, workload: Workload) -> np.ndarray:
        """The longest output of each request."""
        left = self.limits.max_model_len - workload.prompt_tokens
        return left if workload.max_tokens is None else workload.max_tokens

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        # SGLang cuts outputs to the pool less a page and 1 less the pages of the prompt; and the last token is never stored.
        if self._windows is not None and (buffer := self._windows.buffer) is not None:
            # One that it cannot hold is aborted.
            lengths = zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True)
            asked = ((p + o + block_size, self._windows.needed(p, o, block_size)) for p, o in lengths)
            held = [buffer.holds(*each, block_size) and each[0] < buffer.most_tokens for each in asked]
            return np.where(held, 1, np.iinfo(np.int64).max)
        prompts = blocks_of(workload.prompt_tokens, block_size) * block_size
        return blocks_of(prompts + workload.output_tokens + block_size + 1, block_size)


def _defaults(server: Server) -> ServerDefaults:
    return server_defaults(server.gpu.memory_bytes / (1 << 20), server.tensor_parallel)


def _launch(server: Server) -> Launch:
    return Launch(
        model=server.model,
        gpu=server.gpu,
        max_model_len=server.max_model_len,
        max_num_seqs=server.max_num_seqs or 0,
        max_num_batched_tokens=server.max_num_batched_tokens or _defaults(server).chunked_prefill_size,
        tensor_parallel=server.tensor_parallel,
        deployment=server.deployment,
    )


def _no_slots(server: Server, options: SGLangOptions) -> SettingError:
    fraction = options.mem_fraction_static or fraction_of(_launch(server))
    remedy = f"{server.model.name} leaves no slots on {server.gpu.name}; give more, or use more or larger GPUs"
    return SettingError("mem_fraction_static", fraction, remedy)


def _buffer_of(
    server: Server, options: SGLangOptions, states: StatePool, num_blocks: int, block_size: int
) -> SharedBuffer:
    """The buffer of states and so many pages, if SGLang is told how many; else of all memory that weights leave (``config_from_budget``)."""
    of_slot, of_state = states.slot_bytes
    slots, pool = num_blocks * block_size, states.slots * of_state
    (memory,) = stage_memories(_launch(server), options.mem_fraction_static, 1, pool + of_state)
    budget = memory.kv_cache_bytes
    if budget // of_slot // block_size != num_blocks:
        budget = slots * aligned(of_slot)
    else:
        budget -= budget % BUDGET_ALIGNMENT
    return SharedBuffer.of(budget + pool, of_slot, of_state, block_size, slots)


def _buffer_of_windows(
    server: Server, options: SGLangOptions, bytes_of: tuple[int, int], blocks: tuple[int, int], block_size: int
) -> SharedBuffer:
    """As ``_buffer_of``, of so many pages of the KV cache and of windows."""
    ratio = options.swa_full_tokens_ratio
    slots, windows = (each * block_size for each in blocks)
    (memory,) = stage_memories(_launch(server), options.mem_fraction_static, ratio)
    budget, given = memory.kv_cache_bytes, num_slots(_launch(server), options.mem_fraction_static, ratio)
    if given // block_size == blocks[0]:
        return SharedBuffer.of_windows(budget - budget % BUDGET_ALIGNMENT, *bytes_of, block_size, None)
    return SharedBuffer.of_windows(slots * bytes_of[0] + windows * bytes_of[1], *bytes_of, block_size, slots)


def _state_bytes(server: Server, options: SGLangOptions) -> int:
    ranks, stages = server.tensor_parallel, server.deployment.pipeline_parallel
    return state_bytes(server.model, ranks, stages, options.mamba_ssm_dtype)


def _running(state: State) -> int:
    """Sequences of SGLang's running batch; those that have finished in the step in flight are not known to have."""
    return state.batch_size + len(state.finished)


def _follows(string: tuple[Run, ...], others: RadixTree) -> bool:
    """Whether a string begins as one of the others; if not it is another one."""
    beginning = first_tokens(string, IN_BATCH_TOKENS)
    _, tokens = others.match(beginning)
    if tokens < IN_BATCH_TOKENS:
        others.insert(beginning)
    return tokens >= IN_BATCH_TOKENS


def _order(state: State, queue: Queue) -> tuple[Sequence, ...]:
    """The queue for a plan, which names it where it is another one."""
    return () if queue is state.waiting else tuple(queue)
