"""History of the blocks of a prefix cache, computed from logs when a metric needs it.

Blocks are taken from the free queue in the order of its tape (``free_queue``). The moments of these takings are in other
logs: one record per prefill, and one record (first block, last block, lag) per decoding sequence. Both sequences aligned
give the moment at which each block is taken again:

    tape, without holes     | request 3's 40 blocks      | request 1's 17  | request 4's 8 ...
    taken                   | 25, row 7    | 3, step 90  | 1, step 91 | 60, row 8       ...

The cached level, evictions and vLLM's KV-cache residency metrics follow from this. A block is born when it is taken, touched
when a request hits it, and logged when it is taken again:

    take        hit    hit            hit                 taken again
     |-----------|------|--------------|---------------------|
                  <gap-> <----gap-----> <--idle before evict->
     <------------------------lifetime----------------------->

As in vLLM, birth and release are not touches, so the time before the first hit is not a gap; only the gaps
between the last four touches are logged; blocks that are never taken again are not logged; and blocks are
logged with or without a hash. vLLM samples one block in a hundred by default; here every block is recorded.

Source: vLLM, vllm/v1/core/kv_cache_metrics.py (``--kv-cache-metrics``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain, pairwise
from types import ModuleType

import numpy as np

from ...types.columns import column_by_slices, column_of, columns_of, release, slices
from .free_queue import ALONE, FreeQueue, Log
from .growth import Growth

KEPT_TOUCHES = 4
#: Columns of blocks that a prefill took. The first record of a sequence has its look-up; in others ``index`` is NO_LOOK_UP.
TAKE = ("moment", "decode_step", "blocks", "index", "known_tokens", "hit_tokens")
#: Columns of blocks that a sequence took while it decoded: its blocks ``first`` up to ``stop``.
GROWTH = ("first", "stop", "lag")
NO_LOOK_UP = -1
#: Values, and the number of blocks with each value.
Observed = tuple[np.ndarray, np.ndarray]
#: Parts of the tape, or takings, that are read at a time, to bound what intermediate columns take.
_CHUNK = 1 << 17
#: Fields of the core's state on its way through the takings, beside one for each phase of a block, and along the tape.
_TAKING_FIELDS, _TAPE_FIELDS = 5, 6
#: Parts of the tape with lives of their own, of one record of ``freed``, as a guess.
_CUTS_OF_A_RECORD = 32


class QueueHistory:
    """Logs of a free queue, and metrics computed from them.

    Attributes:
        takes, growths: Logs with the columns ``TAKE`` and ``GROWTH``, without tables that are ``ALONE``.
        growing: Returns the growths of the sequences that decode now.
        alone: Returns the takings of present tables that will be logged as ``ALONE``, by ``TAKE``.
        in_step: Returns the moments at which decode steps (int64) start, in the caller's numbering.
        compiled: The compiled core (``engine._core``), which computes the same in place of numpy; or None. It has the moments of
            ``accounting.moments``, with ``after_step`` for ``in_step``.
    """

    def __init__(self, queue: FreeQueue, block_size: int, in_step: Callable[[np.ndarray], np.ndarray]) -> None:
        self.in_step = in_step
        self.takes, self.growths = Log(TAKE), Log(GROWTH)
        self.growing: Callable[[], Iterable[tuple[int, int, int]]] = tuple
        self.alone: Callable[[], Iterable[tuple[int, ...]]] = tuple
        self.compiled: ModuleType | None = None
        self._queue, self._block_size = queue, block_size
        # What follows from the logs at a time without held blocks, and their lengths at that time.
        self._read_lengths: tuple[int, ...] = ()
        self._takes_read: dict[str, np.ndarray] | None = None
        self._past_read: _Past | None = None

    def _past(self) -> _Past:
        """The present logs as columns; cached if no blocks are held."""
        growing, alone = [*self.growing()], [*self.alone()]
        if growing or alone:
            return _Past(self, growing, self._takes_of(alone))
        takes = self._all_takes(alone)
        if self._past_read is None:
            self._past_read = _Past(self, growing, takes)
        return self._past_read

    def forget(self) -> None:
        """Drop what is cached; it is computed anew when a metric needs it."""
        self._takes_read = self._past_read = None

    def look_ups(self) -> dict[str, np.ndarray]:
        """The look-ups that led to an admission, by row: int64 columns ``index``, ``known_tokens`` and ``hit_tokens``."""
        takes = self._all_takes([*self.alone()])
        looks = column_of(
            part.start + np.flatnonzero(takes["index"][part] != NO_LOOK_UP) for part in slices(len(takes["index"]))
        )
        return {name: _taken_from(takes[name], looks) for name in TAKE[3:]}

    def _all_takes(self, held: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
        """``_takes_of``; cached if nothing is held."""
        if held:
            return self._takes_of(held)
        lengths = tuple(map(len, (self.takes, self.growths, self._queue.freed, self._queue.hits)))
        if lengths != self._read_lengths:
            self.forget()
            self._read_lengths = lengths
        if self._takes_read is None:
            self._takes_read = self._takes_of(held)
        return self._takes_read

    def _takes_of(self, held: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Takings of all prefills, by ``TAKE``, in the order of rows. ``held`` has the takings that are not yet logged."""
        freed, now = self._queue.freed.columns(), Log(TAKE)
        for take in held:
            now.add(*take)

        def left() -> Iterator[tuple[np.ndarray, ...]]:
            for part in slices(len(freed["touched"])):
                alone = freed["touched"][part] <= ALONE
                rows = {name: column[part][alone] for name, column in freed.items()}
                moment, known = rows["born"], rows["known_tokens"]
                yield moment, known - rows["lag"], rows["grown_from"], ALONE - rows["touched"], known, rows["first"]

        logged = (tuple(log.columns().values()) for log in (self.takes, now))
        takes = dict(zip(TAKE, columns_of([np.int64] * len(TAKE), chain(logged, left())), strict=True))
        order = column_of([np.argsort(takes["moment"], kind="stable")])
        return {name: _taken_from(column, order) for name, column in takes.items()}

    def changes(self) -> dict[str, np.ndarray]:
        """Changes of the number of cached blocks: int64 columns ``moment`` and ``blocks``."""
        past = self._past()

        def changed() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for part in slices(len(past.named)):
                yield past.freed["moment"][part], past.named[part]
            yield past.hits["moment"], -past.hits["blocks"]
            for part, named in past.named_by_taking():
                yield past.moment[part], -named

        def some() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for moment, blocks in changed():
                kept = blocks != 0
                yield (moment, blocks) if kept.all() else (moment[kept], blocks[kept])

        return dict(zip(("moment", "blocks"), columns_of([np.int64] * 2, some()), strict=True))

    @property
    def evicted_blocks(self) -> int:
        """Number of blocks that were taken while they had a name."""
        past = self._past()
        return int(past.named_before(past.edges[-1:])[0])

    def observed_ticks(self, ticks_of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> dict[str, Observed]:
        """Observations by vLLM's names of the metrics: values, and the number of blocks with each value; int64.

        Args:
            ticks_of: Converts moments (int64) to ticks.
        """
        parts = [*self.observations(ticks_of)]
        return {
            name: (np.concatenate([part[name][0] for part in parts]), np.concatenate([part[name][1] for part in parts]))
            for name in parts[0]
        }

    def observations(self, ticks_of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Iterator[dict[str, Observed]]:
        """``observed_ticks`` in parts, of a long run too many to be held at once.

        Of a run without hits both names of the ages have the same tuple, in all parts.
        """
        untouched = not self._queue.touches
        for born, touched, taken, blocks, gaps in self._past().lives():
            end, (since, until, of) = ticks_of(taken), gaps.T
            lifetime = end - ticks_of(born), blocks
            yield {
                "vllm:kv_block_lifetime_seconds": lifetime,
                # Where nothing was hit each block was touched last at its birth.
                "vllm:kv_block_idle_before_evict_seconds": lifetime if untouched else (end - ticks_of(touched), blocks),
                "vllm:kv_block_reuse_gap_seconds": (ticks_of(until) - ticks_of(since), of),
            }


#: Moments of birth, last touch and next taking, the number of blocks, and gaps; see ``_Past.lives``.
Lives = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class _Past:
    """The logs as columns. A *position* is an index in the order of takings, a *place* an index on the tape.

    Attributes:
        freed, hits, unstacked: Columns of the queue's logs; ``hits`` in the order of the tape.
        named: Number of blocks with a name in each record of ``freed``.
        moment, edges: Moment of each taking, and the positions between which its blocks are: int64 [takings],
            [takings + 1].
    """

    def __init__(
        self, history: QueueHistory, growing: list[tuple[int, int, int]], takes: dict[str, np.ndarray]
    ) -> None:
        queue, self._size, self._touches = history._queue, history._block_size, history._queue.touches
        self._in_step, self._compiled = history.in_step, history.compiled
        self.freed = queue.freed.columns()
        self.moment, self.edges = self._takings(takes, self._growths(history, growing))
        # The head must be up to date for the log of the stack.
        queue.catch_up()
        queue.reach(queue.num_free + queue.num_taken - int(self.edges[-1]))
        hits, self.unstacked = queue.hits.columns(), queue.unstacked.columns()
        order = np.argsort(hits["place"])
        self.hits = {name: column[order] for name, column in hits.items()}
        self._start, self.named, self._unnamed, self._named_before = columns_of([np.int64] * 4, self._records())
        #: Number of blocks in the holes before each hole, and in all holes.
        self._skipped = np.concatenate([[0], np.cumsum(self.hits["blocks"])])

    def _records(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Of each record of ``freed``: blocks of those before it, its blocks with and without a name, and named blocks of
        those before it."""
        start = named_before = 0
        for part in slices(len(self.freed["first"])):
            first, stop, named = (self.freed[name][part] for name in ("first", "stop", "named"))
            blocks = stop - first
            named = np.clip(named - first, 0, blocks)
            starts, before = start + np.cumsum(blocks), named_before + np.cumsum(named)
            yield starts - blocks, named, blocks - named, before - named
            start, named_before = int(starts[-1]), int(before[-1])

    def _growths(self, history: QueueHistory, growing: list[tuple[int, int, int]]) -> dict[str, np.ndarray]:
        """Takings of decoding sequences, by ``GROWTH``."""
        now, freed = Log(GROWTH), self.freed
        for growth in growing:
            now.add(*growth)

        def left() -> Iterator[tuple[np.ndarray, ...]]:
            for part in slices(len(freed["touched"])):
                alone = freed["touched"][part] <= ALONE
                rows = {name: column[part][alone] for name, column in freed.items()}
                yield (
                    np.maximum(rows["first"], rows["grown_from"]),
                    np.maximum(rows["stop"], rows["named"]),
                    rows["lag"],
                )

        logged = (tuple(log.columns().values()) for log in (history.growths, now))
        return dict(zip(GROWTH, columns_of([np.int64] * len(GROWTH), chain(logged, left())), strict=True))

    def _takings(self, takes: dict[str, np.ndarray], growths: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """``moment`` and ``edges``."""
        size, number = self._size, len(growths["first"])

        def start(part: slice) -> np.ndarray:
            return growths["first"][part] * size + 1 - growths["lag"][part]

        def stop(part: slice) -> np.ndarray:
            return start(part) + np.maximum(0, growths["stop"][part] - growths["first"][part]) * size

        steps = column_by_slices(number, start), column_by_slices(number, stop)
        taken = self._takings_in_turn if self._compiled is None else self._compiled_takings
        none = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
        moment, edges = columns_of([np.int64] * 2, chain([none], taken(takes, *steps)))
        return moment, edges

    def _compiled_takings(
        self, takes: dict[str, np.ndarray], start: np.ndarray, stop: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """``_takings_in_turn`` by the compiled core."""
        assert self._compiled is not None
        columns = np.sort(start), np.sort(stop), takes["decode_step"], takes["moment"], takes["blocks"]
        state = np.zeros(_TAKING_FIELDS + self._size, dtype=np.int64)
        moments, upto = np.empty((2, _CHUNK), dtype=np.int64)
        found = _CHUNK
        while found == _CHUNK:
            found = self._compiled.takings(columns, self._size, state, moments, upto)
            yield moments[:found], upto[:found]
            release()

    def _takings_in_turn(
        self, takes: dict[str, np.ndarray], start: np.ndarray, stop: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Moments of all takings, and the blocks taken up to each, some steps at a time. In a step the running sequences take
        blocks before prefills do.

        Args:
            start, stop: int64 [growths], the first step in which each sequence takes a block, and the one in which it would
                take the first that it does not take.
        """
        growth, blocks = Growth(self._size, start, stop), 0
        last = max(growth.last, int(takes["decode_step"].max(initial=0)))
        for part in slices(last + 1, _CHUNK):
            grown = growth.until(part.stop)
            steps = np.flatnonzero(grown)
            low, high = np.searchsorted(takes["decode_step"], [part.start, part.stop])
            prefills = slice(low, high)
            steps_of = part.start + steps, takes["decode_step"][prefills]
            order = np.argsort(np.concatenate([2 * steps_of[0], 2 * steps_of[1] + 1]), kind="stable")
            moments = np.concatenate([self._in_step(steps_of[0]), takes["moment"][prefills]])
            upto = blocks + np.cumsum(np.concatenate([grown[steps], takes["blocks"][prefills]])[order])
            yield moments[order], upto
            blocks = int(upto[-1]) if len(upto) else blocks

    @cached_property
    def _tape(self) -> tuple[np.ndarray, ...]:
        """The columns by which the compiled core goes along the tape."""
        names = ("first", "stop", "named", "grown_from", "born", "lag", "touched")
        freed, hits = (self.freed[name] for name in names), (self.hits[name] for name in ("place", "blocks"))
        return self._start, *freed, *hits, self.edges, self.moment, self._stacked

    def named_by_taking(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Some takings at a time, and the number of blocks with a name in each."""
        if self._compiled is not None:
            at = np.zeros(_TAPE_FIELDS, dtype=np.int64)
            for part in slices(len(self.moment)):
                named = np.empty(part.stop - part.start, dtype=np.int64)
                self._compiled.names(self._tape, at, named)
                yield part, named
            return
        before = int(self.named_before(self.edges[:1])[0])
        for part in slices(len(self.moment)):
            upto = self.named_before(self.edges[part.start + 1 : part.stop + 1])
            yield part, np.diff(upto, prepend=before)
            before = int(upto[-1])

    @cached_property
    def _stacked(self) -> np.ndarray:
        """Position of each block that was taken from the stack."""
        before = self.unstacked["before"]
        return column_by_slices(len(before), lambda part: before[part] + np.arange(part.start, part.stop))

    def _place(self, position: np.ndarray) -> np.ndarray:
        """Place of the block taken at each position; for a block of the stack, the next place taken from the tape."""
        from_tape = position - np.searchsorted(self._stacked, position)
        before = np.searchsorted(self.hits["place"] - self._skipped[:-1], from_tape, side="right")
        return from_tape + self._skipped[before]

    def named_before(self, position: np.ndarray) -> np.ndarray:
        """Number of blocks with a name among the blocks taken before each position; ascending positions, one at least."""
        place = self._place(position)
        low, high = np.searchsorted(self._start, place[[0, -1]], side="right") - [1, 0]
        records = slice(low, high)
        ends = np.append(np.searchsorted(place, self._start[records][1:]), len(place))
        places = np.diff(ends, prepend=0)
        first, named, before = (
            np.repeat(column[records], places)
            for column in (self._start + self._unnamed, self.named, self._named_before)
        )
        found = before + np.minimum(np.maximum(0, place - first), named)
        # A place is never in a hole, so each hole before it counts completely.
        return found - self._skipped[np.searchsorted(self.hits["place"], place, side="right")]

    def lives(self) -> Iterator[Lives]:
        """Lives of blocks that were taken again, in parts.

        A part has the moments of birth, of the last touch (or birth) and of the next taking, and the number of blocks with
        them; and gaps as rows (touch, next touch, blocks), all in the last part. The moments of a part are valid until the next
        one is asked for.
        """
        no_gaps, count = np.zeros((0, 3), dtype=np.int64), np.zeros(len(self._touches), dtype=np.int64)
        last = np.array([touches[-1] for touches in self._touches], dtype=np.int64)
        on_tape = self._lives_on_tape if self._compiled is None else self._compiled_lives
        for born, touched, taken, blocks in on_tape(last, count):
            yield born, touched, taken, blocks, no_gaps
        for part in slices(len(self._stacked)):
            stacked = self._born(self.unstacked, part, self.unstacked["first"][part])
            yield stacked, stacked, self._taken(self._stacked[part]), np.ones_like(stacked), no_gaps
        nothing = np.zeros(0, dtype=np.int64)
        yield nothing, nothing, nothing, nothing, self._gaps(count)

    def _compiled_lives(self, last: np.ndarray, count: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """``_lives_on_tape`` by the compiled core, with the moments of all parts in one buffer."""
        assert self._compiled is not None
        at, buffer = np.zeros(_TAPE_FIELDS, dtype=np.int64), np.empty((4, _CHUNK), dtype=np.int64)
        found = _CHUNK
        while found == _CHUNK:
            found = self._compiled.lives(self._tape, self._size, last, count, at, buffer)
            born, touched, taken, blocks = buffer[:, :found]
            yield born, touched, taken, blocks.copy()
            release()

    def _lives_on_tape(self, last: np.ndarray, count: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Moments of birth, of the last touch and of the next taking of blocks that were taken from the tape, and the number
        of blocks with them, in parts.

        Args:
            last: The last moment of each of the touches.
            count: Counts the blocks with each of the touches.
        """
        for records, cuts, takings in self._cuts():
            record, blocks, born, taken = self._lives_between(records, cuts, takings)
            index = self.freed["touched"][record]
            hit = index >= 0
            np.add.at(count, index[hit], blocks[hit])
            touched = born.copy()
            touched[hit] = last[index[hit]]
            yield born, touched, taken, blocks

    def _cuts(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Some records of ``freed`` at a time, the places on the tape between which their blocks have one life, or lie in a
        hole, and the taking that each of these places is in. A part ends where the next one begins."""
        freed, hits, edges = self.freed, self.hits, self.edges
        places = column_by_slices(len(edges), lambda part: self._place(edges[part]))
        end, number = int(places[-1]), len(self._start)
        for part in slices(number, max(1, _CHUNK // _CUTS_OF_A_RECORD)):
            first, start = int(self._start[part.start]), self._start[part]
            stop = int(self._start[part.stop]) if part.stop < number else end
            # Each block taken by a decoding sequence has its own moment of birth.
            grown = np.maximum(0, freed["stop"][part] - np.maximum(freed["first"][part], freed["grown_from"][part]))
            single = np.repeat(start - np.cumsum(grown) + grown, grown) + np.arange(grown.sum())
            holes = slice(*np.searchsorted(hits["place"], [first, stop]))
            taken = slice(*np.searchsorted(places, [first, stop]))
            bounds = (
                *(start, start + grown, single, np.array([stop])),
                *(hits["place"][holes], hits["place"][holes] + hits["blocks"][holes]),
            )
            # The lowest bit tells the edges of takings from the others, and sorts them last.
            marks = np.sort(np.concatenate([np.concatenate(bounds) << 1, places[taken] << 1 | 1]))
            taking = taken.start - 1 + np.cumsum(marks & 1)
            cuts = marks >> 1
            kept = (np.diff(cuts, append=cuts[-1] + 1) > 0) & (cuts >= first) & (cuts <= min(stop, end))
            yield part, cuts[kept], taking[kept]

    def _lives_between(
        self, records: slice, cuts: np.ndarray, takings: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Records of ``freed``, number of blocks, and moments of birth and of the next taking, of the blocks between cuts."""
        freed, hits = self.freed, self.hits
        blocks, place, taking = np.diff(cuts), cuts[:-1], takings[:-1]
        ends = np.append(np.searchsorted(place, self._start[records][1:]), len(place))
        record = records.start + np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        # The first record has the blocks of the initial pool, which were never taken before.
        kept = record > 0
        if len(hits["place"]):
            hole = np.searchsorted(hits["place"], place, side="right")
            kept &= np.append(0, hits["place"] + hits["blocks"])[hole] <= place
        if not kept.all():
            blocks, place, record, taking = blocks[kept], place[kept], record[kept], taking[kept]
        born = self._born(freed, record, freed["stop"][record] - 1 - place + self._start[record])
        return record, blocks, born, self.moment[taking]

    def _taken(self, position: np.ndarray) -> np.ndarray:
        """Moments of the takings of the blocks at positions."""
        return self.moment[np.searchsorted(self.edges, position, side="right") - 1]

    def _gaps(self, count: np.ndarray) -> np.ndarray:
        """The gaps between touches, of so many blocks with each of the touches; int64 [gaps, 3]."""
        gaps = [
            (since, until, of)
            for touches, of in zip(self._touches, count.tolist(), strict=True)
            if of
            for since, until in pairwise(touches)
        ]
        return np.array(gaps, dtype=np.int64).reshape(-1, 3)

    def _born(self, columns: dict[str, np.ndarray], record: np.ndarray | slice, place: np.ndarray) -> np.ndarray:
        """Moments at which the blocks at places of tables were taken."""
        grown_from, born, lag = (columns[name][record] for name in ("grown_from", "born", "lag"))
        return np.where(place >= grown_from, self._in_step(place * self._size + 1 - lag), born)


def _taken_from(column: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of a long column."""
    return column_by_slices(len(rows), lambda part: column[rows[part]])
