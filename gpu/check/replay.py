"""Check that a recorded plan matches the contents of its block tables: invariant 8, on a device.

Two checks of each selected row do not use a block table. The row's attention must match dense attention in
float64 over the sequence's actual tokens. The keys and values that its table points to must be the tokens' own, one by
one. The second check detects an error that attention cannot: two full blocks of one sequence that are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...sim.recording.plans import Plan
from ..devices.fp8 import indexed
from ..model.executor import KEY, QUERY, VALUE, Executor
from ..model.skeleton import DTYPES
from .cases import TOLERANCE, dense_attention, error, slots_of

#: Maximum relative L2 error of a head's attention.
LIMITS = {name: TOLERANCE[str(dtype).removeprefix("torch.")] for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A wrong row, in the first layer that shows the error.

    Attributes:
        step: Step of the plan.
        sequence: Sequence number in the plan.
        layer: Layer of the model.
        error: Relative L2 error of attention, of the worst head of a new token.
        limit: Maximum error.
        position: The first token of the sequence with another token's key or value; None if all are correct.
    """

    step: int
    sequence: int
    layer: int
    error: float
    limit: float
    position: int | None

    def __str__(self) -> str:
        held = "all its tokens are in place" if self.position is None else f"token {self.position} is another's"
        where = f"step {self.step}, sequence {self.sequence}, layer {self.layer}"
        return f"{where}: attention is off by {self.error:.2g} (at most {self.limit:g}); {held}"


@dataclass(slots=True)
class Checked:
    """Results of a replay.

    Attributes:
        steps: Number of executed steps.
        checked_steps: Number of steps with all rows checked.
        checked_rows: Number of checked rows.
        wrong_rows: Number of wrong rows among them.
        worst_error: The largest error of attention, relative L2; NaN if any error is NaN.
        mismatches: The first wrong row of each sequence.
    """

    steps: int = 0
    checked_steps: int = 0
    checked_rows: int = 0
    wrong_rows: int = 0
    worst_error: float = 0.0
    mismatches: list[Mismatch] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The results for JSON; a NaN error, which comes from unwritten slots, is null."""
        found = asdict(self)
        for one in (found, *found["mismatches"]):
            one.update({name: None for name, value in one.items() if value != value})
        return found


@torch.inference_mode()
def check(executor: Executor, every: int = 1, steps: Iterable[int] | None = None) -> Checked:
    """Execute the moves and writes of a plan, and check every row of every ``every``-th step.

    Args:
        executor: Executor of the plan, before its first step.
        every: 1 checks all steps.
        steps: All steps of the plan in order, for example wrapped in a progress bar.
    """
    checked = Checked()
    for step in range(executor.plan.num_steps) if steps is None else steps:
        inputs = executor.advance(step)
        checked.steps += 1
        if step % every:
            continue
        out = executor.attention(step, inputs)
        checked.checked_steps += 1
        for row in range(len(executor.plan.step(step).sequence)):
            _look(executor, step, row, out, checked)
    return checked


def _look(executor: Executor, step: int, row: int, out: list[Tensor], checked: Checked) -> None:
    found = executor.plan.step(step)
    tokens = slice(*found.query_start_loc[row : row + 2])
    compared = [_compared(executor, step, row, layer, attended[tokens]) for layer, attended in enumerate(out)]
    checked.checked_rows += 1
    # np.max propagates NaN.
    checked.worst_error = float(np.max([checked.worst_error, *(off for off, _ in compared)]))
    limit, sequence = LIMITS[executor.dtype], int(found.sequence[row])
    wrong = (layer for layer, (off, place) in enumerate(compared) if not off <= limit or place is not None)
    layer = next(wrong, None)
    if layer is not None:
        checked.wrong_rows += 1
        if all(sequence != other.sequence for other in checked.mismatches):
            off, place = compared[layer]
            checked.mismatches.append(Mismatch(step, sequence, layer, off, limit, place))


def _compared(executor: Executor, step: int, row: int, layer: int, out: Tensor) -> tuple[float, int | None]:
    """The error of a row's attention, and the first position with another token's key or value."""
    names = executor.plan.logical_tokens(step, row)
    tokens = executor.place(names), executor.place(np.arange(len(names)))
    query, keys, values = (
        executor.drawn(QUERY, layer, *tokens),
        *(executor.held(kind, layer, *tokens) for kind in (KEY, VALUE)),
    )
    slots = executor.place(held_slots(executor.plan, step, row))
    caches = executor.pool.keys[layer], executor.pool.values[layer]
    found = (indexed(cache).flatten(0, 1)[slots] for cache in caches)
    differ = [one != indexed(right) for one, right in zip(found, (keys, values), strict=True)]
    wrong = (differ[0] | differ[1]).flatten(1).any(1).nonzero()
    position = int(wrong[0]) if len(wrong) else None
    keys, values = executor.numbers(KEY, layer, keys), executor.numbers(VALUE, layer, values)
    return error(out, dense_attention(query[len(names) - len(out) :], keys, values)), position


def held_slots(plan: Plan, step: int, row: int) -> np.ndarray:
    """The slot of each token of a row, from its block table."""
    place = plan.row_offsets[step] + row
    context = int(plan.context_lens[place])
    if plan.is_paged:
        return slots_of(plan.block_table(step, row), context, plan.meta["block_size"])
    return plan.slot_starts[place] + np.arange(context)
