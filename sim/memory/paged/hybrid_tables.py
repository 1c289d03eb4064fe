"""Block tables for layers in KV groups: a table a group, null where a window has passed.

A step goes through the sequences in order of arrival. For each, as ``KVCacheManager.allocate_slots`` of vLLM 0.33 does,

    skip       group by group, the blocks before the window of the first token to compute are given back
    take       group by group, blocks for the tokens of the step
    publish    group by group, full blocks get a hash where there is a prefix cache (``group_cache``)
"""

from __future__ import annotations

from operator import attrgetter

from ...types.sequence import Sequence
from ..accounting.kv_groups import PageGroups
from ..accounting.moments import at_row, in_step
from .block_pool import BlockPool
from .group_cache import NULL_BLOCK, GroupCache, Table


class HybridTables:
    """Physical pages behind the counts. Tables grow when sequences come, go or are looked at, as ``BlockTables`` do.

    Args:
        cache: The prefix cache; the tables then take their blocks from its pool.

    Attributes:
        tables: Of each sequence one table a group, in the order of the groups.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: PageGroups, cache: GroupCache | None = None) -> None:
        self.pool = BlockPool(num_blocks) if cache is None else cache.pool
        self.tables: dict[Sequence, tuple[Table, ...]] = {}
        self._size, self._groups, self._cache = block_size, groups, cache
        # Sequences that may take, or give back, in a step: by the step modulo the block size.
        self._takers: list[set[Sequence]] = [set() for _ in range(block_size)]
        self._givers: list[set[Sequence]] = [set() for _ in range(block_size)]
        # Those that have yet to decode for the first time, when they give back what their prompt needed.
        self._prompts: set[Sequence] = set()
        self._grown_until = 0

    def reach(self, sequence: Sequence, computed: int, tokens: int) -> None:
        """Let the tables of a sequence with ``computed`` tokens reach to ``tokens``."""
        self.skip(sequence, computed)
        self.take(sequence, tokens)

    def skip(self, sequence: Sequence, computed: int) -> None:
        """Give back the blocks that lie before the window of the token after ``computed`` ones."""
        for table in self._tables_of(sequence)[self._groups.windowed]:
            place = stop = min(self._groups.skipped_blocks(computed, self._size), len(table))
            while place and table[place - 1] is not NULL_BLOCK:
                place -= 1
            if place < stop:
                self._give_back(table[place:stop], True)
                table[place:stop] = [NULL_BLOCK] * (stop - place)

    def take(self, sequence: Sequence, tokens: int) -> None:
        """Extend the tables of a sequence to ``tokens``, which the step computes."""
        tables = self._tables_of(sequence)
        for table in tables:
            missing = -(-tokens // self._size) - len(table)
            if missing > 0:
                table += self.pool.take_many(missing)
        if self._cache:
            self._cache.publish(sequence, tables, tokens)

    def _tables_of(self, sequence: Sequence) -> tuple[Table, ...]:
        tables = self.tables.get(sequence)
        if tables is None:
            tables = self.tables[sequence] = tuple([] for _ in range(self._groups.number))
        return tables

    def _give_back(self, entries: Table, windowed: bool) -> None:
        """Entries of a table, the last of which is the first one to be taken again."""
        blocks = [block for block in entries if block is not NULL_BLOCK]
        if self._cache:
            self._cache.leave(blocks, windowed)
        self.pool.release(blocks)

    def join(self, sequence: Sequence, decode_step: int) -> None:
        """A prefill ends in ``decode_step``: from the next one on the tables grow, and windows move on."""
        start, size = sequence.start_tokens, self._size
        self.reach(sequence, sequence.computed_tokens, start)
        # Before step s it holds start + s - decode_step - 1 tokens.
        self._takers[(decode_step + 1 - start) % size].add(sequence)
        self._givers[(decode_step + self._groups.window_tokens - start) % size].add(sequence)
        self._prompts.add(sequence)

    def grow_until(self, decode_step: int) -> None:
        """Let all tables grow through the steps before ``decode_step`` that they were not yet done for."""
        for step in range(self._grown_until, decode_step):
            place = step % self._size
            moving = self._takers[place] | self._givers[place] | self._prompts
            if self._cache:
                # Those that fill a block in the step.
                moving |= self._takers[(step + 1) % self._size]
                self._cache.moment = in_step(step)
            self._prompts.clear()
            for sequence in sorted(moving, key=attrgetter("order")):
                held = sequence.held_tokens(step)
                self.reach(sequence, held, held + 1)
            if self._cache:
                self._cache.settle()
        self._grown_until = max(decode_step, self._grown_until)
        if self._cache:
            self._cache.moment = at_row(self._cache.log.row)

    def grown(self, decode_step: int) -> None:
        """The running sequences have grown through ``decode_step``, one by one."""
        self._prompts.clear()
        self._grown_until = decode_step + 1

    def drop(self, sequence: Sequence) -> None:
        """Give back all that the tables of a sequence name; nothing where that was done before."""
        for place, table in enumerate(self.tables.pop(sequence, ())):
            self._give_back(table, self._groups.is_windowed(place))
        if self._cache:
            self._cache.forget(sequence)
        for members in (*self._takers, *self._givers):
            members.discard(sequence)
        self._prompts.discard(sequence)
