"""Cached blocks in segments: consecutive places of one chain, filled by one table, that are in the same tables.

    chain 1     places 0 to 40, published by request 0
    segments    [0, 25) in the tables of requests 0 and 7    [25, 38) in the table of request 0    [38, 40) free

A block has the same place in its chain and in every table, because names stand for whole prefixes. A segment is split if a
request hits a part of it; segments are never merged. A table consists of the segments that it hit or published, and of
blocks that it took and has not published. The blocks that a decoding sequence takes and fills follow from the decode step;
they become segments only at a look-up of their chain or at the end of the sequence. A request that shares no prefix with
other requests has no segments, unless it is preempted.

Free segments are in the queue (``free_queue``). The head of the queue determines the free part of each: the last place is
taken first.

If two tables publish the same places at the same time, each has its own segment. A look-up goes through the segments of the
chain in their order: it finds the segment published first, and, where its blocks were taken, the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from .chains import Chain, Chains, Path
from .free_queue import UNTOUCHED, FreeIds, FreeQueue
from .history import KEPT_TOUCHES, NO_LOOK_UP, QueueHistory

#: Parts of segments: segment, first place, end (exclusive).
Found = list[tuple["Segment", int, int]]
#: Greater than any place of a table.
_END = 1 << 62


class Segment:
    """Blocks at places ``first`` up to ``stop`` of a chain, with the same references.

    Attributes:
        references: Number of tables with these blocks.
        place: Place of the last block on the tape of the free queue; valid without references.
        grown_from, born, lag: Moments of the takings; see ``free_queue.FREED``.
        touches: Moments of the last four hits.
        next: The following segment in tables with both segments.
    """

    __slots__ = ("born", "chain", "first", "grown_from", "ids", "lag", "next", "place", "references", "stop", "touches")
    next: Segment | None

    def __init__(self, chain: Chain, first: int, stop: int, born: int, table: BlockTable) -> None:
        self.chain, self.first, self.stop = chain, first, stop
        self.references, self.place = 1, 0
        self.grown_from, self.born, self.lag = table.taken, born, table.lag
        self.touches: tuple[int, ...] = ()
        self.next = None
        #: Ids of the blocks by place, or None for blocks without ids.
        self.ids = table.ids

    def split(self, at: int) -> Segment:
        """Keep the places before ``at``. Returns a new segment with the remaining places."""
        rest = object.__new__(Segment)
        for name in Segment.__slots__:
            setattr(rest, name, getattr(self, name))
        rest.first = at
        self.place += self.stop - at
        self.stop, self.next = at, rest
        segments = self.chain.segments
        segments.insert(segments.index(self) + 1, rest)
        return rest


class BlockTable:
    """The blocks of one sequence.

    Args:
        taken, born: Number of blocks that it takes first, and the moment.

    Attributes:
        path: Names of its blocks; None if no other request can share them.
        parts: Segments that it hit or published: a first segment, which continues with its next ones, and an end.
        published: Number of full blocks that were hit or published.
        taken: Number of blocks before its sequence decodes.
        takes: Takings before its sequence decodes: end (exclusive) and moment of each.
        decodes, lag: Whether its sequence has decoded with a path, or before a pause; and the sequence's lag.
        ids: Ids of the blocks, or None for blocks without ids.
    """

    # Defaults on the class: most sequences share no blocks, and their tables must be cheap to create.
    path: Path | None = None
    parts: tuple[tuple[Segment, int], ...] = ()
    published = lag = 0
    decodes = False
    ids: list[int] | None = None

    def __init__(self, taken: int = 0, born: int = 0) -> None:
        self.taken = taken
        self.takes = [(taken, born)]

    def segments(self) -> list[Segment]:
        """Its segments, in the order of their places."""
        found = []
        for first, stop in self.parts:
            segment: Segment | None = first
            while segment is not None:
                found.append(segment)
                segment = segment.next if segment.stop < stop else None
        return found

    def spans(self, first: int, stop: int) -> list[tuple[int, int, int]]:
        """Places ``first`` up to ``stop``, which the table itself took, as (first, end, moment) of each taking.

        Blocks taken while the sequence decodes are in the last span.
        """
        spans = []
        for end, born in self.takes[:-1]:
            if first < min(end, stop):
                spans.append((first, min(end, stop), born))
                first = min(end, stop)
        if first < stop:
            spans.append((first, stop, self.takes[-1][1]))
        return spans


class SegmentPool:
    """The blocks of a prefix cache.

    The caller counts free blocks and brings ``queue`` up to date (``FreeQueue.reach``) before a look-up, and with
    ``unnamed_first`` also before a release.

    Args:
        num_blocks: Usable blocks, without vLLM's null block.
        block_size: Tokens per block.
        chains: Names of the blocks of requests.
        in_step: See ``QueueHistory``.
        unnamed_first: Whether blocks without a name are freed to the head of the queue instead of its tail.
        ids: Whether blocks have ids.
        ahead: Whether a step is decided before the step before it is over: a block that decoding fills can then be found
            a step later, when all its tokens are known.

    Attributes:
        queue: The free blocks.
        history: Log of the takings.
        num_shared: Table entries beyond the first of each block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        chains: Chains,
        in_step: Callable[[np.ndarray], np.ndarray],
        unnamed_first: bool = False,
        ids: bool = False,
        ahead: bool = False,
    ) -> None:
        self.queue = (FreeIds if ids else FreeQueue)(num_blocks, unnamed_first, block_size)
        self.history = QueueHistory(self.queue, block_size, in_step)
        self.num_shared = 0
        self._block_size, self._chains, self._ahead = block_size, chains, ahead
        # Paths of unshared requests that were preempted and may find their own blocks again.
        self._returning: dict[int, Path] = {}

    def path(self, request: int) -> Path | None:
        """Path of a request; None if the cache neither has any of its blocks nor can share them with another request."""
        if self._chains.unshared[request]:
            return self._returning.get(request)
        return self._chains.path(request)

    def look_up(self, path: Path, stop: int, decode_step: int) -> Found:
        """The longest cached prefix of the blocks of ``path`` before place ``stop``. Does not change counts.

        Args:
            decode_step: The last step with full blocks of running sequences that the look-up can find.
        """
        found: Found = []
        place = 0
        for chain, end in path:
            if chain.author is not None:
                self._publish_filled(chain.author, decode_step)
            end = min(end, stop)
            while place < end:
                part = self._first_published(chain, place, end)
                if part is None:
                    return found
                found.append(part)
                place = part[2]
            if place == stop:
                break
        return found

    def _first_published(self, chain: Chain, place: int, stop: int) -> tuple[Segment, int, int] | None:
        """The segment published first among the segments with ``place``, up to a place of an earlier segment."""
        head, part, gone = self.queue.head, None, False
        for segment in chain.segments:
            end = segment.stop
            if not segment.references:
                end = min(end, segment.place + end - head)
            if end <= segment.first:
                gone = True
            elif segment.first <= place < end:
                part = segment, place, min(stop, end)
                break
            elif place < segment.first < stop:
                stop = segment.first
        if gone:
            chain.segments = [
                segment
                for segment in chain.segments
                if segment.references or segment.place + segment.stop - head > segment.first
            ]
        return part

    def enter(self, path: Path | None, found: Found, now: int, ids: list[int] | None = None) -> BlockTable:
        """Create a table with the blocks that a look-up found.

        Raises:
            SimulationFault: Some of them were taken after the look-up.
        """
        table = BlockTable()
        table.path, table.ids, table.takes = path, ids, []
        parts = []
        for segment, first, stop in found:
            # An earlier part of ``found`` may have split this segment.
            while segment.stop <= first and segment.next is not None:
                segment = segment.next
            if segment.first < first:
                segment = segment.split(first)
            if stop < segment.stop:
                segment.split(stop)
            if segment.references:
                self.num_shared += stop - first
            else:
                self.queue.hit(segment.place, stop - first, now)
            segment.references += 1
            segment.touches = (*segment.touches[1 - KEPT_TOUCHES :], now)
            if ids is not None and segment.ids is not None:
                ids += segment.ids[first:stop]
            parts.append((segment, stop))
            table.published = table.taken = stop
        table.parts = tuple(parts)
        return table

    def take(self, table: BlockTable, blocks: int, decode_step: int, now: int) -> None:
        """Take blocks for a prefill in ``decode_step``."""
        table.taken += blocks
        table.takes.append((table.taken, now))
        self.history.takes.add(now, decode_step, blocks, NO_LOOK_UP, 0, 0)

    def publish(self, table: BlockTable, stop: int, decode_step: int) -> None:
        """Publish the full blocks of a prefill before place ``stop``: they can be hit from now on.

        Blocks that the running sequences fill in ``decode_step`` are published before them.
        """
        if table.path is not None and stop > table.published:
            for chain, end in table.path:
                if chain.author is not None and end > table.published:
                    self._publish_filled(chain.author, decode_step)
            self._publish(table, table.path, stop)

    def _publish_filled(self, author: BlockTable, decode_step: int) -> None:
        assert author.path is not None
        self._publish(author, author.path, (decode_step - self._ahead + author.lag) // self._block_size)

    def _publish(self, table: BlockTable, path: Path, stop: int) -> None:
        place = table.published
        if stop <= place:
            return
        for chain, end in path:
            if end <= place:
                continue
            for first, last, born in table.spans(place, min(end, stop)):
                segment = Segment(chain, first, last, born, table)
                chain.segments.append(segment)
                table.parts += ((segment, last),)
            place = end
            if place >= stop:
                break
        table.published = stop

    def decode(self, table: BlockTable, lag: int) -> None:
        """The sequence of a table decodes from now on: after step d it has ``d + lag`` tokens."""
        table.lag, table.decodes = lag, True
        for chain, end in table.path or ():
            if end > table.published:
                chain.author = table

    def pause(self, table: BlockTable, filled: int, lag: int) -> None:
        """The sequence of a table stops decoding, with ``filled`` full blocks and this lag."""
        table.lag, table.decodes = lag, True
        self._close(table, filled)

    def _close(self, table: BlockTable, filled: int) -> None:
        if table.path is not None:
            self._publish(table, table.path, filled)
            for chain, _ in table.path:
                if chain.author is table:
                    chain.author = None

    def release(
        self, table: BlockTable, held: int, filled: int, now: int, lag: int | None = None, returns: int | None = None
    ) -> None:
        """Release a table. Blocks in no other table join the free queue, the last one first.

        Args:
            held: Number of its blocks.
            filled: Number of its full blocks.
            lag: Lag of the sequence, if it decoded until now.
            returns: The request, if it was preempted and may find the blocks again.
        """
        if lag is not None:
            table.lag, table.decodes = lag, True
        if table.decodes:
            self.history.growths.add(table.taken, held, table.lag)
        if table.path is None:
            if returns is None:
                self._put(table, 0, held, filled, now)
                return
            table.path = self._returning[returns] = [(Chain(0, []), _END)]
        self._close(table, filled)
        self._put(table, table.published, held, 0, now)
        queue = self.queue
        for segment in reversed(table.segments()):
            segment.references -= 1
            first, stop = segment.first, segment.stop
            if segment.references:
                self.num_shared -= stop - first
                continue
            touched = UNTOUCHED
            if segment.touches:
                touched = len(queue.touches)
                queue.touches.append(segment.touches)
            if isinstance(queue, FreeIds) and segment.ids is not None:
                queue.put_ids(segment.ids[first:stop], stop - first)
            segment.place = queue.put(first, stop, stop, segment.grown_from, segment.born, segment.lag, touched, now)

    def _put(self, table: BlockTable, first: int, stop: int, named: int, now: int) -> None:
        """Free blocks of a table that are in no segment."""
        queue = self.queue
        if isinstance(queue, FreeIds) and table.ids is not None:
            queue.put_ids(table.ids[first:stop], max(0, named - first))
        spans: Iterable[tuple[int, int, int]] = reversed(table.spans(first, stop))
        for start, end, born in spans:
            queue.put(start, end, named, table.taken, born, table.lag, UNTOUCHED, now)
