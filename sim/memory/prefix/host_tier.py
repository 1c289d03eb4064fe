"""The second tier of a prefix cache: blocks in host memory, and the copies between host and GPU.

One link goes each way, and copies one job after the other, beside the steps (``paged.offload`` says what they delay). Tiers behind the
host are asked for what it has not (``tiers``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Values
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ...types.sequence import Sequence
from ...workload.source import NEVER
from .contents_log import Asked
from .host_cache import HostCache, Placed
from .host_look_ups import HostLookUps
from .tiers import Link


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


class HostTier(HostLookUps):
    """Blocks on the host, and the copies to it and from it.

    Args:
        num_blocks: Blocks of the host memory.
        block_size: Tokens per block hash.
        num_kv_groups: KV groups, each with blocks of its own.
        behind: See ``HostLookUps``.
        chunk_blocks: Blocks of the GPU in one of the host.

    Attributes:
        loading: Sequences with a load in progress.
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
        super().__init__(HostCache(num_blocks, num_kv_groups), behind, chunk_blocks)
        self._block_size, self._looked_up = block_size, 0
        self.loading: dict[Sequence, _Job] = {}
        self.offering: dict[Sequence, None] = {}
        # When a decision that computed nothing evicted blocks from the host, for which some sequence may have waited.
        self._evicted_ticks = NEVER
        # Blocks evicted up to the last decision; promotions evict some in the look-ups of the next one.
        self._evicted = 0
        # Finished sequences with stores that have not ended.
        self._over: set[Sequence] = set()
        # Stores that the next step submits; loads of the decision.
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

    @property
    def next_ticks(self) -> int:
        """See ``HostCopies``."""
        return min(self._evicted_ticks, super().next_ticks)

    def complete(self, until: int) -> None:
        """See ``HostCopies``."""
        self._evicted_ticks = NEVER
        super().complete(until)

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

    # --- While a step is decided ---

    def starts_anew(self, sequence: Sequence) -> bool:
        """A waiting sequence is looked up, and offers all its blocks again. Returns whether it has to wait for its own stores."""
        self._offered[sequence] = self._none_offered
        return sequence in self._stores

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
        """See ``HostCopies``; such a step takes no block that is still stored, either."""
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
        done = partial(self._end_copy, job)
        job.end_ticks = self._copy(
            job.sequence.index, now, job.blocks, self._ticks[job.is_store](job.blocks), job.is_store, done
        )

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
        self.note_wait(now, wait)
        self._note_level(now)
