"""vLLM's free queue in runs of blocks: what is free is known by its place, and nothing moves when blocks are taken.

Blocks that are freed are put on a tape, each at the next place. Taking blocks from the head of the queue moves the head on;
a block that is hit leaves a hole:

    tape    0 1 2 3 4 5 6 7 8 9 ...              places; 3 blocks were hit: 5, 6 and 7
                  ^ head     ^ end               free: 3 4 8 9

So a block is still in the queue if its place is not before the head, and where the head is follows from the number of free
blocks: nothing is evicted one by one, and blocks that were taken in a leap need not be known before the next look-up. What was put on the tape, the holes, and when blocks were taken is logged, and ``history`` reads it when the run is over.

Where ``unnamed_first``, blocks without a name go to the head: they are a stack, which is taken from before the tape.

Source: vLLM V1, vllm/v1/core/kv_cache_utils.py (FreeKVCacheBlockQueue) and block_pool.py.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from struct import Struct

import numpy as np

from ...types.errors import SimulationFault

#: Columns of what was freed at once: places of a table from ``first`` up to ``stop``, of which those before ``named`` have a name.
#: Places before ``grown_from`` were taken at ``born``, the others in the steps in which a sequence with ``lag`` takes them.
#: ``touched`` is an index of touches, or ``UNTOUCHED``. Of a table that shared nothing, and took what it knew at once, it is
#: ``ALONE`` less the request, which knew ``known_tokens``: no other log has what it took, up to ``named`` if that is more than
#: ``stop``, as the last block went to the head of the queue.
FREED = ("first", "stop", "named", "grown_from", "born", "lag", "touched", "moment", "known_tokens")
#: Columns of what was hit while it was free: the first place on the tape.
HIT = ("place", "blocks", "moment")
#: Columns of an unnamed block that was taken from the stack: blocks taken from the tape before it, and as in ``FREED``.
UNSTACKED = ("before", "first", "grown_from", "born", "lag")
UNTOUCHED, ALONE = -1, -2


class Log:
    """Records of int64 fields, appended one by one and read as columns at any time.

    Attributes:
        pack, append: Append a record, in two calls of which none is Python's: ``log.append(log.pack(...))``.
    """

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.fields, self.records = fields, array("q")
        self.pack, self.append = Struct(f"={len(fields)}q").pack, self.records.frombytes

    def add(self, *record: int) -> None:
        """Append a record of all fields."""
        self.append(self.pack(*record))

    def __len__(self) -> int:
        return len(self.records) // len(self.fields)

    def columns(self) -> dict[str, np.ndarray]:
        """All records as an int64 column a field."""
        columns = np.array(self.records, dtype=np.int64).reshape(-1, len(self.fields)).T
        return {name: np.ascontiguousarray(column) for name, column in zip(self.fields, columns, strict=True)}


class FreeQueue:
    """The free blocks of a pool, in the order in which they are taken.

    Args:
        num_blocks: Blocks of the pool, all of them free and without a name.
        unnamed_first: Whether blocks without a name are freed to the head of the queue, the last one of a table first.

    Attributes:
        end: Blocks that were put on the tape so far.
        head: The first place on the tape that was not taken.
        freed, hits, unstacked: Logs, by ``FREED``, ``HIT`` and ``UNSTACKED``.
        touches: When blocks were hit, the last four times, of records with an index.
        stack: Blocks that were freed to the head: place in the table, and when they were taken, as in ``FREED``.
        pending: Blocks that are to be freed to the head, each when so many blocks were taken: what leaves a queue that is
            not up to date.
        pushed: Blocks that were freed to the head so far, and those that are pending.
    """

    def __init__(self, num_blocks: int, unnamed_first: bool = False) -> None:
        self.unnamed_first = unnamed_first
        self.end, self.head = num_blocks, 0
        self.freed, self.hits, self.unstacked = Log(FREED), Log(HIT), Log(UNSTACKED)
        self.freed.add(0, num_blocks, 0, num_blocks, 0, 0, UNTOUCHED, 0, 0)
        self.touches: list[tuple[int, ...]] = []
        # Holes that the head has yet to reach, and blocks of those behind it and of all.
        self._holes: list[tuple[int, int]] = []
        self._passed = self._hit = 0
        self.stack: list[tuple[int, int, int, int]] = []
        self.pending: list[tuple[int, tuple[int, int, int, int]]] = []
        self.pushed = 0

    @property
    def num_free(self) -> int:
        """Blocks that are free, if all that were taken are behind the head."""
        return self.end - self._hit - self.head + self._passed + len(self.stack)

    @property
    def num_taken(self) -> int:
        """Blocks that were taken so far, as far as the head is up to date."""
        return self.head - self._passed + len(self.unstacked)

    def reach(self, free: int) -> None:
        """So many blocks are free now: those that were taken since the last time are behind the head.

        Raises:
            SimulationFault: More blocks are free than before.
        """
        if self.pending:
            self.catch_up()
        taken = self.num_free - free
        if taken < 0:
            raise SimulationFault(f"{-taken} blocks are free that nothing released")
        if taken:
            self._take(taken)

    def taken_by(self, free: int) -> int:
        """Blocks that were taken so far, where ``free`` are free now."""
        return self.end - self._hit + self.pushed - free

    def push(self, block: tuple[int, int, int, int]) -> None:
        """A block without a name is freed to the head, which is up to date."""
        self.stack.append(block)
        self.pushed += 1

    def catch_up(self) -> None:
        """Free the blocks that were put off to the head, each when it was its turn."""
        for taken, block in self.pending:
            missing = taken - self.num_taken
            if missing:
                self._take(missing)
            self.stack.append(block)
        self.pending.clear()

    def _take(self, count: int) -> list[tuple[int, int]]:
        """Take so many blocks, from the stack and then from the tape; the parts of the tape."""
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
        """Places ``first`` to ``stop`` of a table are free, the last one first: the place on the tape of that.

        See ``FREED``. With ``unnamed_first`` the head must be up to date where a block has no name.
        """
        if self.unnamed_first and named < stop:
            for place in range(max(first, named), stop):
                self.push((place, grown_from, born, lag))
            stop = max(first, named)
        place = self.end
        if first < stop:
            freed = self.freed
            freed.append(freed.pack(first, stop, named, grown_from, born, lag, touched, moment, 0))
            self.end += stop - first
        return place

    def hit(self, place: int, blocks: int, moment: int) -> None:
        """A table names so many blocks again, from ``place`` of the tape on.

        Raises:
            SimulationFault: Some of them were taken.
        """
        if place < self.head:
            raise SimulationFault("a block is hit that was taken since it was looked up")
        self.hits.add(place, blocks, moment)
        heappush(self._holes, (place, blocks))
        self._hit += blocks


class FreeIds(FreeQueue):
    """As ``FreeQueue``, of blocks with ids, which are known when they are taken.

    Attributes:
        is_named: By id, whether a block that is free, or was hit, has a name.
    """

    def __init__(self, num_blocks: int, unnamed_first: bool = False) -> None:
        super().__init__(num_blocks, unnamed_first)
        self.is_named = bytearray(num_blocks)
        self._tape = list(range(num_blocks))
        self._stacked: list[int] = []

    def shuffle(self, random: np.random.Generator) -> None:
        """Queue the blocks in a random order, before any is taken."""
        if self.num_free < len(self._tape) or self.end > len(self.is_named):
            raise SimulationFault("the free queue is shuffled after blocks were taken")
        self._tape = random.permutation(self._tape).tolist()

    @property
    def free_ids(self) -> tuple[int, ...]:
        """Ids of the free blocks, the next one to be taken first."""
        holes = {place for first, blocks in self._holes for place in range(first, first + blocks)}
        tape = (self._tape[place] for place in range(self.head, self.end) if place not in holes)
        return (*reversed(self._stacked), *tape)

    def put_ids(self, ids: list[int], named: int) -> None:
        """The ids of what is put next, in the order of the table; the first ``named`` have a name."""
        for block in ids[:named]:
            self.is_named[block] = True
        if self.unnamed_first:
            self._stacked += ids[named:]
            ids = ids[:named]
        self._tape += reversed(ids)

    def take_many(self, count: int) -> list[int]:
        """``count`` blocks from the head of the queue, which have no name any more.

        Raises:
            SimulationFault: Fewer are free.
        """
        if count > self.num_free:
            raise SimulationFault(f"{count} blocks are taken and {self.num_free} are free")
        kept = max(0, len(self._stacked) - max(0, count))
        blocks = self._stacked[kept:][::-1]
        del self._stacked[kept:]
        for start, stop in self._take(count):
            blocks += self._tape[start:stop]
        for block in blocks:
            self.is_named[block] = False
        return blocks
