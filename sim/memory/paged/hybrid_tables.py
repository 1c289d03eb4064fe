"""Block tables for layers in KV groups: a table a group, null where a window has passed."""

from __future__ import annotations

from operator import attrgetter

from ...types.sequence import Sequence
from ..accounting.kv_groups import PageGroups
from .block_pool import BlockPool

#: In place of a block that was given back, as vLLM's null block: an entry keeps its place in the table.
NULL_BLOCK = None

Table = list[int | None]


class HybridTables:
    """Physical pages behind the counts. Tables grow when sequences come, go or are looked at, as ``BlockTables`` do.

    In a step the sequences go in order of arrival; each gives back what its windows need no more, group by
    group and last block first, and then takes a page for each group, the full ones first.

    Attributes:
        tables: Of each sequence one table a group, the full groups' first.
    """

    def __init__(self, num_blocks: int, block_size: int, groups: PageGroups) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: dict[Sequence, tuple[Table, ...]] = {}
        self._size, self._groups = block_size, groups
        # Sequences that may take, or give back, in a step: by the step modulo the block size.
        self._takers: list[set[Sequence]] = [set() for _ in range(block_size)]
        self._givers: list[set[Sequence]] = [set() for _ in range(block_size)]
        # Those that have yet to decode for the first time, when they give back what their prompt needed.
        self._prompts: set[Sequence] = set()
        self._grown_until = 0

    def reach(self, sequence: Sequence, computed: int, tokens: int) -> None:
        """Let the tables of a sequence with ``computed`` tokens reach to ``tokens``."""
        tables = self.tables.setdefault(sequence, tuple([] for _ in range(self._groups.number)))
        for table in tables[self._groups.full :]:
            self._skip(table, computed)
        for table in tables:
            table += self.pool.take_many(max(0, -(-tokens // self._size) - len(table)))

    def _skip(self, table: Table, computed: int) -> None:
        """Give back the blocks that lie before the window of the token after ``computed`` ones."""
        place = self._groups.skipped_blocks(computed, self._size)
        while place and (block := table[place - 1]) is not NULL_BLOCK:
            place -= 1
            self.pool.release([block])
            table[place] = NULL_BLOCK

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
            self._prompts.clear()
            for sequence in sorted(moving, key=attrgetter("order")):
                held = sequence.held_tokens(step)
                self.reach(sequence, held, held + 1)
        self._grown_until = max(decode_step, self._grown_until)

    def drop(self, sequence: Sequence) -> None:
        """Give back all that the tables of a sequence name."""
        for table in self.tables.pop(sequence):
            self.pool.release([block for block in table[::-1] if block is not NULL_BLOCK])
        for members in (*self._takers, *self._givers):
            members.discard(sequence)
        self._prompts.discard(sequence)
