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
these may still write (``defer_block_free``). So blocks of a sequence that one of them computes come free only after it: the sequence is
not preempted, and if it has finished, unknown to the batch, its blocks stay taken until all batches that are scheduled by then are over.

Source: vLLM 0.33, vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py and worker.py,
vllm/v1/core/sched/scheduler.py, vllm/v1/kv_offload/cpu/gpu_worker.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import NamedTuple

from ...types.sequence import Sequence
from ..accounting.kv_groups import FULL, RING, SLIDING, STATE, PageGroups
from ..accounting.moments import after_step
from ..prefix import Chains, FreeKVCacheBlockQueue
from ..prefix.contents_log import SettledContentsLog
from ..prefix.host_cache import Placed
from ..prefix.host_tier import HostTier, Offer
from ..prefix.tiers import Link, Offloaded
from .counts import Partial
from .group_cache import NULL_BLOCK, Found
from .group_cache import Table as GroupTable
from .paged import PagedMemory
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


class _Seeker(NamedTuple):
    """How look-ups on the host see the blocks of a group.

    Attributes:
        place: The group.
        size: Tokens of its chunks on the host: one block, or several where there is one group.
        window_tokens: Tokens of its window; 0 in another group.
        needed: Blocks that a look-up needs before a token, of a window or a state; 0 where it needs all.
    """

    place: int
    size: int
    window_tokens: int
    needed: int

    def needed_before(self, tokens: int) -> int:
        """``needed`` where the token after ``tokens`` ones is the next, which may be within a block."""
        before = self.window_tokens - 1 + -tokens % self.size
        return max(self.needed, -(-before // self.size)) if self.window_tokens else self.needed


class Deferred(NamedTuple):
    """Blocks of a finished sequence that a batch in flight computes in vain.

    Attributes:
        fence: Batches that must be over before they come free.
        tables: Its block tables.
    """

    fence: int
    tables: tuple[GroupTable, ...]


class HostTierMemory(PagedMemory, ABC):
    """As ``PagedMemory`` with a prefix cache, with a second tier of that cache in host memory.

    Attributes:
        tier: The blocks on the host, and the copies.
        watermark_blocks: Blocks that an admission leaves free beside running sequences.
        reserves_whole: Whether a load needs the blocks of all tokens of its sequence to be free.
        step_blocks: Blocks that a load leaves free beside those that prefills in progress still need.
        deferred: Finished sequences that batches in flight compute in vain, in the order in which their blocks come free.
        scheduled, processed: Batches that compute anything that were scheduled, and that are over (``sched_step_seq``,
            ``processed_step_seq``).
        taken: Ids of blocks that the decision has taken or hit, or that an admitted sequence has.
    """

    tier: HostTier
    step_blocks = 0

    def _connect(self, host: Offloaded, watermark_blocks: int, reserves_whole: bool) -> None:
        """Join a host, and the tiers behind it, to the memory."""
        groups, block_size = self.groups, self.block_size
        self.watermark_blocks, self.reserves_whole = watermark_blocks, reserves_whole
        self._hashed, self._chunk_blocks = groups.hash_block_size(block_size), host.chunk_blocks
        links = [
            Link(spec, host.store(place, groups.number), host.chunk_bytes) for place, spec in enumerate(host.tiers)
        ]
        self.tier = self.transfers = HostTier(host.num_chunks, self._hashed, groups.number, links, host.chunk_blocks)
        assert self.cache is not None
        if (contents := self.cache.log.contents) is not None:
            contents.log_holdings()
            self.tier.cache.contents = SettledContentsLog(groups.number)
        self.cache.states = []
        #: Tokens of a chunk of each group.
        self._sizes = tuple(size * host.chunk_blocks for size in groups.block_sizes(block_size))
        seekers: list[_Seeker] = []
        for each in groups.classes(block_size):
            window = each.window_tokens if each.kind == SLIDING else 0
            needed = 0 if each.kind == FULL else -(-window // each.block_size) or 1
            if each.kind != RING:
                size = each.block_size * host.chunk_blocks
                seekers += (_Seeker(place, size, window, needed) for place in each.places)
        seekers.sort()
        #: Of each group that look-ups find, in their order, and in that of a look-up on the host.
        self._seekers = seekers
        self._seeking = sorted(seekers, key=lambda seeker: (seeker.needed > 0, -seeker.needed))
        full = {seeker.size for seeker in seekers if not seeker.needed} or {max(seeker.size for seeker in seekers)}
        # Loads end at blocks of groups that keep every token, if these have one size (``alignment_tokens``).
        self._aligned = full.pop() if len(full) == 1 else None
        # Ids in the tables of windows of sequences with blocks to offer, as they were allocated: a window may have passed some.
        self._in_windows: dict[Sequence, dict[int, list[int | None]]] = {}
        self.taken: set[int] = set()
        self.cache.pool.taken = self.taken
        self.deferred: dict[Sequence, Deferred] = {}
        self.scheduled = self.processed = 0
        # Whether blocks came free after the last decision.
        self._has_freed = False

    def log_no_contents(self) -> None:
        self.tier.cache.contents = None
        for link in self.tier.behind:
            link.store.contents = None
        super().log_no_contents()

    @property
    def any_running(self) -> bool:
        """Whether any sequence has blocks and does not wait for its load, or after it."""
        assert self.group_tables is not None
        return len(self.group_tables.tables) > len(self.tier.loaded)

    def blocks_to_come_of(self, sequence: Sequence) -> int:
        """Blocks that a sequence takes before all its known tokens are computed."""
        tables, start = self.group_tables, sequence.start_tokens
        assert tables is not None
        computed = self.tier.loaded.get(sequence, sequence.computed_tokens)
        return tables.lacked(sequence, tables.tables[sequence], start, start, computed, admits=True)

    def blocks_to_come(self) -> int:
        """The same of all sequences with blocks: prefills in progress, and loads."""
        assert self.group_tables is not None
        return sum(map(self.blocks_to_come_of, self.group_tables.tables))

    def on_host(self, sequence: Sequence, known: int) -> int | None:
        """Tokens of a waiting sequence after the ``known`` ones that can be loaded; None if it waits for a copy.

        Each group may shorten the prefix that others have accepted. After a window or a state has, or where a block was still written,
        the groups are asked again.
        """
        cache, tier = self.cache, self.tier
        assert cache is not None
        hashed_tokens = min(sequence.start_tokens, len(cache.names_of(sequence)) * self._hashed)
        most, found, waits, seekers = sequence.start_tokens, 0, False, self._seeking
        sparse = [seeker for seeker in seekers if seeker.needed]
        if sparse:
            most -= 1
            if self.groups.states:
                most -= most % self.block_size
        # The drafter's group is asked for one block more, which is then dropped.
        drops = self.groups.drops_block
        while seekers:
            again: list[_Seeker] = []
            any_sparse = False
            for seeker in seekers:
                size = seeker.size
                hashed, start = hashed_tokens // size, known // size
                most = min(most, hashed * size)
                if most - known < size:
                    return 0
                dropped = drops and seeker.place == self.groups.drafter
                stop = min(-(-most // size) + dropped, hashed)
                placed = self._placed(sequence, seeker, start, stop)
                if not seeker.needed:
                    blocks = tier.prefix(sequence.index, placed)
                else:
                    first = seeker.needed_before(min(most, (stop - dropped) * size))
                    blocks = tier.window(sequence.index, [*placed], seeker.needed + dropped, first + dropped)
                waits = waits or blocks is None
                if blocks is not None:
                    most = min(most, (start + blocks - dropped) * size)
                    drops = drops and not dropped
                if most - known < size:
                    return 0
                if most - known < found:
                    drops = drops or (self.groups.drops_block and seeker.place != self.groups.drafter)
                    if waits:
                        waits, again = False, self._seeking
                    elif any_sparse and not again:
                        again = sparse
                any_sparse = any_sparse or seeker.needed > 0
                found = most - known
            seekers = again
        if waits or any(self._loads_now(sequence, seeker, known, known + found) for seeker in self._seekers):
            return None
        return found

    def _loads_now(self, sequence: Sequence, seeker: _Seeker, known: int, tokens: int) -> bool:
        """Whether a block that a group needs for the first ``tokens``, beside those of the ``known`` ones, is on its way."""
        assert self.cache is not None
        start, stop = known // seeker.size, -(-tokens // seeker.size)
        if seeker.needed:
            start = max(start, stop - seeker.needed_before(tokens))
        return self.tier.is_loading(self._names(sequence, seeker, start, stop))

    def load(self, sequence: Sequence, found: Found, tokens: int) -> None:
        """A waiting sequence takes the blocks that it found, and new ones up to ``tokens`` that it loads from the host."""
        cache, tables = self.cache, self.group_tables
        assert cache is not None and tables is not None
        known = found.blocks * self.block_size
        kept = tables.passed(found.tables, tokens)
        until = tuple(-(-tokens // size) for size in self._sizes)
        blocks: list[Placed] = []
        behind: dict[int, int] = {}
        num_blocks, promoted = 0, self.tier.sources(sequence)
        for seeker in self._seekers:
            stop = until[seeker.place]
            first = max(known * self._chunk_blocks // seeker.size, len(kept[seeker.place]))
            at = first // self._chunk_blocks
            num_blocks += -(-tokens * self._chunk_blocks // seeker.size) - first
            chunks = [*self._placed(sequence, seeker, at, stop)]
            blocks += chunks
            if promoted:
                self._note_sources(behind, seeker, chunks, at, (known, tokens), promoted)
        cache.enter(sequence, Found(kept, found.blocks))
        tables.enter(sequence, kept)
        tables.take(sequence, tokens, known, loads=True)
        tables.take_after_load(sequence, tokens)
        self._hold_load(sequence, tokens, known)
        by_tier: Counter[int] = Counter()
        for unit, tier in behind.items():
            by_tier[tier] += min((unit + 1) * self._hashed, tokens) - max(unit * self._hashed, known)
        self.tier.on_looked_up(sequence, known, tokens - known, by_tier)
        self.tier.load(sequence, tokens, blocks, num_blocks, until)

    def _names(self, sequence: Sequence, seeker: _Seeker, start: int, stop: int) -> list[int]:
        """Names of chunks of a sequence in one group: those of their last blocks."""
        assert self.cache is not None
        each = self._chunk_blocks
        return self.cache.group_names(sequence, seeker.place, start * each, stop * each)[each - 1 :: each]

    def _placed(self, sequence: Sequence, seeker: _Seeker, start: int, stop: int) -> Iterator[Placed]:
        places = (self._place(seeker.size, chunk) for chunk in range(start, stop))
        return zip(self._names(sequence, seeker, start, stop), places, strict=True)

    def _note_sources(
        self,
        behind: dict[int, int],
        seeker: _Seeker,
        chunks: list[Placed],
        at: int,
        span: tuple[int, int],
        promoted: Mapping[int, int],
    ) -> None:
        """Note the farthest tier that has the tokens of a span in one of the groups; a state stands for all of them.

        Args:
            behind: The place of the tier, by place of a hash.
            chunks: Those that are loaded, from the place ``at`` on.
        """
        unit = self._hashed
        for chunk, (name, _) in enumerate(chunks, at):
            if (tier := promoted.get(name)) is None:
                continue
            own = chunk * seeker.size, (chunk + 1) * seeker.size
            start, stop = span if seeker.needed and not seeker.window_tokens else own
            for place in range(max(start, span[0]) // unit, -(-min(stop, span[1]) // unit)):
                behind[place] = max(tier, behind.get(place, tier))

    def _place(self, size: int, block: int) -> int:
        """Place of a block's last hash among those of its sequence, in a group with blocks of ``size`` tokens."""
        return (block + 1) * size // self._hashed - 1

    def end_load(self, sequence: Sequence) -> int:
        """Publish what a sequence has loaded. Returns its computed tokens; its last one is computed in any case."""
        cache, tables = self.cache, self.group_tables
        assert cache is not None and tables is not None
        tokens = self.tier.loaded[sequence]
        cache.publish(sequence, tables.tables[sequence], tokens)
        computed = sequence.computed_tokens = min(tokens, sequence.start_tokens - 1)
        self._loaded(sequence)
        return computed

    def end_decision(self, computed: AbstractSet[Sequence]) -> int:
        """See ``OffloadTransaction``."""
        self._note_windows(computed)
        states = self._take_states()
        offering = sorted((each for each in self.tier.offering if each in computed), key=attrgetter("order"))
        offers = [offer for sequence in offering if (offer := self._offer_of(sequence)).blocks]
        # Where batches are in flight the next decision does not begin at once.
        idle = not computed and not (self.pipelined and self.scheduled > self.processed)
        wait = self.tier.end_decision(states, offers, self.taken, idle)
        for sequence in offering:
            offered = self.tier.offered(sequence)
            if all(offered[place] >= sequence.prompt_tokens // size for place, size, _, _ in self._seekers):
                self.forget(sequence)
        self.taken.clear()
        self.scheduled += bool(computed)
        return wait

    def _defer(self, sequence: Sequence) -> None:
        """A finished sequence keeps its blocks until the batches that are scheduled by now are over."""
        assert self.group_tables is not None
        self.deferred[sequence] = Deferred(self.scheduled, self.group_tables.detach(sequence))

    def _process(self, batches: int) -> None:
        """So many batches are over: blocks that waited for them come free."""
        assert self.group_tables is not None
        self.processed, self._has_freed = batches, False
        while self.deferred and (first := next(iter(self.deferred.items())))[1].fence <= batches:
            sequence, (_, tables) = first
            del self.deferred[sequence]
            self._leave(sequence)
            # The last group's last block comes first.
            self.group_tables.give_back_all(tables)
            self._has_freed = True

    def forget(self, sequence: Sequence) -> None:
        """A sequence has nothing to offer any more."""
        self.tier.offering.pop(sequence, None)
        self._in_windows.pop(sequence, None)
        assert self.cache is not None
        self.cache.states = [state for state in self.cache.states or () if state[0] is not sequence]

    def _note_windows(self, computed: AbstractSet[Sequence]) -> None:
        """Note the blocks of windows that sequences with blocks to offer have taken; those that others took since are lost."""
        assert self.group_tables is not None
        sliding = [seeker.place for seeker in self._seekers if seeker.window_tokens]
        if not sliding:
            return
        for noted in self._in_windows.values():
            for place, ids in noted.items():
                noted[place] = [None if block in self.taken else block for block in ids]
        for sequence in self.tier.offering:
            if sequence in computed:
                tables, noted = self.group_tables.tables[sequence], self._in_windows.setdefault(sequence, {})
                for place in sliding:
                    ids = noted.setdefault(place, [])
                    ids += tables[place][len(ids) :]

    def _take_states(self) -> list[Offer]:
        """Offers of the states that can be found from now on, by sequence and group."""
        assert self.cache is not None
        states, self.cache.states = self.cache.states or [], []
        turns = {sequence: turn for turn, sequence in enumerate(dict.fromkeys(state[0] for state in states))}
        offers = []
        for sequence, _, name, at, block in sorted(states, key=lambda state: (turns[state[0]], state[1])):
            if (at + 1) * self.block_size <= sequence.prompt_tokens:
                offers.append(Offer(sequence, self.tier.offered(sequence), [(name, at, [block])], {block}))
        return offers

    def may_admit(self, waiting: Sequence, running: Iterable[Sequence]) -> bool:
        """See ``PagedMemory``.

        Running sequences may fill the next block of its prefix, which has the same place in theirs.
        """
        cache = self.cache
        assert cache is not None
        if self.groups.kinds != (FULL,) or any(link.spec.shared for link in self.tier.behind):
            return True
        names, place = cache.names_of(waiting), cache.look_up(waiting).blocks
        return (
            self._has_freed
            or not self.tier.is_at_rest()
            or any(cache.names_of(sequence)[place : place + 1] == names[place : place + 1] for sequence in running)
        )

    def _offer_of(self, sequence: Sequence) -> Offer:
        """Full blocks of the prompt that a sequence has not offered, and that a look-up can use; not its states."""
        cache, tables = self.cache, self.group_tables
        assert cache is not None and tables is not None
        # Blocks with generated tokens are not offered (``offload_prompt_only``, the default).
        tokens, offered = min(cache.computed(sequence), sequence.prompt_tokens), self.tier.offered(sequence)
        until = tuple(max(before, tokens // size) for before, size in zip(offered, self._sizes, strict=True))
        blocks: list[tuple[int, int, list[int]]] = []
        passing: set[int] = set()
        if until == offered:
            return Offer(sequence, offered, blocks)
        for seeker in self._seekers:
            place, size, window_tokens, needed = seeker
            table = tables.tables[sequence][place]
            if window_tokens:
                table = self._in_windows.get(sequence, {}).get(place, [])
            elif needed:
                continue
            each = self._chunk_blocks
            for at, name in enumerate(self._names(sequence, seeker, offered[place], until[place]), offered[place]):
                ids = [block for block in table[at * each : (at + 1) * each] if block is not None]
                if ids and (not window_tokens or self._can_be_found(sequence, seeker, at)):
                    blocks.append((name, self._place(size, at), ids))
                    if window_tokens:
                        passing.update(ids)
        return Offer(sequence, until, blocks, passing)

    def _can_be_found(self, sequence: Sequence, seeker: _Seeker, at: int) -> bool:
        """Whether a look-up on the host can use a block of a group with a window: every one where loads do not end at its blocks
        (``reachable_block_mask`` of vLLM)."""
        assert self.cache is not None
        aligned, size = self._aligned, seeker.size
        if aligned is None or aligned % size:
            return True
        needed = -(-(seeker.window_tokens - 1) // size)
        junction = self.cache.junction(sequence) * self.block_size
        boundaries = (sequence.prompt_tokens - 1, junction) if junction else (sequence.prompt_tokens - 1,)
        ends = (boundary // aligned * aligned // size for boundary in boundaries)
        # Look-ups drop a block of the drafter's group, which is the one after an end.
        more = self.groups.drops_block and seeker.place == self.groups.drafter
        if segment := self.groups.retention_tokens // size:
            tail = segment - needed - more
            if tail <= 0 or (at >= more and (at - more) % segment >= tail):
                return True
        return any(end - needed <= at < end + more for end in ends)

    def _finish(self, sequence: Sequence) -> None:
        """A sequence offers what it has not, and gives back what its windows have passed, before its other blocks."""
        tables = self.group_tables
        assert tables is not None
        if sequence not in tables.tables:
            return
        self.tier.finish(self._offer_of(sequence))
        self.forget(sequence)
        self._pass_at_end(sequence)

    def slots_of(self, tokens: int) -> int:
        """Slots that a step takes which computes the first ``tokens`` of a sequence."""
        return tokens

    def count_as_tables(self, sequence: Sequence) -> None:
        """Count the blocks that a sequence has in its tables, where counts are kept beside them."""

    @abstractmethod
    def _leave(self, sequence: Sequence) -> None:
        """Count the blocks of a deferred sequence no more."""

    @abstractmethod
    def _hold_load(self, sequence: Sequence, tokens: int, known: int) -> None:
        """Count the blocks of a sequence that loads ``tokens``, of which the GPU had ``known``."""

    @abstractmethod
    def _loaded(self, sequence: Sequence) -> None:
        """Count the tokens that a sequence has loaded."""


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
        return super()._idle_tables(admitted) + [each.tables for each in self.deferred.values()]

    # A victim of the decision has no tables any more; every other sequence that leaves has finished.

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        assert self.group_tables is not None
        self.group_tables.grow_until(decode_step)
        if not self._stalled.keys().isdisjoint(leaving := [*leaving]):
            # They left before the next decision.
            self._publish_stalled()
        for sequence in leaving:
            if sequence not in self.partial:
                self._finish(sequence)
            super().release((sequence,), decode_step)

    def _release_partial(self, sequence: Sequence, decode_step: int) -> None:
        self._finish(sequence)
        super()._release_partial(sequence, decode_step)

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``; the blocks of sequences that the coming step computes in vain come free after it."""
        for sequence in leaving:
            if sequence in self.partial:
                super().release_finished((sequence,), decode_step)
            else:
                assert self.group_tables is not None
                self.group_tables.grow_until(decode_step + 1)
                self._finish_in_vain(sequence, decode_step)
        self._settle_cache(after_step(decode_step))

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

    def end_decision(self, computed: AbstractSet[Sequence]) -> int:
        """See ``HostTierMemory``; the step before is over by the next decision."""
        before, wait = self.scheduled, super().end_decision(computed)
        self._process(before)
        if self._has_freed:
            self._settle_cache()
        return wait

    def _finish_in_vain(self, sequence: Sequence, decode_step: int) -> None:
        cache, tables = self.cache, self.group_tables
        assert cache is not None and tables is not None
        cache.publish(sequence, tables.tables[sequence], sequence.held_tokens(decode_step))
        self._finish(sequence)
        super().stall(sequence, decode_step)
        # A step in vain may have passed blocks, and taken some.
        self.count_as_tables(sequence)
        held = self.partial[sequence]
        tokens = held.computed_tokens + 1
        self.partial[sequence] = held._replace(computed_tokens=tokens, known_tokens=tokens)
        self._defer(sequence)

    def _leave(self, sequence: Sequence) -> None:
        held = self.partial.pop(sequence)
        self._hold(-held.blocks, [-back for back in held.skipped], held.blocks)
        self.free += self.fixed
