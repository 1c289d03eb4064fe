"""SGLang: requests are admitted by the length of their prefix in the radix tree, longest first."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

import numpy as np

from ..memory.accounting.kv_groups import PageGroups
from ..memory.paged.radix_memory import RETRACT_STEPS, RadixMemory, RadixTransaction
from ..memory.paged.radix_slots import SlotRadixMemory
from ..memory.prefix import RadixTree, first_tokens
from ..spec.startup.launch import Launch
from ..spec.startup.sglang import ServerDefaults, fraction_of, max_running_requests, num_slots, server_defaults
from ..types.errors import SettingError
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from ..workload.content import Run
from ..workload.workload import Workload
from .base import Policy, Source
from .options import Options, SGLangOptions
from .server import Limits, Pool, Server

#: Above so many that wait, SGLang sorts no more; and so many prefixes are touched where it does not sort.
MOST_SORTED = 128
#: Looks at a queue that is not sorted from one in which its prefixes are touched to the next.
REFRESH_INTERVAL = 32
#: A request that finds at most so many tokens in the tree, and as many in another waiting request, is put off.
IN_BATCH_TOKENS = 32
#: ``--max-prefill-tokens`` of SGLang.
MAX_PREFILL_TOKENS = 16_384
#: Slots that remain for each sequence when one of them ends.
IGNORE_EOS_RESERVE = 1
#: In place of what was found: behind all others.
PUT_OFF = -1
#: Slots of a page, which an admission counts beyond its tokens.
PAGE = 1
#: An output counts no longer than this when room is asked for it.
CLIP_MAX_NEW_TOKENS = 4096

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
    """

    name = "sglang"
    source = Source("SGLang 0.5.23", "wheel", "2026-11-29: five rules of 0.5.9")
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

    def __init__(self, limits: Limits, options: SGLangOptions | None = None, groups: PageGroups | None = None) -> None:
        super().__init__(limits, options, groups)
        self._ratio = NewTokenRatio()
        # Departures at which the batch was found full; and times that nothing was to do, at the last decision.
        self._full_at: int | None = None
        self._idle_spans = 0
        # Looks at a queue that was not sorted.
        self._unsorted = 0

    @classmethod
    def pool_size(
        cls, server: Server, options: Options, num_blocks: int | None, block_size: int | None
    ) -> tuple[int, int]:
        """See ``Policy``; the slots that SGLang computes at its start (``spec.startup.sglang``).

        Raises:
            SettingError: The weights leave no slot.
        """
        if block_size not in (None, 1):
            raise SettingError("block_size", block_size, "sglang's tree has pages of one token; leave it out")
        if num_blocks is not None:
            return num_blocks, 1
        assert isinstance(options, SGLangOptions)
        launch = Launch(
            model=server.model,
            gpu=server.gpu,
            max_model_len=server.max_model_len,
            max_num_seqs=server.max_num_seqs or 0,
            max_num_batched_tokens=server.max_num_batched_tokens or _defaults(server).chunked_prefill_size,
            tensor_parallel=server.tensor_parallel,
            deployment=server.deployment,
        )
        found = num_slots(launch, options.mem_fraction_static)
        if found < 1:
            fraction = options.mem_fraction_static or fraction_of(launch)
            remedy = f"{server.model.name} leaves no slots on {server.gpu.name}; give more, or use more or larger GPUs"
            raise SettingError("mem_fraction_static", fraction, remedy)
        return found, 1

    @classmethod
    def step_limits(
        cls, server: Server, pool: tuple[int, int], seqs: int | None, tokens: int | None
    ) -> tuple[int, int]:
        """See ``Policy``; the chunk is chosen by card."""
        return max_running_requests(*pool, seqs), tokens or _defaults(server).chunked_prefill_size

    def memory(self, pool: Pool) -> RadixMemory:
        kind = SlotRadixMemory if pool.ids else RadixMemory
        return kind(pool.num_blocks, pool.token_runs, pool.caches_prefixes)

    def schedule(self, state: State, transaction: RadixTransaction) -> StepPlan:
        """A prefill if there can be one, else a step that decodes."""
        if state.idle_spans > self._idle_spans:
            self._idle_spans = state.idle_spans
            self._ratio.reset(state.decode_step)
        if not state.batch_size or self._full_at != transaction.departures:
            self._full_at = None
        queue: Queue = state.waiting
        if state.prefilling or (queue and not self._is_full(state, transaction)):
            queue = self._in_order(queue, transaction)
            plan = self._prefill(state, transaction, queue)
            if plan is not None:
                return plan
        return self._decode(state, transaction, queue)

    def _is_full(self, state: State, transaction: RadixTransaction) -> bool:
        """Whether the queue is not considered: it was in vain since the last sequence left, or there is no seat."""
        if state.batch_size >= self.limits.max_num_seqs:
            self._full_at = transaction.departures
        return self._full_at is not None

    def _in_order(self, queue: Queue, transaction: RadixTransaction) -> Queue:
        """Waiting requests, the longest prefix first; those with a prefix that another one will compute come last.

        The queue itself, where it is not sorted.
        """
        if not transaction.keeps:
            return queue
        if self.options.schedule_policy == "fcfs" or len(queue) > MOST_SORTED:
            self._refresh(queue, transaction)
            return queue
        found, others = {}, RadixTree()
        for sequence in queue:
            # The last known token has to be computed in any case.
            matched = transaction.match(sequence)
            found[sequence] = min(matched, sequence.start_tokens - 1)
            if matched <= IN_BATCH_TOKENS and _follows(transaction.known(sequence), others):
                found[sequence] = PUT_OFF
        return tuple(sorted(queue, key=found.__getitem__, reverse=True))

    def _refresh(self, queue: Queue, transaction: RadixTransaction) -> None:
        """Touch the prefixes of those that wait, the first one last, so that it is evicted last."""
        if queue and not self._unsorted % REFRESH_INTERVAL:
            for sequence in reversed(tuple(islice(queue, MOST_SORTED))):
                transaction.match(sequence)
        self._unsorted += bool(queue)

    def _prefill(self, state: State, transaction: RadixTransaction, queue: Queue) -> StepPlan | None:
        """A step that prefills; None where no request can, as the batch is full."""
        ratio = self._ratio.at(state.decode_step)
        batch = PrefillBatch(transaction, self.limits, self._reserve(state, transaction, ratio), state, ratio)
        for sequence in state.prefilling:
            batch.continue_prefill(sequence)
        for sequence in queue:
            if batch.is_spent:
                break
            if state.batch_size + len(batch) >= self.limits.max_num_seqs:
                batch.is_full = True
            if batch.is_full or not batch.add(sequence):
                break
        # What a prefill beside no running sequence finds is forgotten, and one that leaves a prefill unfinished is looked at again.
        if batch.is_full and state.batch_size:
            self._full_at = transaction.departures
        if not batch:
            return None
        if batch.chunks:
            self._full_at = None
        return StepPlan(
            tuple(batch.admitted),
            batch.tokens,
            valid_until_horizon=False,
            chunks=tuple(batch.chunks),
            prefill_only=True,
            order=_order(state, queue),
        )

    def _reserve(self, state: State, transaction: RadixTransaction, ratio: float) -> float:
        """Slots kept for the outputs of running sequences: a share, which is a float as in SGLang."""
        decode_step, most, slots = state.decode_step, transaction.longest_tokens, 0.0
        # A loop of its own, as it runs over all sequences whenever the queue is looked at.
        for s in transaction.batch():
            if s not in state.running:
                continue
            declared = most - s.prompt_tokens
            if s.max_tokens < declared:
                declared = s.max_tokens
            left = declared - s.generated_tokens + s.start_step - decode_step
            slots += (left if left < CLIP_MAX_NEW_TOKENS else CLIP_MAX_NEW_TOKENS) * (1.0 if s.ignores_eos else ratio)
        return slots

    def _decode(self, state: State, transaction: RadixTransaction, queue: Queue) -> StepPlan:
        """Running sequences decode; some are retracted if the slots run out."""
        if transaction.room < state.batch_size:
            return self._retract(state, transaction, queue)
        if not state.waiting:
            return CARRY_ON
        return StepPlan(
            valid_until_horizon=self._full_at is not None, stops_at_arrival=False, order=_order(state, queue)
        )

    def _retract(self, state: State, transaction: RadixTransaction, queue: Queue) -> StepPlan:
        """Retract the sequences with the fewest generated tokens until the others find free slots."""
        decode_step = state.decode_step
        generated = {s: s.generated_tokens + decode_step - s.start_step for s in transaction.batch()}
        kept = sorted(generated, key=lambda s: (generated[s], -s.prompt_tokens), reverse=True)
        retracted: list[Sequence] = []
        while transaction.room < len(kept) and len(kept) > 1:
            transaction.retract(kept[-1], decode_step)
            retracted.append(kept.pop())
        # The batch goes on in the order of the choice.
        transaction.reorder(kept)
        declared = sum(transaction.max_output_tokens(sequence) for sequence in kept)
        self._ratio.estimate(sum(generated[s] for s in kept), len(kept), declared, decode_step)
        self._full_at = None
        return StepPlan(
            preempted=tuple(retracted), valid_until_horizon=False, stops_at_arrival=False, order=(*queue, *retracted)
        )

    def horizon(self, state: State, memory: RadixMemory, limit: int) -> int:
        """Up to the step for which there is no room."""
        return memory.room // state.batch_size

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        # SGLang cuts outputs to the pool less 2 less the prompt; and the last token is never stored.
        return workload.prompt_tokens + workload.output_tokens + 2


def _defaults(server: Server) -> ServerDefaults:
    return server_defaults(server.gpu.memory_bytes / (1 << 20), server.tensor_parallel)


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


class PrefillBatch:
    """A step that prefills, while it is put together: SGLang's ``PrefillAdder``.

    Attributes:
        admitted: Sequences that end their prefill in it.
        chunks: Sequences that continue their prefill after it, with the tokens that they compute in it.
        tokens: Tokens that it computes.
        is_full: Whether ``max_num_seqs`` is reached or the room ran out.
    """

    def __init__(
        self, transaction: RadixTransaction, limits: Limits, reserve: float, state: State, ratio: float
    ) -> None:
        self._state, self._ratio = state, ratio
        self._ends: list[tuple[float, int]] | None = None
        self.admitted: list[Sequence] = []
        self.chunks: list[tuple[Sequence, int]] = []
        self.tokens = 0
        self.is_full = False
        self._transaction = transaction
        self._chunk_tokens = limits.max_num_batched_tokens
        # Sequences of the step, in the order in which they joined it.
        self._order: list[Sequence] = []
        # Slots that are spoken for; and without the outputs to come.
        self._taken = reserve
        self._taken_now = 0

    def __len__(self) -> int:
        return len(self.admitted) + len(self.chunks)

    def continue_prefill(self, sequence: Sequence) -> None:
        """The next chunk of a prefill: as much as the room has, or a whole one if there is none."""
        left = min(self._chunk_left, int(self._room))
        self._compute(
            sequence, sequence.start_tokens - sequence.computed_tokens, left if left > 0 else self._chunk_left
        )

    def add(self, sequence: Sequence) -> bool:
        """Admit a sequence if it fits, and whether another one may follow."""
        transaction = self._transaction
        own = sequence.start_tokens - transaction.look_up(sequence)
        if sequence.ignores_eos and not transaction.keeps:
            if not self._fits_to_its_end(sequence, own + PAGE):
                self.is_full = True
                return False
            transaction.lock(sequence)
            return self._admit(sequence, own)
        to_come = max(0, transaction.max_output_tokens(sequence) - sequence.generated_tokens)
        transaction.lock(sequence)
        # What it locks can be evicted no more.
        if own + min(to_come, CLIP_MAX_NEW_TOKENS) + PAGE >= self._room:
            transaction.unlock(sequence)
            self.is_full = True
            return False
        return self._admit(sequence, own)

    def _admit(self, sequence: Sequence, own: int) -> bool:
        self._transaction.enter(sequence)
        self._compute(sequence, own, self._chunk_left)
        self.is_full = not self._has_room
        return not self.is_full and not self.is_spent

    def _fits_to_its_end(self, sequence: Sequence, own: int) -> bool:
        """Without a tree: whether slots are left at the end of each sequence, the ends in the order of tokens to come.

        Those that run and that were admitted before are collected when the first sequence asks, as SGLang does.
        """
        transaction, left_now = self._transaction, self._transaction.room - self._taken_now
        if own > min(left_now, self._room):
            return False
        mine = self._end(sequence, sequence.generated_tokens)
        if self._ends is None:
            state = self._state
            ran = [each for each in transaction.batch() if each in state.running]
            counted = [(each, each.generated_tokens + state.decode_step - each.start_step) for each in ran]
            counted += [(each, each.generated_tokens) for each in self._order]
            ends = [mine, *(self._end(each, generated) for each, generated in counted)]
            self._ends = sorted((end for end in ends if end[0] > 0), key=lambda end: end[0])
        elif mine[0] > 0:
            # Its place in SGLang: before the last one where it ends after all.
            later = (place for place, end in enumerate(self._ends) if mine[0] <= end[0])
            self._ends.insert(next(later, max(0, len(self._ends) - 1)), mine)
        freed, remaining = 0, left_now - own
        for place, (left, occupied) in enumerate(self._ends):
            running = len(self._ends) - place
            if remaining + freed - left * running <= IGNORE_EOS_RESERVE * running:
                return False
            freed += occupied
        return True

    def _end(self, sequence: Sequence, generated: int) -> tuple[float, int]:
        """Tokens that a sequence is expected to generate yet, and those that it has."""
        ratio = 1.0 if sequence.ignores_eos else self._ratio
        left = self._transaction.max_output_tokens(sequence) * ratio - generated
        return left, sequence.prompt_tokens + generated

    @property
    def is_spent(self) -> bool:
        """Whether chunk or input are used up while there is room."""
        return self._has_room and (self._chunk_left <= 0 or self.tokens >= MAX_PREFILL_TOKENS)

    @property
    def _has_room(self) -> bool:
        return self._room > 0 and self._transaction.room > self._taken_now

    @property
    def _room(self) -> float:
        return self._transaction.room - self._taken

    @property
    def _chunk_left(self) -> int:
        return self._chunk_tokens - self.tokens

    def _compute(self, sequence: Sequence, own: int, most: int) -> None:
        """At most so many tokens, or all that it lacks, with its output to come."""
        tokens = min(own, most)
        self._order.append(sequence)
        self.tokens += tokens
        self._taken_now += tokens + PAGE
        if tokens < own:
            self.chunks.append((sequence, tokens))
            self._taken += tokens + PAGE
        else:
            self.admitted.append(sequence)
            to_come = min(self._transaction.max_output_tokens(sequence), CLIP_MAX_NEW_TOKENS)
            self._taken += tokens + PAGE + to_come


class NewTokenRatio:
    """The share of the outputs to come that is reserved: a float, which every decode lowers until it is reset or estimated
    anew."""

    FIRST = 0.7
    LEAST = FIRST * 0.14
    #: From the first to the least in 600 steps.
    DECAY = (FIRST - LEAST) / 600

    def __init__(self) -> None:
        self._ratio, self._since = self.FIRST, 0

    def at(self, decode_step: int) -> float:
        """The ratio before ``decode_step``; subtracted step by step, as floats round."""
        while self._since < decode_step and self._ratio != self.LEAST:
            self._ratio = max(self._ratio - self.DECAY, self.LEAST)
            self._since += 1
        self._since = max(self._since, decode_step)
        return self._ratio

    def reset(self, decode_step: int) -> None:
        """Begin anew."""
        self._ratio, self._since = self.FIRST, decode_step

    def estimate(self, generated: int, running: int, declared: int, decode_step: int) -> None:
        """Set the estimate by what the sequences left by a retraction in ``decode_step`` need."""
        estimate = (generated + RETRACT_STEPS * running) / (declared + 1)
        self._ratio, self._since = min(1.0, estimate), decode_step + 1
