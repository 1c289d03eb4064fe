"""Paged memory under speculative decoding: slots for drafts, and for the drafter's look-ahead.

A step computes the next token of a decoding sequence and verifies its drafts; the first of them that is wrong, and all after it, are
rejected. The sequence gains one token and those accepted, so sequences no longer grow in lockstep, and blocks are held one by one:

    before the step   c tokens have KV
    reserved          c + 1 + drafts + look-ahead      at most max_model_len
    after the step    c + 1 + accepted                 rejected slots are written again

A block that a step reserves stays in the table. A full block can be found from the step on that computes its last known token; with
EAGLE and MTP also the token after it must be known, which its name covers. Where steps are scheduled ahead, a step reserves as if
all drafts of the step before it were accepted, and knows none of the tokens that that step generates.

Source: vLLM 0.33, vllm/v1/core/sched/scheduler.py and async_scheduler.py, vllm/v1/core/kv_cache_manager.py (``allocate_slots``),
vllm/v1/core/kv_cache_utils.py (``get_request_block_hasher``).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np

from ...types.sequence import Sequence, StepPlan
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.drafts import Speculation
from ..accounting.ledger import Meter
from ..accounting.repeats import idle_repeats
from ..prefix import BlockPool, Chains, FreeKVCacheBlockQueue, lookup_blocks
from ..prefix.block_tables import BlockTables
from .paged import PagedMemory
from .transaction import PagedTransaction


class Verified(NamedTuple):
    """Drafts of a sequence in a step, and those of them that its output keeps."""

    drafts: int
    kept: int


class SpeculativeTransaction(PagedTransaction):
    """As ``PagedTransaction``; every grant takes effect at once."""

    __slots__ = ("found",)
    memory: SpeculativeMemory
    #: Blocks that the last look-up found.
    found: list[int]

    def tokens_of(self, sequence: Sequence, budget: int) -> int:
        """Tokens that a sequence computes which decodes: the next one and its drafts; 0 if it surely ends in the step before."""
        memory = self.memory
        computed, known = memory.progress(sequence, self.decode_step)
        if sequence in memory.in_flight and known + 1 >= sequence.prompt_tokens + sequence.max_tokens:
            return 0
        drafts = memory.speculation.config.num_speculative_tokens
        return max(0, min(1 + drafts, budget, memory.max_model_len - computed - 1))

    def padded(self, sequence: Sequence, computed: int, tokens: int) -> int:
        """Tokens of the next chunk of a sequence that computes ``tokens`` after ``computed``: where steps only decode, one that
        enters with one token is padded to the length of a decode with drafts."""
        memory = self.memory
        if sequence in memory.prefilling or sequence.start_tokens - computed > 1 or memory.continues_prefill:
            return tokens
        length = 1 + memory.speculation.config.num_speculative_tokens
        pads = (memory.drafts or computed) and computed + length < memory.max_model_len
        return length if pads else tokens

    def look_up(self, sequence: Sequence) -> int:
        """See ``PagedTransaction``."""
        self.found = self.memory.find(sequence)
        return len(self.found) * self.block_size

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``."""
        whole = -(-sequence.start_tokens // self.block_size) - len(self.found) + self._hits()
        return max(whole, self._at_once(tokens))

    def beyond(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``."""
        now = tokens - len(self.found) * self.block_size
        return self.lacking(sequence, now) - self._at_once(now)

    def _at_once(self, tokens: int) -> int:
        """Blocks that must be free to compute ``tokens`` after those that were found."""
        found = len(self.found)
        return self.memory.blocks_with_lookahead(found * self.block_size + tokens) - found + self._hits()

    def _hits(self) -> int:
        """Found blocks in no table."""
        references = self.memory.pool.ref_cnt
        return sum(not references[block] for block in self.found)

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """See ``PagedTransaction``."""
        sequence.computed_tokens = known = len(self.found) * self.block_size
        self.memory.enter(sequence, self.found)
        drafts = known + tokens - sequence.start_tokens
        if drafts > 0:
            self.memory.padding[sequence] = drafts
        self._reach(sequence, known + tokens, sequence.start_tokens)

    def needed(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``."""
        computed, _ = self.memory.progress(sequence, self.decode_step)
        held = len(self.memory.block_table(sequence))
        return max(0, self.memory.blocks_with_lookahead(computed + tokens) - held)

    def take(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """See ``PagedTransaction``."""
        memory = self.memory
        computed, known = memory.progress(sequence, self.decode_step)
        if sequence in memory.prefilling:
            memory.continues_prefill = True
        else:
            memory.drafts[sequence] = tokens - 1
        self._reach(sequence, computed + tokens, known)

    def _reach(self, sequence: Sequence, tokens: int, known: int) -> None:
        self.memory.reach(sequence, tokens)
        self.memory.publish(sequence, tokens, known)
        self.free = self.memory.free

    def preempt(self, sequence: Sequence) -> None:
        """See ``PagedTransaction``."""
        self.memory.drop_table(sequence)
        self.memory.drafts.pop(sequence, None)
        self.free = self.memory.free

    def verifies(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts of the step, none of which count as prompts; how far the step gets is drawn."""
        drafts, padding = self.memory.drafts, self.memory.padding
        return plan._replace(
            drafts={**drafts, **padding},
            prefill_tokens=plan.prefill_tokens - sum(padding.values()),
            valid_until_horizon=False,
        )

    # Tables are always up to date, and nothing is granted tentatively.

    def grow_tables(self, steps: int) -> None:
        """See ``PagedTransaction``."""

    def end_of_running(self, any_left: bool) -> None:
        """See ``PagedTransaction``."""

    def pass_over(self, sequence: Sequence) -> None:
        """See ``PagedTransaction``."""


class SpeculativeMemory(PagedMemory):
    """As ``PagedMemory`` for one KV group, with block tables, where steps verify drafts.

    Args:
        num_blocks, block_size, order: See ``PagedMemory``.
        speculation: Draws the accepted drafts.
        chains: Names of the blocks, which cover the tokens that hashes look ahead; None without a prefix cache.
        max_model_len: No slot is reserved past it.
        ahead: Whether a step is decided while the step before it runs.

    Attributes:
        pool: The blocks.
        drafts: Drafts that each decoding sequence verifies in the coming step.
        padding: Drafts of sequences that enter with one token to compute, all of which are rejected: they pad it to the length
            of a decode.
        continues_prefill: Whether a running sequence computes a part of its prompt in the coming step.
        in_flight: Drafts of the last step, by sequence that decoded in it, where the coming step does not know them yet.
        prefilling: Tokens with KV of sequences in a chunked prefill.
    """

    meter = ("live", "held", "prefill_tail", "shared", "rejected")
    _transaction: SpeculativeTransaction
    tables: BlockTables

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        speculation: Speculation,
        chains: Chains | None,
        max_model_len: int,
        order: type[FreeKVCacheBlockQueue],
        ahead: bool,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.speculation: Speculation = speculation
        self.max_model_len = max_model_len
        self.pool = BlockPool(num_blocks, order)
        self.tables = BlockTables(num_blocks, 0, block_size, self.pool)
        self.drafts: dict[Sequence, int] = {}
        self.padding: dict[Sequence, int] = {}
        self.continues_prefill = False
        self.in_flight: dict[Sequence, Verified] = {}
        self.prefilling: dict[Sequence, int] = {}
        self._chains, self._ahead = chains, ahead
        self._lookahead = speculation.config.lookahead_tokens
        self._names: dict[Sequence, list[int]] = {}
        self._published: dict[Sequence, int] = {}
        # Tokens with KV of sequences that neither decode nor prefill; of sequences that decoded in the last step, where the coming
        # one cannot find them yet; and rejected slots of the last step.
        self._standing: dict[Sequence, int] = {}
        self._to_publish: dict[Sequence, int] = {}
        self._verified: dict[Sequence, Verified] = {}
        self._is_decided = False
        if chains is not None:
            self.cache_log = self.cached_level = CacheLog(block_size)
        self._transaction = SpeculativeTransaction(self)

    @property
    def evicted_blocks(self) -> int:
        """See ``Memory``."""
        return self.pool.evicted_blocks

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: blocks with a hash."""
        return self.pool.hashed_ids()

    # --- What the transaction asks for ---

    def transaction(self, decode_step: int) -> SpeculativeTransaction:
        """See ``Memory``."""
        if self._is_decided:
            # The last decision led to no step: what was in flight is known by now.
            self._land()
        self._is_decided = True
        self.drafts, self.padding, self.continues_prefill = {}, {}, False
        transaction = self._transaction
        transaction.decode_step, transaction.free = decode_step, self.free
        transaction.takes = transaction.need = 0
        return transaction

    def progress(self, sequence: Sequence, decode_step: int) -> tuple[int, int]:
        """Tokens that a sequence with blocks has computed before ``decode_step``, drafts in flight included, and tokens that are
        known when that step is decided."""
        if sequence in self.prefilling:
            return self.prefilling[sequence], sequence.start_tokens
        if sequence in self._standing:
            held = self._standing[sequence]
            return held, held + 1
        held, last = sequence.held_tokens(decode_step), self.in_flight.get(sequence)
        return (held, held + 1) if last is None else (held + last.drafts - last.kept, held - last.kept)

    def blocks_with_lookahead(self, tokens: int) -> int:
        """Blocks of ``tokens`` and of the drafter's slots after them."""
        return -(-min(tokens + self._lookahead, self.max_model_len) // self.block_size)

    def block_table(self, sequence: Sequence) -> list[int]:
        """The blocks of a sequence, in order."""
        return self.tables.tables.setdefault(sequence, [])

    def find(self, sequence: Sequence) -> list[int]:
        """The longest cached prefix of a sequence that waits, without its last token."""
        if self._chains is None:
            return []
        names = self._names_of(sequence)
        return self.pool.get_cached_blocks(names[: lookup_blocks(sequence.start_tokens, self.block_size)])

    def enter(self, sequence: Sequence, found: list[int]) -> None:
        """A sequence that waits takes the blocks that it found."""
        self.pool.touch(found)
        self.tables.tables[sequence] = list(found)
        self._published[sequence] = len(found)
        self.prefilling[sequence] = len(found) * self.block_size
        if self.cache_log is not None:
            self.cache_log.look_ups.append((sequence.index, sequence.start_tokens, len(found) * self.block_size))
        self.free = self.pool.num_free

    def reach(self, sequence: Sequence, tokens: int) -> None:
        """A sequence takes the blocks of ``tokens`` and of the slots after them that it lacks."""
        table = self.block_table(sequence)
        table += self.pool.get_new_blocks(max(0, self.blocks_with_lookahead(tokens) - len(table)))
        self.free = self.pool.num_free

    def publish(self, sequence: Sequence, tokens: int, known: int) -> None:
        """Blocks of the first ``tokens``, of ``known`` ones, can be found from now on."""
        if self._chains is None:
            return
        hashed = known - self.speculation.config.hash_lookahead_tokens
        done, full = self._published[sequence], min(tokens, hashed) // self.block_size
        if full <= done:
            return
        names, table = self._names_of(sequence)[:full], self.tables.tables[sequence]
        self.pool.cache_full_blocks(table[done : len(names)], names[done:])
        self._published[sequence] = len(names)

    def _names_of(self, sequence: Sequence) -> list[int]:
        assert self._chains is not None
        names = self._names.get(sequence)
        if names is None:
            names = self._names[sequence] = self._chains.names(sequence.index)
        return names

    def drop_table(self, sequence: Sequence) -> None:
        """A sequence gives up its blocks; nothing happens if it did."""
        table = self.tables.tables.pop(sequence, None)
        if table is None:
            return
        self.pool.free_blocks(table)
        for kept in (self._names, self._published, self.prefilling, self._standing, self._to_publish, self.in_flight):
            kept.pop(sequence, None)
        self.free = self.pool.num_free

    # --- Steps ---

    def _verify(self, state: State) -> None:
        """The step ends: its sequences gain the drafts that are accepted beside the token that each step computes."""
        log, decode_step = self.speculation.log, state.decode_step
        self._verified = {}
        for sequence in state.running:
            padding = self.padding.get(sequence, 0)
            drafts, kept = self.drafts.get(sequence, 0) or padding, 0
            if drafts:
                generated = decode_step + sequence.lag - sequence.prompt_tokens
                accepted = 0 if padding else min(drafts, self.speculation.accepted(sequence, generated))
                kept = min(accepted, sequence.output_tokens - generated - 1)
                log.append((sequence.index, decode_step, drafts, accepted, kept))
            self._verified[sequence] = Verified(drafts, kept)
        state.accept({sequence: verified.kept for sequence, verified in self._verified.items() if verified.kept})

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        """See ``Memory``."""
        tables, references = self.tables.tables, self.pool.ref_cnt
        idle = (sequence for sequence in (*self.prefilling, *self._standing, *admitted) if sequence in tables)
        entries = chain.from_iterable(map(tables.__getitem__, idle))
        return (self.pool.num_shared - idle_repeats(entries, references.__getitem__)) * self.block_size

    def advance(self, state: State, steps: int) -> Meter:
        """See ``Memory``."""
        if steps:
            self._verify(state)
        self._is_decided = False
        if self.cache_log is not None:
            self.cache_log.enter_row(self.pool.num_cached)
        self._land()
        verified = self._verified if steps else {}
        self._verified = {}
        meter = self._meter(state, verified)
        for sequence in verified:
            self._to_publish[sequence] = state.decode_step + sequence.lag
        if self._ahead:
            self.in_flight = verified
        else:
            self._land()
        return meter

    def _land(self) -> None:
        """The tokens of the last step are known."""
        for sequence, tokens in self._to_publish.items():
            self.publish(sequence, tokens, tokens + 1)
        self._to_publish, self.in_flight = {}, {}

    def _meter(self, state: State, verified: dict[Sequence, Verified]) -> Meter:
        """Slots of the step: with tokens, held, past the ends of sequences, named again by tables, and of rejected drafts."""
        live = held = tail = rejected = 0
        for sequence, table in self.tables.tables.items():
            slots, last = len(table) * self.block_size, verified.get(sequence)
            if last is not None:
                tokens, refused = state.decode_step + sequence.lag, last.drafts - last.kept
            else:
                tokens, refused = self.prefilling.get(sequence) or self._standing.get(sequence, 0), 0
            live, held, rejected = live + tokens, held + slots, rejected + refused
            tail += max(0, slots - max(sequence.target_tokens, tokens + refused))
        return live, held, tail, self.pool.num_shared * self.block_size, rejected

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``Memory``; its blocks were taken when the step was decided."""
        self.prefilling.pop(sequence, None)
        self._standing.pop(sequence, None)

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """See ``Memory``; its blocks were taken when the step was decided."""
        self.prefilling[sequence] = sequence.computed_tokens

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """See ``Memory``."""
        self._standing[sequence] = sequence.held_tokens(decode_step)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        for sequence in leaving:
            self.drop_table(sequence)
            self.speculation.forget(sequence)
        self._end_row()

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        for sequence in leaving:
            held = sequence.held_tokens(decode_step)
            self.publish(sequence, held, held + 1)
            self.drop_table(sequence)
            self.speculation.forget(sequence)
        self._end_row()

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``Memory``; their blocks were given up when the step was decided."""

    def _end_row(self) -> None:
        if self.cache_log is not None:
            self.cache_log.end_row(self.pool.num_cached)

    def settle(self, state: State, steps: int) -> None:
        """See ``Memory``; tables are always up to date."""

    def room_after(self, state: State, steps: int) -> int:
        """See ``Memory``; what the steps accept is not known, so it is the room before them."""
        return self.free * self.block_size
