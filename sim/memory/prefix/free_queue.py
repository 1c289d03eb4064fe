"""vLLM's free queue, with runs of blocks on an append-only tape.

Freed blocks are appended to the tape, each at the next place. Taking blocks from the head of the queue advances the head. A
block that is hit leaves a hole:

    tape    0 1 2 3 4 5 6 7 8 9 ...              places; blocks 5, 6 and 7 were hit
                  ^ head     ^ end               free: 3 4 8 9

A block is in the queue if its place is at or after the head and not in a hole. The position of the head follows from the
number of free blocks, so evictions need no work per block, and blocks taken in a leap are determined at the next look-up.
Logs have the freed blocks, the holes and the times at which blocks were taken; ``history`` reads them after the run.

A *named* block is one with a hash, which a look-up can find. With ``unnamed_first``, blocks without a name go to the head of
the queue: they form a stack, and blocks are taken from the stack before the tape.

Source: vLLM V1, vllm/v1/core/kv_cache_utils.py (FreeKVCacheBlockQueue) and block_pool.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush
from struct import Struct

import numpy as np

from ...types.columns import Records
from ...types.errors import SimulationFault

#: Columns of blocks that were freed together: places ``first`` up to ``stop`` of a table; places before ``named`` have a name.
#: Places before ``grown_from`` were taken at ``born``, later places in the steps in which a sequence with ``lag`` takes them.
#: ``touched`` is an index into the touches, or ``UNTOUCHED``. For a table that shared no block and took the blocks of all its
#: ``known_tokens`` at once, ``touched`` is ``ALONE`` minus the request. Its takings are in no other log; they end at ``stop``,
#: or at ``named`` if that is greater, because the last block went to the head of the queue.
FREED = ("first", "stop", "named", "grown_from", "born", "lag", "touched", "moment", "known_tokens")
#: Columns of blocks that were hit while free: first place on the tape, number of blocks, and moment.
HIT = ("place", "blocks", "moment")
#: Columns of a block taken from the stack: blocks taken from the tape before it, place in the table, and as in ``FREED``.
UNSTACKED = ("before", "first", "grown_from", "born", "lag")
#: Columns of a table that shared no block and took the blocks of all its ``known_tokens`` at once, when it is released with
#: ``tokens`` in so many ``blocks``: the request, and the number of free blocks before its release; else as in ``FREED``.
LEFT = ("tokens", "blocks", "lag", "index", "known_tokens", "born", "moment", "free")
UNTOUCHED, ALONE = -1, -2
#: Records of the compiled core.
_HOLE, _STACKED = Struct("=2q"), Struct("=4q")


class Log:
    """Records of int64 fields, appended one by one and read as columns.

    Attributes:
        pack, append: ``log.append(log.pack(...))`` appends a record without calling a Python function.
    """

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.fields, self.records = fields, array("q")
        self._record = Struct(f"={len(fields)}q")
        self._sealed = Records(len(fields))
        self.pack, self.append = self._record.pack, self.records.frombytes

    def add(self, *record: int) -> None:
        """Append a record of all fields."""
        self.append(self.pack(*record))

    def clear(self) -> None:
        """Remove all records, of a log that is never sealed."""
        del self.records[:]

    def rows(self) -> Iterator[tuple[int, ...]]:
        """All present records, one by one, of a log that is never sealed."""
        return self._record.iter_unpack(self.records.tobytes())

    def __len__(self) -> int:
        return len(self._sealed) + len(self.records) // len(self.fields)

    def seal(self) -> None:
        """Turn what has gathered into columns, which need not stay in memory."""
        if self.records:
            self._sealed.extend(np.array(self.records, dtype=np.int64).reshape(-1, len(self.fields)))
            del self.records[:]

    def columns(self) -> dict[str, np.ndarray]:
        """All records, as one int64 column per field; to be read only."""
        self.seal()
        return dict(zip(self.fields, self._sealed.arrays(), strict=True))


class FreeQueue:
    """The free blocks of a pool, in the order in which they are taken.

    Args:
        num_blocks: Blocks of the pool. All are free and without a name at first.
        unnamed_first: Whether blocks without a name go to the head of the queue; the last one of a table is then taken
            first.
        block_size: Tokens per block; only tables in ``left`` need it.

    Attributes:
        left: Log with the columns ``LEFT``: tables that the queue does not know yet. Most tables are such, and no one looks
            at the queue for long, so a release must cost next to nothing.
        end: Number of blocks put on the tape so far.
        head: The first place on the tape that was not taken.
        hits, unstacked: Logs with the columns ``HIT`` and ``UNSTACKED``.
        touches: Moments of the last four hits, for records of ``freed`` with an index.
        stack: Blocks freed to the head: place in the table, and ``grown_from``, ``born`` and ``lag`` as in ``FREED``.
        pending: Blocks to push on the stack later, each with the number of blocks taken before it; used while the head is
            not up to date.
        pushed: Number of blocks freed to the head so far, including pending ones.
    """

    def __init__(self, num_blocks: int, unnamed_first: bool = False, block_size: int = 1) -> None:
        self.unnamed_first = unnamed_first
        self.end, self.head = num_blocks, 0
        self._block_size, self.left = block_size, Log(LEFT)
        self._freed, self.hits, self.unstacked = Log(FREED), Log(HIT), Log(UNSTACKED)
        self._freed.add(0, num_blocks, 0, num_blocks, 0, 0, UNTOUCHED, 0, 0)
        self.touches: list[tuple[int, ...]] = []
        # Holes after the head; number of blocks in holes that the head has passed, and in all holes.
        self._holes: list[tuple[int, int]] = []
        self._passed = self._hit = 0
        self.stack: list[tuple[int, int, int, int]] = []
        self.pending: list[tuple[int, tuple[int, int, int, int]]] = []
        self.pushed = 0

    @property
    def freed(self) -> Log:
        """Log with the columns ``FREED``."""
        if self.left.records:
            self._free_left()
        return self._freed

    def _free_left(self) -> None:
        """Free the blocks of the tables in ``left``, in their order."""
        rows = self.left.rows()
        self.left.clear()
        size, append, pack, push = self._block_size, self._freed.append, self._freed.pack, self.pending.append
        for tokens, blocks, lag, index, known, born, moment, free in rows:
            stop, named, grown_from = blocks, tokens // size, -(-known // size)
            if named < stop and self.unnamed_first:
                # All blocks that were free at first or freed since, less those that are free, were taken before.
                push((self.end - self._hit + self.pushed - free, (named, grown_from, born, lag)))
                self.pushed += 1
                stop, named = named, stop
            append(pack(0, stop, named, grown_from, born, lag, ALONE - index, moment, known))
            self.end += stop

    def take_over(
        self, records: tuple[bytes, bytes, bytes], state: tuple[int, int, int, int, int, bytes, bytes]
    ) -> None:
        """Take over the state of the compiled core's queue (``engine._core``).

        Args:
            records: Of ``freed``, ``hits`` and ``unstacked``, those since the last time.
            state: ``end``, ``head``, blocks in the holes that the head has passed, blocks in all holes, ``pushed``, and the
                holes and the stack as records.
        """
        for log, more in zip((self._freed, self.hits, self.unstacked), records, strict=True):
            log.append(more)
            log.seal()
        self.end, self.head, self._passed, self._hit, self.pushed, holes, stack = state
        self._holes, self.stack = [*_HOLE.iter_unpack(holes)], [*_STACKED.iter_unpack(stack)]

    @property
    def num_free(self) -> int:
        """Number of free blocks, if the head is up to date."""
        return self.end - self._hit - self.head + self._passed + len(self.stack)

    @property
    def num_taken(self) -> int:
        """Number of blocks taken so far, if the head is up to date."""
        return self.head - self._passed + len(self.unstacked)

    def reach(self, free: int) -> None:
        """Bring the head up to date: ``free`` blocks are free now, and the others have been taken.

        Raises:
            SimulationFault: More blocks are free than before.
        """
        self.catch_up()
        taken = self.num_free - free
        if taken < 0:
            raise SimulationFault(f"{-taken} blocks are free that nothing released")
        if taken:
            self._take(taken)

    def push(self, block: tuple[int, int, int, int]) -> None:
        """Free a block without a name to the head. The head must be up to date."""
        self.stack.append(block)
        self.pushed += 1

    def catch_up(self) -> None:
        """Push the pending blocks on the stack, each after the blocks that were taken before it."""
        if self.left.records:
            self._free_left()
        for taken, block in self.pending:
            missing = taken - self.num_taken
            if missing:
                self._take(missing)
            self.stack.append(block)
        self.pending.clear()

    def _take(self, count: int) -> list[tuple[int, int]]:
        """Take ``count`` blocks from the stack and then from the tape. Returns the taken parts of the tape."""
        stack, holes, parts, head = self.stack, self._holes, [], self.head
        while count and stack:
            self.unstacked.add(head - self._passed, *stack.pop())
            count -= 1
        while count:
            stop = head + count
            if holes and holes[0][0] < stop:
                stop, blocks = heappop(holes)
                self._passed += blocks
            else:
                blocks = 0
            parts.append((head, stop))
            count -= stop - head
            head = stop + blocks
        self.head = head
        return parts

    def put(
        self, first: int, stop: int, named: int, grown_from: int, born: int, lag: int, touched: int, moment: int
    ) -> int:
        """Free places ``first`` up to ``stop`` of a table, the last one first. Returns the place of the last one on the tape.

        Arguments are those of ``FREED``. With ``unnamed_first`` the head must be up to date if a block has no name.
        """
        if self.unnamed_first and named < stop:
            for place in range(max(first, named), stop):
                self.push((place, grown_from, born, lag))
            stop = max(first, named)
        freed, place = self.freed, self.end
        if first < stop:
            freed.append(freed.pack(first, stop, named, grown_from, born, lag, touched, moment, 0))
            self.end += stop - first
        return place

    def hit(self, place: int, blocks: int, moment: int) -> None:
        """Reuse ``blocks`` free blocks, from ``place`` of the tape on, in a table.

        Raises:
            SimulationFault: Some of them were taken.
        """
        if place < self.head:
            raise SimulationFault("a block is hit that was taken since it was looked up")
        self.hits.add(place, blocks, moment)
        heappush(self._holes, (place, blocks))
        self._hit += blocks


class FreeIds(FreeQueue):
    """As ``FreeQueue``, with block ids, which are known when blocks are taken.

    Attributes:
        is_named: By id, whether a free or reused block has a name.
        evicted_blocks: Number of blocks that were taken while they had a name.
    """

    def __init__(self, num_blocks: int, unnamed_first: bool = False, block_size: int = 1) -> None:
        super().__init__(num_blocks, unnamed_first, block_size)
        self.is_named = bytearray(num_blocks)
        self.evicted_blocks = 0
        self._tape = list(range(num_blocks))
        self._stacked: list[int] = []

    def shuffle(self, random: np.random.Generator) -> None:
        """Queue the blocks in a random order; only before any block is taken."""
        if self.num_free < len(self._tape) or self.end > len(self.is_named):
            raise SimulationFault("the free queue is shuffled after blocks were taken")
        self._tape = random.permutation(self._tape).tolist()

    @property
    def free_ids(self) -> tuple[int, ...]:
        """Ids of the free blocks, in the order in which they will be taken."""
        holes = {place for first, blocks in self._holes for place in range(first, first + blocks)}
        tape = (self._tape[place] for place in range(self.head, self.end) if place not in holes)
        return (*reversed(self._stacked), *tape)

    def put_ids(self, ids: list[int], named: int) -> None:
        """Set the ids of the blocks of the next ``put``, in the order of the table; the first ``named`` have a name."""
        for block in ids[:named]:
            self.is_named[block] = True
        if self.unnamed_first:
            self._stacked += ids[named:]
            ids = ids[:named]
        self._tape += reversed(ids)

    def release(self, blocks: list[int]) -> None:
        """Nothing: ``SegmentPool.release`` puts the blocks of a table into the queue, with their contents."""

    def take_many(self, count: int) -> list[int]:
        """Take ``count`` blocks from the head of the queue. They lose their names.

        Raises:
            SimulationFault: Fewer blocks are free.
        """
        if count > self.num_free:
            raise SimulationFault(f"{count} blocks are taken and {self.num_free} are free")
        kept = max(0, len(self._stacked) - max(0, count))
        blocks = self._stacked[kept:][::-1]
        del self._stacked[kept:]
        for start, stop in self._take(count):
            blocks += self._tape[start:stop]
        for block in blocks:
            self.evicted_blocks += self.is_named[block]
            self.is_named[block] = False
        return blocks
