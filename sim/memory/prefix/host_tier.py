"""The second tier of a prefix cache: blocks in host memory, and the copies between host and GPU.

One link goes each way, and copies one job after the other, beside the steps (``paged.offload`` says what they delay). Tiers behind the
host are asked for what it has not (``tiers``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Values
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from functools import partial
from heapq import heappop, heappush
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ...types.errors import SettingError, SimulationFault
from ...types.sequence import Sequence
from ...workload.source import NEVER
from ..accounting.ledger import Table
from .contents_log import Asked
from .host_cache import HostCache, Placed
from .tiers import Link

#: Columns of an admission's look-up on the host, in tokens; parallel to those of the GPU's prefix cache.
HOST_LOOK_UP = ("index", "queried_tokens", "hit_tokens")
#: Columns of a copy between GPU and host.
TRANSFER = ("index", "asked_ticks", "start_ticks", "end_ticks", "blocks", "is_store")
#: Columns of a change of the host's blocks.
HOST_LEVEL = ("ticks", "used_blocks")
#: Columns of a step that waits for stores.
FLUSH = ("start_ticks", "ticks")
#: Columns of the tokens that a look-up found in a tier behind the host: row of the look-up, place of the tier.
BEHIND = ("look_up", "tier", "hit_tokens")
#: Decisions to promote while nothing runs, which a later arrival may still end.
_MOST_TURNS = 10_000


class LookUp(Enum):
    """vLLM's ``LookupResult``: what a look-up of a block finds."""

    MISS, HIT, HIT_PENDING, RETRY = range(4)


class Offer(NamedTuple):
    """Full blocks of a sequence.

    Attributes:
        until: For each KV group, blocks that it has offered with these, from its first on, those that are never offered included.
        blocks: Name, place, and ids on the GPU of each chunk; the place is that of its last hash.
        passing: Ids of those that the sequence may give back before it finishes: of windows and states.
    """

    sequence: Sequence
    until: tuple[int, ...]
    blocks: list[tuple[int, int, list[int]]]
    passing: AbstractSet[int] = frozenset()


@dataclass(eq=False, slots=True)
class _Job:
    """A copy of blocks between GPU and host.

    Attributes:
        names: The chunks by name.
        blocks: Blocks of the GPU.
        block_ids: Of a store, the ids on the GPU of those that the sequence keeps to its end.
        passing: Ids of the others.
        end_ticks: End of the copy; ``NEVER`` before it is submitted.
    """

    sequence: Sequence
    names: list[int]
    blocks: int
    block_ids: list[int]
    passing: list[int]
    is_store: bool
    end_ticks: int = NEVER


class HostTier:
    """Blocks on the host, and the copies to it and from it.

    Args:
        num_blocks: Blocks of the host memory.
        block_size: Tokens per block hash.
        num_kv_groups: KV groups, each with blocks of its own.
        behind: The tiers behind the host, in the order in which they are asked.
        chunk_blocks: Blocks of the GPU in one of the host.

    Attributes:
        cache: Names of the blocks on the host.
        look_ups, transfers, levels, flushes, behind_hits: Records, by the columns above.
        seen_ticks: When what the coming decision knows was known, for tiers behind.
        loading: Sequences with a load in progress.
        loaded: Sequences that load or have loaded and are not admitted yet, with their tokens, those that the GPU had included.
        offering: Sequences with blocks of their prompts that they have not offered.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_groups: int = 1,
        behind: Values[Link] = (),
        chunk_blocks: int = 1,
    ) -> None:
        self.cache, self._block_size = HostCache(num_blocks, num_kv_groups), block_size
        self.look_ups, self.transfers = Table(HOST_LOOK_UP), Table(TRANSFER)
        self.levels, self.flushes, self.behind_hits = Table(HOST_LEVEL), Table(FLUSH), Table(BEHIND)
        self.behind, self.chunk_blocks, self.seen_ticks = behind, chunk_blocks, 0
        if any(link.spec.writes_back for link in behind):
            self.cache.on_evicted = self._write_back
        self.loading: dict[Sequence, _Job] = {}
        self.loaded: dict[Sequence, int] = {}
        self.offering: dict[Sequence, None] = {}
        # Of loads and of stores: ticks of a job, and when the link has done all that was submitted.
        self._ticks: tuple[Callable[[int], int], Callable[[int], int]] = _not_connected, _not_connected
        self._free_from = [0, 0]
        self._clock: Callable[[], int] = _not_connected
        self._level = self._submitted = self._looked_up = 0
        # When a decision that computed nothing evicted blocks from the host, for which some sequence may have waited.
        self._evicted_ticks = NEVER
        # Blocks evicted up to the last decision; promotions evict some in the look-ups of the next one.
        self._evicted = 0
        # By its end, what is to be done when a submitted job has ended; stores that the next step submits; loads of the decision.
        self._running: list[tuple[int, int, Callable[[], None]]] = []
        # Of each sequence the blocks that it has promoted, with the place of their tier; promotions of the decision by both.
        self._sources: dict[int, dict[int, int]] = {}
        self._promoting: dict[tuple[int, int], list[int]] = {}
        # Decisions to promote since a step last computed anything.
        self._turns = 0
        # Finished sequences with stores that have not ended.
        self._over: set[Sequence] = set()
        self._unsubmitted: list[_Job] = []
        self._new_loads: list[_Job] = []
        self._being_loaded: set[int] = set()
        # Stores of each sequence that have not ended, and those of finished sequences by the ids of their blocks.
        self._stores: dict[Sequence, list[_Job]] = {}
        self._fenced: dict[int, list[_Job]] = {}
        # Stores that the step waits for.
        self._to_flush: list[_Job] = []
        self._finished: list[Offer] = []
        self._none_offered = (0,) * num_kv_groups
        self._offered: dict[Sequence, tuple[int, ...]] = {}
        # Blocks that the GPU had at each look-up, and full blocks of the sequence.
        self._known: list[int] = []
        self._asked: list[int] = []

    def connect(self, clock: Callable[[], int], load: Callable[[int], int], store: Callable[[int], int]) -> None:
        """Set the clock of the run, and the time that a load or a store of some blocks takes, in ticks."""
        self._clock, self._ticks = clock, (load, store)

    @property
    def labels(self) -> list[str]:
        """Names of the tiers behind the host, as vLLM's metrics have them."""
        return [f"{place}:{link.spec.type}" for place, link in enumerate(self.behind, 1)]

    @property
    def next_ticks(self) -> int:
        """When the next copy ends or a decision can be another one, or ``NEVER``."""
        return min(self._evicted_ticks, self._running[0][0] if self._running else NEVER)

    @property
    def loaded_tokens(self) -> int:
        """Tokens that waiting sequences have blocks for."""
        return sum(self.loaded.values())

    def complete(self, until: int) -> None:
        """Note the copies that have ended by ``until``."""
        self._evicted_ticks = NEVER
        self.seen_ticks = until
        while self.next_ticks <= until:
            heappop(self._running)[2]()

    def _end_copy(self, job: _Job) -> None:
        if not job.is_store:
            self.cache.end_load(job.names)
            self._being_loaded.difference_update(job.names)
            del self.loading[job.sequence]
            return
        self.cache.end_store(job.names)
        for link in self.behind:
            if not link.spec.writes_back:
                self.cache.pin(job.names)
                self._until(link.write(job.names, self.seen_ticks), partial(self.cache.end_load, job.names))
        jobs = self._stores[job.sequence]
        jobs.remove(job)
        if not jobs:
            del self._stores[job.sequence]
            if job.sequence in self._over:
                self._over.remove(job.sequence)
                self._forget(job.sequence)
        for block in (*job.passing, *job.block_ids):
            if block in self._fenced and job in self._fenced[block]:
                self._fenced[block].remove(job)
                if not self._fenced[block]:
                    del self._fenced[block]

    def _forget(self, sequence: Sequence) -> None:
        """A sequence has finished, and so have its stores."""
        self._sources.pop(sequence.index, None)
        for link in self.behind:
            link.forget(sequence.index)

    def _until(self, end_ticks: int, done: Callable[[], None]) -> None:
        """Call ``done`` when the engine knows that it is ``end_ticks``."""
        heappush(self._running, (end_ticks, self._submitted, done))
        self._submitted += 1

    def _write_back(self, names: list[int]) -> None:
        for link in self.behind:
            if link.spec.writes_back:
                link.write(names, self.seen_ticks)

    # --- While a step is decided ---

    def starts_anew(self, sequence: Sequence) -> bool:
        """A waiting sequence is looked up, and offers all its blocks again. Returns whether it has to wait for its own stores."""
        self._offered[sequence] = self._none_offered
        return sequence in self._stores

    def _find(self, request: int, name: int, place: int) -> LookUp:
        """Look a block up on the host, and behind it, from where it is then promoted to the host."""
        cache = self.cache
        if cache.has(name):
            return LookUp.HIT if cache.is_ready(name) else LookUp.HIT_PENDING
        answer = LookUp.MISS
        for tier, link in enumerate(self.behind):
            found = link.find(request, name, self.seen_ticks)
            if found:
                if not cache.start_store(request, [(name, place)]):
                    return LookUp.MISS
                self._promoting.setdefault((tier, request), []).append(name)
                self._sources.setdefault(request, {})[name] = tier
                return LookUp.HIT_PENDING
            if found is None:
                answer = LookUp.RETRY
        return answer

    def prefix(self, request: int, blocks: Iterable[Placed]) -> int | None:
        """Number of blocks, from the first of ``blocks`` on, that are here; None if some of them are still written."""
        found, waits = 0, False
        for name, place in blocks:
            answer = self._find(request, name, place)
            if answer is LookUp.MISS:
                break
            found += 1
            waits = waits or answer is not LookUp.HIT
        return None if waits else found

    def window(self, request: int, blocks: Values[Placed], needed: int, first: int) -> int | None:
        """End of the last run of blocks that are here, as for a window or a state, or length of a run that begins with ``blocks``.

        Args:
            needed: Length of a run.
            first: Length of one that ends with ``blocks``.

        Returns:
            None if a block of the run is still written, or it is not known yet whether one is here.
        """
        run, waits, retries = 0, False, False
        for at in reversed(range(len(blocks))):
            answer = self._find(request, *blocks[at])
            if answer in (LookUp.HIT, LookUp.HIT_PENDING):
                run += 1
                waits = waits or answer is LookUp.HIT_PENDING
            else:
                run, waits, first = 0, False, needed
                retries = retries or answer is LookUp.RETRY
            if run == first:
                return None if waits or retries else at + run
        return None if waits or retries else run

    def sources(self, sequence: Sequence) -> dict[int, int]:
        """The blocks that a sequence has promoted to the host, by name, with the place of their tier."""
        return self._sources.get(sequence.index, {})

    def is_loading(self, names: Iterable[int]) -> bool:
        """Whether one of these blocks is on its way to the GPU."""
        return bool(self._being_loaded) and not self._being_loaded.isdisjoint(names)

    def load(
        self, sequence: Sequence, tokens: int, blocks: Values[Placed], num_blocks: int, until: tuple[int, ...]
    ) -> None:
        """A sequence begins to load ``num_blocks`` of the GPU from chunks, and then has ``tokens``, for which each group has ``until``
        chunks."""
        self.cache.start_load(sequence.index, blocks)
        names = [name for name, _ in blocks]
        self.loading[sequence] = job = _Job(sequence, names, num_blocks, [], [], False)
        self.loaded[sequence], self._offered[sequence] = tokens, until
        self._being_loaded.update(names)
        self._new_loads.append(job)

    def preempt(self, sequence: Sequence) -> None:
        """A sequence is preempted: the step waits for its stores."""
        self._to_flush += self._stores.get(sequence, ())

    def finish(self, offer: Offer) -> None:
        """A sequence finishes with blocks that it has not offered; it offers them with the next decision."""
        for job in self._stores.get(offer.sequence, ()):
            self._fence(job, job.block_ids)
        self._finished.append(offer)

    @property
    def has_finished(self) -> bool:
        """Whether finished sequences offer blocks with the next decision."""
        return bool(self._finished)

    def is_settled(self) -> bool:
        """Whether steps without admissions, finishes and preemptions begin no store, and take no block that is still stored."""
        return not (self.offering or self._unsubmitted or self._fenced or self._finished)

    def is_at_rest(self) -> bool:
        """Whether no copy goes on, and nothing that was loaded waits."""
        return not (self._running or self.loaded)

    def offered(self, sequence: Sequence) -> tuple[int, ...]:
        """For each KV group, blocks of a sequence that it has offered, from its first on."""
        return self._offered.get(sequence, self._none_offered)

    def end_decision(self, states: Iterable[Offer], offers: Iterable[Offer], taken: set[int], idle: bool) -> int:
        """A step is decided: submit copies, and take the offers of the sequences that it computes.

        Args:
            states: States that can be found from now on, one by one; they are offered once.
            offers: In the order of the running sequences.
            taken: Ids of blocks that were taken or hit in the decision.
            idle: Whether the step computes nothing, so that the next one begins at once.

        Returns:
            Ticks that the step waits for stores.
        """
        now, evicted = self._clock(), self._evicted
        for job in self._unsubmitted:
            self._submit(job, now)
        self._unsubmitted = []
        self._to_flush += (job for block in sorted(taken & self._fenced.keys()) for job in self._fenced[block])
        for offer in (*states, *offers):
            self._store(offer)
        # In the order of the step's outputs, which is that of the running sequences.
        finished, self._finished = sorted(self._finished, key=lambda offer: offer.sequence.order), []
        for offer in finished:
            self._store_finished(offer, taken, now)
        for offer in finished:
            self.cache.finish(offer.sequence.index)
            if offer.sequence in self._stores:
                self._over.add(offer.sequence)
            else:
                self._forget(offer.sequence)
            self._offered.pop(offer.sequence, None)
        # Copies that ended in the last step are not known to have ended.
        wait = max((max(0, job.end_ticks - now) for job in self._to_flush), default=0)
        self._to_flush = []
        for job in self._new_loads:
            self._submit(job, now + wait)
        self._new_loads = []
        self._look_behind(idle)
        if idle:
            for job in self._unsubmitted:
                self._submit(job, now)
            self._unsubmitted = []
            if self.cache.evicted_blocks > evicted:
                self._evicted_ticks = now + wait
        self._evicted = self.cache.evicted_blocks
        self._record(now, wait)
        return wait

    def _look_behind(self, idle: bool) -> None:
        """Submit the promotions and the look-ups of the decision.

        Raises:
            SettingError: Nothing runs, and promoted blocks evict each other again and again.
        """
        now = self.seen_ticks
        self._turns = idle * (self._turns + bool(self._promoting))
        if self._turns > _MOST_TURNS:
            remedy = "is fewer than a request finds behind them: vLLM promotes its blocks for ever; give the host more memory"
            raise SettingError("blocks on the host", self.cache.num_blocks, remedy)
        for (tier, request), names in self._promoting.items():
            until, found = self.behind[tier].read(names, now)
            self._until(until, partial(self._end_promotion, tier, request, names, found))
        self._promoting = {}
        for link in self.behind:
            if (asked := link.begin_look_ups(now)) is not None:
                self._until(*asked)

    def _end_promotion(self, tier: int, request: int, names: list[int], found: int) -> None:
        """Blocks are on the host, the first ``found`` of ``names``; the others are not."""
        read, lost = names[:found], names[found:]
        self.behind[tier].store.end_read(read)
        self.cache.end_store(read)
        self.cache.drop(lost)
        self.behind[tier].mark_miss(lost)
        sources = self._sources.get(request, {})
        for name in lost:
            if sources.get(name) == tier:
                del sources[name]

    def _store_finished(self, offer: Offer, taken: set[int], now: int) -> None:
        """Take the offer of a finished sequence; the step waits for it if it takes one of the blocks, but not for those of windows."""
        offer = offer._replace(
            blocks=[each for each in offer.blocks if offer.passing.isdisjoint(each[2]) or taken.isdisjoint(each[2])]
        )
        job = self._store(offer) if offer.blocks else None
        if job is None:
            return
        self._fence(job, job.block_ids)
        if not taken.isdisjoint(job.block_ids):
            self._unsubmitted.remove(job)
            self._submit(job, now)
            self._to_flush.append(job)

    def _store(self, offer: Offer) -> _Job | None:
        """The job that copies those blocks of an offer that are not on the host, if any."""
        sequence = offer.sequence
        missing = self.cache.start_store(sequence.index, [(name, place) for name, place, _ in offer.blocks])
        if missing is None:
            # Offered again with the next step.
            return None
        self._offered[sequence] = offer.until
        if not missing:
            return None
        blocks_of = {name: blocks for name, _, blocks in offer.blocks}
        ids: tuple[list[int], list[int]] = ([], [])
        for name in missing:
            for block in blocks_of[name]:
                ids[block in offer.passing].append(block)
        job = _Job(sequence, missing, len(ids[0]) + len(ids[1]), *ids, True)
        self._stores.setdefault(sequence, []).append(job)
        self._unsubmitted.append(job)
        self._fence(job, job.passing)
        return job

    def _fence(self, job: _Job, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._fenced.setdefault(block, []).append(job)

    def _submit(self, job: _Job, now: int) -> None:
        """Put a job at the end of the queue of its direction."""
        start = max(now, self._free_from[job.is_store])
        job.end_ticks = self._free_from[job.is_store] = start + self._ticks[job.is_store](job.blocks)
        self._until(job.end_ticks, partial(self._end_copy, job))
        self.transfers.append((job.sequence.index, now, start, job.end_ticks, job.blocks, job.is_store))

    def on_looked_up(
        self, sequence: Sequence, known: int, found: int, behind: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        """A sequence enters, or begins to load.

        Args:
            known: Tokens that the GPU has.
            found: Tokens after these that are here.
            behind: Those of them that came from each tier behind, by its place.
        """
        for tier, tokens in behind.items():
            self.behind_hits.append((self._looked_up, tier, tokens))
        self._looked_up += 1
        self.look_ups.append((sequence.index, sequence.start_tokens - known, found))
        if self.cache.contents is not None:
            self._known.append(known // self._block_size)
            self._asked.append(sequence.start_tokens // self._block_size)
            for contents in (self.cache.contents, *(link.store.contents for link in self.behind)):
                if contents is not None:
                    contents.on_looked_up(True, -(-found // self._block_size), 0)

    def asked(self) -> Asked:
        """The full blocks of each look-up that the GPU does not have, where contents are logged."""
        requests = self.look_ups.columns()["index"]
        return Asked(requests, np.array(self._known, dtype=np.int64), np.array(self._asked, dtype=np.int64))

    def _record(self, now: int, wait: int) -> None:
        if self.cache.contents is not None:
            self.cache.contents.settle(now)
        if wait:
            self.flushes.append((now, wait))
        if self.cache.used_blocks != self._level:
            self._level = self.cache.used_blocks
            self.levels.append((now, self._level))


def _not_connected(*_: int) -> int:
    raise SimulationFault("an engine must connect the host tier before copies begin")
