"""A finished run at a few evenly spaced times: the block map, the pool by buckets, and the queue.

times      at_ms[0]      at_ms[1]      ...         end_ms
a moment   the state of the pool and of the queue from its time to the next one; after ``end_ms`` all is served
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...sim import Run
from ...sim.memory import BUCKETS
from ...sim.memory.accounting.buckets import NOT_HELD
from ...sim.metrics.requests import request_times
from ...sim.metrics.residencies import residencies_columns
from ...sim.recording.blocks import BlockMap
from ...sim.types.ticks import PER_MS
from ..blockmap.figure import request_of
from ..blockmap.palette import KINDS, indices

#: Moments of a run, of a recording of up to twice as many columns; and blocks of its map.
MOST_MOMENTS, MOST_BLOCKS = 32, 1024
#: A share of the pool is stored in ten-thousandths.
WHOLE = 10_000
_FREE, _HELD = BUCKETS.index("free"), [bucket not in NOT_HELD for bucket in BUCKETS]


@dataclass(frozen=True, eq=False)
class Moments:
    """A run at evenly spaced times.

    Attributes:
        at_ms: int64 [moments], ascending.
        end_ms: When the last request was served.
        pixels: uint8 [moments, blocks], what each block is, as an index of ``blockmap.palette.palette``.
        num_blocks: Blocks of the pool, of which ``pixels`` has some, evenly spaced.
        is_counted: Whether the policy counts slots without addresses: requests are then drawn side by side.
        shares: int64 [moments, 9], slots of each bucket in ten-thousandths of the pool.
        running: int64 [moments], requests with a running sequence.
        waiting: int64 [moments], arrived requests without one that are not finished.
        preempted: int64 [moments], those among ``waiting`` that ran before.
    """

    at_ms: np.ndarray
    end_ms: int
    pixels: np.ndarray
    num_blocks: int
    is_counted: bool
    shares: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    preempted: np.ndarray


def moments(run: Run, found: BlockMap) -> Moments:
    """The moments of a run, from a block map of at least as many columns where the run has as many steps."""
    count = min(MOST_MOMENTS, found.num_columns)
    columns = np.linspace(0, found.num_columns - 1, count).round().astype(np.int64)
    at, is_counted = found.at_ticks[columns], found.meta["layout"] == "counted"
    requests = run.workload.request_of(np.arange(int(run.workload.num_sequences.sum())))
    pixels = indices(found.bucket, request_of(found, requests))[columns]
    if is_counted:
        pixels = _side_by_side(pixels, found.bucket[columns], found)
    return Moments(
        at // PER_MS,
        -(-found.meta["end_ticks"] // PER_MS),
        pixels,
        found.meta["num_blocks"],
        is_counted,
        _shares(found.census_slots[columns], found.meta["num_blocks"] * found.meta["block_size"]),
        *_queue(run, at),
    )


def _side_by_side(pixels: np.ndarray, kinds: np.ndarray, found: BlockMap) -> np.ndarray:
    """The held blocks of each moment without the gaps between them: the gaps of slots that are only counted mean nothing."""
    drawn = int(found.block_ids[-1]) + 1
    blocks = round(found.meta["num_blocks"] * pixels.shape[1] / drawn)
    free = indices(np.array([KINDS.index("free")], dtype=np.uint8), np.array([-1]))[0]
    packed = np.full((len(pixels), blocks), free, dtype=np.uint8)
    is_held = np.array([*_HELD, False])[kinds]
    for row, own, held in zip(packed, pixels, is_held, strict=True):
        kept = own[held][:blocks]
        row[: len(kept)] = kept
    return packed


def _shares(census: np.ndarray, slots: int) -> np.ndarray:
    """Slots by bucket in ten-thousandths of the pool. A census of counted pieces has slots beyond the pool, which are free."""
    held = census.copy()
    held[:, _FREE] = 0
    held[:, _FREE] = slots - held.sum(axis=1)
    return np.round(held * WHOLE / slots).astype(np.int64)


def _queue(run: Run, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Requests that run, that wait, and that wait after a preemption at each time."""
    times, residencies = request_times(run), residencies_columns(run)
    started = residencies["start_ticks"][:, None] <= at
    on_device = started & (at < residencies["end_ticks"][:, None])
    runs, ran = np.zeros((2, len(run.workload), len(at)), dtype=bool)
    np.logical_or.at(runs, residencies["request"], on_device)
    np.logical_or.at(ran, residencies["request"], started)
    runs, ran = runs[times.index], ran[times.index]
    finished = times.finish_ticks[:, None] <= at
    waits = (times.arrival_ticks[:, None] <= at) & ~runs & ~finished
    return (runs & ~finished).sum(axis=0), waits.sum(axis=0), (waits & ran).sum(axis=0)
