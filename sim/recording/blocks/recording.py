"""An observer that records the contents of every block of a pool over a run.

A run leaps over most of its steps, and its length is not known in advance. The pool is therefore sampled on a grid of
simulated times that becomes coarser during the run:

    first stride      the time of the last arrival, which no run is shorter than, over half the maximum of columns
    a leap starts     a sample at each time of the grid within it: the step in progress then, in closed form; tables
                      grow to the end of that step, as the leap would, and the pool is read. No leap is divided
    an idle span      one sample; its columns show a pool without running sequences
    the grid is full  every second column is dropped, and the stride doubles; also if samples have become so expensive
                      that the budget (``_Budget``) allows fewer
    the end           at least half the maximum of columns remain; a run of fewer steps has at most a column per step

The recording does not use the ledger's sums; a test compares its columns with them.

The cost is bounded for any pool and load:

    memory     a column stores only its rows: of a pool of more than 2,048 blocks that many, evenly spaced; a coarse map
               has the rows of the fine map that it names in ``block_ids``. No list has an element for each block of
               the pool; the existing ones have an element for each block that was ever in use
    time       a sample reads the sequences on the device, each of which costs as much as some tens of blocks, and with
               block tables the blocks in use; all samples together read a small multiple of ``MOST_LOOKED_AT``

Evenly spaced times of a run of unknown length:

    stride 1   0 1 2 3 4 5 6 7        the maximum here is eight: the grid is full
    stride 2   0   2   4   6          every second one is dropped, and the next is 8
    stride 2   0   2   4   6   8  ..  14
    stride 4   0       4       8  ..          and so on

Each time is a *column*: the state at that time. A step longer than the stride fills several columns with the same
object. If ``most`` falls during the run, columns are dropped in the same way. The columns therefore depend on the run
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ...config.settings import Settings
from ...cost.base import StepCost
from ...engine.observer import BlockViews, MapLimits, Observed, Observer
from ...engine.run import simulate
from ...memory import Memory
from ...memory.accounting.ledger import STALLED, SWAP, Leap
from ...runs.run import Run
from ...types.errors import SettingError
from ...types.sequence import StepPlan
from ...types.sums import ticks_of, whole_steps
from ...workload.workload import Workload
from ..plans.form import PAGED
from ..plans.layouts import layout_of
from .occupancy import CODES, NO_SEQUENCE, Occupancy, Rows, holders
from .pieces import Pieces, PiecesSeen, look_at_pieces
from .recorded import GIVEN_UP, RUN_SIZES, SCHEMA_VERSION, BlockMap
from .tables import TableReader, Tables

Content = TypeVar("Content")


class Grid(Generic[Content]):
    """Times 0, stride, 2 * stride, ... with a column each.

    Args:
        stride_ticks: The first stride, at least 1.
        most: Maximum number of columns, at least 1.

    Attributes:
        columns: Those of the times so far; the next one is that of ``next_ticks``.
    """

    def __init__(self, stride_ticks: int, most: int) -> None:
        self.stride_ticks, self.most = stride_ticks, most
        self.columns: list[Content] = []

    @property
    def next_ticks(self) -> int:
        """The first time that has no column yet."""
        return len(self.columns) * self.stride_ticks

    def reach(self, end_ticks: int) -> None:
        """Take a stride with which all times before ``end_ticks`` have room."""
        while -(-end_ticks // self.stride_ticks) > self.most:
            del self.columns[1::2]
            self.stride_ticks *= 2

    def fill(self, column: Content, end_ticks: int) -> None:
        """The column is in force from the next time to before ``end_ticks``, which was reached."""
        missing = -(-end_ticks // self.stride_ticks) - len(self.columns)
        self.columns += [column] * missing


def evenly(columns: int, most: int) -> slice:
    """At most so many of the columns, evenly spaced, each about in the middle of those it stands for."""
    every = -(-columns // most)
    return slice(every // 2, columns, every)


#: Moments, and blocks, of the largest map.
MOST_COLUMNS, MOST_ROWS = 2_000, 2_048
#: Blocks in use that the moments of a map together look at, about, which takes a second or so: 10,000 in each of the most.
MOST_LOOKED_AT = 10_000 * MOST_COLUMNS
#: A sequence takes as long to look at as so many blocks.
_BLOCKS_A_SEQUENCE = 32
_FREE = CODES["free"]
#: Buckets that blocks of tables have.
_OF_TABLES = ("live", "reserved", "block_tail", "cached", "free")


def record(
    settings: Settings,
    workload: Workload,
    step_cost: StepCost | None = None,
    progress: Callable[[int], None] | None = None,
    most_columns: int = MOST_COLUMNS,
    most_rows: int = MOST_ROWS,
) -> tuple[Run, BlockMap]:
    """Serve a workload as ``simulate`` does, and record its block map.

    The run is that of ``simulate``, bit by bit.

    Args:
        step_cost, progress: See ``simulate``.
        most_columns, most_rows: Maximum number of moments and of blocks.

    Raises:
        SettingError: The policy's memory cannot be recorded, or no request fits the pool.
        UserError, SimulationFault: As ``simulate``.
    """
    recording = BlockRecording(settings, workload, most_columns, most_rows)
    run = simulate(replace(settings, ids=True), workload, step_cost, progress, (recording,))
    return replace(run, settings=settings), recording.block_map(run)


class _Look(NamedTuple):
    """A column, and the start of the step in progress; None if no sequence runs."""

    column: Column
    start_ticks: int | None


class _Budget:
    """Limits the number of columns by the cost of the samples so far.

    As many as, each at the price of the dearest look, together read ``MOST_LOOKED_AT`` blocks; half as many each time
    that all looks, those of dropped columns included, have read so many once more. As n columns serve n times a stride that
    doubles, the second happens hardly ever, and more than a few times never.
    """

    def __init__(self, most_columns: int) -> None:
        self._most = most_columns
        self._dearest, self._spent = 1, 0

    def most_after(self, blocks: int) -> int:
        """The most columns after a look that read so many blocks."""
        self._dearest = max(self._dearest, blocks)
        self._spent += blocks
        affordable = min(self._most, MOST_LOOKED_AT // self._dearest)
        return max(1, affordable >> (self._spent // MOST_LOOKED_AT))


class BlockRecording(Observer):
    """Records the block map of a run with block ids.

    Args:
        settings, workload: Inputs of the run.
        most_columns, most_rows: See ``record``.
    """

    maps_blocks = True
    _recorded: Callable[[], tuple[int, memoryview, memoryview]] | None = None

    def __init__(
        self, settings: Settings, workload: Workload, most_columns: int = MOST_COLUMNS, most_rows: int = MOST_ROWS
    ) -> None:
        self._settings, self._workload = settings, workload
        self._most_columns, self._most_rows = most_columns, most_rows

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        self._begin(engine, refused)
        self._state = engine.state
        memory, layout = engine.memory, self._layout
        self._reader = TableReader(memory, layout) if layout.name == PAGED else None

    def core_started(self, views: BlockViews, refused: np.ndarray) -> None:
        self._begin(views, refused)
        codes = {bucket: CODES[bucket] for bucket in _OF_TABLES}
        limits = MapLimits(
            stride_ticks=self._grid.stride_ticks,
            most_columns=self._most_columns,
            most_read=MOST_LOOKED_AT,
            of_sequence=_BLOCKS_A_SEQUENCE,
            **codes,
            num_buckets=len(CODES),
            num_sizes=RUN_SIZES,
        )
        self._recorded = views.record(self._shown, limits)

    def _begin(self, engine: Observed | BlockViews, refused: np.ndarray) -> None:
        """Refuse what cannot be drawn, and choose the first stride."""
        memory, policy = engine.memory, self._settings.policy
        if memory.groups.sliding:
            remedy = "a map has one block table a sequence, and KV groups have several"
            raise SettingError("record_blocks", policy, f"{remedy}; give --disable-hybrid-kv-cache-manager")
        if refused.all():
            remedy = "no step was run, as the pool holds none of the requests; take a larger pool"
            raise SettingError("record_blocks", policy, remedy)
        self._memory, self._layout = memory, layout_of(memory, policy)
        # What has no addresses may be drawn beyond the pool: how many blocks there are is known in the end.
        self._shown: Any = None if is_counted(memory) else spread(memory.num_blocks, self._most_rows)
        least_ticks = _least_ticks(engine, self._workload, refused)
        self._grid: Grid[_Look] = Grid(max(1, 2 * least_ticks // self._most_columns), self._most_columns)
        self._budget = _Budget(self._most_columns)

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """See ``Observer``: look at the pool in those steps of a leap that are on the grid."""
        grid, end_ticks = self._grid, now + ticks
        if grid.next_ticks >= end_ticks:
            return
        _, steps, first, second, growth, *_ = leap
        grid.reach(end_ticks)
        while grid.next_ticks < end_ticks:
            ahead = grid.next_ticks - now - first
            before = 0 if ahead < 0 else 1 + whole_steps(ahead, second, growth)
            start = now + (ticks_of(before, first, second, growth) if before else 0)
            until = now + ticks_of(before + 1, first, second, growth)
            # Of a step that only prefills nothing grows.
            self._look(min(before + 1, steps), start, until)

    def idle_started(self, now: int, ticks: int) -> None:
        """See ``Observer``: one look at what a pool keeps when no sequence runs."""
        self._grid.reach(now + ticks)
        if self._grid.next_ticks < now + ticks:
            self._look(0, None, now + ticks)

    def _look(self, steps: int, start_ticks: int | None, end_ticks: int) -> None:
        """Look at the pool at the end of so many steps from now; so it is until ``end_ticks``."""
        column, read = self._seen(steps)
        self._grid.most = self._budget.most_after(read)
        self._grid.reach(end_ticks)
        self._grid.fill(_Look(column, start_ticks), end_ticks)

    def _seen(self, steps: int) -> tuple[Column, int]:
        """A sample of the pool, and the blocks that were read for it."""
        state, layout = self._state, self._layout
        if state.running or state.prefilling:
            layout.settle(state, steps)
        held = holders(self._memory, state, state.decode_step + steps)
        read = _BLOCKS_A_SEQUENCE * len(held)
        if self._reader is None:
            column = Column(look_at_pieces(self._memory, layout, held))
        else:
            seen = self._reader.look(held)
            read += seen.in_use
            column = Column(seen)
            # Block tables take more room than the rows that follow from them, pieces less.
            column.rows(self._shown)
        return column, read

    def block_map(self, run: Run) -> BlockMap:
        """The block map of the finished run."""
        preemptions, meta = _preemptions(run), self._meta(run)
        if self._recorded is not None:
            return _by_core(self._recorded(), self._shown, run.log.num_steps, preemptions, meta)
        grid = self._grid
        places = range(len(grid.columns))[evenly(len(grid.columns), run.log.num_steps)]
        looks = [grid.columns[place] for place in places]
        columns = [look.column for look in looks]
        shown = self._shown
        if shown is None:
            shown = spread(max(column.num_blocks for column in columns), self._most_rows)
        at = [place * grid.stride_ticks for place in places]
        starts = [
            ticks if look.start_ticks is None else look.start_ticks for ticks, look in zip(at, looks, strict=True)
        ]
        return assembled(columns, shown, at, starts, preemptions, meta)

    def _meta(self, run: Run) -> dict[str, Any]:
        memory, layout = self._memory, self._layout
        return {
            "schema_version": SCHEMA_VERSION,
            "fragmeter": version("fragmeter"),
            "policy": self._settings.policy,
            "model": self._settings.model,
            "layout": "counted" if is_counted(memory) else layout.name,
            "block_size": run.replica.block_size,
            "num_blocks": memory.num_blocks,
            "end_ticks": run.log.end_ticks,
            "trace_sha256": run.workload.sha256(),
        }


def assembled(
    columns: Sequence[Column],
    shown: np.ndarray,
    at_ticks: Sequence[int],
    start_ticks: Sequence[int],
    preemptions: tuple[np.ndarray, np.ndarray, np.ndarray],
    meta: Mapping[str, Any],
) -> BlockMap:
    """The map of some columns; ``BlockMap`` has the meaning of the arguments, ``shown`` are its ``block_ids``."""
    rows = [column.rows(shown) for column in columns]
    grids = {name: np.stack([getattr(each, name) for each in rows]) for name in Rows._fields}
    grids["census_slots"] = np.stack([column.census for column in columns])
    grids["free_runs"] = np.stack([column.free_runs for column in columns])
    grids["largest_free_blocks"] = np.array([column.largest_free for column in columns])
    return _completed(grids, shown, np.array(at_ticks), np.array(start_ticks), preemptions, meta)


def look_type(shown: int) -> np.dtype[np.void]:
    """A look by the compiled core, which shows so many blocks: ``start_ticks`` below 0 where no sequence runs."""
    counts = [
        ("start_ticks", "i8"),
        ("largest_free_blocks", "i8"),
        ("census_slots", "i8", len(CODES)),
        ("free_runs", "i8", RUN_SIZES),
    ]
    rows = [(name, "i4", shown) for name in ("sequence", "live_slots", "references")]
    return np.dtype([*counts, *rows, ("bucket", "u1", shown)], align=True)


def _by_core(
    recorded: tuple[int, memoryview, memoryview],
    shown: np.ndarray,
    most: int,
    preemptions: tuple[np.ndarray, np.ndarray, np.ndarray],
    meta: Mapping[str, Any],
) -> BlockMap:
    """The map that the compiled core has recorded, with at most so many columns."""
    stride, columns = recorded[0], np.frombuffer(recorded[1], dtype=np.int32)
    chosen, looks = evenly(len(columns), most), np.frombuffer(recorded[2], dtype=look_type(len(shown)))
    at, numbers = np.arange(len(columns))[chosen] * stride, columns[chosen]
    grids = {name: looks[name][numbers] for name in looks.dtype.names or ()}
    starts = grids.pop("start_ticks")
    return _completed(grids, shown, at, np.where(starts < 0, at, starts), preemptions, meta)


def _completed(
    grids: dict[str, np.ndarray],
    shown: np.ndarray,
    at: np.ndarray,
    starts: np.ndarray,
    preemptions: tuple[np.ndarray, np.ndarray, np.ndarray],
    meta: Mapping[str, Any],
) -> BlockMap:
    """The map of some columns, in which preemptions are not marked yet."""
    _mark_given_up(grids["bucket"], grids["sequence"], at, preemptions)
    return BlockMap(
        meta=meta,
        at_ticks=at,
        start_ticks=starts,
        block_ids=shown,
        **grids,
        preempted_ticks=preemptions[0],
        preempted_sequence=preemptions[1],
        preempted_swapped=preemptions[2],
    )


def _least_ticks(engine: Observed | BlockViews, workload: Workload, refused: np.ndarray) -> int:
    """Lower bound of the run's duration: the last arrival, or the steps of all tokens at ``max_num_seqs``."""
    served = ~refused
    # When users send a request depends on the run.
    last = 0 if workload.users is not None else int(workload.arrival_ticks[served].max())
    steps = -(-int(workload.output_tokens[served].sum()) // engine.policy.limits.max_num_seqs)
    return max(last, steps * engine.cost.step_ticks(1, 1, 0, 0))


def spread(blocks: int, most: int) -> np.ndarray:
    """At most ``most`` of the blocks, evenly spaced, int64."""
    return np.unique(np.linspace(0, blocks - 1, min(blocks, most)).round().astype(np.int64))


class Column:
    """One sample: its rows, computed when they are first read."""

    def __init__(self, seen: Tables | PiecesSeen) -> None:
        self._seen: Any = seen
        self._rows: Rows | None = None

    @property
    def num_blocks(self) -> int:
        """See ``Occupancy``; before the rows are asked for."""
        return self._occupancy().num_blocks

    def _occupancy(self) -> Occupancy:
        if isinstance(self._seen, PiecesSeen):
            self._seen = Pieces(self._seen)
        return self._seen

    def rows(self, shown: np.ndarray) -> Rows:
        """The blocks that are shown, which are always the same; from then on nothing else is kept but the counts."""
        if self._rows is None:
            seen = self._occupancy()
            self._rows, self.census = seen.rows(shown), seen.census
            self.free_runs, self.largest_free = _runs(seen.free_lengths())
            self._seen = None
        return self._rows


def _runs(lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Maximal runs of free blocks, counted by the power of two below their length; and the longest."""
    sizes = np.frexp(lengths)[1] - 1
    return np.bincount(np.minimum(sizes, RUN_SIZES - 1), minlength=RUN_SIZES), int(lengths.max(initial=0))


def _preemptions(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Time, sequence and kind of each preemption of a sequence."""
    evictions = run.log.evictions
    pushed = evictions["swapped"] != STALLED
    ticks, index, swapped = (evictions[name][pushed] for name in ("ticks", "index", "swapped"))
    return ticks, index, (swapped == SWAP).astype(np.int64)


def _mark_given_up(
    bucket: np.ndarray, sequence: np.ndarray, at: np.ndarray, evictions: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Separate free blocks with a preempted last holder from others, column by column."""
    ticks, victims, _ = evictions
    begin = np.searchsorted(ticks, at, side="right")
    given_up = np.zeros(bucket.shape[1], dtype=bool)
    any_given_up = False
    for column in range(1, len(at)):
        gone = victims[begin[column - 1] : begin[column]]
        if not any_given_up and not len(gone):
            continue
        before, held = sequence[column - 1], sequence[column] != NO_SEQUENCE
        if len(gone):
            given_up = ~held & np.where(before == NO_SEQUENCE, given_up, np.isin(before, gone))
        else:
            given_up &= ~held & (before == NO_SEQUENCE)
        any_given_up = bool(given_up.any())
        bucket[column, given_up & (bucket[column] == _FREE)] = GIVEN_UP


def is_counted(memory: Memory) -> bool:
    """Whether pieces have no addresses."""
    return memory.placement is not None and not memory.placement.has_addresses
