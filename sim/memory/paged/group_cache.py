"""The prefix cache of KV groups: look-ups of cached prefixes, and publication of blocks for later look-ups.

One pool serves all groups. A block's hash includes its group, so groups never share a block. A prefix is found if every
group can continue from its end:

    full groups       have each of its blocks
    sliding groups    have the ``ceil((window - 1) / block_size)`` blocks before its end, which the window needs
    state groups      have the state at its end

    block            0  1  2  3  4  5  6      the window needs two blocks
    full             x  x  x  x  x  x  .      the longest prefix has 6 blocks
    sliding          .  .  x  x  .  x  x      search from the right: blocks 2 and 3, so 4 blocks are found

A sliding or state group publishes only blocks that a look-up can use: the blocks before a *boundary*. A boundary is the last
token of the prompt, or the end of a longer prefix that other groups had at the look-up of the request (6 above). A look-up
finds a block from the step on that computes it, but a state only after that step.

Source: vLLM 0.33, vllm/v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py, with
``prefix_cache_retention_interval`` 0, the default.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...types.sequence import Sequence
from ..accounting.cache_log import CacheLog
from ..accounting.kv_groups import FULL, RING, SLIDING, STATE, PageGroups, skipped_blocks
from ..accounting.repeats import idle_repeats
from ..prefix import BlockPool, Chains, lookup_blocks

#: Entry of a released block, like vLLM's null block; the following entries keep their places in the table.
NULL_BLOCK = None

Table = list[int | None]


class Found(NamedTuple):
    """Result of a look-up.

    Attributes:
        tables: For each group, the first blocks of its table; null before the window.
        blocks: Length of the prefix in blocks.
    """

    tables: tuple[Table, ...]
    blocks: int


class GroupCache:
    """Published blocks of the groups, and look-ups.

    Args:
        pool: The blocks.
        block_size: Tokens per block.
        groups: The KV groups that share the pool.
        chains: Names of the blocks of every request.

    Attributes:
        pool: The blocks.
        log: Log of the look-ups and of changes of the cached level.
        moment: Moment of the next change, in the numbering of the log.
        shared: Number of table entries beyond the first of each block, by kind of group.
    """

    def __init__(self, pool: BlockPool, block_size: int, groups: PageGroups, chains: Chains) -> None:
        self.log = CacheLog(block_size)
        self.moment = 0
        self.shared = {FULL: 0, SLIDING: 0, STATE: 0}
        self.pool = pool
        self._groups, self._size, self._chains = groups, block_size, chains
        self._number = groups.number
        self._places = {kind: [at for at, one in enumerate(groups.kinds) if one == kind] for kind in groups.kinds}
        # Number of blocks needed before a token: for the window, and for a state.
        self._needed = {SLIDING: -(-(groups.window_tokens - 1) // block_size), STATE: 1}
        self._computed_now: set[int] = set()
        # For each sequence: names of its blocks, number of published or found blocks, and junction of its look-up.
        self._names: dict[Sequence, list[int]] = {}
        self._published: dict[Sequence, int] = {}
        self._junction: dict[Sequence, int] = {}

    def settle(self) -> None:
        """Log the number of cached blocks from ``moment`` on."""
        self.log.settle(self.pool.num_cached, self.moment)

    def look_up(self, sequence: Sequence) -> Found:
        """The longest cached prefix of a waiting sequence's tokens, without its last token, in all groups."""
        names = self.names_of(sequence)
        blocks = lookup_blocks(sequence.start_tokens, self._size)
        if self._groups.kinds == (FULL,):
            # As below, for the most frequent case; a block's hash is its name.
            self._junction[sequence] = 0
            found: Table = [*self.pool.get_cached_blocks(names[:blocks])]
            return Found((found,), len(found))
        longest, before = 0, -1
        if FULL in self._places:
            blocks = longest = self._prefix(names[:blocks])
        # Each kind may shorten the prefix that another kind has accepted.
        while blocks != before:
            before = blocks
            if SLIDING in self._places:
                blocks = self._end_in_windows(names[:blocks])
                longest = max(longest, blocks)
            if STATE in self._places:
                blocks = self._end_at_state(names[:blocks])
                longest = max(longest, blocks)
        first = {FULL: 0, SLIDING: skipped_blocks(blocks * self._size, self._groups.window_tokens, self._size)}
        tables: list[Table] = []
        for place, kind in enumerate(self._groups.kinds):
            if kind == RING:
                tables.append([])
                continue
            start = min(blocks, first.get(kind, max(0, blocks - 1)))
            table: Table = [NULL_BLOCK] * start
            table += self.pool.get_cached_blocks([self._hash(name, place) for name in names[start:blocks]])
            tables.append(table)
        self._junction[sequence] = longest if longest > blocks else 0
        return Found(tuple(tables), blocks)

    def _prefix(self, names: list[int]) -> int:
        """Number of blocks, from the first one on, that all full groups have."""
        blocks = len(names)
        for place in self._places[FULL]:
            blocks = len(self.pool.get_cached_blocks([self._hash(name, place) for name in names[:blocks]]))
        return blocks

    def _end_in_windows(self, names: list[int]) -> int:
        """The longest prefix, in blocks, before the end of which all sliding groups have the blocks of the window."""
        run = 0
        for place in reversed(range(len(names))):
            run = run + 1 if self._has(SLIDING, names[place]) else 0
            if run and run >= self._needed[SLIDING]:
                return place + run
        # A run that starts at the first block is a complete prefix.
        return run

    def _end_at_state(self, names: list[int]) -> int:
        """The longest prefix, in blocks, with a state at its end in all state groups."""
        return next((place + 1 for place in reversed(range(len(names))) if self._has(STATE, names[place])), 0)

    def _has(self, kind: str, name: int) -> bool:
        return all(self.pool.is_cached(self._hash(name, place)) for place in self._places[kind])

    def _hash(self, name: int, place: int) -> int:
        return name * self._number + place

    def names_of(self, sequence: Sequence) -> list[int]:
        """Names of the blocks that a sequence fills up to the end of its output."""
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
        for kind, table in zip(self._groups.kinds, found.tables, strict=True):
            blocks = [block for block in table if block is not NULL_BLOCK]
            if blocks:
                self.shared[kind] += sum(references[block] > 0 for block in blocks)
                self.pool.touch(blocks)
        self._published[sequence] = found.blocks
        self.log.look_ups.append((sequence.index, sequence.start_tokens, found.blocks * self._size))

    def publish(self, sequence: Sequence, tables: tuple[Table, ...], tokens: int) -> None:
        """Publish the full blocks of the first ``tokens``: look-ups can find them from now on."""
        done, full = self._published.get(sequence, 0), tokens // self._size
        if full <= done:
            return
        names, pool = self.names_of(sequence), self.pool
        ends = ((sequence.prompt_tokens - 1) // self._size, self._junction.get(sequence, 0))
        for place, (kind, table) in enumerate(zip(self._groups.kinds, tables, strict=True)):
            if kind == RING:
                continue
            needed = self._needed.get(kind)
            for at in range(done, full):
                block = table[at]
                if block is NULL_BLOCK or (needed is not None and not any(end - needed <= at < end for end in ends)):
                    continue
                name = self._hash(names[at], place)
                pool.cache_full_blocks((block,), (name,))
                if kind == STATE:
                    self._computed_now.add(name)
        self._published[sequence] = full

    def published(self, sequence: Sequence) -> int:
        """Blocks of a sequence, from its first on, that it published or found."""
        return self._published.get(sequence, 0)

    def repeated_blocks(self, idle: Iterable[tuple[Table, ...]]) -> int:
        """Entries beyond the first of each block in the tables of one full group; tables that are ``idle`` are left out.

        All full groups share the same places, as a prefix is found in all of them.
        """
        places = self._places.get(FULL, [])
        if not places or not self.shared[FULL]:
            return 0
        blocks = (block for tables in idle for block in tables[places[0]] if block is not NULL_BLOCK)
        return self.shared[FULL] // len(places) - idle_repeats(blocks, self.pool.ref_cnt.__getitem__)

    def leave(self, blocks: list[int], kind: str) -> None:
        """Update ``shared`` before a table of a group of this kind releases ``blocks``."""
        references = self.pool.ref_cnt
        if kind != RING:
            self.shared[kind] -= sum(references[block] > 1 for block in blocks)

    def forget(self, sequence: Sequence) -> None:
        """Delete the entries of a sequence without tables."""
        for kept in (self._names, self._published, self._junction):
            kept.pop(sequence, None)
