"""The second tier of a prefix cache: blocks in host memory, and the copies between host and GPU.

One link goes each way, and copies one job after the other, beside the steps (``paged.offload`` says what they delay).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from ...types.errors import SimulationFault
from ...types.sequence import Sequence
from ...workload.source import NEVER
from ..accounting.ledger import Table
from .host_cache import HostCache

#: Columns of an admission's look-up on the host, in tokens; parallel to those of the GPU's prefix cache.
HOST_LOOK_UP = ("index", "queried_tokens", "hit_tokens")
#: Columns of a copy between GPU and host.
TRANSFER = ("index", "asked_ticks", "start_ticks", "end_ticks", "blocks", "is_store")
#: Columns of a change of the host's blocks.
HOST_LEVEL = ("ticks", "used_blocks")
#: Columns of a step that waits for stores.
FLUSH = ("start_ticks", "ticks")


class Offer(NamedTuple):
    """Full blocks of a sequence, from place ``first`` on, by name and by id on the GPU."""

    sequence: Sequence
    first: int
    names: list[int]
    block_ids: list[int]


@dataclass(eq=False, slots=True)
class _Job:
    """A copy of blocks between GPU and host.

    Attributes:
        names: The blocks by name.
        block_ids: Their ids on the GPU, of a store.
        end_ticks: End of the copy; ``NEVER`` before it is submitted.
    """

    sequence: Sequence
    names: list[int]
    block_ids: list[int]
    is_store: bool
    end_ticks: int = NEVER


class HostTier:
    """Blocks on the host, and the copies to it and from it.

    Args:
        num_blocks: Blocks of the host memory.
        block_size: Tokens a block.

    Attributes:
        cache: Names of the blocks on the host.
        look_ups, transfers, levels, flushes: Records, by the columns above.
        loading: Sequences with a load in progress.
        loaded: Sequences that load or have loaded and are not admitted yet, with their blocks, those that the GPU had included.
        offering: Sequences with blocks of their prompts that they have not offered.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cache, self._block_size = HostCache(num_blocks), block_size
        self.look_ups, self.transfers = Table(HOST_LOOK_UP), Table(TRANSFER)
        self.levels, self.flushes = Table(HOST_LEVEL), Table(FLUSH)
        self.loading: dict[Sequence, _Job] = {}
        self.loaded: dict[Sequence, int] = {}
        self.offering: dict[Sequence, None] = {}
        # Of loads and of stores: ticks of a job, and when the link has done all that was submitted.
        self._ticks: tuple[Callable[[int], int], Callable[[int], int]] = _not_connected, _not_connected
        self._free_from = [0, 0]
        self._clock: Callable[[], int] = _not_connected
        self._level = self._submitted = 0
        # Submitted jobs by their end; stores that the next step submits; loads of the decision.
        self._running: list[tuple[int, int, _Job]] = []
        self._unsubmitted: list[_Job] = []
        self._new_loads: list[_Job] = []
        self._being_loaded: set[int] = set()
        # Stores of each sequence that have not ended, and those of finished sequences by the ids of their blocks.
        self._stores: dict[Sequence, list[_Job]] = {}
        self._fenced: dict[int, list[_Job]] = {}
        # Stores that the step waits for.
        self._to_flush: list[_Job] = []
        self._finished: list[Offer] = []
        self._offered: dict[Sequence, int] = {}

    def connect(self, clock: Callable[[], int], load: Callable[[int], int], store: Callable[[int], int]) -> None:
        """Set the clock of the run, and the time that a load or a store of some blocks takes, in ticks."""
        self._clock, self._ticks = clock, (load, store)

    @property
    def next_ticks(self) -> int:
        """When the next copy ends, or ``NEVER``."""
        return self._running[0][0] if self._running else NEVER

    @property
    def loaded_tokens(self) -> int:
        """Tokens that waiting sequences have blocks for."""
        return sum(self.loaded.values()) * self._block_size

    def complete(self, until: int) -> None:
        """Note the copies that have ended by ``until``."""
        while self.next_ticks <= until:
            job = heappop(self._running)[2]
            if not job.is_store:
                self.cache.end_load(job.names)
                self._being_loaded.difference_update(job.names)
                del self.loading[job.sequence]
                continue
            self.cache.end_store(job.names)
            jobs = self._stores[job.sequence]
            jobs.remove(job)
            if not jobs:
                del self._stores[job.sequence]
            for block in job.block_ids:
                if block in self._fenced and job in self._fenced[block]:
                    self._fenced[block].remove(job)
                    if not self._fenced[block]:
                        del self._fenced[block]

    # --- While a step is decided ---

    def look_up(self, sequence: Sequence, names: list[int]) -> int | None:
        """Number of blocks, from the first of ``names`` on, that a waiting sequence can load; None if it waits for a copy."""
        self._offered[sequence] = 0
        if sequence in self._stores:
            return None
        found, waits = 0, False
        for name in names:
            if not self.cache.has(name):
                break
            found += 1
            waits = waits or not self.cache.is_ready(name) or name in self._being_loaded
        return None if waits else found

    def load(self, sequence: Sequence, first: int, names: list[int]) -> None:
        """A sequence begins to load blocks, the first of which is at place ``first``."""
        self.cache.start_load(sequence.index, _placed(first, names))
        self.loading[sequence] = job = _Job(sequence, names, [], False)
        self.loaded[sequence] = self._offered[sequence] = first + len(names)
        self._being_loaded.update(names)
        self._new_loads.append(job)

    def preempt(self, sequence: Sequence) -> None:
        """A sequence is preempted: the step waits for its stores."""
        self._to_flush += self._stores.get(sequence, ())

    def finish(self, offer: Offer) -> None:
        """A sequence finishes with blocks that it has not offered; it offers them with the next decision."""
        for job in self._stores.get(offer.sequence, ()):
            self._fence(job)
        self._finished.append(offer)

    def is_settled(self) -> bool:
        """Whether steps without admissions, finishes and preemptions begin no store, and take no block that is still stored."""
        return not (self.offering or self._unsubmitted or self._fenced or self._finished)

    def is_at_rest(self) -> bool:
        """Whether no copy goes on, and nothing that was loaded waits."""
        return not (self._running or self.loaded)

    def offered(self, sequence: Sequence) -> int:
        """Blocks of a sequence that it has offered, from its first on."""
        return self._offered.get(sequence, 0)

    def end_decision(self, offers: Iterable[Offer], taken: set[int], idle: bool) -> int:
        """A step is decided: submit copies, and take the offers of the sequences that it computes.

        Args:
            offers: In the order of the running sequences.
            taken: Ids of blocks that were taken or hit in the decision.
            idle: Whether the step computes nothing, so that the next one begins at once.

        Returns:
            Ticks that the step waits for stores.
        """
        now = self._clock()
        for job in self._unsubmitted:
            self._submit(job, now)
        self._unsubmitted = []
        self._to_flush += (job for block in sorted(taken & self._fenced.keys()) for job in self._fenced[block])
        for offer in offers:
            self._store(offer)
        # In the order of the step's outputs, which is that of the running sequences.
        finished, self._finished = sorted(self._finished, key=lambda offer: offer.sequence.order), []
        for offer in finished:
            self._store_finished(offer, taken, now)
        for offer in finished:
            self.cache.finish(offer.sequence.index)
            self._offered.pop(offer.sequence, None)
        # Copies that ended in the last step are not known to have ended.
        wait = max((max(0, job.end_ticks - now) for job in self._to_flush), default=0)
        self._to_flush = []
        for job in self._new_loads:
            self._submit(job, now + wait)
        self._new_loads = []
        if idle:
            for job in self._unsubmitted:
                self._submit(job, now)
            self._unsubmitted = []
        self._record(now, wait)
        return wait

    def _store_finished(self, offer: Offer, taken: set[int], now: int) -> None:
        """Take the offer of a finished sequence; the step waits for it if it takes one of the blocks."""
        job = self._store(offer) if offer.names else None
        if job is None:
            return
        self._fence(job)
        if not taken.isdisjoint(job.block_ids):
            self._unsubmitted.remove(job)
            self._submit(job, now)
            self._to_flush.append(job)

    def _store(self, offer: Offer) -> _Job | None:
        """The job that copies those blocks of an offer that are not on the host, if any."""
        sequence = offer.sequence
        missing = self.cache.start_store(sequence.index, _placed(offer.first, offer.names))
        if missing is None:
            # Offered again with the next step.
            return None
        self._offered[sequence] = offer.first + len(offer.names)
        if not missing:
            return None
        block_of = dict(zip(offer.names, offer.block_ids, strict=True))
        job = _Job(sequence, missing, [block_of[name] for name in missing], True)
        self._stores.setdefault(sequence, []).append(job)
        self._unsubmitted.append(job)
        return job

    def _fence(self, job: _Job) -> None:
        for block in job.block_ids:
            self._fenced.setdefault(block, []).append(job)

    def _submit(self, job: _Job, now: int) -> None:
        """Put a job at the end of the queue of its direction."""
        blocks = len(job.names)
        start = max(now, self._free_from[job.is_store])
        job.end_ticks = self._free_from[job.is_store] = start + self._ticks[job.is_store](blocks)
        heappush(self._running, (job.end_ticks, self._submitted, job))
        self._submitted += 1
        self.transfers.append((job.sequence.index, now, start, job.end_ticks, blocks, job.is_store))

    def _record(self, now: int, wait: int) -> None:
        if wait:
            self.flushes.append((now, wait))
        if self.cache.used_blocks != self._level:
            self._level = self.cache.used_blocks
            self.levels.append((now, self._level))


def _not_connected(*_: int) -> int:
    raise SimulationFault("an engine must connect the host tier before copies begin")


def _placed(first: int, names: list[int]) -> list[tuple[int, int]]:
    return [(name, place) for place, name in enumerate(names, first)]
