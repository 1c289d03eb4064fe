"""Paged memory with a prefix cache: free blocks keep their contents for prompts with the same prefix, as in vLLM.

    look up     a waiting sequence finds its longest cached prefix by the names of its blocks
    enter       it takes the found blocks, and new blocks for the tokens that it computes
    publish     a block gets a name, and can be found, from the step on that computes its last token
    release     blocks in no table join the tail of the free queue and keep their names

Counts are those of ``PagedMemory``, except for shared blocks: ``free`` counts blocks in no table, and a block in two
tables is held once. In a step the running sequences take and publish blocks before a waiting sequence enters, and
waiting sequences enter one after the other. Grants take effect at once, so the next look-up sees their evictions and
publications. The executor carries out the rest of the plan.

Contents are segments of blocks (``prefix.segments``). Blocks that running sequences take, and the resulting evictions, are
computed from the counts at a look-up of blocks that may be cached. The log has the step of each change after the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ...types.state import State
from ..accounting.cache_log import CacheLog
from ..accounting.ledger import Meter
from ..accounting.moments import after_step, at_row
from ..accounting.repeats import idle_repeats
from ..prefix import BlockTable, Chains, Found, FreeIds, Path, SegmentPool, lookup_blocks
from .block_tables import BlockTables
from .paged import PagedMemory
from .transaction import PagedTransaction

#: Result of a look-up that found nothing; never changed.
_NOTHING: Found = []


class CachedTransaction(PagedTransaction):
    """As ``PagedTransaction``; grants take effect at once."""

    __slots__ = ("found", "left", "path", "seeker")
    memory: CachedMemory
    #: Free blocks after the blocks of the running sequences and the grants so far.
    left: int
    #: The last sequence with a look-up and without a grant, the names of its blocks, and the found blocks.
    seeker: Sequence | None
    path: Path | None
    found: Found

    def look_up(self, sequence: Sequence) -> int:
        """See ``PagedTransaction``."""
        memory = self.memory
        self.seeker = sequence
        # Blocks that were never computed and that no other request shares are not looked up.
        if memory.unshared[sequence.index] and not sequence.lost_tokens:
            self.path, self.found = None, _NOTHING
            return 0
        self.path = memory.path(sequence)
        self.found = [] if self.path is None else memory.find(sequence, self.path, self.left, self.decode_step)
        return self.found[-1][2] * self.block_size if self.found else 0

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """See ``PagedTransaction``: all blocks except found blocks in tables. Found free blocks count as taken."""
        blocks = -(-sequence.start_tokens // self.block_size)
        if not self.found:
            return blocks
        return blocks - sum(stop - first for segment, first, stop in self.found if segment.references)

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        """See ``PagedTransaction``."""
        memory, path = self.memory, self.path
        self.seeker = None
        self.free -= blocks
        if path is None:
            sequence.computed_tokens = 0
            if memory.leaves_alone and tokens == sequence.start_tokens:
                memory.alone[sequence] = at_row(memory.cache_log.row)
            else:
                blocks = memory.enter_unshared(sequence, tokens, self.decode_step)
            self.left -= blocks
            return
        found = self.found
        sequence.computed_tokens = known = found[-1][2] * self.block_size if found else 0
        self.left -= memory.enter(sequence, path, found, known, self.decode_step)
        self.extend(sequence, known + tokens)

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """See ``PagedTransaction``."""
        self.left -= self.memory.hold(sequence, tokens, self.decode_step)

    # For steps that handle the running sequences one by one.

    def preempt(self, sequence: Sequence) -> None:
        """See ``PagedTransaction``."""
        memory, before = self.memory, self.memory.free
        memory.preempt_deciding(sequence, self.free, self.decode_step)
        self.free += memory.free - before


class CachedMemory(PagedMemory):
    """As ``PagedMemory`` for one KV group, with a prefix cache.

    Args:
        num_blocks: Blocks of the device pool, without vLLM's null block.
        block_size: Tokens per block.
        chains: Names of the blocks of every request.
        ids: See ``PagedMemory``.
        unnamed_first, ahead: See ``SegmentPool``.

    Attributes:
        pool: The blocks and their contents.
        held: Tables of the sequences on the device, except those in ``alone``.
        alone: Moments at which sequences took their blocks that share no blocks and took those of all their tokens at once.
        leaves_alone: Whether a sequence in ``alone`` is logged as one record when it leaves.
    """

    _transaction: CachedTransaction

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        chains: Chains,
        ids: bool,
        unnamed_first: bool,
        ahead: bool,
    ) -> None:
        super().__init__(num_blocks, block_size)
        # A running sequence takes a block as its last step ends; also for a token that is computed in vain, in a step in which
        # no sequence decodes.
        self.pool = SegmentPool(num_blocks, block_size, chains, after_step, unnamed_first, ids, ahead)
        self._ahead = ahead
        self.pool.history.growing, self.pool.history.alone = self._growing, self._take_alone
        self.held: dict[Sequence, BlockTable] = {}
        self.alone: dict[Sequence, int] = {}
        self.cache_log: CacheLog = CacheLog(block_size, self.pool.history)
        self.cached_level = self.cache_log
        self.leaves_alone = not ids
        self._pack_left, self._append_left = self.pool.queue.left.pack, self.pool.queue.left.append
        if isinstance(self.pool.queue, FreeIds):
            # Not a ``BlockPool``: tables only take blocks from it, and the segment pool puts released blocks into it.
            self.tables = BlockTables(0, 0, block_size, self.pool.queue)
        self._transaction = CachedTransaction(self)
        #: For each request, whether no other request has a common prefix with it.
        self.unshared = chains.unshared
        # Those of them that have finished and take no more blocks, with the step that comes after their last one.
        self._resting: dict[Sequence, int] = {}
        # Paths of waiting sequences with a look-up.
        self._paths: dict[Sequence, Path | None] = {}
        # Sequences that were preempted while the current step was decided.
        self._gone: set[Sequence] = set()
        #: Decode step up to which the running sequences have grown.
        self._grown_until = 0
        self._decided_until = 0

    @property
    def evicted_blocks(self) -> int:
        """Number of blocks that were taken while a look-up could find them.

        With ids they are counted as they are taken; without, they follow from the logs, in a time that grows with these.
        """
        queue = self.pool.queue
        return queue.evicted_blocks if isinstance(queue, FreeIds) else self.pool.history.evicted_blocks

    def transaction(self, decode_step: int) -> CachedTransaction:
        """See ``Memory``."""
        transaction = self._transaction
        if self.tables is not None:
            self.tables.grow_until(decode_step)
        transaction.free = free = self.free
        transaction.need = transaction.takes = need = self._phases[decode_step % self.block_size]
        transaction.left, transaction.decode_step = free - need, decode_step
        transaction.seeker = None
        return transaction

    # --- Grants of a transaction ---

    def path(self, sequence: Sequence) -> Path | None:
        """Path of a waiting sequence; None if none of its blocks can be cached."""
        path = self._paths.get(sequence)
        if path is None and (path := self.pool.path(sequence.index)) is not None:
            self._paths[sequence] = path
        return path

    def find(self, sequence: Sequence, path: Path, free: int, decode_step: int) -> Found:
        """The longest cached prefix of a waiting sequence's tokens without the last one; ``free`` blocks are free."""
        if self.tables is not None:
            self.tables.grow_until(decode_step + 1)
        self.pool.queue.reach(free)
        self._decided_until = decode_step + 1
        return self.pool.look_up(path, lookup_blocks(sequence.start_tokens, self.block_size), decode_step)

    def enter_unshared(self, sequence: Sequence, tokens: int, decode_step: int) -> int:
        """Create a table for the first ``tokens`` of a waiting sequence without a path. Returns the number of blocks."""
        blocks, now = -(-tokens // self.block_size), at_row(self.cache_log.row)
        self.pool.history.takes.add(now, decode_step, blocks, sequence.index, sequence.start_tokens, 0)
        self.held[sequence] = table = BlockTable(blocks, now)
        if self.tables is not None:
            self.tables.grow_until(decode_step + 1)
            self.tables.hold(sequence, tokens)
            table.ids = self.tables.tables[sequence]
        return blocks

    def enter(self, sequence: Sequence, path: Path, found: Found, known: int, decode_step: int) -> int:
        """Create a table with the found blocks of a waiting sequence. Returns the number of them that were free.

        Args:
            known: Number of tokens of the found blocks.
        """
        ids, pool, now = None, self.pool, at_row(self.cache_log.row)
        if self.tables is not None:
            ids = self.tables.tables.setdefault(sequence, [])
        del self._paths[sequence]
        shared = pool.num_shared
        self.held[sequence] = pool.enter(path, found, now, ids)
        shared = pool.num_shared - shared
        # Its admission later subtracts the blocks of all its tokens from ``free``.
        self.free += shared
        pool.history.takes.add(now, decode_step, 0, sequence.index, sequence.start_tokens, known)
        return known // self.block_size - shared

    def hold(self, sequence: Sequence, tokens: int, decode_step: int) -> int:
        """Extend a table to ``tokens`` and publish its full blocks. Returns the number of blocks that it takes."""
        table, size = self.held[sequence], self.block_size
        blocks = -(-tokens // size) - table.taken
        if self.tables is not None:
            self.tables.grow_until(decode_step + 1)
            self.tables.hold(sequence, tokens)
        if blocks:
            self.pool.take(table, blocks, decode_step, at_row(self.cache_log.row))
        if table.path is not None:
            self.pool.publish(table, tokens // size, decode_step)
            if tokens == sequence.start_tokens:
                self.pool.decode(table, tokens - decode_step)
        return blocks

    # --- Calls of the executor and the engine ---

    def stall(self, sequence: Sequence, decode_step: int) -> None:
        """See ``PagedMemory``."""
        if sequence in self.partial:
            return
        self._wake(sequence)
        filled = sequence.held_tokens(decode_step) // self.block_size
        table = self.held[sequence] = self._pop(sequence)
        self.pool.pause(table, filled, sequence.lag)
        super().stall(sequence, decode_step)

    def hold_finished(self, finished: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        phases, size = self._phases, self.block_size
        for sequence in finished:
            if self.leaves_alone and sequence in self.alone:
                # Cheaper than a stall, which gives it a table.
                self._resting[sequence] = decode_step
                phase = (1 - sequence.lag) % size
                phases[phase] -= 1
                phases[phase + size] -= 1
                continue
            tokens = self._known_tokens(sequence, decode_step)
            table = self.held[sequence] = self._pop(sequence)
            self.pool.pause(table, tokens // self.block_size, sequence.lag)
            super().stall(sequence, decode_step)
            sequence.computed_tokens = tokens

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``."""
        self._decided_until = decode_step + 1
        if self.leaves_alone and not self.held:
            self._release_alone(leaving, decode_step, True)
            return
        leaving = tuple(leaving)
        if self.leaves_alone and all(map(self.alone.__contains__, leaving)):
            self._release_alone(leaving, decode_step, True)
            return
        if self.tables is not None:
            self.tables.grow_until(decode_step + 1)
        for sequence in leaving:
            free = self.free - self._phases[decode_step % self.block_size]
            if sequence in self._resting:
                self._release((sequence,), decode_step, returns=False, free=free)
            elif sequence in self.partial:
                sequence.computed_tokens = sequence.held_tokens(decode_step)
                self._drop(sequence, decode_step, after_step(decode_step), returns=False, free=free)
            else:
                self._release((sequence,), decode_step, returns=False, free=free, in_vain=True)

    def _wake(self, sequence: Sequence) -> bool:
        """Count a resting sequence again. Returns whether it rested."""
        if sequence not in self._resting:
            return False
        del self._resting[sequence]
        phase = (1 - sequence.lag) % self.block_size
        self._phases[phase] += 1
        self._phases[phase + self.block_size] += 1
        return True

    def _known_tokens(self, sequence: Sequence, decode_step: int) -> int:
        """Computed tokens of a decoding sequence with known ids when ``decode_step`` was scheduled: with asynchronous scheduling the last
        one is still being sampled."""
        tokens = sequence.held_tokens(decode_step)
        return tokens - (self._ahead and tokens > sequence.start_tokens)

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``PagedMemory``."""
        running, gone = [], self._gone
        self._gone = set()
        for sequence in (each for each in preempted if each not in gone):
            if sequence in self.partial:
                self._drop(sequence, decode_step, after_step(decode_step), returns=True)
            else:
                running.append(sequence)
        if running:
            self._release(running, decode_step, returns=True)

    def preempt_deciding(self, sequence: Sequence, free: int, decode_step: int) -> None:
        """Preempt a sequence while the step is decided; ``free`` blocks are free before it."""
        self._gone.add(sequence)
        self._decided_until = decode_step + 1
        if sequence in self.partial:
            self._drop(sequence, decode_step, after_step(decode_step), returns=True, free=free)
        else:
            self._release((sequence,), decode_step, returns=True, free=free)

    def drop(self, sequence: Sequence, decode_step: int) -> None:
        """See ``PagedMemory``; between two rows of the ledger."""
        self._drop(sequence, decode_step, at_row(self.cache_log.row), returns=False)

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``PagedMemory``."""
        if self.leaves_alone and not self.held:
            self._release_alone(leaving, decode_step)
            return
        leaving = tuple(leaving)
        if self.leaves_alone and all(map(self.alone.__contains__, leaving)):
            self._release_alone(leaving, decode_step)
        else:
            self._release(leaving, decode_step, returns=False)

    def _release_alone(self, leaving: Iterable[Sequence], decode_step: int, in_vain: bool = False) -> None:
        """As ``_release``, for finished sequences without shared blocks: one record for each sequence.

        No block is looked up, so the queue need not be up to date.

        Args:
            in_vain: Whether all running sequences, these included unless they rest, have taken their blocks for
                ``decode_step``.
        """
        size, pop, phases, now = self.block_size, self.alone.pop, self._phases, after_step(decode_step)
        append, pack, resting = self._append_left, self._pack_left, self._resting
        free, freed = self.free - in_vain * phases[decode_step % size], 0
        for sequence in leaving:
            lag = sequence.lag
            tokens = decode_step - 1 + lag
            stop = blocks = -(-tokens // size)
            if sequence in resting:
                del resting[sequence]
            else:
                phase = (1 - lag) % size
                phases[phase] -= 1
                phases[phase + size] -= 1
                if in_vain:
                    stop = tokens // size + 1
            append(pack(tokens, stop, lag, sequence.index, sequence.start_tokens, pop(sequence), now, free))
            free += stop
            freed += blocks
        self.free += freed

    def _release(
        self,
        leaving: Iterable[Sequence],
        decode_step: int,
        returns: bool,
        free: int | None = None,
        in_vain: bool = False,
    ) -> None:
        """Release the blocks of sequences that decoded in the previous step.

        Args:
            returns: Whether they will be computed again.
            free: Free blocks before the release; None if the running sequences have taken none in this step.
            in_vain: Whether they have taken a block for a token that ``decode_step`` computes in vain.
        """
        size, pool = self.block_size, self.pool
        if self.tables is not None:
            self.tables.grow_until(decode_step)
        if pool.queue.unnamed_first:
            pool.queue.reach(self.free if free is None else free)
        # This also applies to victims: they decoded in the previous step.
        now, shared = after_step(decode_step), pool.num_shared
        for sequence in leaving:
            self._wake(sequence)
            tokens, index = decode_step - 1 + sequence.lag, sequence.index if returns else None
            filled = (self._known_tokens(sequence, decode_step) if returns else tokens) // size
            pool.release(self._pop(sequence), -(-(tokens + in_vain) // size), filled, now, sequence.lag, index)
        PagedMemory.release(self, leaving, decode_step)
        self.free += pool.num_shared - shared

    def _drop(self, sequence: Sequence, decode_step: int, now: int, returns: bool, free: int | None = None) -> None:
        """Release the blocks of a sequence that does not decode."""
        pool = self.pool
        if self.tables is not None:
            self.tables.grow_until(decode_step)
        if pool.queue.unnamed_first:
            pool.queue.reach(self.free if free is None else free)
        filled, shared = sequence.computed_tokens // self.block_size, pool.num_shared
        index = sequence.index if returns else None
        pool.release(self._pop(sequence), self.partial[sequence].blocks, filled, now, None, index)
        super().drop(sequence, decode_step)
        self.free += pool.num_shared - shared

    def _pop(self, sequence: Sequence) -> BlockTable:
        """Remove and return the table of a sequence."""
        born = self.alone.pop(sequence, None)
        if born is None:
            return self.held.pop(sequence)
        self.pool.history.takes.add(*self._take_of(sequence, born))
        return BlockTable(-(-sequence.start_tokens // self.block_size), born)

    def _take_of(self, sequence: Sequence, born: int) -> tuple[int, ...]:
        """Taking of a sequence without a table, by ``history.TAKE``."""
        known = sequence.start_tokens
        return born, known - sequence.lag, -(-known // self.block_size), sequence.index, known, 0

    def _take_alone(self) -> Iterator[tuple[int, ...]]:
        """See ``QueueHistory``."""
        return (self._take_of(sequence, born) for sequence, born in self.alone.items())

    def steps_before_admission(self, state: State, steps: int) -> int:
        """See ``PagedMemory``: the steps until a running sequence publishes the next block of the waiting sequence."""
        transaction = self._transaction
        if transaction.seeker is None or transaction.path is None:
            return steps
        place = transaction.found[-1][2] if transaction.found else 0
        author = self._author_of(transaction.seeker, transaction.path, place)
        if author is None:
            return steps
        until = (place + 1) * self.block_size - author.lag - state.decode_step + self._ahead
        if until < 1:
            raise SimulationFault(f"block {place} of request {transaction.seeker.index} is full and was not published")
        return min(steps, until)

    def _author_of(self, seeker: Sequence, path: Path, place: int) -> BlockTable | None:
        """The table of a decoding sequence that will publish the block at ``place`` of the waiting ``seeker``, if any."""
        if place >= lookup_blocks(seeker.start_tokens, self.block_size):
            return None
        chain = next(chain for chain, stop in path if place < stop)
        author = chain.author
        # The author may have gone on to another chain before ``place``.
        fills = author is not None and any(own is chain and place < stop for own, stop in author.path or ())
        return author if fills else None

    def repeated_slots(self, admitted: Iterable[Sequence] = ()) -> int:
        """See ``Memory``; without ids the same as with."""
        shared, held = self.pool.num_shared, self.held
        if not shared:
            return 0
        idle = (held[sequence].segments() for sequence in (*self.partial, *admitted) if sequence in held)
        pieces = chain.from_iterable(idle)
        shared -= idle_repeats(pieces, lambda piece: piece.references, lambda piece: piece.stop - piece.first)
        return shared * self.block_size

    def advance(self, state: State, steps: int) -> Meter:
        """See ``PagedMemory``; shared slots are live once."""
        self.cache_log.row += 1
        self._grown_until = state.decode_step + steps
        live, held, tail = super().advance(state, steps)
        return live - self.pool.num_shared * self.block_size, held, tail

    def _growing(self) -> Iterator[tuple[int, int, int]]:
        """See ``QueueHistory``."""
        # The head of the queue has passed the blocks of a decided step, although the step has not run.
        size, until = self.block_size, max(self._grown_until, self._decided_until)
        if self.tables is not None:
            # Tables with ids may have grown through the step that is being decided.
            until = max(until, self.tables.grown_until)
        taken = {sequence: table.taken for sequence, table in self.held.items()}
        taken |= {sequence: -(-sequence.start_tokens // size) for sequence in self.alone}
        for sequence, blocks in taken.items():
            if sequence not in self.partial:
                # One that rests took none in a step that was decided after its last one.
                yield blocks, -(-(self._resting.get(sequence, until) - 1 + sequence.lag) // size), sequence.lag
            elif self.held[sequence].decodes:
                yield blocks, self.partial[sequence].blocks, self.held[sequence].lag

    # --- Recordings ---

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: blocks with a hash."""
        if self.tables is None or not isinstance(self.pool.queue, FreeIds):
            return super().cached_block_ids()
        size, until = self.block_size, self.tables.grown_until
        named = [np.flatnonzero(np.frombuffer(self.pool.queue.is_named, np.uint8))]
        for sequence, table in self.held.items():
            stalled = sequence in self.partial
            full = (sequence.computed_tokens if stalled else self._known_tokens(sequence, until)) // size
            named.append(np.array(self.tables.tables[sequence][:full], dtype=np.int64))
        return np.concatenate(named)
