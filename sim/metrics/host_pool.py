"""Use of the swap space over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runs.run import Run
from ..types.sums import dot


def host_pool(run: Run) -> dict[str, Any] | None:
    """Swap space of a run in blocks: size, maximum in use, mean in use over time; None without swapping."""
    changes, capacity = run.log.host, run.replica.host_blocks
    if not len(changes["ticks"]):
        return None
    until = np.append(changes["ticks"][1:], run.log.end_ticks)
    used = dot(changes["held_blocks"], until - changes["ticks"])
    return {
        "num_cpu_blocks": capacity,
        "max_used_blocks": int(changes["held_blocks"].max()),
        "mean_used_blocks": used / run.log.end_ticks,
    }


def host_held_at_rows(run: Run, part: slice = slice(None)) -> np.ndarray:
    """Slots of the swap space in use in every row of the run log, or in some rows, int64 [rows]."""
    changes = run.log.host
    place = np.searchsorted(changes["ticks"], run.log.rows["start_ticks"][part], side="right")
    return np.concatenate([[0], changes["held_blocks"]])[place] * run.replica.block_size
