"""The engine of one replica in compiled form, for the runs that the compiled core can serve.

``_core.c`` computes the leaps of ``engine.Engine`` with the same integers, and writes the same records. Nothing outside of
one replica changes its open loop, so SimPy keeps the clock at a coarser grain: one event spans as many leaps as the core's
buffers hold.

    SimPy's clock     |--------------------- one event ---------------------|--------- ...
    leaps of the core |--|-----|-|-|----------|---|-------|-|-----------|---|--|-- ...

``engine.py`` is the specification, and serves every other run. ``setup.py`` builds the core where there is a compiler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import simpy

from ..cost import PaperCost
from ..memory.accounting.ledger import Ledger
from ..memory.paged.paged import PagedMemory
from ..policy.options import VllmV0Options
from ..policy.vllm_sosp23 import VllmSosp23
from ..types.errors import SimulationFault
from ..workload.workload import Workload
from .replica import Replica
from .settings import Settings

_SOURCE = Path(__file__).with_name("_core.c")
#: Leaps that a buffer holds.
_LEAPS = 1 << 15
_FOREVER = (1 << 63) - 1
#: What ``_core.serve`` says first.
_ENDED, _STUCK = 1, 2


@cache
def compiled() -> tuple[ModuleType | None, str]:
    """The compiled core, or None; and which it is, or why there is none."""
    try:
        from . import _core
    except ImportError:
        return None, "not built"
    if _SOURCE.is_file() and hashlib.sha256(_SOURCE.read_bytes()).hexdigest() != _core.SOURCE_SHA256:
        return None, f"built from another {_SOURCE.name} than the one beside it"
    return _core, f"built from {_SOURCE.name} with SHA-256 {_core.SOURCE_SHA256[:12]}"


def serves(settings: Settings, replica: Replica) -> bool:
    """Whether the core serves an open loop of single sequences, without observers, on this replica.

    It has vllm-sosp23 over one KV group without block ids, where preempted sequences are recomputed.
    """
    policy, memory = replica.policy, replica.memory
    if type(policy) is not VllmSosp23 or type(memory) is not PagedMemory:
        return False
    options = policy.options
    recomputes = isinstance(options, VllmV0Options) and options.preemption_mode == "recompute"
    plain = recomputes and memory.is_plain and memory.tables is None
    return settings.core and settings.leap and plain and compiled()[0] is not None


class CoreEngine:
    """Serves an open loop with the compiled core.

    Args:
        env: SimPy environment with a clock in ticks, an int.
        workload: Requests of one sequence each.
        refused: bool [n], requests that no schedule can serve.
        replica: One that ``serves`` accepts.
        edges: Ticks at which a measurement begins and ends, or none; leaps end there.

    Attributes:
        process, ledger, end_ticks, stopped: As of ``Engine``.
        delivered: Requests that have arrived in the steps that are computed so far.
    """

    stopped = False

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        refused: np.ndarray,
        replica: Replica,
        edges: Iterable[int] = (),
    ) -> None:
        core = compiled()[0]
        assert core is not None
        self.env, self.ledger, self._core = env, Ledger(replica.memory.meter), core
        self.end_ticks, self.delivered = int(env.now), 0
        self._name, self._edges = replica.policy.name, tuple(edges)
        rows = np.flatnonzero(~refused).astype(np.int64)
        columns = (column[rows] for column in (workload.arrival_ticks, workload.prompt_tokens, workload.output_tokens))
        limits = replica.policy.limits
        self._most = min(limits.max_num_seqs, max(1, len(rows)))
        pool = replica.num_blocks, replica.block_size
        numbers = *pool, self._most, limits.max_num_batched_tokens, limits.watermark_blocks
        cost = replica.cost
        # A subclass may have other step times.
        terms = cost.terms if type(cost) is PaperCost else None
        self._handle = core.start(rows, *columns, numbers, self._edges, cost.step_ticks, cost.decode_line, terms)
        self.process = env.process(self._serve())

    def _serve(self) -> Generator[simpy.Event, None, None]:
        tables = self.ledger.rows, self.ledger.residencies, self.ledger.evictions
        # With room for all that one leap may admit or preempt.
        room = _LEAPS + self._most
        buffers = [np.empty((room, len(table.fields)), dtype=np.int64) for table in tables]
        now, status = 0, 0
        while status != _ENDED:
            until = min((edge for edge in self._edges if edge > now), default=_FOREVER)
            status, end, self.delivered, waiting, *counts = self._core.serve(self._handle, until, *buffers)
            if status == _STUCK:
                raise SimulationFault(f"policy {self._name} is stuck: nothing runs and {waiting} requests wait")
            for table, records, count in zip(tables, buffers, counts, strict=True):
                table.extend(records[:count])
            yield self.env.timeout(end - now)
            now = end
        self.end_ticks = now
