"""Paged memory with a second tier of its prefix cache in host memory, as in vLLM's native KV offloading, and tiers behind it.

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

A sequence that waits for a copy keeps its place in the queue, without a slot in the batch. So does one whose blocks a tier behind the
host has: they are promoted to the host first.

With asynchronous scheduling, and over pipeline stages, a decision is taken while batches are in flight, and a load must not write what
these may still write (``fences``).

Source: vLLM 0.33, vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py and worker.py,
vllm/v1/core/sched/scheduler.py, vllm/v1/kv_offload/cpu/gpu_worker.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from ...types.sequence import Sequence
from ..accounting.kv_groups import SLIDING, STATE, PageGroups
from ..prefix import Chains, FreeKVCacheBlockQueue
from ..prefix.tiers import Offloaded
from .counts import Partial
from .group_cache import NULL_BLOCK, Found
from .group_cache import Table as GroupTable
from .host_tier_memory import HostTierMemory
from .transaction import PagedTransaction


class OffloadTransaction(PagedTransaction):
    """As ``PagedTransaction`` over a prefix cache, with look-ups on the host."""

    __slots__ = ("lacks_all",)
    memory: HostTierMemory
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
        known = super().look_up(sequence)
        assert memory.cache is not None and known is not None
        tokens = None if tier.starts_anew(sequence) else memory.on_host(sequence, known)
        if not tokens:
            return None if tokens is None else known
        if not self._fits(sequence, known + tokens):
            self.lacks_all = True
            return known
        memory.load(sequence, self.group_found, known + tokens)
        self.free = memory.cache.pool.num_free
        return None

    def _fits(self, sequence: Sequence, tokens: int) -> bool:
        """Whether a load of a sequence that then has so many tokens fits beside what prefills in progress still need."""
        memory, found = self.memory, self.group_found
        cache, tables = memory.cache, memory.group_tables
        assert cache is not None and tables is not None
        if cache.computes_now(found):
            return False
        kept, start = tables.passed(found.tables, tokens), sequence.start_tokens
        # A state that was found counts, although the load has a later one.
        kinds = zip(memory.groups.kinds, found.tables, kept, strict=True)
        hits = cache.to_take(Found(tuple(whole if kind == STATE else own for kind, whole, own in kinds), found.blocks))
        free = self.free - hits - memory.watermark_blocks * memory.any_running
        if memory.reserves_whole and tables.lacked(sequence, kept, start, start, tokens, admits=True) > free:
            return False
        at_once = tables.lacked(sequence, kept, tokens, tokens, tokens)
        return at_once <= free - memory.blocks_to_come() - memory.step_blocks

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        if self.lacks_all:
            return self.memory.num_blocks + 1
        if sequence in self.memory.tier.loaded:
            computed = sequence.computed_tokens
            return max(self.memory.blocks_to_come_of(sequence), self._after_load(sequence, computed + tokens))
        return super().lacking(sequence, tokens)

    def beyond(self, sequence: Sequence, tokens: int) -> int:
        if self.lacks_all:
            return 0
        if sequence in self.memory.tier.loaded:
            return self.lacking(sequence, tokens - sequence.computed_tokens) - self._after_load(sequence, tokens)
        return super().beyond(sequence, tokens)

    def _after_load(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that a sequence takes after its load for its first ``tokens``."""
        memory, computed = self.memory, sequence.computed_tokens
        tables = memory.group_tables
        assert tables is not None
        return tables.lacked(sequence, tables.tables[sequence], tokens, memory.slots_of(tokens), computed)

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        memory = self.memory
        assert memory.cache is not None and memory.group_tables is not None
        if sequence in memory.tier.loaded:
            del memory.tier.loaded[sequence]
            memory.tier.offering[sequence] = None
            self._continue(sequence, tokens)
            # vLLM takes all blocks of an admitted request for allocated, those that it has loaded, too (``update_state_after_alloc``).
            tables = memory.group_tables.tables[sequence]
            memory.taken.update(block for table in tables for block in table if block is not NULL_BLOCK)
            self.free = memory.cache.pool.num_free
            return
        super().enter(sequence, tokens, blocks)
        memory.tier.offering[sequence] = None
        memory.tier.on_looked_up(sequence, sequence.computed_tokens, 0)

    def _continue(self, sequence: Sequence, tokens: int) -> None:
        """Grant a sequence that has loaded its blocks those to compute ``tokens``."""
        tables, known = self.memory.group_tables, sequence.computed_tokens
        assert tables is not None
        tables.reach(sequence, known, known + tokens, known + tokens)

    def pass_over(self, sequence: Sequence) -> None:
        super().pass_over(sequence)
        # Its windows have passed blocks although it then found too few.
        self.memory.count_as_tables(sequence)

    def preempt(self, sequence: Sequence) -> None:
        self.memory.tier.preempt(sequence)
        self.memory.forget(sequence)
        super().preempt(sequence)

    def end_decision(self, computed: AbstractSet[Sequence]) -> int:
        self.grow_tables(1)
        super().end_decision(computed)
        return self.memory.end_decision(computed)


class OffloadedMemory(HostTierMemory):
    """As ``HostTierMemory``, where sequences grow in lockstep.

    Args:
        num_blocks, block_size, groups, chains, order: See ``PagedMemory``.
        host: The host memory, and the tiers behind it.
        watermark_blocks, reserves_whole: See ``HostTierMemory``.
    """

    _transaction: OffloadTransaction

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: PageGroups,
        chains: Chains,
        host: Offloaded,
        order: type[FreeKVCacheBlockQueue],
        watermark_blocks: int,
        reserves_whole: bool,
    ) -> None:
        super().__init__(num_blocks, block_size, groups=groups, chains=chains, in_turn=True, order=order)
        self._connect(host, watermark_blocks, reserves_whole)
        #: Classes of the groups that give blocks back while their sequences run, as in ``giving``.
        classes = [each for each in groups.classes(block_size) if each.window_tokens]
        self._passing = [each for kind in (SLIDING, STATE) for each in classes if each.kind == kind]
        # Sequences that the last decision stalled while a step ran, with the tokens that they have after it.
        self._stalled: dict[Sequence, int] = {}
        self._transaction = OffloadTransaction(self)

    def _hold_load(self, sequence: Sequence, tokens: int, known: int) -> None:
        stop = -(-tokens // self.unit_tokens)
        skipped = tuple(kind.in_chunk(tokens, tokens, tokens, sequence.prefill_end) for kind in self.giving)
        self._hold(stop, skipped)
        self.free -= self.fixed
        # Tokens that a window has passed count in every group as if they were there: no group has fewer than it has given back.
        passed = (
            back * each.block_size for each, back in zip(self._passing, skipped, strict=True) if each.kind == SLIDING
        )
        self.partial[sequence] = Partial(stop, skipped, max([known, *passed]), known)

    def _loaded(self, sequence: Sequence) -> None:
        held, computed = self.partial[sequence], sequence.computed_tokens
        self.partial[sequence] = held._replace(computed_tokens=computed, known_tokens=computed)

    def _idle_tables(self, admitted: Iterable[Sequence]) -> list[tuple[GroupTable, ...]]:
        """See ``PagedMemory``; sequences that were computed in vain keep their blocks for another step."""
        return super()._idle_tables(admitted) + [each.tables for each in self.fences.deferred.values()]

    # A victim of the decision has no tables any more; every other sequence that leaves has finished.

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        assert self.group_tables is not None
        self.group_tables.grow_until(decode_step)
        if not self._stalled.keys().isdisjoint(leaving := [*leaving]):
            # They left before the next decision.
            self._publish_stalled()
        super().release(leaving, decode_step)

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """See ``Memory``; a block that the running step fills is found from the next decision on."""
        is_stalled = sequence in self.partial
        super().stall(sequence, decode_step)
        if not is_stalled:
            # It may have been asked for a block that it did not get; its windows have passed blocks then.
            self.count_as_tables(sequence)
        if not finished:
            self._stalled[sequence] = sequence.held_tokens(decode_step)

    def count_as_tables(self, sequence: Sequence) -> None:
        assert self.group_tables is not None
        tables, held = self.group_tables.tables[sequence], self.partial[sequence]
        sizes = ((place, size // self._chunk_blocks) for place, size, _, _ in self._seekers)
        blocks = min(len(tables[place]) * size for place, size in sizes) // self.unit_tokens
        skipped = tuple(tables[each.places[0]].count(NULL_BLOCK) for each in self._passing)
        more = [now - before for now, before in zip(skipped, held.skipped, strict=True)]
        self._hold(blocks - held.blocks, more, held.blocks)
        self.partial[sequence] = held._replace(blocks=blocks, skipped=skipped)

    def _publish_stalled(self) -> None:
        assert self.cache is not None and self.group_tables is not None
        for sequence, tokens in self._stalled.items():
            self.cache.publish(sequence, self.group_tables.tables[sequence], tokens)
        self._stalled = {}

    def _open_groups(self, decode_step: int) -> int:
        self._publish_stalled()
        return super()._open_groups(decode_step)

    def _finish_in_vain(self, sequence: Sequence, decode_step: int) -> None:
        self._pass_at_end(sequence)
        super().stall(sequence, decode_step)
        # A step in vain may have passed blocks, and taken some.
        self.count_as_tables(sequence)
        held = self.partial[sequence]
        tokens = held.computed_tokens + 1
        self.partial[sequence] = held._replace(computed_tokens=tokens, known_tokens=tokens)
        self._defer(sequence)
