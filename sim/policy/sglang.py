"""SGLang: requests are admitted by the length of their prefix in the radix tree, longest first."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..memory.accounting.kv_groups import PageGroups
from ..memory.paged.radix_memory import RETRACT_STEPS, RadixMemory, RadixTransaction
from ..memory.paged.radix_slots import SlotRadixMemory
from ..memory.prefix import RadixTree, first_tokens
from ..types.errors import SettingError
from ..types.sequence import CARRY_ON, Sequence, StepPlan
from ..types.state import State
from ..workload.content import Run
from ..workload.workload import Workload
from .base import Policy
from .options import Options, SGLangOptions
from .server import Limits, Pool, Server

#: Above so many that wait, SGLang sorts no more.
MOST_SORTED = 128
#: A request that finds at most so many tokens in the tree, and as many in another waiting request, is put off.
IN_BATCH_TOKENS = 32
#: ``--max-prefill-tokens`` of SGLang.
MAX_PREFILL_TOKENS = 16_384
#: In place of what was found: behind all others.
PUT_OFF = -1
#: An output counts no longer than this when room is asked for it.
CLIP_MAX_NEW_TOKENS = 4096

Queue = Collection[Sequence]


class SGLang(Policy[RadixMemory, RadixTransaction]):
    """SGLang (release 0.5.9, ``managers/scheduler.py``, ``schedule_policy.py``) over a radix tree.

    A step either prefills or decodes; prefills come first. Waiting requests are sorted by the length of their prefix in
    the tree (``lpm``) or by arrival (``fcfs``). They are admitted while their own tokens and remaining outputs fit into
    the room, which is the sum of free and evictable slots. Only a share of the outputs of running sequences is
    reserved. The share falls while no sequence is retracted. If it was too small, the sequences with the fewest generated
    tokens are retracted.

    It leaps while no request waits, and while the batch is full: then the queue is not considered before a sequence
    finishes, and no request uses the tree, so all evictions within the leap are known. A leap ends before a decode
    without room. After a finish a full batch decodes once, and then the queue is considered again. A prefill is a step
    of its own.
    """

    name = "sglang"
    system = "SGLang 0.5.9"
    options_type = SGLangOptions
    options: SGLangOptions
    reads_max_tokens = True
    default_max_num_seqs = 2048
    default_max_num_batched_tokens = 8192
    default_block_size = 1
    caches_prefixes = True

    def __init__(self, limits: Limits, options: SGLangOptions | None = None, groups: PageGroups | None = None) -> None:
        super().__init__(limits, options, groups)
        self._ratio = NewTokenRatio()
        # Decode step at which the batch was found full, and at which nothing ran.
        self._full_since: int | None = None
        self._idle_at = 0
        # Sequences that ran when the last prefill was planned, with those that it admitted.
        self._started = 0

    @classmethod
    def pool_size(
        cls, server: Server, options: Options, num_blocks: int | None, block_size: int | None
    ) -> tuple[int, int]:
        if block_size not in (None, 1):
            raise SettingError("block_size", block_size, "sglang's tree has pages of one token; leave it out")
        return super().pool_size(server, options, num_blocks, block_size)

    def memory(self, pool: Pool) -> RadixMemory:
        kind = SlotRadixMemory if pool.ids else RadixMemory
        return kind(pool.num_blocks, pool.token_runs, pool.caches_prefixes)

    def schedule(self, state: State, transaction: RadixTransaction) -> StepPlan:
        """A prefill if there can be one, else a step that decodes."""
        if not state.batch_size and not state.prefilling:
            self._full_since, self._idle_at = None, state.decode_step
            self._ratio.reset(state.decode_step)
        elif state.batch_size < self._started:
            # A sequence finished with that prefill.
            self._full_since = None
        self._started = 0
        queue: Queue = state.waiting
        if state.prefilling or (queue and not self._is_full(state, transaction)):
            queue = self._in_order(queue, transaction)
            plan = self._prefill(state, transaction, queue)
            if plan is not None:
                return plan
        return self._decode(state, transaction, queue)

    def _is_full(self, state: State, transaction: RadixTransaction) -> bool:
        """Whether the queue is not considered: no sequence has finished, or none has decoded since."""
        left = transaction.left_before(state.decode_step)
        return self._full_since is not None and not self._idle_at < left >= self._full_since

    def _in_order(self, queue: Queue, transaction: RadixTransaction) -> Queue:
        """Waiting requests, the longest prefix first; those with a prefix that another one will compute come last.

        The queue itself, where it is not sorted.
        """
        if self.options.schedule_policy == "fcfs" or len(queue) > MOST_SORTED:
            return queue
        found, others = {}, RadixTree()
        for sequence in queue:
            found[sequence] = tokens = transaction.match(sequence)
            if tokens <= IN_BATCH_TOKENS and _follows(transaction.known(sequence), others):
                found[sequence] = PUT_OFF
        return tuple(sorted(queue, key=found.__getitem__, reverse=True))

    def _prefill(self, state: State, transaction: RadixTransaction, queue: Queue) -> StepPlan | None:
        """A step that prefills; None where no request can, as the batch is full."""
        batch = PrefillBatch(transaction, self.limits, self._reserve(state, transaction))
        for sequence in state.prefilling:
            batch.continue_prefill(sequence)
        for sequence in queue:
            if state.batch_size + len(batch) >= self.limits.max_num_seqs:
                batch.is_full = True
            if batch.is_full or not batch.add(sequence):
                break
        self._full_since = state.decode_step if batch.is_full else None
        if not batch:
            return None
        self._started = state.batch_size + len(batch.admitted)
        return StepPlan(
            tuple(batch.admitted),
            batch.tokens,
            valid_until_horizon=False,
            chunks=tuple(batch.chunks),
            prefill_only=True,
            order=_order(state, queue),
        )

    def _reserve(self, state: State, transaction: RadixTransaction) -> int:
        """Slots kept for the outputs of running sequences, in ``NewTokenRatio.UNIT``ths."""
        decode_step, most, slots = state.decode_step, transaction.longest_tokens, 0
        # A loop of its own, as it runs over all sequences whenever the queue is looked at.
        for s in state.running:
            declared = most - s.prompt_tokens
            if s.max_tokens < declared:
                declared = s.max_tokens
            left = declared - s.generated_tokens + s.start_step - decode_step
            slots += left if left < CLIP_MAX_NEW_TOKENS else CLIP_MAX_NEW_TOKENS
        return slots * self._ratio.at(decode_step)

    def _decode(self, state: State, transaction: RadixTransaction, queue: Queue) -> StepPlan:
        """Running sequences decode; some are retracted if the slots run out."""
        if transaction.room < state.batch_size:
            return self._retract(state, transaction, queue)
        if not state.waiting:
            return CARRY_ON
        # After this step the batch no longer has the sequences that left just now, and is looked at again.
        valid_until_horizon = transaction.left_before(state.decode_step + 1) < state.decode_step
        return StepPlan(valid_until_horizon=valid_until_horizon, stops_at_arrival=False, order=_order(state, queue))

    def _retract(self, state: State, transaction: RadixTransaction, queue: Queue) -> StepPlan:
        """Retract the sequences with the fewest generated tokens until the others find free slots."""
        decode_step = state.decode_step
        generated = {s: s.generated_tokens + decode_step - s.start_step for s in state.running}
        kept = sorted(generated, key=lambda s: (generated[s], -s.prompt_tokens), reverse=True)
        retracted: list[Sequence] = []
        while transaction.room < len(kept) and len(kept) > 1:
            transaction.retract(kept[-1], decode_step)
            retracted.append(kept.pop())
        declared = sum(transaction.max_output_tokens(sequence) for sequence in kept)
        self._ratio.estimate(sum(generated[s] for s in kept), len(kept), declared, decode_step)
        self._full_since = None
        return StepPlan(
            preempted=tuple(retracted), valid_until_horizon=False, stops_at_arrival=False, order=(*queue, *retracted)
        )

    def horizon(self, state: State, memory: RadixMemory, limit: int) -> int:
        """Up to the step for which there is no room."""
        return memory.room // state.batch_size

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        # SGLang cuts outputs to the pool less 2 less the prompt; and the last token is never stored.
        return workload.prompt_tokens + workload.output_tokens + 2


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

    def __init__(self, transaction: RadixTransaction, limits: Limits, reserve: int) -> None:
        self.admitted: list[Sequence] = []
        self.chunks: list[tuple[Sequence, int]] = []
        self.tokens = 0
        self.is_full = False
        self._transaction = transaction
        self._chunk_tokens = limits.max_num_batched_tokens
        # Slots that are spoken for, in UNITths.
        self._taken = reserve

    def __len__(self) -> int:
        return len(self.admitted) + len(self.chunks)

    def continue_prefill(self, sequence: Sequence) -> None:
        """The next chunk of a prefill; its room is reserved since its first chunk."""
        self._compute(sequence, sequence.start_tokens - sequence.computed_tokens)

    def add(self, sequence: Sequence) -> bool:
        """Admit a sequence if it fits, and whether another one may follow."""
        transaction = self._transaction
        found = transaction.look_up(sequence)
        own = sequence.start_tokens - found
        total_tokens = own + min(
            transaction.max_output_tokens(sequence) - sequence.generated_tokens, CLIP_MAX_NEW_TOKENS
        )
        if self._exceeds(total_tokens):
            self.is_full = True
            return False
        if self and own >= MAX_PREFILL_TOKENS - self.tokens:
            return False
        transaction.lock(sequence)
        # What it locks can be evicted no more.
        if self._exceeds(total_tokens) or not self._chunk_left:
            self.is_full = self._exceeds(total_tokens)
            transaction.unlock(sequence)
            return False
        transaction.enter(sequence)
        self._compute(sequence, own)
        return self._is_open()

    def _exceeds(self, total_tokens: int) -> bool:
        return total_tokens * NewTokenRatio.UNIT >= self._transaction.room * NewTokenRatio.UNIT - self._taken

    @property
    def _chunk_left(self) -> int:
        return self._chunk_tokens - self.tokens

    def _compute(self, sequence: Sequence, own: int) -> None:
        """What is left of the chunk, or the whole, with its output to come."""
        tokens = min(own, self._chunk_left)
        self.tokens += tokens
        self._taken += tokens * NewTokenRatio.UNIT
        if tokens < own:
            self.chunks.append((sequence, tokens))
        else:
            self.admitted.append(sequence)
            self._taken += min(self._transaction.max_output_tokens(sequence), CLIP_MAX_NEW_TOKENS) * NewTokenRatio.UNIT

    def _is_open(self) -> bool:
        """Whether room, input and chunk are left."""
        self.is_full = self._exceeds(0)
        return not self.is_full and bool(self._chunk_left) and self.tokens < MAX_PREFILL_TOKENS


class NewTokenRatio:
    """The share of the outputs to come that is reserved, in ``UNIT``ths: whole numbers, so that nothing is rounded.

    It follows from the decode step: every decode lowers it, until it is reset or estimated anew.
    """

    UNIT = 300_000
    #: 0.7, 0.14 of that, and the difference in 600 steps.
    FIRST, LEAST, DECAY = 210_000, 29_400, 301

    def __init__(self) -> None:
        self._ratio, self._since = self.FIRST, 0

    def at(self, decode_step: int) -> int:
        """The ratio before ``decode_step``."""
        decodes = decode_step - self._since
        return max(self.LEAST, self._ratio - decodes * self.DECAY) if decodes else self._ratio

    def reset(self, decode_step: int) -> None:
        """Begin anew."""
        self._ratio, self._since = self.FIRST, decode_step

    def estimate(self, generated: int, running: int, declared: int, decode_step: int) -> None:
        """Set the estimate by what the sequences left by a retraction in ``decode_step`` need."""
        estimate = (generated + RETRACT_STEPS * running) * self.UNIT // (declared + 1)
        self._ratio, self._since = min(self.UNIT, estimate), decode_step + 1
