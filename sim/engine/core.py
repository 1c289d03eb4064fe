"""The engine of one replica in compiled form, for the runs that the compiled core can serve.

``_core_*.c`` compute the leaps of ``engine.Engine`` with the same integers, and writes the same records. Nothing outside of
one replica changes its open loop, so SimPy keeps the clock at a coarser grain: one event spans as many leaps as the core's
buffers hold.

    SimPy's clock     |--------------------- one event ---------------------|--------- ...
    leaps of the core |--|-----|-|-|----------|---|-------|-|-----------|---|--|-- ...

An event also ends with the first leap that ends at a look or after it. The ledger then has what it has in Python at this
look: all leaps before, and admissions and preemptions of the one in progress, but not its row.

Behind a router that looks, a replica computes what happens up to each arrival (``cluster/routed_core.py``). ``engine.py`` is the
specification, and serves every other run. ``setup.py`` builds the core where there is a compiler.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import numpy as np
import simpy

from ..config.settings import Settings
from ..cost import PaperCost, StepCost, step_parts
from ..cost.base import effective_context, saved_ticks
from ..memory import Memory
from ..memory.accounting.ledger import Ledger, Table
from ..memory.paged.cached import CachedMemory
from ..memory.paged.paged import PagedMemory
from ..memory.prefix import CoreResidency
from ..memory.prefix.contents_log import STAY
from ..policy.base import AnyPolicy
from ..policy.vllm_sosp23 import VllmSosp23
from ..policy.vllm_v1 import VllmV1
from ..runs.replica import Replica
from ..types.errors import Overdrawn, SimulationFault
from ..workload.workload import Workload
from .core_header import PAGED_METER, PART_NUMBERS, STATUSES, CoreLimits, header
from .observer import MapLimits

_FOLDER = Path(__file__).parent
#: Leaps that a buffer holds.
_LEAPS = 1 << 15
#: ``StepParts`` as the core takes it: calls, ticks of pairs, and ``PART_NUMBERS``.
Parts: TypeAlias = tuple[object, object, object, object, tuple[tuple[int, int], ...], tuple[int, ...]]
FOREVER = (1 << 63) - 1
#: What ``_core.serve`` and ``_core.advance`` say first.
_GOES_ON, _ENDED, _STUCK, _UNPUBLISHED, RESTS, _OVERDRAWN = range(len(STATUSES))
#: Settings that may have another value than their default. The core reads them, or the sizes, limits and step times that
#: follow from them. A run with any other setting, such as one that is added later, is served in Python.
SETTINGS = frozenset(
    (
        "policy", "model", "gpu", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
        "enable_expert_parallel", "quantization", "kv_cache_dtype", "enforce_eager", "block_size", "num_gpu_blocks_override",
        "enable_prefix_caching", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "cost", "server", "step_scale",
        "window", "seed", "outside_ms", "check_leaps",
    )
)  # fmt: skip
#: The policies that the core has: the memories of each, and its options that may have another value than their default.
POLICIES: dict[type[AnyPolicy], tuple[tuple[type[Memory], ...], frozenset[str]]] = {
    VllmSosp23: ((PagedMemory,), frozenset(("watermark", "swap_space", "disable_hybrid_kv_cache_manager"))),
    VllmV1: (
        (CachedMemory, PagedMemory),
        frozenset(
            (
                "watermark",
                "gpu_memory_utilization",
                "vllm_release",
                "disable_hybrid_kv_cache_manager",
                "decode_context_parallel_size",
            )
        ),
    ),
}


def source_sha256(folder: Path) -> str | None:
    """The hash of the core's sources in a folder, and of the declarations that they share with Python; None without them."""
    paths = [*sorted(folder.glob("_core*.c")), folder / "_core.h"]
    if not paths[-1].is_file():
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths) + header().encode()).hexdigest()


@cache
def compiled() -> tuple[ModuleType | None, str]:
    """The compiled core, or None; and which it is, or why there is none."""
    try:
        from . import _core
    except ImportError:
        return None, "not built"
    if source_sha256(_FOLDER) not in (None, _core.SOURCE_SHA256):
        return None, "built from other sources, or other columns, than those of today"
    return _core, f"built from sources with SHA-256 {_core.SOURCE_SHA256[:12]}"


def serves(settings: Settings, replica: Replica, mapped: bool = False) -> bool:
    """Whether the core serves an open loop of single sequences on this replica, without observers or with one that ``maps_blocks``.

    Args:
        mapped: Whether there is such an observer; else no one could read block ids.
    """
    wanted = settings.core and (mapped or not settings.ids)
    return wanted and compiled()[0] is not None and obstacle(settings, replica) is None


def obstacle(settings: Settings, replica: Replica) -> str | None:
    """What the core does not have of the settings of a run, by name and value; None if it has all.

    It has the policies of ``POLICIES`` over one KV group, where preempted sequences are recomputed. It does not
    count blocks that several tables name, so a run that may have some is served in Python if its steps are shorter with them.
    """
    memory = replica.memory
    if type(replica.policy) not in POLICIES:
        return f"policy = {settings.policy}"
    kinds, options = POLICIES[type(replica.policy)]
    given = settings.given()
    unknown = [name for name in given if name not in SETTINGS | options | {"core", "ids"}]
    if unknown:
        return ", ".join(f"{name} = {given[name]}" for name in unknown)
    if replica.policy.stages > 1:
        return f"pipeline_parallel_size = {settings.pipeline_parallel_size}"
    if type(memory) not in kinds or not isinstance(memory, PagedMemory) or not memory.is_plain:
        # Of the settings that the core has only the model brings another memory.
        return f"model = {settings.model}"
    if memory.tables is not None and memory.tables.pool.order is None:
        return f"order of free blocks = {type(memory.tables.pool.free_block_queue).__name__}"
    repeats = effective_context(replica.cost) is not None or saved_ticks(replica.cost) is not None
    if isinstance(memory, CachedMemory) and repeats and not all(memory.unshared):
        return f"cost = {settings.cost}"
    return None


class CoreEngine:
    """Serves an open loop with the compiled core.

    Args:
        env: SimPy environment with a clock in ticks, an int.
        workload: Requests of one sequence each.
        refused: bool [n], requests that no schedule can serve.
        replica: One that ``serves`` accepts.
        edges: Ticks at which a measurement begins and ends, or none; leaps end there.
        looks: Ticks at which the ledger is read; leaps span them.
        mapped: Whether an observer records a block map.

    Attributes:
        process, policy, memory, cost, ledger, end_ticks, stopped: As of ``Engine``.
        delivered: Requests that have arrived in the steps that are computed so far.
    """

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        refused: np.ndarray,
        replica: Replica,
        edges: Iterable[int] = (),
        looks: Iterable[int] = (),
        mapped: bool = False,
    ) -> None:
        self.policy, self.cost = replica.policy, replica.cost
        self.env, self.memory, self.ledger = env, replica.memory, Ledger(replica.memory.meter, compiled()[0])
        self.end_ticks, self.delivered, self.stopped = int(env.now), 0, False
        self._name, edges = replica.policy.name, tuple(edges)
        #: Ticks at which the clock is that of SimPy.
        self._pauses = sorted({*edges, *looks, FOREVER})
        rows = np.flatnonzero(~refused).astype(np.int64)
        columns = (column[rows] for column in (workload.arrival_ticks, workload.prompt_tokens, workload.output_tokens))
        limits = replica.policy.limits
        self._most = min(limits.max_num_seqs, max(1, len(rows)))
        vain = _ends_early(workload, limits.max_model_len)[rows]
        parts = started(replica, (rows, *columns, vain), self._most, edges, mapped=mapped)
        self._core, self._handle, self._cache = parts
        self.process = env.process(self._serve())

    def stop(self) -> None:
        """End the run after the step or leap in progress."""
        self.stopped = True

    def record(self, shown: np.ndarray, limits: MapLimits) -> Callable[[], tuple[int, memoryview, memoryview]]:
        """See ``BlockViews``."""
        self._core.record(self._handle, shown, limits)
        return partial(self._core.recorded, self._handle)

    def _buffers(self) -> tuple[tuple[Table, ...], list[np.ndarray]]:
        """Tables of the ledger, and buffers for their records, with room for all that one leap may admit or preempt."""
        tables = self.ledger.rows, self.ledger.residencies, self.ledger.evictions, self.ledger.chunks
        room = _LEAPS + self._most
        return tables, [np.empty((room, len(table.fields)), dtype=np.int64) for table in tables]

    def _serve(self) -> Generator[simpy.Event, None, None]:
        tables, buffers = self._buffers()
        now, status = 0, 0
        while status != _ENDED and not self.stopped:
            until = self._pauses[bisect_right(self._pauses, now)]
            status, end, self.delivered, waiting, *counts = self._core.serve(self._handle, until, *buffers)
            raise_fault(status, self._name, waiting)
            rows = buffers[0][: counts[0]]
            in_progress = len(rows) > 0 and end >= until and _row_end(rows[-1]) == end
            counts[0] -= in_progress
            for table, records, count in zip(tables, buffers, counts, strict=True):
                table.extend(records[:count])
            if self._cache is not None:
                self._cache.read()
            yield self.env.timeout(end - now)
            if in_progress:
                self.ledger.rows.extend(rows[-1:])
            now = end
        self.end_ticks = now
        if self._cache is not None:
            self._cache.close()
        # The columns of its requests go with it.
        del self._handle


def started(
    replica: Replica,
    columns: tuple[np.ndarray, ...],
    most: int,
    edges: tuple[int, ...],
    routed: bool = False,
    mapped: bool = False,
) -> tuple[ModuleType, object, CoreCache | None]:
    """The core, a handle of a replica in it, and what it computes of the replica's prefix cache, if it has one.

    Args:
        columns: Rows of the requests, their arrivals, prompt and output tokens, and whether they end early.
        most: Maximum number of sequences in a step.
        routed: Whether a router sends the requests one by one; the columns are empty then.
        mapped: Whether a block map is recorded.
    """
    core, memory, limits, cost = compiled()[0], replica.memory, replica.policy.limits, replica.cost
    assert core is not None
    assert isinstance(memory, PagedMemory)
    assert memory.meter == PAGED_METER
    numbers = CoreLimits(
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        max_num_seqs=most,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        watermark_blocks=limits.watermark_blocks,
    )
    # A subclass may have other step times.
    terms = cost.terms if type(cost) is PaperCost else None
    costs = cost.step_ticks, cost.decode_line, terms, _parts_of(cost)
    cached = memory if isinstance(memory, CachedMemory) else None
    tables = None
    if memory.tables is not None and (cached is not None or mapped):
        tables = memory.tables.pool.order, *(() if cached is None else _names(cached, columns[0], routed))
    handle = core.start(*columns, numbers, edges, costs, replica.policy.schedules_ahead, tables, routed)
    return core, handle, None if cached is None else CoreCache(cached, core, handle)


def _parts_of(cost: StepCost) -> Parts | None:
    """The parts of steps with prompts, as the core takes them; None if it calls the cost model."""
    parts = step_parts(cost)
    if parts is None:
        return None
    calls = parts.of_tokens, parts.of_rows, parts.mixed_decode, parts.prefill_node
    return *calls, parts.per_pair, tuple(getattr(parts, name) for name in PART_NUMBERS)


def _row_end(row: np.ndarray) -> int:
    """Ticks at which a leap ends, from its row."""
    start, steps, first, second, growth = row[:5].tolist()
    more = max(steps - 1, 0)
    return int(start + first + more * second + growth * (more * (more - 1) // 2))


def raise_fault(status: int, policy: str, waiting: int) -> None:
    """Raise what a status of the core says.

    Raises:
        SimulationFault: An invariant does not hold.
    """
    if status == _STUCK:
        raise SimulationFault(f"policy {policy} is stuck: nothing runs and {waiting} requests wait")
    if status == _UNPUBLISHED:
        raise SimulationFault("a block that a waiting request looks for is full and was not published")
    if status == _OVERDRAWN:
        raise Overdrawn(f"policy {policy} granted more blocks than are free")


def _ends_early(workload: Workload, max_model_len: int) -> np.ndarray:
    """bool [n]: requests with an EOS before ``max_tokens`` and the model's length, as ``State.note_finished`` expects none."""
    longest = max_model_len - workload.prompt_tokens
    declared = longest if workload.max_tokens is None else workload.max_tokens
    return (workload.output_tokens < declared) & (workload.output_tokens < longest)


def _names(
    memory: CachedMemory, rows: np.ndarray, routed: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, bool]:
    """Names of the blocks of requests, as ``Paths`` has them without the requests; how many chains there are; and whether the contents of
    cached blocks are logged."""
    paths = memory.chains.paths(rows)
    if not routed:
        memory.paths = paths
    return *paths[1:], 1 + int(paths.numbers.max(initial=0)), memory.contents is not None


class CoreCache:
    """What the core computes of a prefix cache, as the memory in Python would have it.

    Args:
        memory: Its logs take what the core has.
        core, handle: The core and its replica.
    """

    def __init__(self, memory: CachedMemory, core: ModuleType, handle: object) -> None:
        self._memory, self._core, self._handle = memory, core, handle
        memory.cache_log.residency = self._residency = CoreResidency()

    def names(self, request: int) -> tuple[int, ...] | None:
        """Chains of a request, and the blocks at which they end, in turn; None if it shares no prefix."""
        if self._memory.unshared[request]:
            return None
        return tuple(each for chain, stop in self._memory.chains.path(request) for each in (chain.number, stop))

    def close(self) -> None:
        """Let go of the core, when the run has ended."""
        kept = np.frombuffer(self._core.kept(self._handle), dtype=np.int64)
        if self._memory.contents is not None:
            self._memory.contents.kept.extend(kept.reshape(-1, len(STAY)))
        del self._handle

    def read(self) -> None:
        """Take what the core has computed since the last time."""
        log, lives = self._memory.cache_log, self._residency
        *logs, self._memory.pool.evicted_blocks = self._core.logs(self._handle)
        contents = self._memory.contents
        tables = [lives.lives, lives.hit_lives, lives.gaps, log.changes, log.look_ups]
        # Without contents the last two are empty.
        tables += [] if contents is None else [contents.stays, contents.events]
        for table, found in zip(tables, logs, strict=False):
            table.extend(np.frombuffer(found, dtype=np.int64).reshape(-1, len(table.fields)))
