"""Timed steps of recorded plans: a skeleton runs them over the simulator's own block tables.

This module calibrates nothing. The plan contains the predicted times, and the measured times come from the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...sim.recording.plans import Plan
from ...sim.types.optional import not_none
from ..calibrate.fitting import Points, errors
from ..devices import timing
from ..devices.timing import Stopwatch
from ..model.batch import Batch
from ..model.executor import batch, move
from ..model.skeleton import Skeleton

#: Passes the step numbers on and shows progress.
Watch = Callable[[Iterable[int], int], Iterable[int]]


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
    sizes: dict[tuple[int, int, int, bool], Batch] = {}
    for plan, steps in timed:
        for found in (batch_of(plan, step) for step in steps):
            blocks = -(-int(found.context_lens.max(initial=1)) // skeleton.pool.block_size)
            # Also by tokens: of two steps with equal rows one may prefill, and GEMMs of new sizes load other kernels.
            size = len(found.token_ids), len(found.query_lens), (blocks - 1).bit_length(), found.is_paged
            sizes.setdefault(size, found)
    # A capture releases the memory that torch has cached, so uncaptured steps run after the captures.
    for found in sorted(sizes.values(), key=lambda found: not found.only_decodes):
        skeleton.step(found)


def batch_of(plan: Plan, step: int) -> Batch:
    """The batch of a step, including the padding of a static batch."""
    found = batch(plan, step)
    padding = int(plan.padding_tokens[step])
    return found if not padding else padded(found, padding, bool(plan.decodes[step]), plan.meta["num_slots"])


def padded(found: Batch, padding: int, decodes: bool, num_slots: int) -> Batch:
    """A step of a static batch with its padding.

    A finished sequence remains as a row of the longest length, which writes nothing and reads slots that no other row reads, if the
    pool has enough: rows over the same slots would find them in a cache. The padding of each prompt up to the longest is one row; its
    tokens attend to each other, and not to the prompt itself.
    """
    longest = int(found.context_lens.max())
    lens = np.ones(padding, np.int64) if decodes else _missing(found.context_lens, longest)
    contexts = np.full(padding, longest) if decodes else lens
    starts = not_none(found.slot_starts)
    return found._replace(
        query_lens=np.concatenate([found.query_lens, lens]),
        context_lens=np.concatenate([found.context_lens, contexts]),
        token_ids=np.pad(found.token_ids, (0, padding)),
        slot_mapping=np.pad(found.slot_mapping, (0, padding), constant_values=-1),
        slot_starts=np.concatenate([starts, _apart(starts, longest, num_slots, len(lens))]),
    )


def _apart(starts: np.ndarray, longest: int, num_slots: int, count: int) -> np.ndarray:
    """First slots of so many rows of ``longest`` tokens, apart from each other and from those that start at ``starts``, as far as
    the pool has room."""
    free: list[int] = []
    end = 0
    for start in (*sorted(starts.tolist()), num_slots):
        free += range(end, start - longest + 1, longest)
        end = start + longest
    return np.resize(free or [0], count)


def _missing(lengths: np.ndarray, longest: int) -> np.ndarray:
    missing = longest - lengths
    return missing[missing > 0]


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
