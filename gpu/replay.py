"""Whether what a recorded plan says is what its tables held: invariant 8, on a device.

Each row of a step that is looked at is held to two things that know no table: its attention to dense attention in
float64 over the tokens that the sequence really holds, and the keys and values found through its table, one by one, to
those tokens' own. The second sees what attention does not: two full blocks of one sequence that change places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..sim.plan import Plan
from .executor import Executor
from .replay_values import KEY, QUERY, VALUE

#: Relative L2 error allowed of a token's attention.
LIMITS = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A row that is not what it should be, in the first layer where that shows.

    Attributes:
        step: Of the plan.
        sequence: As the plan numbers them.
        layer: Of the model.
        error: Relative L2 error of attention, of the worst new token.
        limit: What was allowed.
        position: The first token of the sequence whose key or value is another's; None where all are its own.
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
    """What a replay found.

    Attributes:
        steps: Steps carried out.
        checked_steps: Steps of which every row was looked at.
        checked_rows: Rows that were looked at.
        wrong_rows: Rows among them that are not what they should be.
        worst_error: The largest error of attention, relative L2, NaN where one is.
        mismatches: The first wrong row of each sequence.
    """

    steps: int = 0
    checked_steps: int = 0
    checked_rows: int = 0
    wrong_rows: int = 0
    worst_error: float = 0.0
    mismatches: list[Mismatch] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """As data; an error that is NaN, as of slots that nobody wrote, is null."""
        found = asdict(self)
        for one in (found, *found["mismatches"]):
            one.update({name: None for name, value in one.items() if value != value})
        return found


@torch.inference_mode()
def check(executor: Executor, every: int = 1, steps: Iterable[int] | None = None) -> Checked:
    """Carry out a plan, and look at every row of every ``every``-th step.

    Args:
        executor: Of the plan, not yet begun.
        every: 1 looks at all steps.
        steps: All steps of the plan, in order, perhaps with a progress bar around them.
    """
    checked, seen = Checked(), set()
    for step in range(executor.plan.num_steps) if steps is None else steps:
        out = executor.step(step)
        checked.steps += 1
        if step % every:
            continue
        checked.checked_steps += 1
        for row in range(len(executor.plan.step(step).sequence)):
            _look(executor, step, row, out, checked, seen)
    return checked


def _look(
    executor: Executor, step: int, row: int, out: list[Tensor], checked: Checked, seen: set[int]
) -> None:
    found = executor.plan.step(step)
    sequence = int(found.sequence[row])
    tokens = slice(*found.query_start_loc[row : row + 2])
    checked.checked_rows += 1
    wrong = None
    for layer, attended in enumerate(out):
        error, position = _compared(executor, step, row, layer, attended[tokens])
        # NaN stays.
        checked.worst_error = float(np.maximum(checked.worst_error, error))
        limit = LIMITS[executor.dtype]
        if wrong is None and (not error <= limit or position is not None):
            wrong = Mismatch(step, sequence, layer, error, limit, position)
    if wrong:
        checked.wrong_rows += 1
        if sequence not in seen:
            seen.add(sequence)
            checked.mismatches.append(wrong)


def _compared(executor: Executor, step: int, row: int, layer: int, out: Tensor) -> tuple[float, int | None]:
    """The error of a row's attention, and the first position whose key or value is not its own."""
    names = executor.plan.logical_tokens(step, row)
    tokens = executor.place(names), executor.place(np.arange(len(names)))
    query, keys, values = (executor.drawn(kind, layer, *tokens) for kind in (QUERY, KEY, VALUE))
    slots = executor.place(held_slots(executor.plan, step, row))
    caches = executor.pool.keys[layer], executor.pool.values[layer]
    held_keys, held_values = (cache.flatten(0, 1)[slots] for cache in caches)
    differ = ((held_keys != keys) | (held_values != values)).flatten(1).any(1)
    wrong = differ.nonzero()
    position = int(wrong[0]) if len(wrong) else None
    wanted = dense_attention(query[len(names) - len(out) :], keys, values)
    away = (out.double() - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    return float(away.max()), position


def held_slots(plan: Plan, step: int, row: int) -> np.ndarray:
    """The slot of each token of a row, by its table."""
    place = plan.row_offsets[step] + row
    positions = np.arange(plan.context_lens[place])
    if not plan.is_paged:
        return plan.slot_starts[place] + positions
    block_size = plan.meta["block_size"]
    blocks = plan.block_table(step, row).astype(np.int64)[positions // block_size]
    return blocks * block_size + positions % block_size


def dense_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last tokens of a sequence in float64, by nothing but its formula.

    Args:
        query: ``[queries, heads, head_dim]``.
        keys: ``[tokens, kv_heads, head_dim]``.
        values: As ``keys``.
    """
    queries, heads, head_dim = query.shape
    tokens, kv_heads, _ = keys.shape
    keys, values = (one.double().repeat_interleave(heads // kv_heads, dim=1) for one in (keys, values))
    scores = torch.einsum("qhd,thd->hqt", query.double(), keys) / head_dim**0.5
    seen = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
    return torch.einsum("hqt,thd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
