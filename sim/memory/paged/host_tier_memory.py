"""A paged memory with a second tier of its prefix cache: what sequences offer to the host, and when their blocks come free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from operator import attrgetter

from ...types.sequence import Sequence
from ..accounting.kv_groups import FULL, RING, SLIDING
from ..prefix.contents_log import SettledContentsLog
from ..prefix.host_tier import HostTier, Offer
from ..prefix.tiers import Link, Offloaded
from .host_prefixes import HostPrefixes, Seeker


class HostTierMemory(HostPrefixes, ABC):
    """As ``HostPrefixes``, with what sequences offer to the host.

    Attributes:
        watermark_blocks: Blocks that an admission leaves free beside running sequences.
        reserves_whole: Whether a load needs the blocks of all tokens of its sequence to be free.
        step_blocks: Blocks that a load leaves free beside those that prefills in progress still need.
        taken: Ids of blocks that the decision has taken or hit, or that an admitted sequence has.
    """

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
        self._sizes = tuple(size * host.chunk_blocks for size in groups.block_sizes(block_size))
        seekers: list[Seeker] = []
        for each in groups.classes(block_size):
            window = each.window_tokens if each.kind == SLIDING else 0
            needed = 0 if each.kind == FULL else -(-window // each.block_size) or 1
            if each.kind != RING:
                size = each.block_size * host.chunk_blocks
                seekers += (Seeker(place, size, window, needed) for place in each.places)
        seekers.sort()
        self._seekers = seekers
        self._seeking = sorted(seekers, key=lambda seeker: (seeker.needed > 0, -seeker.needed))
        full = {seeker.size for seeker in seekers if not seeker.needed} or {max(seeker.size for seeker in seekers)}
        # Loads end at blocks of groups that keep every token, if these have one size (``alignment_tokens``).
        self._aligned = full.pop() if len(full) == 1 else None
        # Ids in the tables of windows of sequences with blocks to offer, as they were allocated: a window may have passed some.
        self._in_windows: dict[Sequence, dict[int, list[int | None]]] = {}
        self.taken: set[int] = set()
        self.cache.pool.taken = self.taken
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
        idle = not computed and not (self.pipelined and self.fences.scheduled > self.fences.processed)
        wait = self.tier.end_decision(states, offers, self.taken, idle)
        for sequence in offering:
            offered = self.tier.offered(sequence)
            if all(offered[place] >= sequence.prompt_tokens // size for place, size, _, _ in self._seekers):
                self.forget(sequence)
        self.taken.clear()
        self._has_freed = False
        return wait

    def _process(self, batches: int) -> bool:
        freed = super()._process(batches)
        self._has_freed |= freed
        return freed

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

    def _can_be_found(self, sequence: Sequence, seeker: Seeker, at: int) -> bool:
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

    def _pass_at_end(self, sequence: Sequence) -> None:
        """See ``PagedMemory``; a finished sequence also offers what it has not."""
        assert self.group_tables is not None
        if sequence in self.group_tables.tables:
            self.tier.finish(self._offer_of(sequence))
            self.forget(sequence)
            super()._pass_at_end(sequence)

    def slots_of(self, tokens: int) -> int:
        """Slots that a step takes which computes the first ``tokens`` of a sequence."""
        return tokens

    def count_as_tables(self, sequence: Sequence) -> None:
        """Count the blocks that a sequence has in its tables, where counts are kept beside them."""

    @abstractmethod
    def _loaded(self, sequence: Sequence) -> None:
        """Called when a load from the host is over: the tokens that it brought count as computed."""
