"""Block tables for layers in KV groups: a table a group, null where a window has passed.

A step goes through the sequences in order of arrival. For each, as ``KVCacheManager.allocate_slots`` of vLLM 0.33 does,

    skip       group by group, the blocks before the window of the first token to compute are given back
    take       group by group, blocks for the tokens of the step
    publish    group by group, full blocks get a hash where there is a prefix cache (``group_cache``)
"""

from __future__ import annotations

from operator import attrgetter

from ...types.sequence import Sequence
from ..accounting.kv_groups import STATE, PageGroups, skipped_blocks
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
        self._windows = groups.windows()
        # Sequences that may take, or give back, in a step: by the step modulo the block size.
        self._takers: list[set[Sequence]] = [set() for _ in range(block_size)]
        self._givers: list[set[Sequence]] = [set() for _ in range(block_size)]
        # Those that have yet to decode for the first time, when they give back what their prompt needed.
        self._prompts: set[Sequence] = set()
        # Up to which place each has given back, by kind of group.
        self._skipped: dict[Sequence, dict[str, int]] = {}
        self._grown_until = 0

    def reach(self, sequence: Sequence, computed: int, tokens: int) -> None:
        """Let the tables of a sequence with ``computed`` tokens reach to ``tokens``."""
        self.skip(sequence, computed)
        self.take(sequence, tokens)

    def skip(self, sequence: Sequence, computed: int) -> None:
        """Give back the blocks that no kind of group needs for the token after ``computed`` ones."""
        before, size = self._skipped.get(sequence, {}), self._size
        until = {kind: skipped_blocks(computed, window, size) for kind, window in self._windows.items()}
        if until == before:
            return
        for kind, table in zip(self._groups.kinds, self._tables_of(sequence), strict=True):
            if kind in until:
                places = slice(before.get(kind, 0), until[kind])
                passed = [block for block in table[places] if block is not NULL_BLOCK]
                if passed:
                    self._give_back(passed, kind)
                    table[places] = [NULL_BLOCK] * len(table[places])
        self._skipped[sequence] = until

    def take(self, sequence: Sequence, tokens: int) -> None:
        """Extend the tables of a sequence to ``tokens``, which the step computes."""
        tables, blocks = self._tables_of(sequence), -(-tokens // self._size)
        for kind, table in zip(self._groups.kinds, tables, strict=True):
            missing = blocks - len(table)
            if kind == STATE:
                # The state at the end of the step; those of the blocks that it jumps over are not kept.
                missing = missing if self._groups.states_by_block else 1 - len(table)
                table += [NULL_BLOCK] * (missing - 1)
                missing = min(missing, 1)
            if missing > 0:
                table += self.pool.take_many(missing)
        if self._cache:
            self._cache.publish(sequence, tables, tokens)

    def enter(self, sequence: Sequence, found: tuple[Table, ...]) -> None:
        """The tables of a sequence that waited begin with what it found."""
        self.tables[sequence] = found

    def _tables_of(self, sequence: Sequence) -> tuple[Table, ...]:
        tables = self.tables.get(sequence)
        if tables is None:
            tables = self.tables[sequence] = tuple([] for _ in range(self._groups.number))
        return tables

    def _give_back(self, blocks: list[int], kind: str) -> None:
        """Blocks of one table, the last of which is the first one to be taken again."""
        if self._cache:
            self._cache.leave(blocks, kind)
        self.pool.release(blocks)

    def join(self, sequence: Sequence, decode_step: int) -> None:
        """A prefill ends in ``decode_step``: from the next one on the tables grow, and windows move on."""
        start, size = sequence.start_tokens, self._size
        self.reach(sequence, sequence.computed_tokens, start)
        # Before step s it holds start + s - decode_step - 1 tokens.
        self._takers[(decode_step + 1 - start) % size].add(sequence)
        for window in self._windows.values():
            self._givers[(decode_step + window - start) % size].add(sequence)
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
        tables = self.tables.pop(sequence, None)
        if tables is None:
            return
        self._skipped.pop(sequence, None)
        for kind, table in zip(self._groups.kinds, tables, strict=True):
            self._give_back([block for block in table if block is not NULL_BLOCK], kind)
        if self._cache:
            self._cache.forget(sequence)
        self.park(sequence)

    def park(self, sequence: Sequence) -> None:
        """The tables of a sequence grow no more."""
        for members in (*self._takers, *self._givers):
            members.discard(sequence)
        self._prompts.discard(sequence)
