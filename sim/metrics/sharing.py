"""Memory that sequences save by sharing blocks: samples and beams of a request, and prompts kept for later turns."""

from __future__ import annotations

from typing import Any

from ..runs.run import Run
from ..types.sums import dot

_NOT_HELD = ("free", "cached")


def sharing(run: Run) -> dict[str, Any] | None:
    """Blocks that tables name again, after a first table: mean over time, maximum, and share of all that tables name;
    None if no table does.

    The share is of sums over time. SOSP'23's Fig 15 has the mean of each step's share instead
    (``experiments.paper.sharing``).
    """
    rows = run.log.rows
    if "saved" not in rows or not rows["saved"].any():
        return None
    window = run.accounts.window()
    saved = dot(rows["saved"], rows["ticks"])
    held = sum(ticks for bucket, ticks in window.slot_ticks.items() if bucket not in _NOT_HELD)
    size = run.replica.block_size
    return {
        "saved_pct": 100 * saved / (saved + held),
        "mean_saved_blocks": saved / size / run.log.end_ticks,
        "max_saved_blocks": int(rows["saved"].max()) // size,
    }
