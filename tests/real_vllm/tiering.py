"""Tiers behind the host for vLLM's own tiering manager: files that take a stated time, in a directory with a size.

The manager (look-ups, promotions, cascades) is vLLM's; so is what answers look-ups later (``AsyncLookupManager``), which is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any
from unittest import mock

import numpy as np
from vllm.config.kv_transfer import KVTransferConfig
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext, get_offload_group_idx
from vllm.v1.kv_offload.tiering import spec as real_spec
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from fragmeter.sim.spec.tiers import TierSpec

from .server import Clock


@dataclass(frozen=True)
class Tier:
    """Chunks of a tier (0 is without end), ticks to read and to write one, and whether look-ups are answered later."""

    chunks: int
    read_ticks: int
    write_ticks: int
    answers_later: bool = False

    def config(self, chunk_bytes: int) -> dict[str, Any]:
        """As ``secondary_tiers`` has it; a bandwidth only says which tier it is."""
        size = {"size_gib": self.chunks * chunk_bytes / (1 << 30)} if self.chunks else {}
        return {"type": "fs" if self.answers_later else "example", "latency_us": 0, **size}


@dataclass
class _File:
    ready: int
    used: int
    readers: int = 0


@dataclass
class _Directory:
    """Blocks by key."""

    size: int
    files: dict[bytes, _File] = field(default_factory=dict)
    uses: int = 0

    def use(self) -> int:
        self.uses += 1
        return self.uses

    def has(self, key: bytes, now: int) -> bool:
        return key in self.files and self.files[key].ready <= now

    def room(self, wanted: int, now: int) -> int:
        if not self.size:
            return wanted
        idle = sorted((file.used, key) for key, file in self.files.items() if file.ready <= now and not file.readers)
        for _, key in idle[: max(0, wanted - (self.size - len(self.files)))]:
            del self.files[key]
        return self.size - len(self.files)


class _LookUps(AsyncLookupManager):
    """vLLM's, whose thread has answered before the next decision."""

    def __init__(self, tier: TimedTier) -> None:
        super().__init__(tier_type="timed")
        self._tier = tier

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        return [self._tier.directory.has(key, self._tier.clock.now) for key in keys]

    def flush(self) -> None:
        asked = bool(self._lookup_batch)
        super().flush()
        until = time.monotonic() + 5
        while asked and self._pending_results.empty():
            assert time.monotonic() < until
            time.sleep(0)


class TimedTier(SecondaryTierManager):
    """See the module."""

    given: Iterator[Tier]
    #: Set before the first request comes: the clock, and the ends of copies of the GPU that the scheduler has not heard of.
    clock: Clock
    copies: Mapping[int, int]

    def __init__(self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, **_: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.tier = next(type(self).given)
        self.directory = _Directory(self.tier.chunks)
        self.jobs: list[tuple[int, int, list[bytes]]] = []
        self.free = {True: 0, False: 0}
        self.promotions = 0
        self.lost: dict[int, list[bytes]] = {}
        self.look_ups = _LookUps(self) if self.tier.answers_later else None

    def ends(self) -> list[int]:
        """When the scheduler hears of something."""
        answered = self.look_ups is not None and not self.look_ups._pending_results.empty()
        return [end for end, _, _ in self.jobs] + answered * [self.clock.now]

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        found = (
            self.directory.has(key, self.clock.now) if self.look_ups is None else self.look_ups.lookup(key, req_context)
        )
        return {None: LookupResult.RETRY, True: LookupResult.HIT, False: LookupResult.MISS}[found]

    def _end(self, blocks: int, writes: bool) -> int:
        each = self.tier.write_ticks if writes else self.tier.read_ticks
        self.free[writes] = max(self.clock.now, self.free[writes]) + blocks * each
        return self.free[writes]

    def submit_store(self, job: Any) -> None:
        files, end = self.directory.files, self.clock.now
        missing = []
        # A set: its order differs from process to process.
        for key in sorted(
            job.keys, key=lambda key: (get_offload_group_idx(key), job.req_context.get_offload_key_position(key))
        ):
            if key in files:
                files[key].used = self.directory.use()
            else:
                missing.append(key)
        missing = missing[: self.directory.room(len(missing), self.clock.now)]
        if missing:
            end = self._end(len(missing), True)
            files.update({key: _File(end, self.directory.use()) for key in missing})
        self.jobs.append((end, job.job_id, []))

    def submit_load(self, job: Any) -> None:
        self.promotions += 1
        # As of files, a load ends at the first that is gone.
        keys = [*takewhile(self.directory.files.__contains__, job.keys)]
        for key in keys:
            file = self.directory.files[key]
            file.readers, file.used = file.readers + 1, self.directory.use()
        end = self._end(len(keys), False) if keys else self.clock.now
        self.lost[job.job_id] = [*job.keys][len(keys) :]
        self.jobs.append((end, job.job_id, keys))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        # Of copies that end together the scheduler hears of those of the GPU first; vLLM has no order for them.
        until = self.clock.now - any(end == self.clock.now for end in self.copies.values())
        done = sorted(job for job in self.jobs if job[0] <= until)
        self.jobs = [job for job in self.jobs if job not in done]
        results = []
        for _, number, keys in done:
            for key in keys:
                self.directory.files[key].readers -= 1
            lost = self.lost.pop(number, [])
            if lost and self.look_ups is not None:
                self.look_ups.mark_miss(lost)
            results.append(JobResult(job_id=number, success=not lost, successful_keys=tuple(keys) or None))
        return results

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        if self.look_ups is not None:
            self.look_ups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        if self.look_ups is not None:
            self.look_ups.flush()

    def drain_jobs(self) -> None:
        pass


class _Region:
    """In place of the memory that vLLM shares with its workers: a row a chunk."""

    def __init__(self, num_chunks: int, **_: Any) -> None:
        self._view = memoryview(np.zeros((num_chunks, 1), dtype=np.uint8))

    def create_kv_memoryview(self) -> memoryview:
        return self._view

    def cleanup(self) -> None:
        pass


@contextmanager
def behind(extra: dict[str, Any], tiers: Iterable[Tier]) -> Iterator[None]:
    """vLLM's connector is configured with these, and its tiers are timed."""
    with (
        mock.patch("vllm.config.vllm.KVTransferConfig", partial(KVTransferConfig, kv_connector_extra_config=extra)),
        mock.patch.object(real_spec, "SharedOffloadRegion", _Region),
        mock.patch.dict(SecondaryTierFactory._registry, dict.fromkeys(("fs", "example"), lambda: TimedTier)),
        mock.patch.object(TimedTier, "given", iter(tiers), create=True),
    ):
        yield


@contextmanager
def timed(chunk_bytes: int, tiers: tuple[Tier, ...]) -> Iterator[None]:
    """Our tiers take these times. Tiers of one kind have equal ones."""

    def ticks(spec: TierSpec, size_bytes: int, writes: bool) -> int:
        tier = next(each for each in tiers if each.answers_later == spec.answers_later)
        return size_bytes // chunk_bytes * (tier.write_ticks if writes else tier.read_ticks)

    with mock.patch.object(TierSpec, "ticks", ticks):
        yield
