"""Paged memory with free blocks that keep their contents for prompts that begin alike: vLLM's prefix cache.

    look up     a waiting sequence names its blocks and finds the longest prefix that is cached
    enter       it takes what it found; of the rest it gets blocks for what it computes
    publish     a block is named, and can be found, from the step on that computes its last token
    release     blocks that no table names join the tail of the free queue, and keep their names

Counts are those of ``ChunkedMemory``, but for what is shared: ``free`` counts blocks that no table
names, and a block in two tables is held once. In a step the running take and publish before a sequence
enters, and the first to enter before the next: grants take effect at once, so that the next look-up sees
what they evicted and published. The plan that follows carries out the rest.

Growth takes blocks from the head of the queue, cached ones among them, in the middle of a leap. Tables
grow when they are looked at, step by step, so the log still has the step of each change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

import numpy as np

from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Meter
from ..accounting.moments import after_step, at_row, in_step
from ..prefix import BlockHistory, BlockNames, HashedBlockPool, lookup_blocks
from ..prefix.names import run_of
from .chunked import ChunkedMemory
from .paged import BlockTables, PagedTransaction


class CachedTransaction(PagedTransaction):
    """As ``PagedTransaction``; grants are made at once."""

    __slots__ = ("found", "given_up", "seeker")
    memory: CachedMemory
    #: The sequence that looked up last and was not granted, and what was found.
    seeker: Sequence | None
    found: list[int]
    given_up: Counter[int]

    def begin(self, decode_step: int) -> None:
        """Nothing is granted yet in ``decode_step``."""
        self.decode_step = decode_step
        self.seeker, self.found, self.given_up = None, [], Counter()

    def look_up(self, sequence: Sequence) -> int:
        """See ``PagedTransaction``."""
        tables = self.memory.tables
        tables.grow_until(self.decode_step + 1)
        self.seeker, self.found = sequence, tables.look_up(sequence)
        return len(self.found) * self.block_size

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``: all but the blocks that it finds in tables. What lies free it takes, too."""
        references = self.memory.tables.pool.reference_counts
        held = sum(references[block] > 0 for block in self.found)
        return super().lacking(sequence, tokens) - held

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """See ``PagedTransaction``."""
        self.free -= blocks
        sequence.computed_tokens = known = len(self.found) * self.block_size
        self.memory.tables.enter(sequence, self.found)
        self.seeker = None
        self.extend(sequence, known + tokens)

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """See ``PagedTransaction``."""
        self.memory.tables.grow_until(self.decode_step + 1)
        self.memory.tables.hold(sequence, tokens)

    def reclaimed(self, sequence: Sequence, decode_step: int) -> int:
        """See ``PagedTransaction``: blocks that no other table names but those given up before."""
        table, given_up = self.memory.tables.tables[sequence], self.given_up
        references = self.memory.tables.pool.reference_counts
        given_up.update(table)
        return sum(references[block] == given_up[block] for block in table)


class CachedMemory(ChunkedMemory):
    """As ``ChunkedMemory``, with real block ids always.

    Args:
        num_blocks: Blocks of the device pool, without vLLM's null block.
        block_size: Tokens a block.
        names: Of the blocks of every request.
    """

    def __init__(self, num_blocks: int, block_size: int, names: BlockNames) -> None:
        super().__init__(num_blocks, block_size)
        self.cache_log: CacheLog = CacheLog(block_size, BlockHistory())
        self.cached_level = self.cache_log
        self.tables: CachedTables = CachedTables(num_blocks, block_size, names, self.cache_log)
        self._transaction: CachedTransaction = CachedTransaction(self)
        #: Table entries beyond the first of a block, as ``free`` counts them.
        self._shared = 0

    @property
    def evicted_blocks(self) -> int:
        """Blocks that were taken while they could still be found."""
        return self.tables.pool.evicted_blocks

    def transaction(self, decode_step: int) -> CachedTransaction:
        self.tables.grow_until(decode_step)
        super().transaction(decode_step)
        self._transaction.begin(decode_step)
        return self._transaction

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        super().prefill(sequence, decode_step)
        self._count_shared_once()

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        super().admit(sequence, decode_step, padded_tokens, past)
        self._count_shared_once()

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        super().release(leaving, decode_step)
        self._count_shared_once()
        # Also of victims: a sequence decoded in the step before.
        self.cache_log.settle(self.tables.pool.num_cached, after_step(decode_step))

    def drop(self, sequence: Sequence, decode_step: int) -> None:
        """See ``ChunkedMemory``; between two rows of the ledger."""
        super().drop(sequence, decode_step)
        self._count_shared_once()
        self.cache_log.settle(self.tables.pool.num_cached, at_row(self.cache_log.row))

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: blocks with a hash."""
        named = self.tables.pool.is_named
        # What lies beyond the last one is not looked at.
        return np.flatnonzero(np.frombuffer(named, np.uint8, named.rfind(1) + 1))

    def _count_shared_once(self) -> None:
        shared = self.tables.pool.num_shared
        self.free += shared - self._shared
        self._shared = shared

    def steps_unhelped(self, state: State, steps: int) -> int:
        """See ``ChunkedMemory``: publish the block that it would find next, which then needs no place of its own."""
        seeker, place = self._transaction.seeker, len(self._transaction.found)
        author = seeker and self.tables.author_of(seeker, place)
        if author is None:
            return steps
        until = (place + 1) * self.block_size - author.lag - state.decode_step
        if until < 1:
            raise SimulationFault(f"request {author.index} has filled block {place} and did not publish it")
        return min(steps, until)

    def advance(self, state: State, steps: int) -> Meter:
        """See ``ChunkedMemory``; slots that are shared are live once."""
        self.cache_log.row += 1
        live, held, tail = super().advance(state, steps)
        return live - self._shared * self.block_size, held, tail


class CachedTables(BlockTables):
    """Tables over a pool with free blocks that are found by their names.

    Args:
        num_blocks, block_size: Size of the pool.
        names: Of the blocks of every request.
        log: Records blocks that are taken, hit and evicted.
    """

    def __init__(self, num_blocks: int, block_size: int, names: BlockNames, log: CacheLog) -> None:
        super().__init__(num_blocks, 0, block_size)
        # No kind of ``BlockPool``, as it takes blocks at a moment; whatever takes some is overridden here.
        self.pool: HashedBlockPool = HashedBlockPool(num_blocks, log.history)  # type: ignore[assignment]
        self._log = log
        self._all_names = names
        # Of the blocks that each will have filled when it is done.
        self._names: dict[Sequence, list[int]] = {}
        # Sequences that publish blocks which end in a run while they decode.
        self._authors: dict[int, Sequence] = {}

    def look_up(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest cached prefix of what a waiting sequence knows, without its last token."""
        names = self._names_of(sequence)
        return self.pool.lookup(islice(names, lookup_blocks(sequence.start_tokens, self._block_size)))

    def _names_of(self, sequence: Sequence) -> list[int]:
        names = self._names.get(sequence)
        if names is None:
            names = self._names[sequence] = self._all_names.of(sequence.index)
        return names

    def enter(self, sequence: Sequence, found: list[int]) -> None:
        """A sequence that waited gets a table of the blocks that it found."""
        known, size = sequence.start_tokens, self._block_size
        moment = at_row(self._log.row)
        self.pool.take_cached(found, lookup_blocks(known, size), moment)
        self.tables[sequence] = found
        self._log.look_ups.append((sequence.index, known, len(found) * size))
        self._log.settle(self.pool.num_cached, moment)

    def hold(self, sequence: Sequence, tokens: int) -> None:
        """Extend a table to ``tokens``, which are computed: full blocks are published."""
        table, names, pool = self.tables[sequence], self._names[sequence], self.pool
        held = len(table)
        # All blocks of a table are published but the last one, if it is not full.
        published = held - (held > 0 and pool.hashes[table[-1]] is None)
        missing = -(-tokens // self._block_size) - held
        if missing > 0:
            moment = at_row(self._log.row)
            table += pool.take(missing, moment)
            self._log.settle(pool.num_cached, moment)
        for place in range(published, tokens // self._block_size):
            pool.publish(table[place], names[place])

    def join(self, sequence: Sequence, phase: int) -> None:
        super().join(sequence, phase)
        names = self._names[sequence]
        if names:
            self._authors[run_of(names[-1])] = sequence

    def grow_until(self, decode_step: int) -> None:
        """See ``BlockTables``; in each step the blocks that it fills are published."""
        start, members, size = self._grown_until, self._members, self._block_size
        if decode_step <= start:
            return
        for step in range(start, decode_step + 1):
            growing = members[step % size]
            # A sequence that takes a block in a step filled one in the step before.
            if growing and step > start:
                self._publish_last(growing)
            if growing and step < decode_step:
                self._take(growing, in_step(step))
        self._grown_until = decode_step

    def _publish_last(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            table = self.tables[sequence]
            self.pool.publish(table[-1], self._names[sequence][len(table) - 1])

    def _take(self, sequences: list[Sequence], moment: int) -> None:
        """A block each."""
        for sequence, block in zip(sequences, self.pool.take(len(sequences), moment), strict=True):
            self.tables[sequence].append(block)
        self._log.settle(self.pool.num_cached, moment)

    def leave(self, sequence: Sequence, phase: int) -> None:
        super().leave(sequence, phase)
        self._forget(sequence)

    def drop(self, sequence: Sequence) -> None:
        super().drop(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        names = self._names.pop(sequence)
        if names:
            self._authors.pop(run_of(names[-1]), None)

    def author_of(self, seeker: Sequence, place: int) -> Sequence | None:
        """The sequence that will publish, while it decodes, the block at ``place`` of a waiting one."""
        if place >= lookup_blocks(seeker.start_tokens, self._block_size):
            return None
        return self._authors.get(run_of(self._names[seeker][place]))
