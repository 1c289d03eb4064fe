"""Serves a workload and records which block held what.

A run leaps over most of its steps and hands out no block ids. So it is served twice: first as ``simulate`` does,
which tells when every step is; then with ids, and with a watcher in simulated time that looks at the pool in the steps
chosen:

    1. simulate                     all steps, some tens of thousands of requests a second
    2. choose moments               evenly spaced in time: the step in force at each
    3. serve again, ids kept        leaps end where a chosen step begins (as at the edge of a measurement)
    4. a tick into each such step   every slot is looked up where it lies, through tables and pieces

Nothing is told by the ledger's sums: what is found adds up to them, and a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import simpy

from ..cost.base import StepCost
from ..engine import Engine
from ..errors import SettingError
from ..memory import BUCKETS, BuddyMemory, ContiguousMemory, HybridMemory
from ..memory.ledger import STALLED
from ..plan.form import PAGED
from ..plan.layouts import Layout, layout_of
from ..run import Run, simulate
from ..settings import Settings
from ..workload import Workload
from .moments import Moment, moments
from .occupancy import CODES, Occupancy, look
from .recorded import GIVEN_UP, NOBODY, RUN_SIZES, SCHEMA_VERSION, BlockMap

#: Moments, and blocks, of the largest map.
MOST_COLUMNS, MOST_ROWS = 2_000, 2_048
_FREE, _STRANDED = CODES["free"], CODES["stranded"]


def record(
    settings: Settings,
    workload: Workload,
    step_cost: StepCost | None = None,
    progress: Callable[[int], None] | None = None,
    most_columns: int = MOST_COLUMNS,
    most_rows: int = MOST_ROWS,
) -> tuple[Run, BlockMap]:
    """Serve a workload as ``simulate`` does, and record what its blocks held.

    The run is the one that ``simulate`` gives, bit by bit.

    Args:
        step_cost, progress: See ``simulate``; the second time progress is told again.
        most_columns, most_rows: Moments that are looked at, and blocks that are kept of each.

    Raises:
        SettingError: The policy's memory cannot be recorded.
        UserError, SimulationFault: As ``simulate``.
    """
    run = simulate(settings, workload, step_cost, progress)
    if isinstance(run.replica.memory, HybridMemory):
        remedy = "a map has one block table a sequence, and KV groups have several"
        raise SettingError("record_blocks", settings.policy, f"{remedy}; give --disable-hybrid-kv-cache-manager")
    if not run.book.num_steps:
        remedy = "no step was run, as the pool holds none of the requests; take a larger pool"
        raise SettingError("record_blocks", settings.policy, remedy)
    watcher = _Watcher(moments(run.book, most_columns))
    simulate(replace(settings, ids=True), workload, step_cost, progress, watcher.engine)
    return run, watcher.block_map(run, most_rows)


class _Watcher:
    """Looks at the pool of an engine at chosen moments."""

    def __init__(self, chosen: list[Moment]) -> None:
        self._chosen = chosen
        self._columns: list[_Column] = []

    def engine(
        self,
        env: simpy.Environment,
        source: Any,
        policy: Any,
        memory: Any,
        cost: StepCost,
        edges: tuple[int, ...],
        leap: bool,
        state: Any,
    ) -> Engine:
        """The engine that serves the workload, and stops its leaps where somebody looks."""
        self.layout = layout_of(memory, policy.name)
        self.layout.close()
        edges = sorted({*edges, *(moment.start_ticks for moment in self._chosen)})
        engine = Engine(env, source, policy, memory, cost, edges, leap, state)
        env.process(self._watch(env, engine))
        return engine

    def _watch(self, env: simpy.Environment, engine: Engine) -> Generator[simpy.Event, None, None]:
        seen: tuple[int, bool] | None = None
        for moment in self._chosen:
            key = moment.start_ticks, moment.decodes
            if key != seen:
                # Within the first tick of the step all that it begins with is done.
                yield env.timeout(moment.start_ticks + 1 - env.now)
                column = _Column.of(look(engine.memory, self.layout, engine.state, moment.decodes), engine.memory)
                seen = key
            self._columns.append(column)

    def block_map(self, run: Run, most_rows: int) -> BlockMap:
        """What was seen."""
        rows, columns = max(len(column.bucket) for column in self._columns), self._columns
        shown = np.unique(np.linspace(0, rows - 1, min(rows, most_rows)).round().astype(np.int64))
        grids = {
            name: np.stack([_longer(getattr(column, name), rows, fill)[shown] for column in columns])
            for name, fill in (("bucket", _FREE), ("sequence", NOBODY), ("live_slots", 0), ("references", 0))
        }
        at = np.array([moment.at_ticks for moment in self._chosen])
        cuts = _preemptions(run)
        _mark_given_up(grids["bucket"], grids["sequence"], at, cuts)
        return BlockMap(
            meta=_meta(run, self.layout),
            at_ticks=at,
            start_ticks=np.array([moment.start_ticks for moment in self._chosen]),
            block_ids=shown,
            **grids,
            census_slots=np.stack([column.census for column in columns]),
            free_runs=np.stack([column.free_runs for column in columns]),
            largest_free_blocks=np.array([column.largest_free for column in columns]),
            preempted_ticks=cuts[0],
            preempted_sequence=cuts[1],
            preempted_swapped=cuts[2],
        )


class _Column:
    """One moment, block by block."""

    @classmethod
    def of(cls, seen: Occupancy, memory: Any) -> _Column:
        """Slots, counted by block."""
        column, size = cls(), memory.block_size
        blocks = -(-len(seen.bucket) // size)
        # Of a piece that is drawn beyond the pool the last block may not be whole.
        block = np.arange(len(seen.bucket)) // size
        kinds = len(BUCKETS)
        counts = np.bincount(block * kinds + seen.bucket, minlength=blocks * kinds).reshape(blocks, kinds)
        column.bucket = counts.argmax(axis=1).astype(np.uint8)
        column.live_slots = counts[:, CODES["live"]].astype(np.int32)
        column.census = counts.sum(axis=0)
        column.sequence, column.references = _holders(seen, blocks)
        is_free = counts[:, _FREE] + counts[:, _STRANDED] == size
        column.free_runs, column.largest_free = _runs(is_free)
        return column


def _holders(seen: Occupancy, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each block the first sequence that holds slots of it, and how many name it."""
    first = np.full(blocks, NOBODY, dtype=np.int32)
    # The last one written stands.
    first[seen.block[::-1]] = seen.sequence[::-1]
    named = np.concatenate([seen.block, seen.pinned_blocks])
    return first, np.bincount(named, minlength=blocks).astype(np.int32)


def _runs(is_free: np.ndarray) -> tuple[np.ndarray, int]:
    """Maximal runs of free blocks, counted by the power of two below their length; and the longest."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], is_free.astype(np.int8), [0]])))
    lengths = bounds[1::2] - bounds[::2]
    sizes = np.frexp(lengths)[1] - 1
    return np.bincount(np.minimum(sizes, RUN_SIZES - 1), minlength=RUN_SIZES), int(lengths.max(initial=0))


def _longer(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    return np.concatenate([values, np.full(length - len(values), fill, dtype=values.dtype)])


def _preemptions(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When who was pushed out, and whether to the host."""
    cuts = run.book.cuts
    pushed = cuts["swapped"] != STALLED
    return tuple(cuts[name][pushed] for name in ("ticks", "index", "swapped"))


def _mark_given_up(
    bucket: np.ndarray, sequence: np.ndarray, at: np.ndarray, cuts: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Tell free blocks whose last holder was preempted from others, column by column."""
    ticks, victims, _ = cuts
    begin = np.searchsorted(ticks, at, side="right")
    given_up = np.zeros(bucket.shape[1], dtype=bool)
    for column in range(1, len(at)):
        before, held = sequence[column - 1], sequence[column] != NOBODY
        gone = victims[begin[column - 1] : begin[column]]
        given_up = ~held & np.where(before == NOBODY, given_up, np.isin(before, gone))
        bucket[column, given_up & (bucket[column] == _FREE)] = GIVEN_UP


def _meta(run: Run, layout: Layout) -> dict[str, Any]:
    memory, counted = run.replica.memory, layout.name != PAGED
    # Reservations in blocks have tables, and reservations in chunks have addresses.
    counted = counted and isinstance(memory, ContiguousMemory) and not isinstance(memory, BuddyMemory)
    return {
        "schema_version": SCHEMA_VERSION,
        "fragmeter": version("fragmeter"),
        "policy": run.settings.policy,
        "model": run.settings.model,
        "layout": "counted" if counted else layout.name,
        "block_size": run.replica.block_size,
        "num_blocks": memory.num_blocks,
        "end_ticks": run.book.end_ticks,
        "trace_sha256": run.workload.sha256(),
    }
