"""Paged memory with a prefix cache: free blocks keep their contents for prompts with the same prefix, as in vLLM.

    look up    a waiting sequence finds its longest cached prefix by the hashes of its blocks
    enter      it takes the found blocks, and new blocks for the tokens that it computes
    cache      a full block gets its hash, and can be found, from the step on that computes its last token
    release    blocks in no table join the free queue and keep their hashes

Blocks, hashes and the order of eviction are those of ``prefix.block_pool``. Counts are those of ``PagedMemory``, except for shared
blocks: ``free`` counts blocks in no table, and a block in two tables is held once. A leap ends by these counts alone. When it
is over, ``CachedTables`` takes its blocks in one pass, in the order of the steps and, within a step, of the running sequences:

    steps          90        91          92     93
    take a block   r3 r5     -           r1     r2 r4        r3's new block is the first of the free queue

A step that is decided works on the tables at once: the running sequences take and cache blocks before a waiting sequence
looks its prefix up, and waiting sequences enter one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from collections.abc import Set as AbstractSet
from itertools import chain

import numpy as np

from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Meter
from ..accounting.moments import after_step, at_row
from ..accounting.repeats import idle_repeats
from ..prefix import UNSHARED, BlockPool, BlockResidency, Chains, FreeKVCacheBlockQueue, lookup_blocks
from ..prefix.block_tables import BlockTables
from ..prefix.chains import Paths
from ..prefix.contents_log import Asked, ContentsLog
from .paged import PagedMemory
from .transaction import PagedTransaction

#: Result of a look-up that found nothing; never changed.
_NOTHING: list[int] = []


class CachedTables(BlockTables):
    """Block tables of which full blocks get their hashes as sequences fill them.

    Args:
        pool: The blocks.
        log: Has the row that is decided.
        ahead: Whether a step is decided before the step before it is over: a block that decoding fills then gets its hash
            with the sequence's next block, when all its tokens are known; else in the step that fills it.

    Attributes:
        hashes: Hashes of each sequence's blocks by place; None if no look-up asks for them.
        num_cached_blocks: Blocks of each table with a hash, which are its first ones.
        leaves_at: The moment at which sequences give up their tables.
    """

    pool: BlockPool

    def __init__(self, pool: BlockPool, block_size: int, log: CacheLog, ahead: bool) -> None:
        super().__init__(0, 0, block_size, pool)
        self.hashes: dict[Sequence, Values[int] | None] = {}
        self.num_cached_blocks: dict[Sequence, int] = {}
        self._log, self._ahead = log, ahead
        self.leaves_at = 0

    def enter(self, sequence: Sequence, found: list[int], hashes: Values[int] | None) -> None:
        """A waiting sequence takes the blocks that it found."""
        if found:
            cached = self.pool.num_cached
            self.pool.touch(found, at_row(self._log.row))
            self._log.change(self.pool.num_cached - cached, at_row(self._log.row))
        self.tables[sequence] = found.copy()
        self.hashes[sequence], self.num_cached_blocks[sequence] = hashes, len(found)

    def growing(self) -> Iterable[Sequence]:
        """Sequences that decode."""
        return chain.from_iterable(self._members)

    def hold(self, sequence: Sequence, tokens: int) -> None:
        table = self.tables[sequence]
        missing = -(-tokens // self._block_size) - len(table)
        if missing > 0:
            table += self.pool.get_new_blocks(missing, [at_row(self._log.row)] * missing)

    def cache(self, sequence: Sequence, full: int) -> None:
        """The first ``full`` blocks of a table have hashes from now on."""
        done, hashes = self.num_cached_blocks[sequence], self.hashes[sequence]
        if full > done:
            blocks = self.tables[sequence][done:full]
            self.pool.cache_full_blocks(blocks, [UNSHARED] * len(blocks) if hashes is None else hashes[done:full])
            self.num_cached_blocks[sequence] = full

    def name(self, sequence: Sequence, hashes: Values[int]) -> None:
        """Look-ups may ask from now on for the blocks of a sequence that did not need hashes before."""
        self.hashes[sequence] = hashes
        blocks = self.tables[sequence][: self.num_cached_blocks[sequence]]
        self.pool.cache_full_blocks(blocks, hashes[: len(blocks)])

    def append(self, sequence: Sequence) -> None:
        self._take([sequence], [after_step(self._grown_until)])

    def grow_until(self, decode_step: int) -> None:
        first = self._grown_until
        if decode_step <= first:
            return
        self._grown_until = decode_step
        members, size = self._members, self._block_size
        full: list[Sequence] = []
        moments: list[int] = []
        for step in range(first, decode_step):
            takers = members[step % size]
            if takers:
                full += takers
                # A running sequence takes a block as its last step ends; also for a token that is computed in vain, in a step
                # in which no sequence decodes.
                moments += [after_step(step)] * len(takers)
        if full:
            self._take(full, moments)
        if not self._ahead:
            self._cache_filled(first, decode_step)

    def grown(self, decode_step: int, idle: AbstractSet[Sequence]) -> None:
        super().grown(decode_step, idle)
        if not self._ahead:
            self._cache_filled(decode_step, decode_step + 1, idle)

    def _take(self, full: list[Sequence], moments: list[int]) -> None:
        """A block for each of the sequences in turn, in the table of which all blocks are full."""
        tables, cached, hashes, ahead = self.tables, self.num_cached_blocks, self.hashes, self._ahead
        blocks: list[int] = []
        names: list[int] = []
        for sequence, block in zip(full, self.pool.get_new_blocks(len(full), moments), strict=True):
            table = tables[sequence]
            if ahead and (place := cached[sequence]) < len(table):
                blocks.append(table[place])
                known = hashes[sequence]
                names.append(UNSHARED if known is None else known[place])
                cached[sequence] = place + 1
            table.append(block)
        self.pool.cache_full_blocks(blocks, names)

    def _cache_filled(self, first: int, stop: int, idle: AbstractSet[Sequence] = frozenset()) -> None:
        """Blocks that decoding sequences fill in some steps have hashes from the step on."""
        members, size = self._members, self._block_size
        for step in range(first, stop):
            for sequence in members[(step + 1) % size]:
                if sequence not in idle:
                    self.cache(sequence, (step + sequence.lag) // size)

    def drop(self, sequence: Sequence) -> None:
        self._free(sequence)

    def leave(self, sequence: Sequence, phase: int) -> None:
        self.park(sequence, phase)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        cached = self.pool.num_cached
        self.pool.free_blocks(self.tables.pop(sequence), self.leaves_at)
        self._log.change(self.pool.num_cached - cached, self.leaves_at)
        del self.hashes[sequence], self.num_cached_blocks[sequence]


class CachedTransaction(PagedTransaction):
    """As ``PagedTransaction``; grants take effect at once."""

    __slots__ = ("found", "hashes", "seeker")
    memory: CachedMemory
    #: The last sequence with a look-up and without a grant, the hashes of its blocks if they are looked up, and the found blocks.
    seeker: Sequence | None
    hashes: Values[int] | None
    found: list[int]

    def look_up(self, sequence: Sequence) -> int:
        memory = self.memory
        self.seeker, self.hashes, self.found = sequence, None, _NOTHING
        # Blocks that were never computed and that no other request shares are not looked up.
        if not memory.unshared[sequence.index] or sequence.lost_tokens:
            self.hashes = memory.hashes(sequence)
            self.found = memory.find(sequence, self.hashes, self.decode_step)
        return len(self.found) * self.block_size

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``: all blocks except found blocks in tables. Found free blocks count as taken."""
        blocks = -(-sequence.start_tokens // self.block_size)
        if not self.found:
            return blocks
        references = self.memory.pool.ref_cnt
        return blocks - len(self.found) + [*map(references.__getitem__, self.found)].count(0)

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        self.seeker = None
        self.free -= blocks
        sequence.computed_tokens = known = len(self.found) * self.block_size
        self.memory.enter(sequence, self.found, self.hashes, self.decode_step)
        self.extend(sequence, known + tokens)

    def extend(self, sequence: Sequence, tokens: int) -> None:
        self.memory.hold(sequence, tokens)

    # For steps that handle the running sequences one by one.

    def preempt(self, sequence: Sequence) -> None:
        memory, before = self.memory, self.memory.free
        memory.preempt_deciding(sequence, self.decode_step)
        self.free += memory.free - before


class CachedMemory(PagedMemory):
    """As ``PagedMemory`` with a prefix cache, for one KV group.

    Args:
        num_blocks: Blocks of the device pool, without vLLM's null block.
        block_size: Tokens per block.
        chains: Block hashes of every request.
        order: Class of the queue that orders free blocks.
        ahead: See ``CachedTables``.

    Attributes:
        pool: The blocks.
        tables: Block tables of the sequences on the device.
        chains: Block hashes of every request.
        unshared: For each request, whether no other request shares a prefix with it.
        contents: Log of the contents that the pool keeps; None if no two requests share any.
        paths: Paths of the served requests, if known; else None.
    """

    _transaction: CachedTransaction
    tables: CachedTables
    cache_log: CacheLog
    num_kv_groups, has_bounds = 1, True

    def __init__(
        self, num_blocks: int, block_size: int, chains: Chains, order: type[FreeKVCacheBlockQueue], ahead: bool
    ) -> None:
        super().__init__(num_blocks, block_size)
        residency = BlockResidency()
        # The requests of a cluster come one by one.
        none_shares = len(chains.unshared) > 0 and all(chains.unshared)
        self.contents = None if none_shares else ContentsLog()
        self.paths: Paths | None = None
        self.pool = BlockPool(num_blocks, order, residency, self.contents)
        self.cache_log = self.cached_level = CacheLog(block_size, residency)
        self.contents_kept = None if none_shares else self
        self.tables = CachedTables(self.pool, block_size, self.cache_log, ahead)
        self.unshared, self.chains, self._ahead = chains.unshared, chains, ahead
        self._transaction = CachedTransaction(self)
        # Hashes of the blocks of sequences that share a prefix.
        self._hashes: dict[Sequence, list[int]] = {}
        # Sequences that were preempted while the current step was decided.
        self._gone: set[Sequence] = set()
        # Ahead of batches in flight: sequences whose last token is in flight when their next one is decided, and the step after it.
        self._unsettled: dict[Sequence, int] = {}

    def sealed_contents(self) -> ContentsLog:
        """See ``ContentsKept``."""
        if self.contents is None:
            raise SimulationFault("no contents are logged where no two requests share any")
        self.pool.seal_contents()
        return self.contents

    def log_no_contents(self) -> None:
        self.contents = self.pool.contents = self.contents_kept = None

    def asked(self) -> Asked:
        """See ``ContentsKept``."""
        look_ups = self.cache_log.look_up_columns()
        stop = lookup_blocks(look_ups["known_tokens"], self.block_size)
        return Asked(look_ups["index"], np.zeros_like(stop), stop)

    def could_hit(self) -> None:
        """See ``ContentsKept``."""

    def paths_of(self, requests: np.ndarray) -> Paths:
        """See ``ContentsKept``."""
        return self.chains.paths(requests) if self.paths is None else self.paths

    @property
    def evicted_blocks(self) -> int:
        """See ``Memory``: blocks that were taken while a look-up could find them."""
        return self.pool.evicted_blocks

    def transaction(self, decode_step: int) -> CachedTransaction:
        self.tables.grow_until(decode_step)
        transaction = self._transaction
        transaction.free = self.free
        transaction.need = transaction.takes = self.phases.counts[decode_step % self.block_size]
        transaction.decode_step, transaction.seeker = decode_step, None
        return transaction

    # --- Grants of a transaction ---

    def hashes(self, sequence: Sequence) -> Values[int]:
        """Block hashes of a sequence, by position in its block table."""
        if self.unshared[sequence.index]:
            return self.chains.own_names(sequence.index)
        known = self._hashes.get(sequence)
        if known is None:
            known = self._hashes[sequence] = self.chains.names(sequence.index)
        return known

    def find(self, sequence: Sequence, hashes: Values[int], decode_step: int) -> list[int]:
        """Blocks of the longest cached prefix of a waiting sequence; its last token is always computed."""
        self.tables.grow_until(decode_step + 1)
        return self.pool.get_cached_blocks(hashes[: lookup_blocks(sequence.start_tokens, self.block_size)])

    def enter(self, sequence: Sequence, found: list[int], hashes: Values[int] | None, decode_step: int) -> None:
        """Create the block table of a waiting sequence from the blocks that ``find`` returned."""
        self.tables.grow_until(decode_step + 1)
        shared = self.pool.num_shared
        self.tables.enter(sequence, found, hashes)
        if self.contents is not None:
            self.contents.on_looked_up(hashes is not None, len(found), self.pool.num_free)
        # Its admission later subtracts the blocks of all its tokens from ``free``.
        self.free += self.pool.num_shared - shared
        self.cache_log.look_up(sequence.index, sequence.start_tokens, len(found) * self.block_size)

    def hold(self, sequence: Sequence, tokens: int) -> None:
        """Extend a table to ``tokens`` and cache its full blocks."""
        self.tables.hold(sequence, tokens)
        self.tables.cache(sequence, tokens // self.block_size)

    # --- Calls of the executor and the engine ---

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """See ``PagedMemory``; the full blocks of the tokens that are known have hashes."""
        if sequence in self.partial:
            return
        tokens = sequence.held_tokens(decode_step)
        if finished:
            tokens = sequence.computed_tokens = self._known_tokens(sequence, decode_step)
        self.tables.grow_until(decode_step)
        self.tables.cache(sequence, tokens // self.block_size)
        super().stall(sequence, decode_step)

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        self.tables.grow_until(decode_step + 1)
        for sequence in leaving:
            if sequence in self.partial:
                sequence.computed_tokens = self.partial[sequence].computed_tokens
                self._give_up(sequence, decode_step, after_step(decode_step), returns=False)
            else:
                self._release((sequence,), decode_step, returns=False)

    def _known_tokens(self, sequence: Sequence, decode_step: int) -> int:
        """Computed tokens of a decoding sequence with known ids when ``decode_step`` was scheduled: with asynchronous scheduling the last
        one is still being sampled."""
        tokens = sequence.held_tokens(decode_step)
        return tokens - (self._ahead and tokens > sequence.start_tokens)

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        gone, self._gone = self._gone, set()
        for sequence in preempted:
            if sequence not in gone:
                self._preempt(sequence, decode_step)

    def preempt_deciding(self, sequence: Sequence, decode_step: int) -> None:
        """Preempt a sequence while the step is decided."""
        self._gone.add(sequence)
        self._preempt(sequence, decode_step)

    def _preempt(self, sequence: Sequence, decode_step: int) -> None:
        if sequence in self.partial:
            self._give_up(sequence, decode_step, after_step(decode_step), returns=True)
        else:
            self._release((sequence,), decode_step, returns=True)

    def _drop(self, sequence: Sequence, decode_step: int) -> None:
        """See ``PagedMemory``; between two rows of the ledger."""
        self._give_up(sequence, decode_step, at_row(self.cache_log.row), returns=False)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        if self.partial:
            leaving = self._drop_partial(leaving, decode_step)
        self._release(tuple(leaving), decode_step, returns=False)

    def _release(self, leaving: tuple[Sequence, ...], decode_step: int, returns: bool) -> None:
        """Free the block tables of sequences that finished, or were preempted, after they decoded in the previous step.

        Args:
            returns: Whether they will be computed again.
        """
        self.tables.grow_until(decode_step)
        shared = self.pool.num_shared
        for sequence in leaving:
            tokens = self._known_tokens(sequence, decode_step) if returns else decode_step - 1 + sequence.lag
            self._close(sequence, tokens, returns)
        self.tables.leaves_at = after_step(decode_step)
        PagedMemory.release(self, leaving, decode_step)
        self.free += self.pool.num_shared - shared

    def _give_up(self, sequence: Sequence, decode_step: int, moment: int, returns: bool) -> None:
        """Release the blocks of a sequence that does not decode."""
        self.tables.grow_until(decode_step)
        shared = self.pool.num_shared
        self._close(sequence, sequence.computed_tokens, returns)
        self.tables.leaves_at = moment
        super()._drop(sequence, decode_step)
        self.free += self.pool.num_shared - shared

    def _close(self, sequence: Sequence, tokens: int, returns: bool) -> None:
        """A sequence gives up its blocks, with hashes for the full ones of its first ``tokens``."""
        self.tables.cache(sequence, tokens // self.block_size)
        if not returns:
            self._hashes.pop(sequence, None)
        elif self.tables.hashes[sequence] is None:
            # It may find them again.
            self.tables.name(sequence, self.hashes(sequence))

    def steps_before_admission(self, state: State, steps: int) -> int:
        """See ``PagedMemory``: the steps until a running sequence caches the next block of the waiting sequence."""
        transaction, place = self._transaction, len(self._transaction.found)
        seeker, wanted = transaction.seeker, transaction.hashes
        if seeker is None or wanted is None or place >= lookup_blocks(seeker.start_tokens, self.block_size):
            return steps
        for sequence in self.tables.growing():
            hashes = self.tables.hashes[sequence]
            if hashes is not None and hashes[place : place + 1] == [wanted[place]]:
                until = (place + 1) * self.block_size - sequence.lag - state.decode_step + self._ahead
                if until < 1:
                    raise SimulationFault(f"block {place} of request {seeker.index} is full and was not cached")
                steps = min(steps, until)
        return steps

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        if not self.pool.num_shared:
            return 0
        tables = self.tables.tables
        idle = chain.from_iterable(tables[sequence] for sequence in (*self.partial, *admitted) if sequence in tables)
        repeated = self.pool.num_shared - idle_repeats(idle, self.pool.ref_cnt.__getitem__)
        return repeated * self.block_size

    def advance(self, state: State, steps: int) -> Meter:
        """See ``PagedMemory``; shared slots are live once."""
        self.cache_log.row += 1
        live, held, tail = super().advance(state, steps)
        self.tables.grow_until(state.decode_step + steps)
        return live - self.pool.num_shared * self.block_size, held, tail

    # --- Recordings ---

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: blocks with a hash."""
        return self.pool.hashed_ids()
