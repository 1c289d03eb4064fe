"""Steps of recorded plans, timed: a skeleton runs them over the simulator's own block tables.

Nothing is calibrated here. What a step was predicted to take stands in the plan; what it takes is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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

#: Passes the numbers of steps on and shows how far they have come.
Watch = Callable[[Iterable[int], int], Iterable[int]]


@torch.inference_mode()
def step_us(skeleton: Skeleton, plan: Plan, rounds: int, watch: Watch) -> np.ndarray:
    """Microseconds of every step of a plan, in the quantile that the device's stopwatch takes of ``rounds`` replays.

    A step is timed as an engine would wait for it: moves, computing, and on a GPU the wait for it. What it is made of
    is laid out before.
    """
    stopwatch = timing.stopwatch(skeleton.device)
    warm_up(skeleton, plan)
    steps = watch([step for _ in range(rounds) for step in range(plan.num_steps)], rounds * plan.num_steps)
    samples = [one_step_us(skeleton, plan, step, stopwatch) for step in steps]
    return np.quantile(np.reshape(samples, (rounds, plan.num_steps)), stopwatch.quantile, axis=0)


def one_step_us(skeleton: Skeleton, plan: Plan, step: int, stopwatch: Stopwatch) -> float:
    """Microseconds of one step, this once."""
    moved, computed = plan.step(step), batch_of(plan, step)

    def work(_: int) -> None:
        move(skeleton.pool, plan, moved)
        skeleton.step(computed)

    return stopwatch.elapsed_us(work, range(1))


def warm_up(skeleton: Skeleton, plan: Plan) -> None:
    """Run one step of each size: whatever is compiled, captured or allocated for it is there afterwards."""
    sizes: dict[tuple[int, int, int], Batch] = {}
    for step in range(plan.num_steps):
        found = batch_of(plan, step)
        blocks = -(-int(found.context_lens.max(initial=1)) // skeleton.pool.block_size)
        # By tokens, too: of two steps of as many rows one may prefill, and GEMMs of new sizes load other kernels.
        sizes.setdefault((len(found.token_ids), len(found.query_lens), (blocks - 1).bit_length()), found)
    # A capture gives back what memory torch keeps for later: what is not captured comes after.
    for found in sorted(sizes.values(), key=lambda found: not found.only_decodes):
        skeleton.step(found)


def batch_of(plan: Plan, step: int) -> Batch:
    """What a step computes, including the padding of a static batch."""
    found = batch(plan, step)
    padding = int(plan.padding_tokens[step])
    return found if not padding else padded(found, padding, decodes=bool(plan.decodes[step]))


def padded(found: Batch, padding: int, decodes: bool) -> Batch:
    """A step of a static batch with its padding.

    An ended sequence remains as a row as long as the longest one, and writes nowhere. The padding of each prompt up to the
    longest is one row; its tokens attend to each other, and not to the prompt itself.
    """
    longest = int(found.context_lens.max())
    lens = np.ones(padding, np.int64) if decodes else _missing(found.context_lens, longest)
    contexts = np.full(padding, longest) if decodes else lens
    return found._replace(
        query_lens=np.concatenate([found.query_lens, lens]),
        context_lens=np.concatenate([found.context_lens, contexts]),
        token_ids=np.pad(found.token_ids, (0, padding)),
        slot_mapping=np.pad(found.slot_mapping, (0, padding), constant_values=-1),
        slot_starts=np.pad(not_none(found.slot_starts), (0, len(lens))),
    )


def _missing(lengths: np.ndarray, longest: int) -> np.ndarray:
    missing = longest - lengths
    return missing[missing > 0]


def compared(predicted_us: np.ndarray, measured_us: np.ndarray) -> dict[str, Any]:
    """Errors of single predictions, and of their sum."""
    off = errors(Points("step", {}, measured_us), predicted_us)
    total = float(predicted_us.sum() / measured_us.sum() - 1)
    return {"count": len(measured_us), **off, "total_bias": round(total, 4)}


def quantiles_ms(us: np.ndarray) -> dict[str, float]:
    """Median and 99th percentile."""
    p50, p99 = np.quantile(us, [0.5, 0.99]) / 1e3
    return {"p50_ms": round(float(p50), 4), "p99_ms": round(float(p99), 4)}


def allocates(plan: Plan) -> np.ndarray:
    """bool [steps]: in which a row's block table is longer than in the row of its sequence before."""
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
