"""The prefix cache of KV groups: look-ups of cached prefixes, and publication of blocks for later look-ups.

One pool serves all groups. A block's hash includes its group, so groups never share a block. A prefix is found if every
group can continue from its end:

    full groups       have each of its blocks
    sliding groups    have the ``ceil((window - 1) / block_size)`` blocks before its end, which the window needs
    state groups      have the state at its end

    block            0  1  2  3  4  5  6      the window needs two blocks
    full             x  x  x  x  x  x  .      the longest prefix has 6 blocks
    sliding          .  .  x  x  .  x  x      search from the right: blocks 2 and 3, so 4 blocks are found

Blocks of several sizes have hashes of their greatest common divisor: that of a block is the one at its end. A prefix is then as long as
a multiple of their least common multiple, and blocks are published as all groups reach one (``HybridKVCacheCoordinator``):

    tokens           0   16  32  48  64  80     blocks of 16 and of 32: the window needs two blocks
    full, of 32      x       x       .          64 tokens
    sliding, of 16   .   .   x   x   x   .      it could continue from 80; 64 are a multiple of 32

A sliding or state group publishes only blocks that a look-up can use: the blocks before a *boundary*. A boundary is the last
token of the prompt, the end of a longer prefix that other groups had at the look-up of the request (6 above), or the end of a
segment (``prefix_cache_retention_interval``). A look-up
finds a block from the step on that computes it, but a state only after that step.

Source: vLLM 0.33, vllm/v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py (``reachable_block_mask``).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from typing import NamedTuple

import numpy as np

from ...types.errors import SettingError
from ...types.sequence import Sequence
from ..accounting.cache_log import CacheLog
from ..accounting.kv_groups import FULL, RING, SLIDING, STATE, GroupClass, PageGroups, skipped_blocks
from ..accounting.moments import at_row
from ..accounting.repeats import idle_repeats
from ..prefix import UNSHARED, BlockPool, BlockResidency, Chains, lookup_blocks
from ..prefix.chains import Paths
from ..prefix.contents_log import LOOKED_UP, NAMED, Asked, OneGroup, SettledContentsLog
from ..prefix.published import Cached, Published

#: Entry of a released block, like vLLM's null block; the following entries keep their places in the table.
NULL_BLOCK = None

Table = list[int | None]


class Found(NamedTuple):
    """Result of a look-up.

    Attributes:
        tables: For each group, the first blocks of its table; null before the window.
        blocks: Length of the prefix in blocks; of several sizes, in those of the least common multiple.
    """

    tables: tuple[Table, ...]
    blocks: int


class _Seeker:
    """How look-ups and publications see the blocks of a class of groups.

    Args:
        groups: The class.
        hashed: Tokens of a hash.
        block_size: As of ``GroupCache``.

        retention_tokens: See ``PageGroups``.

    Attributes:
        kind, places, window_tokens: Of the class.
        size: Tokens of its blocks.
        hashes: Hashes of one of its blocks.
        ratio: Its blocks in ``block_size`` tokens.
        needed: Blocks needed before a token: for the window, or for a state.
        segment: Its blocks from one retained checkpoint to the next; 0 for none.
    """

    __slots__ = ("hashes", "kind", "needed", "places", "ratio", "segment", "size", "window_tokens")

    def __init__(self, groups: GroupClass, hashed: int, block_size: int, retention_tokens: int) -> None:
        self.kind, self.places, self.size = groups.kind, groups.places, groups.block_size
        self.window_tokens = groups.window_tokens
        self.hashes, self.ratio = self.size // hashed, block_size // self.size
        self.needed = -(-(groups.window_tokens - 1) // self.size) if self.kind == SLIDING else 1
        self.segment = retention_tokens // self.size

    def retains(self, at: int) -> bool:
        """Whether a block belongs to a retained checkpoint: the window or the state at the end of a segment."""
        return self.segment > 0 and at % self.segment >= self.segment - self.needed

    def names(self, names: list[int], start: int, stop: int) -> list[int]:
        """Names of the blocks from ``start`` to ``stop``, of those of all hashes."""
        if self.hashes == 1:
            return names[start:stop]
        return names[start * self.hashes + self.hashes - 1 : stop * self.hashes : self.hashes]


class GroupCache:
    """Published blocks of the groups, and look-ups.

    Args:
        pool: The blocks.
        block_size: Tokens per block; of several sizes the least common multiple.
        groups: The KV groups that share the pool.
        chains: Names of the hashes of every request.

    Attributes:
        pool: The blocks.
        log: Log of the look-ups and of changes of the cached level.
        moment: Moment of the next change, in the numbering of the log.
        shared: Number of table entries beyond the first of each block, by class of groups.
        states: Published states: sequence, group, name, place and block of each; None where they are not asked for.
    """

    def __init__(self, pool: BlockPool, block_size: int, groups: PageGroups, chains: Chains) -> None:
        pool.residency = BlockResidency(logs_evictions=False)
        self.log = CacheLog(block_size, pool.residency)
        self.moment = 0
        self.pool, self.block_size = pool, block_size
        self.num_kv_groups = groups.number
        #: Those of requests that share nothing are logged, too.
        self.unshared: Values[bool] = (False,)
        self.has_bounds = FULL in groups.kinds and not groups.sizes
        if not chains.unshared or not all(chains.unshared):
            pool.contents = self.log.contents = SettledContentsLog(groups.number)
        self.states: list[tuple[Sequence, int, int, int, int]] | None = None
        if groups.retention_tokens % block_size:
            remedy = f"must be a multiple of the block size, {block_size} tokens"
            raise SettingError("prefix_cache_retention_interval", groups.retention_tokens, remedy)
        self._groups, self._size, self._chains = groups, block_size, chains
        self._number, self._block_sizes = groups.number, groups.block_sizes(block_size)
        self._hashed = hashed = groups.hash_block_size(block_size)
        self._classes = groups.classes(block_size)
        self.shared = [0] * len(self._classes)
        #: Of each group.
        self._class_of = {place: number for number, each in enumerate(self._classes) for place in each.places}
        #: What a look-up asks, groups that keep every token first.
        self._seekers = [
            _Seeker(each, hashed, block_size, groups.retention_tokens) for each in self._classes if each.kind != RING
        ]
        self._seekers.sort(key=lambda seeker: seeker.kind != FULL)
        self._of_group = {place: seeker for seeker in self._seekers for place in seeker.places}
        self._computed_now: set[int] = set()
        # For each sequence: names of its hashes, published or found blocks of each group, computed tokens, and junction of its look-up.
        self._names: dict[Sequence, list[int]] = {}
        self._published: dict[Sequence, list[int]] = {}
        self._computed: dict[Sequence, int] = {}
        self._junction: dict[Sequence, int] = {}

    def sealed_contents(self) -> SettledContentsLog:
        """See ``ContentsKept``."""
        assert self.log.contents is not None
        self.pool.seal_contents()
        return self.log.contents

    def log_no_contents(self) -> None:
        """See ``Memory``."""
        self.pool.contents = self.log.contents = None

    def asked(self) -> Asked:
        """See ``ContentsKept``: the same hashes in each group."""
        look_ups = self.log.look_up_columns()
        stop = lookup_blocks(look_ups["known_tokens"], self._size) * (self._size // self._hashed)
        return Asked(look_ups["index"], np.zeros_like(stop), stop)

    def paths_of(self, requests: np.ndarray) -> Paths:
        """See ``ContentsKept``."""
        return self._chains.paths(requests, whole=True)

    def settle(self) -> None:
        """Log the number of cached blocks from ``moment`` on."""
        self.log.settle(self.pool.num_cached, self.moment)

    def look_up(self, sequence: Sequence) -> Found:
        """The longest cached prefix of a waiting sequence's tokens, without its last token, in all groups."""
        names = self.names_of(sequence)
        if self._groups.kinds == (FULL,):
            # As below, for the most frequent case; a block's hash is its name.
            self._junction[sequence] = 0
            asked = lookup_blocks(sequence.start_tokens, self._size)
            found: Table = [*self.pool.get_cached_blocks(names[:asked])]
            if self._groups.drops_block:
                del found[-1:]
            return Found((found,), len(found))
        blocks, longest = self._longest(self.pool, names, sequence.start_tokens)
        tables: list[Table] = []
        for place, kind in enumerate(self._groups.kinds):
            if kind == RING:
                tables.append([])
                continue
            seeker = self._of_group[place]
            stop = blocks * seeker.ratio
            start = 0 if kind == FULL else max(0, stop - 1)
            if kind == SLIDING:
                start = min(stop, skipped_blocks(blocks * self._size, seeker.window_tokens, seeker.size))
            table: Table = [NULL_BLOCK] * start
            table += self.pool.get_cached_blocks([self._hash(name, place) for name in seeker.names(names, start, stop)])
            tables.append(table)
        self._junction[sequence] = longest if longest > blocks else 0
        return Found(tuple(tables), blocks)

    def _longest(self, cached: Cached, names: list[int], tokens: int) -> tuple[int, int]:
        """Blocks of the longest prefix of so many tokens, without the last one, that all groups have; and of the longest of some."""
        blocks, names = lookup_blocks(tokens, self._size), names[: tokens // self._hashed]
        longest, before, first, drops = 0, -1, True, True
        # Each class may shorten the prefix that another one has accepted. Groups that keep every token have all shorter ones, too.
        while blocks != before:
            before = blocks
            for seeker in self._seekers:
                if seeker.kind == FULL:
                    if not first:
                        continue
                    found = self._prefix(cached, seeker, names, blocks)
                elif seeker.kind == SLIDING:
                    found = self._end_in_windows(cached, seeker, names, blocks, drops)
                else:
                    found = self._end_at_state(cached, seeker, names, blocks)
                # The drafter's group drops a block of a prefix once, and again of one that others have shortened.
                drops = (drops or found < blocks) and not (drops and self._drops_in(seeker))
                blocks = found
                longest = max(longest, blocks)
            first = False
        return blocks, longest

    def could_hit(self) -> OneGroup | None:
        """See ``ContentsKept``: the blocks of a full group that each look-up would have hit if no block had lost its hash."""
        published, groups = Published(self._number), self._groups
        if groups.kinds == (FULL,) and not groups.drops_block:
            return None
        look_ups = self.log.look_up_columns()
        requests, tokens = look_ups["index"].tolist(), look_ups["known_tokens"].tolist()
        hits = np.zeros(len(requests), dtype=np.int64)
        events = self.sealed_contents().events.columns()
        alone = groups.kinds == (FULL,) and groups.drops_block
        for kind, name, blocks in zip(*(events[column].tolist() for column in ("kind", "name", "blocks")), strict=True):
            if kind == NAMED:
                published.add(name, blocks)
            elif kind == LOOKED_UP:
                names = self._chains.names(requests[name])
                # Without other groups no further block is asked for.
                names = names[: lookup_blocks(tokens[name], self._size)] if alone else names
                hits[name] = self._longest(published, names, tokens[name])[0]
        return OneGroup(groups.kinds.index(FULL), hits)

    def _prefix(self, cached: Cached, seeker: _Seeker, names: list[int], most: int) -> int:
        """Length of a prefix that all groups of a class have, of at most so many blocks of ``block_size``.

        Of those with a drafter one more block is asked for, and the last one is dropped.
        """
        dropped = int(self._drops_in(seeker))
        blocks = most * seeker.ratio + dropped
        for place in seeker.places:
            asked = [self._hash(name, place) for name in seeker.names(names, 0, blocks)]
            blocks = len(cached.get_cached_blocks(asked))
        return max(0, blocks - dropped) // seeker.ratio

    def _end_in_windows(self, cached: Cached, seeker: _Seeker, names: list[int], most: int, drops: bool) -> int:
        """As ``_prefix``, for groups of which only the blocks of the window before its end must be there."""
        run, ratio, dropped = 0, seeker.ratio, int(drops and self._drops_in(seeker))
        asked = seeker.names(names, 0, most * ratio + dropped)
        for place in reversed(range(len(asked))):
            # A run ends where a block of ``block_size`` does.
            if run or not (place + 1 - dropped) % ratio:
                run = run + 1 if self._has(cached, seeker, asked[place]) else 0
            if run and run >= seeker.needed + dropped:
                return (place + run - dropped) // ratio
        # A run that starts at the first block is a complete prefix.
        return max(0, run // ratio * ratio - dropped) // ratio

    def _end_at_state(self, cached: Cached, seeker: _Seeker, names: list[int], most: int) -> int:
        """As ``_prefix``, for groups of which only the state at its end must be there."""
        return next((place + 1 for place in reversed(range(most)) if self._has(cached, seeker, names[place])), 0)

    def _has(self, cached: Cached, seeker: _Seeker, name: int) -> bool:
        return all(cached.is_cached(self._hash(name, place)) for place in seeker.places)

    def shares_in_windows(self) -> bool:
        """Whether tables of groups that release blocks share some."""
        pairs = zip(self.shared, self._classes, strict=True)
        return any(shared and each.kind in (SLIDING, STATE) for shared, each in pairs)

    def shared_by_kind(self) -> tuple[int, int, int]:
        """``shared`` of the full, sliding and state groups."""
        found = {FULL: 0, SLIDING: 0, STATE: 0, RING: 0}
        for shared, each in zip(self.shared, self._classes, strict=True):
            found[each.kind] += shared
        return found[FULL], found[SLIDING], found[STATE]

    def group_names(self, sequence: Sequence, place: int, start: int, stop: int) -> list[int]:
        """Names of the blocks of a sequence in one group."""
        names = self._of_group[place].names(self.names_of(sequence), start, stop)
        return [self._hash(name, place) for name in names]

    def _hash(self, name: int, place: int) -> int:
        return name * self._number + place

    def names_of(self, sequence: Sequence) -> list[int]:
        """Names of the hashes of a sequence up to the end of its output."""
        names = self._names.get(sequence)
        if names is None:
            names = self._names[sequence] = self._chains.names(sequence.index)
        return names

    def to_take(self, found: Found) -> int:
        """Number of found blocks that are in the free queue."""
        references = self.pool.ref_cnt
        return sum(not references[block] for table in found.tables for block in table if block is not NULL_BLOCK)

    def junction(self, sequence: Sequence) -> int:
        """Blocks of a longer prefix that some groups had at the last look-up of a sequence; 0 without one."""
        return self._junction.get(sequence, 0)

    def begin_step(self) -> None:
        """Start a step: all blocks published before it have been computed."""
        self._computed_now.clear()

    def computes_now(self, found: Found) -> bool:
        """Whether a found state is computed in the current step, in the found block or in another one with its hash."""
        states = (
            table[-1] for kind, table in zip(self._groups.kinds, found.tables, strict=True) if kind == STATE and table
        )
        return any(block is not NULL_BLOCK and self.pool.block_hash[block] in self._computed_now for block in states)

    def enter(self, sequence: Sequence, found: Found) -> None:
        """Take the blocks that a waiting sequence has found."""
        references = self.pool.ref_cnt
        for place, table in enumerate(found.tables):
            blocks = [block for block in table if block is not NULL_BLOCK]
            if blocks:
                self.shared[self._class_of[place]] += sum(references[block] > 0 for block in blocks)
                self.pool.touch(blocks, at_row(self.log.row))
        self._published[sequence] = [found.blocks * self._size // size for size in self._block_sizes]
        if self.log.contents is not None:
            self.log.contents.on_looked_up(True, found.blocks, self.pool.num_free)
        self.log.look_up(sequence.index, sequence.start_tokens, found.blocks * self._size)

    def publish(
        self, sequence: Sequence, tables: tuple[Table, ...], tokens: int, hashed_tokens: int | None = None
    ) -> None:
        """Publish the full blocks of the first ``tokens``: look-ups can find them from now on.

        Args:
            hashed_tokens: Tokens with hashes, which may cover tokens after a block that are not known yet; None for all.
        """
        self._computed[sequence] = tokens
        names, pool, unit, size = self.names_of(sequence), self.pool, self._hashed, self._size
        # A block without the tokens that its hash covers beside its own has no name.
        named = min(tokens if hashed_tokens is None else hashed_tokens, len(names) * unit) // unit * unit
        done = self._published.setdefault(sequence, [0] * self._number)
        first = min(tokens // size * size, named) // self._block_sizes[0]
        if first <= done[0] and not (self._groups.sizes and self._groups.drafts):
            return
        ends, drops = self._ends(sequence), self._groups.drops_block
        for place, (kind, table) in enumerate(zip(self._groups.kinds, tables, strict=True)):
            if kind == RING:
                continue
            seeker = self._of_group[place]
            needed, ratio, hashes = seeker.needed, seeker.ratio, seeker.hashes
            reach, more = self._reach(seeker, tokens), int(self._drops_in(seeker))
            # The block after an end is dropped; what begins alike up to a junction only has the block before it to drop.
            own = (*ends, *(end - 1 for end in ends[2:])) if more else ends
            stop = min(reach, named) // seeker.size
            blocks: list[int] = []
            keys: list[int] = []
            for at in range(done[place], stop):
                block = table[at]
                if block is NULL_BLOCK:
                    continue
                if kind == STATE and drops and at == stop - 1 and tokens % size:
                    # A prefill has exported it from the block before.
                    if at and at in ends[1:]:
                        self._publish_state(sequence, place, at - 1, block)
                    continue
                reached = kind == FULL or any(end * ratio - needed <= at < end * ratio + more for end in own)
                if not reached and not seeker.retains(at):
                    continue
                if kind == STATE:
                    self._publish_state(sequence, place, at, block)
                    continue
                blocks.append(block)
                keys.append(self._hash(names[at * hashes + hashes - 1], place))
            pool.cache_full_blocks(blocks, keys)
            done[place] = max(done[place], stop)
            if kind == FULL and hashes > 1:
                self._publish_tail(sequence, seeker, table, reach, named)

    def _reach(self, seeker: _Seeker, tokens: int) -> int:
        """Tokens up to which the blocks of a class can be found once ``tokens`` are computed: all groups reach the same end of a block
        of ``block_size``, and that of the drafter the block after it, which look-ups drop (``get_num_cacheable_tokens``)."""
        aligned = tokens // self._size * self._size
        return min(tokens, aligned + seeker.size) if aligned and self._drops_in(seeker) else aligned

    def _drops_in(self, seeker: _Seeker) -> bool:
        """Whether look-ups drop the last block of a class."""
        return self._groups.drops_block and self._groups.drafter in seeker.places

    def _publish_tail(self, sequence: Sequence, seeker: _Seeker, table: Table, reach: int, named: int) -> None:
        """A block within which a prompt ends has a hash, too: that of the last tokens of its prompt. No look-up asks for it, but without
        references the block is evicted as one with a hash (``_cache_partial_tail_block``)."""
        end = min((sequence.prompt_tokens - (not self._drops_in(seeker))) // self._hashed * self._hashed, named)
        if not 0 < end <= reach or end % seeker.size == 0:
            return
        block = table[end // seeker.size]
        if block is not NULL_BLOCK and self.pool.block_hash[block] is None:
            self.pool.cache_full_blocks((block,), (UNSHARED,))

    def _publish_state(self, sequence: Sequence, place: int, at: int, block: int) -> None:
        """Publish the state at the end of the block ``at``, which a look-up finds after this step."""
        name = self._hash(self.names_of(sequence)[at], place)
        self.pool.cache_full_blocks((block,), (name,))
        self._computed_now.add(name)
        if self.states is not None:
            self.states.append((sequence, place, name, at, block))

    def _ends(self, sequence: Sequence) -> tuple[int, ...]:
        """Ends, in blocks, of the prefixes that a later look-up may find: of the prompt again, and of a longer one (``replay_boundaries``
        of vLLM); and of the junction."""
        prompt, size, junction = sequence.prompt_tokens, self._size, self._junction.get(sequence, 0)
        more = (junction,) if junction else ()
        if not self._groups.drops_block:
            return (prompt - 1) // size, *more
        return max(0, (prompt - 1) // size - 1), max(0, prompt // size - 1), *more

    def computed(self, sequence: Sequence) -> int:
        """Tokens of a sequence up to which ``publish`` was asked for blocks."""
        return self._computed.get(sequence, 0)

    def repeated_slots(self, idle: Iterable[tuple[Table, ...]]) -> int:
        """Tokens of the entries beyond the first of each block in the tables of one full group; tables that are ``idle`` are left out.

        All full groups share the same places, as a prefix is found in all of them.
        """
        number = next((at for at, each in enumerate(self._classes) if each.kind == FULL), None)
        if number is None or not self.shared[number]:
            return 0
        full = self._classes[number]
        blocks = (block for tables in idle for block in tables[full.places[0]] if block is not NULL_BLOCK)
        repeated = self.shared[number] // full.number - idle_repeats(blocks, self.pool.ref_cnt.__getitem__)
        return repeated * full.block_size

    def leave(self, blocks: list[int], group: int) -> None:
        """Update ``shared`` before a table of a group releases ``blocks``."""
        references, number = self.pool.ref_cnt, self._class_of[group]
        if self._classes[number].kind != RING:
            self.shared[number] -= sum(references[block] > 1 for block in blocks)

    def forget(self, sequence: Sequence) -> None:
        """Delete the entries of a sequence without tables."""
        for kept in (self._names, self._published, self._computed, self._junction):
            kept.pop(sequence, None)
