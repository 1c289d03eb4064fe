"""Timed steps of recorded plans: a skeleton runs them over the simulator's own block tables.

This module calibrates nothing. The plan contains the predicted times, and the measured times come from the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...sim.recording.plans import Plan
from ...sim.types.errors import SettingError
from ..calibrate.fitting import Points, errors
from ..devices import timing
from ..devices.timing import Stopwatch
from ..model.batch import Batch
from ..model.executor import batch, move
from ..model.skeleton import Skeleton

#: Passes the step numbers on and shows progress.
Watch = Callable[[Iterable[int], int], Iterable[int]]
#: See :func:`size_of`.
Size = tuple[int, int, int, bool]


@torch.inference_mode()
def pass_us(skeleton: Skeleton, plan: Plan, steps: Sequence[int], watch: Watch) -> np.ndarray:
    """Microseconds of these steps of a plan, one after the other, float [steps]; :func:`warm_up` comes before.

    The time of a step includes its moves, its computation, and on a GPU the wait for completion, as an engine would
    experience it. The inputs are prepared before.
    """
    stopwatch = timing.stopwatch(skeleton.device)
    return np.array([one_step_us(skeleton, plan, step, stopwatch) for step in watch(steps, len(steps))])


def one_step_us(skeleton: Skeleton, plan: Plan, step: int, stopwatch: Stopwatch) -> float:
    """Microseconds of a single execution of one step."""
    moved, computed = plan.step(step), batch_of(plan, step)

    def work(_: int) -> None:
        move(skeleton.pool, plan, moved)
        skeleton.step(computed)

    return stopwatch.elapsed_us(work, range(1))


@torch.inference_mode()
def warm_up(skeleton: Skeleton, timed: Iterable[tuple[Plan, Sequence[int]]]) -> None:
    """Run one step of each size, so that compilation, captures and allocations are complete afterwards.

    Args:
        timed: All plans that will be timed, and their steps.
    """
    sizes: dict[Size, Batch] = {}
    for plan, steps in timed:
        for found in (batch_of(plan, step) for step in steps):
            sizes.setdefault(size_of(found, skeleton.pool.block_size), found)
    # A capture releases the memory that torch has cached, so uncaptured steps run after the captures.
    for found in sorted(sizes.values(), key=lambda found: not found.only_decodes):
        skeleton.step(found)


def size_of(found: Batch, block_size: int) -> Size:
    """What compilation, captures and allocations depend on: tokens, rows, blocks of the longest context as a power of two, paging.

    Also tokens: of two steps with equal rows one may prefill, and GEMMs of new sizes load other kernels.
    """
    blocks = -(-int(found.context_lens.max(initial=1)) // block_size)
    return len(found.token_ids), len(found.query_lens), (blocks - 1).bit_length(), found.is_paged


def batch_of(plan: Plan, step: int) -> Batch:
    """The batch of a step, including the padding of a static batch.

    Raises:
        SettingError: The plan begins within a static batch.
    """
    found = batch(plan, step)
    return padded(found, plan, step) if plan.padding_tokens.any() else found


def padded(found: Batch, plan: Plan, step: int) -> Batch:
    """A step of a static batch with its padding, as it is priced: every prompt is as long as the longest, and each sequence remains a
    row of the same length, in the slots that are reserved for it, until the last one ends. Padding writes nothing."""
    starts = np.flatnonzero(plan.prefill_tokens[: step + 1])
    if not len(starts):
        remedy = (
            "is within a static batch, and its longest prompt is unknown; record from the first step of the batch on"
        )
        raise SettingError("plan", plan.meta["first_step"] + step, remedy)
    first = int(starts[-1])
    rows = slice(*plan.row_offsets[first : first + 2])
    sequences, slot_starts = plan.sequence[rows], plan.slot_starts[rows]
    longest = int(plan.context_lens[rows].max())
    lens = np.full(len(sequences), longest if step == first else 1)
    # The new tokens of a row that are not padding are its last ones.
    own = np.zeros(len(sequences), np.int64)
    own[np.searchsorted(sequences, plan.step(step).sequence)] = found.query_lens
    is_padding = np.arange(longest) < (longest - own)[:, None] if step == first else own[:, None] == 0
    slots, token_ids = np.full(is_padding.shape, -1, np.int64), np.zeros(is_padding.shape, np.int64)
    slots[~is_padding], token_ids[~is_padding] = found.slot_mapping, found.token_ids
    contexts = np.full(len(sequences), longest + step - first)
    return Batch(lens, contexts, token_ids.ravel(), slots.ravel(), slot_starts=slot_starts)


def compared(predicted_us: np.ndarray, measured_us: np.ndarray) -> dict[str, Any]:
    """Errors of single predictions, and of their sum."""
    off = errors(Points("step", {}, measured_us), predicted_us)
    total = float(predicted_us.sum() / measured_us.sum() - 1)
    return {"count": len(measured_us), **off, "total_bias": round(total, 4)}


def quantiles_ms(us: np.ndarray) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    p50, p99 = np.quantile(us, [0.5, 0.99]) / 1e3
    return {"p50_ms": round(float(p50), 4), "p99_ms": round(float(p99), 4)}


def allocates(plan: Plan) -> np.ndarray:
    """bool [steps]: whether a step has a row with a longer block table than its sequence's previous row."""
    blocks = np.diff(plan.table_offsets)
    before: dict[int, int] = {}
    grown = np.zeros(plan.num_steps, bool)
    for step, row in _rows(plan):
        sequence = int(plan.sequence[row])
        grown[step] |= blocks[row] > before.get(sequence, 0)
        before[sequence] = int(blocks[row])
    return grown


def _rows(plan: Plan) -> Iterator[tuple[int, int]]:
    for step in range(plan.num_steps):
        yield from ((step, row) for row in range(*plan.row_offsets[step : step + 2]))
