"""Serves a workload again and records which block held what.

A run leaps over most of its steps and hands out no block ids. So it is served twice: first as ``simulate`` does,
which says when every step is; then with ids, and with a watcher in simulated time that looks at the pool in the steps
chosen:

    1. simulate                     all steps, some tens of thousands of requests a second
    2. choose moments               evenly spaced in time: the step in force at each
    3. serve again, ids kept        leaps end where a chosen step begins (as at the edge of a measurement)
    4. a tick into each such step   who holds which blocks, through tables and pieces; what the rows of the map are

Nothing is taken from the ledger's sums: what is found adds up to them, and a test says so.

What this costs is bounded, whatever the pool and the load:

    memory     a moment leaves its rows alone: of a pool of more than 2,048 blocks so many, evenly spaced; a coarse map
               has the rows of the fine one that it names in ``block_ids``. No list has an element for each block of
               the pool; those that there are have one for each block that was ever in use
    time       a moment looks at the sequences on the device, each of which takes as long as some tens of blocks, and where
               they have block tables at the blocks in use; where all that would be more than ``MOST_LOOKED_AT`` there are
               fewer moments
    the run    the second time nothing is written down of it, and blocks that a table keeps are not read again
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import simpy

from ...cost.base import StepCost
from ...engine.engine import Engine
from ...engine.run import Run, serve, simulate
from ...engine.settings import Settings
from ...memory import Memory
from ...memory.accounting.ledger import STALLED, NoLedger
from ...types.errors import SettingError
from ...types.state import State
from ...workload.workload import Workload
from ..plans.form import PAGED
from ..plans.layouts import Layout, layout_of
from .moments import Moment, moments
from .occupancy import CODES, NOBODY, Occupancy, Rows, holders
from .pieces import Pieces
from .recorded import GIVEN_UP, RUN_SIZES, SCHEMA_VERSION, BlockMap
from .tables import TableReader

#: Moments, and blocks, of the largest map.
MOST_COLUMNS, MOST_ROWS = 2_000, 2_048
#: Blocks in use that all moments together look at, about, which takes a second or so: 10,000 in each of the most.
MOST_LOOKED_AT = 10_000 * MOST_COLUMNS
#: A sequence takes as long to look at as so many blocks.
_BLOCKS_A_SEQUENCE = 32
_FREE = CODES["free"]


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
    return run, record_again(run, workload, step_cost, progress, most_columns, most_rows)


def record_again(
    run: Run,
    workload: Workload,
    step_cost: StepCost | None = None,
    progress: Callable[[int], None] | None = None,
    most_columns: int = MOST_COLUMNS,
    most_rows: int = MOST_ROWS,
) -> BlockMap:
    """Serve the workload of a run once more, and record what its blocks held.

    Args:
        workload: As it was given to ``simulate``.
        step_cost, progress, most_columns, most_rows: See ``record``.

    Raises:
        SettingError, UserError, SimulationFault: As ``record``.
    """
    settings = run.settings
    if run.replica.memory.groups.sliding:
        remedy = "a map has one block table a sequence, and KV groups have several"
        raise SettingError("record_blocks", settings.policy, f"{remedy}; give --disable-hybrid-kv-cache-manager")
    if not run.book.num_steps:
        remedy = "no step was run, as the pool holds none of the requests; take a larger pool"
        raise SettingError("record_blocks", settings.policy, remedy)
    watcher = _Watcher(moments(run.book, min(most_columns, _affordable_columns(run))), most_rows)
    serve(replace(settings, ids=True), workload, step_cost, progress, watcher.engine)
    return watcher.block_map(run)


def _affordable_columns(run: Run) -> int:
    """Moments that together look at about ``MOST_LOOKED_AT`` blocks."""
    blocks = int(run.book.rows["width"].max()) * _BLOCKS_A_SEQUENCE
    if run.replica.memory.placement is None:
        ledger = run.accounts.at_rows()
        in_use = run.book.capacity_slots - ledger["free"] - ledger["stranded"]
        # Rows that grow hold more in their last step than in the first one, but not by much.
        blocks += -(-int(in_use.max()) // run.replica.block_size)
    return max(1, MOST_LOOKED_AT // blocks)


class _ObservedEngine(Engine):
    """An engine whose run only a watcher looks at."""

    ledger_of = NoLedger


class _Watcher:
    """Looks at the pool of an engine at chosen moments."""

    def __init__(self, chosen: list[Moment], most_rows: int) -> None:
        self._chosen, self._most_rows = chosen, most_rows
        self._columns: list[_Column] = []

    def engine(
        self,
        env: simpy.Environment,
        source: Any,
        policy: Any,
        memory: Memory,
        cost: StepCost,
        edges: Iterable[int],
        leap: bool,
        state: Any,
    ) -> Engine:
        """The engine that serves the workload, and stops its leaps where somebody looks."""
        self.layout = layout_of(memory, policy.name)
        self.layout.close()
        self._reader = TableReader(memory, self.layout) if self.layout.name == PAGED else None
        # What has no addresses may be drawn beyond the pool: how many blocks there are is known in the end.
        self._shown = None if is_counted(memory) else _spread(memory.num_blocks, self._most_rows)
        edges = sorted({*edges, *(moment.start_ticks for moment in self._chosen)})
        engine = _ObservedEngine(env, source, policy, memory, cost, edges, leap, state)
        env.process(self._watch(env, engine))
        return engine

    def _watch(self, env: simpy.Environment, engine: Engine) -> Generator[simpy.Event, None, None]:
        seen: tuple[int, bool] | None = None
        for moment in self._chosen:
            key = moment.start_ticks, moment.decodes
            if key != seen:
                # Within the first tick of the step all that it begins with is done.
                yield env.timeout(moment.start_ticks + 1 - env.now)
                column = _Column(self._look(engine.memory, engine.state, moment.decodes), self._shown)
                seen = key
            self._columns.append(column)

    def _look(self, memory: Memory, state: State, decodes: bool) -> Occupancy:
        """The pool in the step that is about to run, which ``decodes`` or not."""
        if state.running or state.prefilling:
            self.layout.settle(state, decodes and bool(state.width))
        held = holders(memory, state, state.clock + decodes)
        return Pieces(memory, self.layout, held) if self._reader is None else self._reader.look(held)

    def block_map(self, run: Run) -> BlockMap:
        """What was seen."""
        columns, shown = self._columns, self._shown
        if shown is None:
            shown = _spread(max(column.num_blocks for column in columns), self._most_rows)
        rows = [column.rows(shown) for column in columns]
        grids = {name: np.stack([getattr(each, name) for each in rows]) for name in Rows._fields}
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


def _spread(blocks: int, most: int) -> np.ndarray:
    """At most so many of the blocks, evenly spaced, int64."""
    return np.unique(np.linspace(0, blocks - 1, min(blocks, most)).round().astype(np.int64))


class _Column:
    """One moment: its rows, or what they follow from as long as it is not known which are shown."""

    def __init__(self, seen: Occupancy, shown: np.ndarray | None) -> None:
        self._seen: Occupancy | Rows = seen if shown is None else seen.rows(shown)
        self.num_blocks, self.census = seen.num_blocks, seen.census
        self.free_runs, self.largest_free = _runs(seen.free_lengths())

    def rows(self, shown: np.ndarray) -> Rows:
        """The blocks that are shown."""
        return self._seen if isinstance(self._seen, Rows) else self._seen.rows(shown)


def _runs(lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Maximal runs of free blocks, counted by the power of two below their length; and the longest."""
    sizes = np.frexp(lengths)[1] - 1
    return np.bincount(np.minimum(sizes, RUN_SIZES - 1), minlength=RUN_SIZES), int(lengths.max(initial=0))


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
        if len(gone):
            given_up = ~held & np.where(before == NOBODY, given_up, np.isin(before, gone))
        else:
            given_up &= ~held & (before == NOBODY)
        bucket[column, given_up & (bucket[column] == _FREE)] = GIVEN_UP


def is_counted(memory: Memory) -> bool:
    """Whether pieces have no addresses."""
    return memory.placement is not None and not memory.placement.has_addresses


def _meta(run: Run, layout: Layout) -> dict[str, Any]:
    memory = run.replica.memory
    return {
        "schema_version": SCHEMA_VERSION,
        "fragmeter": version("fragmeter"),
        "policy": run.settings.policy,
        "model": run.settings.model,
        "layout": "counted" if is_counted(memory) else layout.name,
        "block_size": run.replica.block_size,
        "num_blocks": memory.num_blocks,
        "end_ticks": run.book.end_ticks,
        "trace_sha256": run.workload.sha256(),
    }
