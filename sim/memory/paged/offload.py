"""Paged memory with a second tier of its prefix cache in host memory, as in vLLM's native KV offloading.

    look up    a waiting sequence finds its prefix in the GPU's cache, and the blocks that follow it in the host's
    load       it takes blocks for these, and waits while they are copied; the sequences after it go on without it
    publish    when the copy has ended, its blocks can be found on the GPU, and it is admitted as after a hit there
    store      after each decision the sequences that it computes offer the full blocks of their prompts; those that are not
               on the host are copied there, from the start of the next step on

One link goes each way, and copies one job after the other. Copies overlap with steps. What they delay:

    a load     its own sequence, and those that find one of its blocks on the host meanwhile
    a store    sequences that find one of its blocks on the host meanwhile, and its own sequence if that was preempted
    a flush    every sequence: a step begins only after the stores of a preempted sequence, and of finished sequences with a
               block that is taken again in the step

A sequence that waits for a copy keeps its place in the queue, without a slot in the batch.

With asynchronous scheduling a decision is taken while a step runs, and a load must not write what that step may still write.
So blocks of a sequence that the running step computes come free only after it: the sequence is not preempted, and if it has
finished, unknown to the step, its blocks stay taken for one more decision.

Source: vLLM 0.33, vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py and worker.py,
vllm/v1/core/sched/scheduler.py, vllm/v1/kv_offload/cpu/gpu_worker.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from operator import attrgetter

from ...types.sequence import Sequence
from ..accounting.kv_groups import PageGroups
from ..accounting.moments import after_step
from ..prefix import Chains, FreeKVCacheBlockQueue
from ..prefix.host_tier import HostTier, Offer
from .counts import Partial
from .group_cache import Found
from .group_cache import Table as GroupTable
from .paged import PagedMemory
from .transaction import PagedTransaction


class OffloadTransaction(PagedTransaction):
    """As ``PagedTransaction`` over a prefix cache, with look-ups on the host."""

    __slots__ = ("lacks_all",)
    memory: OffloadedMemory
    #: Whether the sequence that was looked up last found too few blocks for its load.
    lacks_all: bool

    def look_up(self, sequence: Sequence) -> int | None:
        """See ``PagedTransaction``; None for a sequence that waits for a copy from now on."""
        memory, tier = self.memory, self.memory.tier
        self.lacks_all = False
        if sequence in tier.loading:
            return None
        if sequence in tier.loaded:
            return memory.end_load(sequence)
        known = PagedTransaction.look_up(self, sequence)
        assert memory.cache is not None and known is not None
        first = self.group_found.blocks
        names = memory.cache.names_of(sequence)[first : sequence.start_tokens // self.block_size]
        blocks = tier.look_up(sequence, names)
        if not blocks:
            return None if blocks is None else known
        if not self._fits(sequence, first + blocks):
            self.lacks_all = True
            return known
        memory.load(sequence, self.group_found, blocks)
        self.free = memory.cache.pool.num_free
        return None

    def _fits(self, sequence: Sequence, blocks: int) -> bool:
        """Whether a load of a sequence that then has so many blocks fits beside what prefills in progress still need."""
        memory = self.memory
        assert memory.cache is not None
        found, whole = self.group_found.blocks, -(-sequence.start_tokens // self.block_size)
        hits, spare = memory.cache.to_take(self.group_found), memory.watermark_blocks * memory.any_running
        if memory.reserves_whole and whole - found + hits + spare > self.free:
            return False
        return blocks - found + hits + spare <= self.free - memory.blocks_to_come()

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``."""
        if self.lacks_all:
            return self.memory.num_blocks + 1
        if sequence in self.memory.tier.loaded:
            return self.memory.blocks_to_come_of(sequence)
        return super().lacking(sequence, tokens)

    def beyond(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``."""
        if self.lacks_all:
            return 0
        if sequence in self.memory.tier.loaded:
            size = self.block_size
            return -(-sequence.start_tokens // size) - max(-(-tokens // size), self.memory.tier.loaded[sequence])
        return super().beyond(sequence, tokens)

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """See ``PagedTransaction``."""
        memory = self.memory
        assert memory.cache is not None and memory.group_tables is not None
        if sequence in memory.tier.loaded:
            del memory.tier.loaded[sequence]
            memory.tier.offering[sequence] = None
            known = sequence.computed_tokens
            memory.group_tables.reach(sequence, known, known + tokens, known + tokens)
            self.free = memory.cache.pool.num_free
            return
        super().enter(sequence, tokens, blocks)
        memory.tier.offering[sequence] = None
        memory.tier.look_ups.append((sequence.index, sequence.start_tokens - sequence.computed_tokens, 0))

    def preempt(self, sequence: Sequence) -> None:
        """See ``PagedTransaction``."""
        self.memory.tier.preempt(sequence)
        self.memory.tier.offering.pop(sequence, None)
        super().preempt(sequence)

    def end_decision(self, computed: AbstractSet[Sequence]) -> int:
        """See ``PagedTransaction``."""
        self.grow_tables(1)
        return self.memory.end_decision(computed)


class OffloadedMemory(PagedMemory):
    """As ``PagedMemory`` for one KV group with a prefix cache, with a second tier of that cache in host memory.

    Args:
        num_blocks, block_size, chains, order: See ``PagedMemory``.
        groups: One group that keeps every token.
        offloaded_blocks: Blocks of the host memory.
        watermark_blocks: Blocks that an admission leaves free beside running sequences.
        reserves_whole: Whether a load needs the blocks of all tokens of its sequence to be free.

    Attributes:
        tier: The blocks on the host, and the copies.
        deferred: Finished sequences that the running step computes in vain, with their blocks, which come free after it.
    """

    _transaction: OffloadTransaction

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: PageGroups,
        chains: Chains,
        offloaded_blocks: int,
        order: type[FreeKVCacheBlockQueue],
        watermark_blocks: int,
        reserves_whole: bool,
    ) -> None:
        super().__init__(num_blocks, block_size, groups=groups, chains=chains, in_turn=True, order=order)
        self.watermark_blocks, self.reserves_whole = watermark_blocks, reserves_whole
        self.tier = self.transfers = HostTier(offloaded_blocks, block_size)
        assert self.cache is not None
        self._taken: set[int] = set()
        self.cache.pool.taken = self._taken
        self.deferred: dict[Sequence, list[int]] = {}
        # Whether blocks came free after the last decision.
        self._has_freed = False
        # Sequences that the last decision stalled while a step ran, with the tokens that they have after it.
        self._stalled: dict[Sequence, int] = {}
        self._transaction = OffloadTransaction(self)

    @property
    def any_running(self) -> bool:
        """Whether any sequence has blocks and does not wait for its load, or after it."""
        assert self.group_tables is not None
        return len(self.group_tables.tables) > len(self.tier.loaded)

    def blocks_to_come_of(self, sequence: Sequence) -> int:
        """Blocks that a sequence takes before all its known tokens are computed."""
        assert self.group_tables is not None
        return max(0, -(-sequence.start_tokens // self.block_size) - len(self.group_tables.tables[sequence][0]))

    def blocks_to_come(self) -> int:
        """The same of all sequences with blocks: prefills in progress, and loads."""
        assert self.group_tables is not None
        return sum(map(self.blocks_to_come_of, self.group_tables.tables))

    def load(self, sequence: Sequence, found: Found, blocks: int) -> None:
        """A waiting sequence takes the blocks that it found, and ``blocks`` new ones that it loads from the host."""
        cache, tables, size = self.cache, self.group_tables, self.block_size
        assert cache is not None and tables is not None
        first, known = found.blocks, found.blocks * size
        names = cache.names_of(sequence)[first : first + blocks]
        cache.enter(sequence, found)
        tables.enter(sequence, found.tables)
        tables.take(sequence, known + blocks * size, known)
        self._hold(first + blocks, ())
        self.partial[sequence] = Partial(first + blocks, (), known, known)
        self.tier.look_ups.append((sequence.index, sequence.start_tokens - known, blocks * size))
        self.tier.load(sequence, first, names)

    def end_load(self, sequence: Sequence) -> int:
        """Publish what a sequence has loaded. Returns its computed tokens; its last one is computed in any case."""
        cache, tables = self.cache, self.group_tables
        assert cache is not None and tables is not None
        tokens = self.tier.loaded[sequence] * self.block_size
        cache.publish(sequence, tables.tables[sequence], tokens)
        computed = sequence.computed_tokens = min(tokens, sequence.start_tokens - 1)
        held = self.partial[sequence]
        self.partial[sequence] = held._replace(computed_tokens=computed, known_tokens=computed)
        return computed

    def end_decision(self, computed: AbstractSet[Sequence]) -> int:
        """See ``OffloadTransaction``."""
        offering = sorted((each for each in self.tier.offering if each in computed), key=attrgetter("order"))
        offers = [offer for sequence in offering if (offer := self._offer_of(sequence)).names]
        wait = self.tier.end_decision(offers, self._taken, not computed)
        for sequence in offering:
            if self.tier.offered(sequence) >= sequence.prompt_tokens // self.block_size:
                del self.tier.offering[sequence]
        self._taken.clear()
        self._free_deferred()
        return wait

    def may_admit(self, waiting: Sequence, running: Iterable[Sequence]) -> bool:
        """See ``PagedMemory``.

        Running sequences may fill the next block of its prefix, which has the same place in theirs.
        """
        cache = self.cache
        assert cache is not None
        names, place = cache.names_of(waiting), cache.look_up(waiting).blocks
        return (
            self._has_freed
            or not self.tier.is_at_rest()
            or any(cache.names_of(sequence)[place : place + 1] == names[place : place + 1] for sequence in running)
        )

    def _offer_of(self, sequence: Sequence) -> Offer:
        assert self.cache is not None and self.group_tables is not None
        # Blocks with generated tokens are not offered (``offload_prompt_only``, the default).
        full = min(self.cache.published(sequence), sequence.prompt_tokens // self.block_size)
        first = self.tier.offered(sequence)
        if full <= first:
            return Offer(sequence, first, [], [])
        names, table = self.cache.names_of(sequence), self.group_tables.tables[sequence][0]
        ids = [block for block in table[first:full] if block is not None]
        return Offer(sequence, first, names[first:full], ids)

    def _idle_tables(self, admitted: Iterable[Sequence]) -> list[tuple[GroupTable, ...]]:
        """See ``PagedMemory``; sequences that were computed in vain keep their blocks for another step."""
        in_vain: list[tuple[GroupTable, ...]] = [([*blocks],) for blocks in self.deferred.values()]
        return super()._idle_tables(admitted) + in_vain

    # A victim of the decision has no tables any more; every other sequence that leaves has finished.

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        assert self.group_tables is not None
        leaving = tuple(leaving)
        self.group_tables.grow_until(decode_step)
        for sequence in leaving:
            if sequence in self.group_tables.tables:
                self._finish(sequence)
        super().release(leaving, decode_step)

    def _release_partial(self, sequence: Sequence, decode_step: int) -> None:
        assert self.group_tables is not None
        if sequence in self.group_tables.tables:
            self._finish(sequence)
        super()._release_partial(sequence, decode_step)

    def _finish(self, sequence: Sequence) -> None:
        self.tier.finish(self._offer_of(sequence))
        self.tier.offering.pop(sequence, None)

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``; the blocks of sequences that the coming step computes in vain come free after it."""
        leaving = tuple(leaving)
        in_vain = [sequence for sequence in leaving if sequence not in self.partial]
        super().release_finished((sequence for sequence in leaving if sequence in self.partial), decode_step)
        for sequence in in_vain:
            self._defer(sequence, decode_step)
        self._settle_cache(after_step(decode_step))

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """See ``Memory``; a block that the running step fills is found from the next decision on."""
        super().stall(sequence, decode_step)
        if not finished:
            self._stalled[sequence] = sequence.held_tokens(decode_step)

    def _open_groups(self, decode_step: int) -> int:
        assert self.cache is not None and self.group_tables is not None
        for sequence, tokens in self._stalled.items():
            self.cache.publish(sequence, self.group_tables.tables[sequence], tokens)
        self._stalled = {}
        return super()._open_groups(decode_step)

    def _defer(self, sequence: Sequence, decode_step: int) -> None:
        cache, tables = self.cache, self.group_tables
        assert cache is not None and tables is not None
        cache.publish(sequence, tables.tables[sequence], sequence.held_tokens(decode_step))
        self._finish(sequence)
        super().stall(sequence, decode_step)
        (blocks,) = tables.detach(sequence)
        held = self.partial[sequence]
        self._hold(len(blocks) - held.blocks, ())
        tokens = held.computed_tokens + 1
        self.partial[sequence] = Partial(len(blocks), (), tokens, tokens)
        self.deferred[sequence] = [block for block in blocks if block is not None]

    def _free_deferred(self) -> None:
        """The step that computed finished sequences in vain is over."""
        self._has_freed = bool(self.deferred)
        if not self.deferred:
            return
        assert self.group_tables is not None
        for sequence, blocks in self.deferred.items():
            self._hold(-self.partial.pop(sequence).blocks, ())
            self.group_tables.give_back(blocks, 0)
        self.deferred = {}
        self._settle_cache()
