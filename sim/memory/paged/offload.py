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

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ...workload.source import NEVER
from ..accounting.kv_groups import FULL, PageGroups
from ..accounting.ledger import Table
from ..accounting.moments import after_step
from ..prefix import Chains, FreeKVCacheBlockQueue
from ..prefix.host_cache import HostCache
from .group_cache import Found
from .group_cache import Table as GroupTable
from .paged import PagedMemory, Partial
from .transaction import PagedTransaction

#: Columns of an admission's look-up on the host, in tokens; parallel to those of the GPU's prefix cache.
HOST_LOOK_UP = ("index", "queried_tokens", "hit_tokens")
#: Columns of a copy between GPU and host.
TRANSFER = ("index", "asked_ticks", "start_ticks", "end_ticks", "blocks", "is_store")
#: Columns of a change of the host's blocks.
HOST_LEVEL = ("ticks", "used_blocks")
#: Columns of a step that waits for stores.
FLUSH = ("start_ticks", "ticks")


class Offer(NamedTuple):
    """Full blocks of a sequence, from place ``first`` on, by name and by id on the GPU."""

    sequence: Sequence
    first: int
    names: list[int]
    block_ids: list[int]


@dataclass(eq=False, slots=True)
class _Job:
    """A copy of blocks between GPU and host.

    Attributes:
        names: The blocks by name.
        block_ids: Their ids on the GPU, of a store.
        end_ticks: End of the copy; ``NEVER`` before it is submitted.
    """

    sequence: Sequence
    names: list[int]
    block_ids: list[int]
    is_store: bool
    end_ticks: int = NEVER


class HostTier:
    """Blocks on the host, and the copies to it and from it.

    Args:
        num_blocks: Blocks of the host memory.
        block_size: Tokens a block.

    Attributes:
        cache: Names of the blocks on the host.
        look_ups, transfers, levels, flushes: Records, by the columns above.
        loading: Sequences with a load in progress.
        loaded: Sequences that load or have loaded and are not admitted yet, with their blocks, those that the GPU had included.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cache, self._block_size = HostCache(num_blocks), block_size
        self.look_ups, self.transfers = Table(HOST_LOOK_UP), Table(TRANSFER)
        self.levels, self.flushes = Table(HOST_LEVEL), Table(FLUSH)
        self.loading: dict[Sequence, _Job] = {}
        self.loaded: dict[Sequence, int] = {}
        # Of loads and of stores: ticks of a job, and when the link has done all that was submitted.
        self._ticks: tuple[Callable[[int], int], Callable[[int], int]] = _not_connected, _not_connected
        self._free_from = [0, 0]
        self._clock: Callable[[], int] = _not_connected
        self._level = self._submitted = 0
        # Submitted jobs by their end; stores that the next step submits; loads of the decision.
        self._running: list[tuple[int, int, _Job]] = []
        self._unsubmitted: list[_Job] = []
        self._new_loads: list[_Job] = []
        self._being_loaded: set[int] = set()
        # Stores of each sequence that have not ended, and those of finished sequences by the ids of their blocks.
        self._stores: dict[Sequence, list[_Job]] = {}
        self._fenced: dict[int, list[_Job]] = {}
        # Stores that the step waits for.
        self._to_flush: list[_Job] = []
        self._finished: list[Offer] = []
        self._offered: dict[Sequence, int] = {}

    def connect(self, clock: Callable[[], int], load: Callable[[int], int], store: Callable[[int], int]) -> None:
        """Set the clock of the run, and the time that a load or a store of some blocks takes, in ticks."""
        self._clock, self._ticks = clock, (load, store)

    @property
    def next_ticks(self) -> int:
        """When the next copy ends, or ``NEVER``."""
        return self._running[0][0] if self._running else NEVER

    @property
    def loaded_tokens(self) -> int:
        """Tokens that waiting sequences have blocks for."""
        return sum(self.loaded.values()) * self._block_size

    def complete(self, until: int) -> None:
        """Note the copies that have ended by ``until``."""
        while self.next_ticks <= until:
            job = heappop(self._running)[2]
            if not job.is_store:
                self.cache.end_load(job.names)
                self._being_loaded.difference_update(job.names)
                del self.loading[job.sequence]
                continue
            self.cache.end_store(job.names)
            jobs = self._stores[job.sequence]
            jobs.remove(job)
            if not jobs:
                del self._stores[job.sequence]
            for block in job.block_ids:
                if block in self._fenced and job in self._fenced[block]:
                    self._fenced[block].remove(job)
                    if not self._fenced[block]:
                        del self._fenced[block]

    # --- While a step is decided ---

    def look_up(self, sequence: Sequence, names: list[int]) -> int | None:
        """Number of blocks, from the first of ``names`` on, that a waiting sequence can load; None if it waits for a copy."""
        self._offered[sequence] = 0
        if sequence in self._stores:
            return None
        found, waits = 0, False
        for name in names:
            if not self.cache.has(name):
                break
            found += 1
            waits = waits or not self.cache.is_ready(name) or name in self._being_loaded
        return None if waits else found

    def load(self, sequence: Sequence, first: int, names: list[int]) -> None:
        """A sequence begins to load blocks, the first of which is at place ``first``."""
        self.cache.start_load(sequence.index, _placed(first, names))
        self.loading[sequence] = job = _Job(sequence, names, [], False)
        self.loaded[sequence] = self._offered[sequence] = first + len(names)
        self._being_loaded.update(names)
        self._new_loads.append(job)

    def preempt(self, sequence: Sequence) -> None:
        """A sequence is preempted: the step waits for its stores."""
        self._to_flush += self._stores.get(sequence, ())

    def finish(self, offer: Offer) -> None:
        """A sequence finishes with blocks that it has not offered; it offers them with the next decision."""
        for job in self._stores.get(offer.sequence, ()):
            self._fence(job)
        self._finished.append(offer)

    def is_settled(self) -> bool:
        """Whether no store is to begin, and no step can take a block that is still stored."""
        return not (self._unsubmitted or self._fenced or self._finished)

    def is_at_rest(self) -> bool:
        """Whether no copy goes on, and nothing that was loaded waits."""
        return not (self._running or self.loaded)

    def offered(self, sequence: Sequence) -> int:
        """Blocks of a sequence that it has offered, from its first on."""
        return self._offered.get(sequence, 0)

    def end_decision(self, offers: Iterable[Offer], taken: set[int], idle: bool) -> int:
        """A step is decided: submit copies, and take the offers of the sequences that it computes.

        Args:
            offers: In the order of the running sequences.
            taken: Ids of blocks that were taken or hit in the decision.
            idle: Whether the step computes nothing, so that the next one begins at once.

        Returns:
            Ticks that the step waits for stores.
        """
        now = self._clock()
        for job in self._unsubmitted:
            self._submit(job, now)
        self._unsubmitted = []
        self._to_flush += (job for block in sorted(taken & self._fenced.keys()) for job in self._fenced[block])
        for offer in offers:
            self._store(offer)
        finished, self._finished = self._finished, []
        for offer in finished:
            self._store_finished(offer, taken, now)
        for offer in finished:
            self.cache.finish(offer.sequence.index)
            self._offered.pop(offer.sequence, None)
        # Copies that ended in the last step are not known to have ended.
        wait = max((max(0, job.end_ticks - now) for job in self._to_flush), default=0)
        self._to_flush = []
        for job in self._new_loads:
            self._submit(job, now + wait)
        self._new_loads = []
        if idle:
            for job in self._unsubmitted:
                self._submit(job, now)
            self._unsubmitted = []
        self._record(now, wait)
        return wait

    def _store_finished(self, offer: Offer, taken: set[int], now: int) -> None:
        """Take the offer of a finished sequence; the step waits for it if it takes one of the blocks."""
        job = self._store(offer) if offer.names else None
        if job is None:
            return
        self._fence(job)
        if not taken.isdisjoint(job.block_ids):
            self._unsubmitted.remove(job)
            self._submit(job, now)
            self._to_flush.append(job)

    def _store(self, offer: Offer) -> _Job | None:
        """The job that copies those blocks of an offer that are not on the host, if any."""
        sequence = offer.sequence
        missing = self.cache.start_store(sequence.index, _placed(offer.first, offer.names))
        if missing is None:
            # Offered again with the next step.
            return None
        self._offered[sequence] = offer.first + len(offer.names)
        if not missing:
            return None
        block_of = dict(zip(offer.names, offer.block_ids, strict=True))
        job = _Job(sequence, missing, [block_of[name] for name in missing], True)
        self._stores.setdefault(sequence, []).append(job)
        self._unsubmitted.append(job)
        return job

    def _fence(self, job: _Job) -> None:
        for block in job.block_ids:
            self._fenced.setdefault(block, []).append(job)

    def _submit(self, job: _Job, now: int) -> None:
        """Put a job at the end of the queue of its direction."""
        blocks = len(job.names)
        start = max(now, self._free_from[job.is_store])
        job.end_ticks = self._free_from[job.is_store] = start + self._ticks[job.is_store](blocks)
        heappush(self._running, (job.end_ticks, self._submitted, job))
        self._submitted += 1
        self.transfers.append((job.sequence.index, now, start, job.end_ticks, blocks, job.is_store))

    def _record(self, now: int, wait: int) -> None:
        if wait:
            self.flushes.append((now, wait))
        if self.cache.used_blocks != self._level:
            self._level = self.cache.used_blocks
            self.levels.append((now, self._level))


def _not_connected(*_: int) -> int:
    raise SimulationFault("an engine must connect the host tier before copies begin")


def _placed(first: int, names: list[int]) -> list[tuple[int, int]]:
    return [(name, place) for place, name in enumerate(names, first)]


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
            memory.offering[sequence] = None
            known = sequence.computed_tokens
            memory.group_tables.reach(sequence, known, known + tokens, known + tokens)
            self.free = memory.cache.pool.num_free
            return
        super().enter(sequence, tokens, blocks)
        memory.offering[sequence] = None
        memory.tier.look_ups.append((sequence.index, sequence.start_tokens - sequence.computed_tokens, 0))

    def preempt(self, sequence: Sequence) -> None:
        """See ``PagedTransaction``."""
        self.memory.tier.preempt(sequence)
        self.memory.offering.pop(sequence, None)
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
        offering: Sequences with blocks of their prompts that they have not offered.
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
        self.offering: dict[Sequence, None] = {}
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
        offering = sorted((each for each in self.offering if each in computed), key=attrgetter("order"))
        offers = [offer for sequence in offering if (offer := self._offer_of(sequence)).names]
        wait = self.tier.end_decision(offers, self._taken, not computed)
        for sequence in offering:
            if self.tier.offered(sequence) >= sequence.prompt_tokens // self.block_size:
                del self.offering[sequence]
        self._taken.clear()
        self._free_deferred()
        return wait

    def is_settled(self) -> bool:
        """See ``PagedMemory``."""
        return not self.offering and self.tier.is_settled()

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
        self.offering.pop(sequence, None)

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``; the blocks of sequences that the coming step computes in vain come free after it."""
        leaving = tuple(leaving)
        in_vain = [sequence for sequence in leaving if sequence not in self.partial]
        super().release_finished((sequence for sequence in leaving if sequence in self.partial), decode_step)
        for sequence in in_vain:
            self._defer(sequence, decode_step)
        self._settle_cache(after_step(decode_step))

    def hold_finished(self, finished: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        for sequence in finished:
            super().stall(sequence, decode_step)

    def stall(self, sequence: Sequence, decode_step: int) -> None:
        """See ``Memory``; a block that the running step fills is found from the next decision on."""
        super().stall(sequence, decode_step)
        self._stalled[sequence] = sequence.held_tokens(decode_step)

    def _open_groups(self, decode_step: int, takes: int) -> int:
        assert self.cache is not None and self.group_tables is not None
        for sequence, tokens in self._stalled.items():
            self.cache.publish(sequence, self.group_tables.tables[sequence], tokens)
        self._stalled = {}
        return super()._open_groups(decode_step, takes)

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
            self.group_tables.give_back(blocks, FULL)
        self.deferred = {}
        self._settle_cache()
