"""A ledger for each KV group, if layers with a sliding window share the pool with other layers.

A slot of a group is one token in the group's layers. All groups have slots of the same number of bytes, so shares of
slots are shares of bytes: the shares of all groups and of free slots add up to the pool.
"""

from __future__ import annotations

from collections import Counter
from math import fsum
from typing import Any

import numpy as np

from ..memory.accounting.kv_groups import RING, STATE
from ..runs.integrals import Accounts, Window
from ..runs.run import Run
from ..types.once import once

#: The buckets of slots that a group holds.
HELD = ("live", "reserved", "block_tail")


def kv_groups(run: Run) -> list[dict[str, Any]]:
    """Buckets of each KV group in the settings' window, in percent of the pool; empty without KV groups."""
    layout, span = run.replica.layout, run.window
    if layout is None:
        return []
    kinds = _numbers(run)
    windows = {kind: accounts.window(span.start_ticks, span.end_ticks) for kind, accounts in _accounts(run).items()}
    return [
        {
            "name": name,
            "layers": group.num_layers,
            "padding_layers": layout.page_layers - group.num_layers,
            "window": group.span.tokens or None,
            "page_bytes": run.replica.page_bytes,
            **_shares(windows[group.span.kind], kinds[group.span.kind], layout.page_padding(place)),
        }
        for place, (name, group) in enumerate(zip(layout.names, layout.groups, strict=True))
    ]


def group_buckets_at_rows(run: Run, part: slice = slice(None)) -> dict[str, np.ndarray]:
    """Slots of each bucket of each group in the first step of every row, or of some rows, int64 [rows], as ``name.bucket``."""
    layout = run.replica.layout
    if layout is None:
        return {}
    kinds = _numbers(run)
    at_rows = {kind: accounts.at_rows(part) for kind, accounts in _accounts(run).items()}
    return {
        f"{name}.{bucket}": at_rows[group.span.kind][bucket] // kinds[group.span.kind]
        for name, group in zip(layout.names, layout.groups, strict=True)
        for bucket in ((STATE,) if group.span.kind in (STATE, RING) else HELD)
    }


@once
def _accounts(run: Run) -> dict[str, Accounts]:
    """The ledger of the groups of each kind, together."""
    groups = run.log.groups
    return {kind: Accounts(run.log, groups._replace(kinds=(kind,) * groups.kinds.count(kind))) for kind in groups.kinds}


def _numbers(run: Run) -> Counter[str]:
    """Groups of each kind: they hold the same, but for blocks that two requests computed side by side, so one group's
    slots are the mean."""
    return Counter(run.log.groups.kinds)


def _shares(window: Window, groups: int, padding: float) -> dict[str, dict[str, float]]:
    """Of one of so many groups: its buckets, and beside them how much of their pages it cannot use.

    Args:
        padding: Share of a page that the group cannot use.
    """
    held = (STATE,) if window.slot_steps.get(STATE) else HELD
    shares: dict[str, dict[str, float]] = {}
    for name, slots in (("iterations", window.slot_steps), ("time", window.slot_ticks)):
        capacity = max(1, sum(slots.values()))
        one = {
            bucket: slots[bucket] // groups if slots[bucket] % groups == 0 else slots[bucket] / groups
            for bucket in held
        }
        shares[f"mean_over_{name}_pct"] = {bucket: 100 * (one[bucket] / capacity) for bucket in held}
    means = {name.removesuffix("_pct"): padding * fsum(buckets.values()) for name, buckets in shares.items()}
    return shares | {"page_padding_pct": means}
