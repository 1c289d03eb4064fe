"""Paged memory of sequences that do not grow in lockstep: steps verify drafts, or several batches are in flight.

A step computes the next token of a decoding sequence and verifies its drafts; the first of them that is wrong, and all after it, are
rejected. The sequence gains one token and those accepted, and blocks are held one by one:

    before the step   c tokens have KV
    reserved          c + 1 + drafts + look-ahead      at most max_model_len
    after the step    c + 1 + accepted                 rejected slots are written again

A block that a step reserves stays in the table. A full block can be found from the step on that computes its last known token; with
EAGLE and MTP also the token after it must be known, which its name covers.

A decision that is taken while batches are in flight counts what they compute as computed, all drafts included, and knows none of their
tokens (``Progress``): windows and states release blocks behind what is processed. States have a block for each draft besides
(``group_tables``).

    batch            1       2       3               prompt of 8 in chunks of 4, two stages
    scheduled        0-3     4-7     8
    in flight        0       4       0               batch 3 is decided when 1 and 2 are over
    processed        0       0       8

Source: vLLM 0.33, vllm/v1/core/sched/scheduler.py and async_scheduler.py, vllm/v1/core/kv_cache_manager.py (``allocate_slots``),
vllm/v1/core/kv_cache_utils.py (``get_request_block_hasher``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import cast

from ...types.sequence import Sequence, StepPlan
from ...types.state import State
from ..accounting.drafts import Speculation
from ..accounting.kv_groups import RING, SLIDING, STATE, PageGroups
from ..accounting.ledger import Meter, of_class
from ..prefix import Chains, FreeKVCacheBlockQueue
from .group_cache import NULL_BLOCK, Found, Table
from .group_tables import GroupTables
from .paged import PagedMemory
from .transaction import PagedTransaction


class Progress:
    """What vLLM's ``Request`` says of a sequence with blocks.

    Args:
        computed: Tokens with KV, those of batches in flight and all their drafts included (``num_computed_tokens``).
        known: Tokens that are known (``num_tokens``).

    Attributes:
        in_flight: Tokens that batches in flight compute (``num_in_flight_tokens``).
        rejected: Drafts in flight that will be rejected, which no decision knows.
        prefills: Whether it has computed a part of its prompt only.
    """

    __slots__ = ("computed", "in_flight", "known", "prefills", "rejected")

    def __init__(self, computed: int, known: int, prefills: bool = False) -> None:
        self.computed, self.known, self.prefills = computed, known, prefills
        self.in_flight = self.rejected = 0

    @property
    def processed(self) -> int:
        """Tokens that are computed whatever the batches in flight do; windows and states release what is behind them."""
        return self.computed - self.in_flight

    @property
    def held(self) -> int:
        """Tokens with KV, without the drafts that will be rejected."""
        return self.computed - self.rejected


class Scheduled:
    """A sequence in a batch.

    Args:
        progress: Of the sequence; another one counts after a preemption.
        tokens: Those that the batch computes.

    Attributes:
        sampled: Tokens that the batch generates; 0 within a prompt.
        rejected: Drafts among ``tokens`` that are rejected.
    """

    __slots__ = ("progress", "rejected", "sampled", "tokens")

    def __init__(self, progress: Progress, tokens: int) -> None:
        self.progress, self.tokens = progress, tokens
        self.sampled = self.rejected = 0


#: The sequences that a batch computes.
Batch = dict[Sequence, Scheduled]


class SpeculativeTransaction(PagedTransaction):
    """As ``PagedTransaction``; every grant takes effect at once."""

    __slots__ = ()
    memory: SpeculativeMemory

    def tokens_of(self, sequence: Sequence, budget: int) -> int:
        """Tokens that a sequence computes which decodes: the next one and its drafts; 0 if it surely ends in a batch in flight."""
        memory = self.memory
        progress = memory.progress[sequence]
        if progress.in_flight and progress.known + 1 >= sequence.prompt_tokens + sequence.max_tokens:
            return 0
        return max(0, min(1 + memory.num_drafts, budget, memory.max_model_len - progress.computed - 1))

    def padded(self, sequence: Sequence, computed: int, tokens: int) -> int:
        """Tokens of the next chunk of a sequence that computes ``tokens`` after ``computed``: where steps only decode, one that
        enters with one token is padded to the length of a decode with drafts."""
        memory = self.memory
        if memory.prefills(sequence) or sequence.start_tokens - computed > 1 or memory.continues_prefill:
            return tokens
        length = 1 + memory.num_drafts
        pads = (memory.drafts or computed) and computed + length < memory.max_model_len
        return length if pads else tokens

    def look_up(self, sequence: Sequence) -> int | None:
        cache, kinds = self.memory.cache, self.memory.groups.kinds
        if cache is None:
            # What a sequence comes with has no blocks yet.
            self.known = sequence.computed_tokens
            self.group_found = Found(self.memory.kept.passed(tuple([] for _ in kinds), self.known), 0)
        else:
            self.group_found = cache.look_up(sequence)
            self.known = self.group_found.blocks * self.block_size
        return self.known

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        cache, known = self.memory.cache, sequence.start_tokens
        if cache is not None and cache.computes_now(self.group_found):
            # The state at the end of the prefix is only available after this step.
            return self.memory.num_blocks + 1
        found = self.group_found.tables
        whole = self.memory.kept.lacked(sequence, found, known, known, self.known, admits=True) + self._hits()
        return max(whole, self._at_once(sequence, tokens))

    def beyond(self, sequence: Sequence, tokens: int) -> int:
        now = tokens - self.known
        if self.memory.cache is not None and self.memory.cache.computes_now(self.group_found):
            return 0
        return self.lacking(sequence, now) - self._at_once(sequence, now)

    def _at_once(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that must be free to compute ``tokens`` after those that were found."""
        known = self.known
        slots = self.memory.slots_with_lookahead(known + tokens)
        return self.memory.kept.lacked(sequence, self.group_found.tables, known + tokens, slots, known) + self._hits()

    def _hits(self) -> int:
        """Found blocks in no table."""
        return 0 if self.memory.cache is None else self.memory.cache.to_take(self.group_found)

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        sequence.computed_tokens = self.known
        self.memory.enter(sequence, self.group_found, self.known)
        self._enter_with(sequence, self.known, tokens)

    def _enter_with(self, sequence: Sequence, known: int, tokens: int) -> None:
        """A sequence that has ``known`` tokens takes the blocks to compute ``tokens``."""
        drafts = known + tokens - sequence.start_tokens
        if drafts > 0:
            self.memory.padding[sequence] = drafts
        self._reach(sequence, tokens)

    def needed(self, sequence: Sequence, tokens: int) -> int:
        memory = self.memory
        progress = memory.progress[sequence]
        memory.kept.skip(sequence, progress.processed)
        self.free = memory.free = memory.kept.pool.num_free
        until = progress.computed + tokens
        slots = memory.slots_with_lookahead(until)
        return memory.kept.lacked(sequence, memory.kept.tables[sequence], until, slots, progress.computed)

    def take(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        memory = self.memory
        if memory.prefills(sequence):
            memory.continues_prefill = True
        else:
            memory.drafts[sequence] = tokens - 1
        self._reach(sequence, tokens)

    def _reach(self, sequence: Sequence, tokens: int) -> None:
        self.memory.reach(sequence, tokens)
        self.free = self.memory.free

    def preempt(self, sequence: Sequence) -> None:
        self.memory.drop_table(sequence)
        self.memory.drafts.pop(sequence, None)
        self.memory.batch.pop(sequence, None)
        self.free = self.memory.free

    def end_decision(self, computed: AbstractSet[Sequence]) -> int:
        """See ``PagedTransaction``; vLLM's ``_update_after_schedule``."""
        self.memory.begin_batch()
        return super().end_decision(computed)

    def verifies(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts of the step, none of which count as prompts; how far the step gets is drawn."""
        drafts, padding = self.memory.drafts, self.memory.padding
        return plan._replace(
            drafts={**drafts, **padding},
            prefill_tokens=plan.prefill_tokens - sum(padding.values()),
            valid_until_horizon=False,
        )

    def is_in_flight(self, sequence: Sequence) -> bool:
        return self.memory.progress[sequence].in_flight > 0

    def pass_over(self, sequence: Sequence) -> None:
        """See ``PagedTransaction``; batches in flight are counted."""

    def pass_in_vain(self, sequence: Sequence, tokens: int) -> None:
        """See ``PagedTransaction``; the pool says what is free."""

    # Tables are always up to date, and nothing is granted tentatively.

    def grow_tables(self, steps: int) -> None:
        """See ``PagedTransaction``."""

    def end_of_running(self, any_left: bool, idle: AbstractSet[Sequence] = frozenset()) -> None:
        """See ``PagedTransaction``."""


class SpeculativeMemory(PagedMemory):
    """As ``PagedMemory`` with block tables, where steps verify drafts.

    Args:
        num_blocks, block_size, order, groups: See ``PagedMemory``.
        speculation: Draws the accepted drafts.
        chains: Names of the blocks, which cover the tokens that hashes look ahead; None without a prefix cache.
        max_model_len: No slot is reserved past it.

    Attributes:
        kept: The block tables.
        progress: Of every sequence with blocks.
        batch: What the decision schedules.
        drafts: Drafts that each decoding sequence verifies in the coming step.
        padding: Drafts of sequences that enter with one token to compute, all of which are rejected: they pad it to the length
            of a decode.
        continues_prefill: Whether a running sequence computes a part of its prompt in the coming step.
    """

    _transaction: SpeculativeTransaction

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        speculation: Speculation | None,
        chains: Chains | None,
        max_model_len: int,
        order: type[FreeKVCacheBlockQueue],
        groups: PageGroups,
    ) -> None:
        super().__init__(num_blocks, block_size, ids=True, groups=groups, chains=chains, in_turn=True, order=order)
        assert self.group_tables is not None
        self.kept: GroupTables = self.group_tables
        self.speculation, self.num_drafts, self._lookahead = speculation, 0, 0
        if speculation is not None:
            self.meter += ("rejected",)
            self.num_drafts = speculation.config.num_speculative_tokens
            self._lookahead = speculation.config.lookahead_tokens
        self.max_model_len = max_model_len
        self.progress: dict[Sequence, Progress] = {}
        self.batch: Batch = {}
        self.drafts: dict[Sequence, int] = {}
        self.padding: dict[Sequence, int] = {}
        self.continues_prefill = False
        self._hash_lookahead = 0 if chains is None else chains.lookahead_tokens
        # The batch in flight, where the engine does not count them.
        self._unknown: Batch = {}
        self._is_decided = False
        self._transaction = SpeculativeTransaction(self)

    # --- What the transaction asks for ---

    def transaction(self, decode_step: int) -> SpeculativeTransaction:
        if self._is_decided and not self.pipelined:
            # The last decision led to no step: what was in flight is known by now.
            self._land()
        self._is_decided = True
        if self.cache is not None:
            self.cache.begin_step()
        self.batch, self.drafts, self.padding, self.continues_prefill = {}, {}, {}, False
        transaction = self._transaction
        transaction.decode_step, transaction.free = decode_step, self.free
        transaction.takes = transaction.need = 0
        return transaction

    def prefills(self, sequence: Sequence) -> bool:
        """Whether a sequence has computed a part of its prompt only."""
        return sequence in self.progress and self.progress[sequence].prefills

    def slots_with_lookahead(self, tokens: int) -> int:
        """Slots of ``tokens`` and of the drafter's after them."""
        return min(tokens + self._lookahead, self.max_model_len)

    def enter(self, sequence: Sequence, found: Found, computed: int) -> None:
        """A sequence that waits takes the blocks that it found; its first ``computed`` tokens need no computing."""
        if self.cache is not None:
            self.cache.enter(sequence, found)
            self.kept.enter(sequence, found.tables)
        else:
            self.kept.receive(sequence, computed)
        self.progress[sequence] = Progress(computed, sequence.start_tokens, prefills=True)

    def resume(self, sequence: Sequence, computed: int) -> None:
        """A sequence that stands computes again, after its first ``computed`` tokens."""
        self.kept.skip(sequence, computed)
        self.progress[sequence] = Progress(computed, sequence.start_tokens, prefills=True)

    def stand(self, sequence: Sequence, tokens: int) -> None:
        """A sequence has blocks, and its first ``tokens``, but computes nothing."""
        self.progress[sequence] = Progress(tokens, sequence.start_tokens)

    def reach(self, sequence: Sequence, tokens: int) -> None:
        """A sequence takes the blocks to compute ``tokens``, and of the slots after them, that it lacks."""
        progress = self.progress[sequence]
        self.batch[sequence] = Scheduled(progress, tokens)
        until, known = progress.computed + tokens, progress.known
        hashed = known - self._hash_lookahead
        self.kept.take(sequence, until, min(until, known), self.slots_with_lookahead(until), hashed=hashed)
        self.free = self.kept.pool.num_free

    def begin_batch(self) -> None:
        """The decision is taken: what it schedules counts as computed for the next one."""
        self.fences.scheduled += bool(self.batch)
        for scheduled in self.batch.values():
            scheduled.progress.computed += scheduled.tokens
            scheduled.progress.in_flight += scheduled.tokens

    def land(self, batch: Mapping[Sequence, object]) -> None:
        """See ``Memory``; vLLM's ``update_from_output``."""
        if batch and self._process(self.fences.processed + 1):
            self.free = self.kept.pool.num_free
        for sequence, scheduled in cast(Batch, batch).items():
            progress = scheduled.progress
            progress.in_flight -= scheduled.tokens
            progress.computed -= scheduled.rejected
            progress.rejected -= scheduled.rejected
            progress.known += scheduled.sampled
            if scheduled.sampled and self.progress.get(sequence) is progress:
                self._publish(sequence, progress.processed, progress.known)

    def _land(self) -> None:
        """The tokens of the step in flight are known."""
        batch, self._unknown = self._unknown, {}
        self.land(batch)

    def _publish(self, sequence: Sequence, tokens: int, known: int) -> None:
        """Blocks of the first ``tokens`` can be found from now on, as far as the tokens that their hashes cover are ``known``."""
        if self.cache is not None:
            self.cache.publish(sequence, self.kept.tables[sequence], tokens, known - self._hash_lookahead)

    def drop_table(self, sequence: Sequence) -> None:
        """A sequence gives up its blocks; nothing happens if it did."""
        if sequence not in self.kept.tables:
            return
        self.kept.drop(sequence)
        del self.progress[sequence]
        self.free = self.kept.pool.num_free

    # --- Steps ---

    def _verify(self, state: State) -> None:
        """The step ends: its sequences gain the drafts that are accepted beside the token that each step computes."""
        decode_step, gained = state.decode_step, {}
        for sequence in state.running:
            scheduled, padding = self.batch[sequence], self.padding.get(sequence, 0)
            scheduled.sampled = 1
            if (drafts := self.drafts.get(sequence, 0) or padding) and self.speculation is not None:
                generated = decode_step + sequence.lag - sequence.prompt_tokens
                # What ended in a batch in flight computes in vain.
                left = sequence.output_tokens - generated - 1
                accepted = 0 if padding or left < 0 else min(drafts, self.speculation.accepted(sequence, generated))
                kept = max(0, min(accepted, left))
                self.speculation.log.append((sequence.index, decode_step, drafts, accepted, kept))
                scheduled.sampled += kept
                scheduled.rejected = drafts - kept
                scheduled.progress.rejected += drafts - kept
                if kept:
                    gained[sequence] = kept
        state.accept(gained)

    def _idle_tables(self, admitted: Iterable[Sequence]) -> list[tuple[Table, ...]]:
        admitted = {*admitted}
        return [
            tables
            for sequence, tables in self.kept.tables.items()
            if sequence not in self.batch or sequence in admitted or self.prefills(sequence)
        ]

    def advance(self, state: State, steps: int) -> Meter:
        if steps:
            self._verify(state)
        self._is_decided = False
        if self.cache_log is not None:
            self.cache_log.enter_row(self.kept.pool.num_cached)
        if self.pipelined:
            return self._meter()
        self._land()
        meter, self._unknown, self.batch = self._meter(), self.batch, {}
        if not self.groups.ahead:
            self._land()
        return meter

    def _held_tables(self) -> list[tuple[Sequence, tuple[Table, ...]]]:
        """The tables of all sequences with blocks."""
        deferred = self.fences.deferred.items()
        return [*self.kept.tables.items(), *((sequence, each.tables) for sequence, each in deferred)]

    def _meter(self) -> Meter:
        """Slots of the step by the columns of ``meter``: those of a full group, and what groups of another kind have less of."""
        size, groups = self.block_size, self.groups
        # Of a group of each kind; all that grow have as many entries, those without a block included.
        sliding, state_group = (groups.kinds.index(kind) if kind in groups.kinds else None for kind in (SLIDING, STATE))
        growing = next((place for place, kind in enumerate(groups.kinds) if kind not in (STATE, RING)), 0)
        sums = dict.fromkeys((*self.meter, "rejected"), 0)
        for sequence, own in self._held_tables():
            slots, progress = len(own[growing]) * size, self.progress[sequence]
            tokens, refused = progress.held, progress.rejected
            sums["live"] += tokens
            sums["rejected"] += refused
            if groups.sizes:
                self._meter_classes(sums, own, max(sequence.target_tokens, tokens + refused))
                continue
            sums["held"] += slots
            sums["prefill_tail"] += max(0, slots - max(sequence.target_tokens, tokens + refused))
            if sliding is not None:
                sums["skipped"] += own[sliding].count(NULL_BLOCK) * size
            if state_group is not None and groups.states_by_block:
                blocks = len(own[state_group]) - own[state_group].count(NULL_BLOCK)
                sums["skipped_states"] += slots - blocks * size
        if self.fixed:
            sums["states"] = size * len(self._held_tables())
        if self.cache is not None and groups.sizes:
            for place, each in enumerate(self.classes):
                sums[of_class("shared", place)] = self.cache.shared[place] * each.block_size
        elif self.cache is not None:
            names = ("shared", "shared_in_windows", "shared_states")
            sums |= {name: entries * size for name, entries in zip(names, self.cache.shared_by_kind(), strict=True)}
        return tuple(sums[name] for name in self.meter)

    def _meter_classes(self, sums: dict[str, int], own: tuple[Table, ...], target: int) -> None:
        """Add the slots of a sequence in each class of groups, whose blocks have sizes of their own; ``target`` is what it will fill."""
        for place, each in enumerate(self.classes):
            table, size = own[each.places[0]], each.block_size
            slots = len(table) * size
            sums[of_class("held", place)] += slots
            sums[of_class("prefill_tail", place)] += max(0, slots - target)
            if each.kind == SLIDING:
                sums[of_class("skipped", place)] += table.count(NULL_BLOCK) * size

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``Memory``; its blocks were taken when the step was decided."""
        self.progress[sequence].prefills = False

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """See ``Memory``; its blocks were taken when the step was decided."""

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """See ``Memory``; it keeps what it has."""

    def pass_windows(self, sequence: Sequence) -> None:
        self.kept.skip(sequence, self.progress[sequence].held)
        self.free = self.kept.pool.num_free
        self._end_row()

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        for sequence in leaving:
            self._pass_at_end(sequence)
            progress = self.progress.get(sequence)
            if self.groups.defers and progress is not None and progress.in_flight:
                self._defer(sequence)
                self.stand(sequence, progress.processed)
                # What it has passed is free at once.
                self.free = self.kept.pool.num_free
            else:
                self.drop_table(sequence)
            self._forget(sequence)
        self._end_row()

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        if not self.pipelined:
            self._land()
        self.release(leaving, decode_step)

    def free_deferred(self, decode_step: int) -> None:
        """See ``Memory``; they come free as the tokens of their batch are known, at the beginning of the coming step."""

    def _count_out(self, sequence: Sequence) -> None:
        del self.progress[sequence]

    def _forget(self, sequence: Sequence) -> None:
        """A sequence has finished."""
        if self.speculation is not None:
            self.speculation.forget(sequence)

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``Memory``; their blocks were given up when the step was decided."""

    def _end_row(self) -> None:
        if self.cache_log is not None:
            self.cache_log.end_row(self.kept.pool.num_cached)

    def settle(self, state: State, steps: int) -> None:
        """See ``Memory``; tables are always up to date."""

    def room_after(self, state: State, steps: int) -> int:
        """See ``Memory``; what the steps accept is not known, so it is the room before them."""
        return self.free * self.block_size
