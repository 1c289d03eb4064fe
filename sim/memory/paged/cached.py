"""Paged memory with free blocks that keep their contents for prompts that begin alike: vLLM's prefix cache.

    look up     a waiting sequence names its blocks and finds the longest prefix that is cached
    enter       it takes what it found; of the rest it gets blocks for what it computes
    publish     a block is named, and can be found, from the step on that computes its last token
    release     blocks that no table names join the tail of the free queue, and keep their names

Counts are those of ``ChunkedMemory``, but for what is shared: ``free`` counts blocks that no table
names, and a block in two tables is held once. In a step the running take and publish before a sequence
enters, and the first to enter before the next: grants take effect at once, so that the next look-up sees
what they evicted and published. The plan that follows carries out the rest.

Contents are segments of blocks (``prefix.segments``). What running sequences take, and what that evicts, follows from the
counts when a sequence looks up something that may be cached; the log has the step of each change when the run is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Meter
from ..accounting.moments import after_step, at_row
from ..prefix import BlockTable, Chains, Found, FreeIds, Path, Segment, SegmentPool, lookup_blocks
from .chunked import ChunkedMemory
from .paged import BlockTables, PagedTransaction


class CachedTransaction(PagedTransaction):
    """As ``PagedTransaction``; grants are made at once."""

    __slots__ = ("decode_step", "found", "given_up", "left", "path", "seeker")
    memory: CachedMemory
    decode_step: int
    #: Blocks that are free after the running sequences took theirs, and after the grants so far.
    left: int
    #: The sequence that looked up last and was not granted, the names of its blocks, and what was found.
    seeker: Sequence | None
    path: Path | None
    found: Found
    #: How many of the sequences asked for so far name each segment; None before the first.
    given_up: Counter[Segment] | None

    def lacking(self, sequence: Sequence) -> int:
        """See ``PagedTransaction``: all but the blocks that it finds in tables. What lies free it takes, too."""
        blocks = -(-sequence.start_tokens // self.block_size)
        self.seeker, self.path = sequence, self.memory.path(sequence)
        if self.path is None:
            self.found = []
            return blocks
        self.found = self.memory.find(sequence, self.path, self.left, self.decode_step)
        return blocks - sum(stop - first for segment, first, stop in self.found if segment.references)

    def enter(self, sequence: Sequence, budget: int) -> int:
        """See ``PagedTransaction``: what was found need not be computed."""
        found = self.found
        known = found[-1][2] * self.block_size if found else 0
        self.left -= sum(stop - first for segment, first, stop in found if not segment.references)
        sequence.computed_tokens = known
        self.memory.enter(sequence, self.path, found, known)
        self.seeker = None
        self.extend(sequence, min(sequence.start_tokens, known + budget))
        return known

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """See ``PagedTransaction``."""
        self.left -= self.memory.hold(sequence, tokens, self.decode_step)

    def reclaimed(self, sequence: Sequence, decode_step: int) -> int:
        """See ``PagedTransaction``: blocks that no other table names but those given up before."""
        blocks, table = super().reclaimed(sequence, decode_step), self.memory.held[sequence]
        given_up = self.given_up = Counter() if self.given_up is None else self.given_up
        for segment in table.segments():
            given_up[segment] += 1
            if segment.references > given_up[segment]:
                blocks -= segment.stop - segment.first
        return blocks


class CachedMemory(ChunkedMemory):
    """As ``ChunkedMemory``, with a prefix cache.

    Args:
        num_blocks: Blocks of the device pool, without vLLM's null block.
        block_size: Tokens a block.
        chains: Names of the blocks of every request.
        ids: See ``PagedMemory``.

    Attributes:
        pool: The blocks and what they hold.
        held: What each sequence on the device holds.
    """

    _transaction: CachedTransaction

    def __init__(self, num_blocks: int, block_size: int, chains: Chains, ids: bool = False) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = SegmentPool(num_blocks, block_size, chains, ids=ids)
        self.pool.history.growing = self._growing
        self.held: dict[Sequence, BlockTable] = {}
        self.cache_log: CacheLog = CacheLog(block_size, self.pool.history)
        self.cached_level = self.cache_log
        if isinstance(self.pool.queue, FreeIds):
            self.tables: CachedTables | None = CachedTables(self.pool.queue, block_size)
        self._transaction = CachedTransaction(self)
        # Of sequences that looked up and wait.
        self._paths: dict[Sequence, Path | None] = {}
        #: Table entries beyond the first of a block, as ``free`` counts them.
        self._shared = 0
        #: Decode steps that the running sequences have grown through.
        self._grown_until = 0

    @property
    def evicted_blocks(self) -> int:
        """Blocks that were taken while they could still be found."""
        return self.pool.history.evicted_blocks

    def transaction(self, decode_step: int) -> CachedTransaction:
        transaction = self._transaction
        if self.tables is not None:
            self.tables.grow_until(decode_step)
        transaction.free = free = self.free
        transaction.need = need = self._phases[decode_step % self.block_size]
        transaction.left, transaction.decode_step = free - need, decode_step
        transaction.seeker = transaction.given_up = None
        return transaction

    # --- What a transaction grants ---

    def path(self, sequence: Sequence) -> Path | None:
        """Names of the blocks of a waiting sequence; None where nothing of it can be cached."""
        path = self._paths.get(sequence)
        if path is None and (path := self.pool.path(sequence.index)) is not None:
            self._paths[sequence] = path
        return path

    def find(self, sequence: Sequence, path: Path, free: int, decode_step: int) -> Found:
        """The longest cached prefix of what a waiting sequence knows, without its last token; ``free`` blocks are free."""
        if self.tables is not None:
            self.tables.grow_until(decode_step + 1)
        self.pool.queue.reach(free)
        return self.pool.look_up(path, lookup_blocks(sequence.start_tokens, self.block_size), decode_step)

    def enter(self, sequence: Sequence, path: Path | None, found: Found, known: int) -> None:
        """A sequence that waited gets a table of the blocks that it found, with ``known`` tokens."""
        ids = None if self.tables is None else self.tables.tables.setdefault(sequence, [])
        if path is not None:
            del self._paths[sequence]
        self.held[sequence] = self.pool.enter(path, found, at_row(self.cache_log.row), ids)
        self.cache_log.look_ups.append((sequence.index, sequence.start_tokens, known))

    def hold(self, sequence: Sequence, tokens: int, decode_step: int) -> int:
        """Extend a table to ``tokens``, which are computed: full blocks are published. Returns the blocks that it takes."""
        table, size = self.held[sequence], self.block_size
        blocks = -(-tokens // size) - table.taken
        if self.tables is not None:
            self.tables.grow_until(decode_step + 1)
            self.tables.hold(sequence, tokens)
        if blocks:
            self.pool.take(table, blocks, decode_step, at_row(self.cache_log.row))
        if table.path is not None:
            self.pool.publish(table, tokens // size, decode_step)
        return blocks

    # --- What the executor and the engine do ---

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        super().prefill(sequence, decode_step)
        self._count_shared_once()

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        super().admit(sequence, decode_step, padded_tokens, past)
        self.pool.decode(self.held[sequence], sequence.start_tokens - decode_step)
        self._count_shared_once()

    def stall(self, sequence: Sequence, decode_step: int) -> None:
        self.pool.pause(self.held[sequence], sequence.held_tokens(decode_step) // self.block_size)
        super().stall(sequence, decode_step)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        self._release(list(leaving), decode_step, returns=False)

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``ChunkedMemory``."""
        running = []
        for sequence in preempted:
            if sequence in self.partial:
                self._drop(sequence, decode_step, after_step(decode_step), returns=True)
            else:
                running.append(sequence)
        self._release(running, decode_step, returns=True)

    def drop(self, sequence: Sequence, decode_step: int) -> None:
        """See ``ChunkedMemory``; between two rows of the ledger."""
        self._drop(sequence, decode_step, at_row(self.cache_log.row), returns=False)

    def _release(self, leaving: list[Sequence], decode_step: int, returns: bool) -> None:
        """Running sequences leave; those that return are computed again."""
        if self.tables is not None:
            self.tables.grow_until(decode_step)
        pool, size, held = self.pool, self.block_size, self.held
        # Also of victims: a sequence decoded in the step before.
        now = after_step(decode_step)
        if pool.queue.unnamed_first:
            pool.queue.reach(self.free)
        for sequence in leaving:
            tokens = decode_step - 1 + sequence.lag
            index = sequence.index if returns else None
            pool.release(held.pop(sequence), -(-tokens // size), tokens // size, now, index)
        super().release(leaving, decode_step)
        self._count_shared_once()

    def _drop(self, sequence: Sequence, decode_step: int, now: int, returns: bool) -> None:
        """A sequence that does not decode gives up its blocks."""
        if self.tables is not None:
            self.tables.grow_until(decode_step)
        if self.pool.queue.unnamed_first:
            self.pool.queue.reach(self.free)
        filled = sequence.computed_tokens // self.block_size
        index = sequence.index if returns else None
        self.pool.release(self.held.pop(sequence), self.partial[sequence], filled, now, index)
        super().drop(sequence, decode_step)
        self._count_shared_once()

    def _count_shared_once(self) -> None:
        shared = self.pool.num_shared
        self.free += shared - self._shared
        self._shared = shared

    def steps_unhelped(self, state: State, steps: int) -> int:
        """See ``ChunkedMemory``: publish the block that it would find next, which then needs no place of its own."""
        transaction = self._transaction
        if transaction.seeker is None or transaction.path is None:
            return steps
        place = transaction.found[-1][2] if transaction.found else 0
        author = self._author_of(transaction.seeker, transaction.path, place)
        if author is None:
            return steps
        until = (place + 1) * self.block_size - author.lag - state.decode_step
        if until < 1:
            raise SimulationFault(f"block {place} of request {transaction.seeker.index} is full and was not published")
        return min(steps, until)

    def _author_of(self, seeker: Sequence, path: Path, place: int) -> BlockTable | None:
        """The table of the sequence that will publish, while it decodes, the block at ``place`` of a waiting one."""
        if place >= lookup_blocks(seeker.start_tokens, self.block_size):
            return None
        return next(chain.author for chain, stop in path if place < stop)

    def advance(self, state: State, steps: int) -> Meter:
        """See ``ChunkedMemory``; slots that are shared are live once."""
        self.cache_log.row += 1
        self._grown_until = state.decode_step + steps
        live, held, tail = super().advance(state, steps)
        return live - self._shared * self.block_size, held, tail

    def _growing(self) -> Iterator[tuple[int, int, int]]:
        """See ``QueueHistory``."""
        for sequence, table in self.held.items():
            if table.decodes:
                blocks = self.partial.get(sequence) or -(-(self._grown_until - 1 + table.lag) // self.block_size)
                yield table.taken, blocks, table.lag

    # --- Recordings ---

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: blocks with a hash."""
        if self.tables is None:
            return super().cached_block_ids()
        size, until = self.block_size, self.tables.grown_until
        named = [np.flatnonzero(np.frombuffer(self.tables.pool.is_named, np.uint8))]
        for sequence, table in self.held.items():
            full = table.published
            if table.decodes and sequence not in self.partial:
                full = (until - 1 + table.lag) // size
            elif table.path is None:
                full = sequence.computed_tokens // size
            named.append(np.array(self.tables.tables[sequence][:full], dtype=np.int64))
        return np.concatenate(named)


class CachedTables(BlockTables):
    """Ids of the blocks in tables; what is free is in the queue of the memory's pool.

    Args:
        queue: That queue.
        block_size: Tokens a block.
    """

    def __init__(self, queue: FreeIds, block_size: int) -> None:
        super().__init__(0, 0, block_size)
        # No kind of ``BlockPool``: tables only take from it, and what they give back joins it block by block.
        self.pool: FreeIds = queue  # type: ignore[assignment]

    @property
    def grown_until(self) -> int:
        """Decode step up to which tables have grown."""
        return self._grown_until

    def drop(self, sequence: Sequence) -> None:
        del self.tables[sequence]

    def leave(self, sequence: Sequence, phase: int) -> None:
        self.park(sequence, phase)
        del self.tables[sequence]
