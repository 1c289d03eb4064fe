"""Paged memory in which a request goes on from any token of another one.

A finished request keeps its table while requests name it as their parent. What only such tables name is
*cached*: it counts as free, and is given up, the table used longest ago first, when blocks run out.

    parent   [b0][b1][b2 ..]            22 tokens in blocks of 8
    fork     [b0][b1]     at 16 tokens  names full blocks
    fork     [b0][b1][b3] at 20 tokens  and copies a half-full one
    roll     [b0][b1][b2] to 20 tokens  takes the table over; a copy is needed only of what others name

A parent that still runs can be forked as far as it has got. One that was given up, or is not there
yet, helps no child: the child computes its prompt.

Tables always have ids here, so that what is free is what the pool says.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np

from ...types.sequence import Sequence
from ...types.state import State
from ...workload.dialogue import NO_PARENT, Dialogue
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import METER, Meter
from ..accounting.parents import Parents
from ..accounting.repeats import idle_repeats
from ..prefix.block_tables import BlockTables
from .paged import PagedMemory
from .transaction import PagedTransaction


class Start(NamedTuple):
    """What a child begins with: blocks that it names, a block that it copies, and the parent's table if it takes it."""

    shared: list[int]
    copied: int | None
    parent: int | None


_NOTHING = Start([], None, None)


class DialogueMemory(Parents[list[int]], PagedMemory):
    """As ``PagedMemory``, for requests that continue other requests at any token. Victims are recomputed.

    Attributes:
        kept: Block tables of finished parents.
        cached_blocks: Blocks that only kept tables name.
        cache_log: Changes of ``cached_blocks``, and the tokens that admissions found.
        evicted_blocks: Cached blocks that were reclaimed because free blocks ran out.
    """

    meter: tuple[str, ...] = (*METER[:2], "prefill_tail", "saved")
    cached_blocks = evicted_blocks = 0

    def __init__(self, num_blocks: int, block_size: int, dialogue: Dialogue) -> None:
        super().__init__(num_blocks, block_size)
        self.know(dialogue)
        self.cache_log: CacheLog = CacheLog(block_size)
        self.cached_level = self.cache_log
        # Nothing goes to the host, not even victims with blocks that others hold too.
        self.host_free = -1
        # Tables only grow: a block is copied before a table begins with it.
        self.tables: BlockTables = BlockTables(num_blocks, 0, block_size, in_turn=True)
        # Running tables that name a block, of those that several tables name or did.
        self._named: dict[int, int] = {}
        self._saved_blocks = 0
        self._copied_blocks = 0
        # Kept tables that admissions of this step count on, and how many of their blocks.
        self._promised: dict[int, int] = {}
        self._taken: dict[int, Sequence] = {}
        # Blocks that those admissions name or copy.
        self._claimed: set[int] = set()

    def transaction(self, decode_step: int) -> PagedTransaction:
        self._promised.clear()
        self._joining = False
        self._taken.clear()
        self._claimed.clear()
        self.tables.grow_until(decode_step)
        return super().transaction(decode_step)

    def reserve_decodes(self, need: int) -> None:
        """Reserve blocks for the running sequences of the coming step: ``need``, or all free blocks if there are
        fewer."""
        self._make_free(min(need, self.free))

    def look_up(self, sequence: Sequence, decode_step: int) -> None:
        """Set ``computed_tokens`` of a waiting sequence to the tokens of its parent that are in memory, or to 0."""
        parent, tokens = self._parent[sequence.index], self._parent_tokens[sequence.index]
        found = parent != NO_PARENT and self._has_place(sequence) and self._is_there(parent, tokens, decode_step)
        sequence.computed_tokens = tokens if found else 0

    def promise(self, sequence: Sequence) -> None:
        """Protect the parent's blocks that an admitted sequence starts from, until the step begins."""
        self._joining = True
        parent, tokens = self._parent[sequence.index], sequence.computed_tokens
        if tokens and parent in self.kept:
            self.kept.move_to_end(parent)
            if self._takes(sequence):
                self._taken[parent] = sequence
            self._promised[parent] = max(-(-tokens // self.block_size), self._promised.get(parent, 0))
            start = self._start(sequence)
            self._claimed.update(start.shared, () if start.copied is None else (start.copied,))

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether the pool could hold it beside the block that it copies."""
        return -(-sequence.start_tokens // self.block_size) < self.num_blocks

    def _is_there(self, parent: int, tokens: int, decode_step: int) -> bool:
        if parent in self.kept:
            # A sequence that takes the table over leaves nothing to others that look it up in this step.
            return parent not in self._taken and len(self.kept[parent]) * self.block_size >= tokens
        return self._has_computed(parent, tokens, decode_step)

    def _takes(self, sequence: Sequence) -> bool:
        """Whether it rolls back a parent that no other sequence counts on in this step."""
        parent = self._parent[sequence.index]
        if parent in self._promised:
            return self._taken.get(parent) is sequence
        return self._rolls_back[sequence.index]

    def _start(self, sequence: Sequence) -> Start:
        """What a sequence begins with, as it was looked up."""
        tokens, parent = sequence.computed_tokens, self._parent[sequence.index]
        if not tokens:
            return _NOTHING
        kept = self.kept.get(parent)
        table = self.tables.tables[self._running[parent]] if kept is None else kept
        full, rest = divmod(tokens, self.block_size)
        takes = kept is not None and self._takes(sequence)
        if rest and takes and not self.tables.pool.is_shared(table[full]):
            full, rest = full + 1, 0
        return Start(table[:full], table[full] if rest else None, parent if takes else None)

    def needed_blocks(self, members: Iterable[Sequence], tokens: int = 0) -> int:
        """Blocks by which an admission reduces the free count.

        These are new blocks, cached blocks that become held again, and the source of a copy, which must stay until it
        is made. Blocks that another admission of this step has claimed already count once.
        """
        (sequence,) = members
        start, claimed = self._start(sequence), self._claimed
        again = sum(self._named.get(block) == 0 and block not in claimed for block in start.shared)
        again += start.copied is not None
        return -(-(sequence.start_tokens - tokens) // self.block_size) - len(start.shared) + again

    def held_blocks(self, sequence: Sequence, decode_step: int) -> int:
        """See ``PagedMemory``; blocks that no other running sequence names, and that may be cached afterwards."""
        return sum(self._named.get(block, 1) == 1 for block in self.tables.tables[sequence])

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``PagedMemory``; a sequence with a parent begins with its blocks."""
        start, size, before = self._start(sequence), self.block_size, sequence.start_tokens - 1 + past
        # Of the coming step, which is none where all stand still.
        opens = 0 if past else self.phases.counts[decode_step % size] + (not before % size)
        for block in start.shared:
            self._name(block)
        if start.parent is not None:
            self._release_kept(start.parent)
        self._make_free(-(-before // size) - len(start.shared) + opens)
        self._copied_blocks += start.copied is not None
        self.cache_log.look_up(sequence.index, sequence.start_tokens, sequence.computed_tokens)
        self.tables.tables[sequence] = list(start.shared)
        self._running[sequence.index] = sequence
        super().admit(sequence, decode_step, padded_tokens, past)
        self.tables.copy(start.copied, sequence, len(start.shared))
        self._recount()

    def _name(self, block: int) -> None:
        """One more running table names ``block``."""
        self.tables.pool.touch((block,))
        tables = self._named.get(block, 1)
        self._named[block] = tables + 1
        if tables:
            self._saved_blocks += 1
        else:
            self.cached_blocks -= 1

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``PagedMemory``; a request with children keeps its table for them."""
        self.tables.grow_until(decode_step)
        leaving = tuple(leaving)
        for sequence in leaving:
            if self._children[sequence.index]:
                table = self.tables.tables[sequence]
                self.tables.pool.touch(table)
                self.kept[sequence.index] = list(table)
        self._leave(leaving, decode_step)
        for sequence in leaving:
            self._forget_child(self._parent[sequence.index])
        self._recount()
        self.cache_log.end_row(self.cached_blocks)

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``PagedMemory``; victims keep nothing."""
        self.tables.grow_until(decode_step)
        self._leave(preempted, decode_step)
        self._make_free(self.phases.counts[decode_step % self.block_size])

    def _leave(self, leaving: tuple[Sequence, ...], decode_step: int) -> None:
        for sequence in leaving:
            del self._running[sequence.index]
            for block in self.tables.tables[sequence]:
                self._unname(block)
            # One by one: the pool then says whether a kept table names a block.
            super().release((sequence,), decode_step)
        self._recount()

    def _unname(self, block: int) -> None:
        """One running table less names ``block``, which a kept one may still name."""
        left = self._named.get(block, 1) - 1
        if left:
            self._saved_blocks -= 1
        elif self.tables.pool.is_shared(block):
            self.cached_blocks += 1
        else:
            self._named.pop(block, None)
            return
        self._named[block] = left

    def _make_free(self, blocks: int) -> None:
        """Give up kept tables, the one used longest ago first, until so many blocks are in no table."""
        pool = self.tables.pool
        free = pool.num_free
        for parent in sorted(self.kept, key=self._promised.__contains__):
            if pool.num_free >= blocks:
                return
            if parent in self._promised:
                self._cut(self.kept[parent], self._promised[parent])
            else:
                self._release_kept(parent)
            self.evicted_blocks += pool.num_free - free
            free = pool.num_free

    def _release_kept(self, parent: int) -> None:
        """The table of a parent is kept no more."""
        self._promised.pop(parent, None)
        self._cut(self.kept.pop(parent), 0)

    def _cut(self, table: list[int], blocks: int) -> None:
        """A kept table is left with so many blocks."""
        pool = self.tables.pool
        for block in table[blocks:]:
            if not self._named[block] and not pool.is_shared(block):
                self.cached_blocks -= 1
                del self._named[block]
        pool.free_blocks(table[blocks:])
        del table[blocks:]

    def _recount(self) -> None:
        self.free = self.tables.pool.num_free + self.cached_blocks

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        """See ``Memory``; tables that are kept read nothing."""
        tables = self.tables.tables
        idle = chain.from_iterable(tables[sequence] for sequence in admitted)
        repeated = self._saved_blocks - idle_repeats(idle, lambda block: self._named.get(block, 1))
        return repeated * self.block_size

    def steps_with(self, state: State, blocks: int, limit: int) -> int:
        """See ``PagedMemory``; also up to the step that kept tables have to be given up for."""
        return super().steps_with(state, min(blocks, self.free - self.cached_blocks), limit)

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: blocks of the tables of parents that are done."""
        return np.fromiter(chain.from_iterable(self.kept.values()), dtype=np.int64)

    def copied_slots(self, decodes: bool) -> int:
        """Slots that the copies of half-full blocks write in the coming step."""
        slots, self._copied_blocks = self._copied_blocks * self.block_size, 0
        return slots

    def advance(self, state: State, steps: int) -> Meter:
        """See ``PagedMemory``; with what tables name again."""
        live, held, tail = super().advance(state, steps)
        self.cache_log.enter_row(self.cached_blocks)
        saved = self._saved_blocks * self.block_size
        return live - saved, held, tail, saved
