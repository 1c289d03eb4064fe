"""A ledger for each KV group, if layers with a sliding window or a state share the pool with other layers, or have a pool of their own.

A slot of a group is one token in the group's layers. All groups have slots of the same number of bytes, so shares of
slots are shares of bytes: the shares of all groups and of free slots add up to the pool. Groups with a pool of their own have
free and cached slots of their own, too, and slots of different bytes: their shares are of the bytes of both pools.
"""

from __future__ import annotations

from math import fsum
from typing import Any

import numpy as np

from ..memory.accounting.kv_groups import RING, STATE
from ..runs.integrals import Accounts, Window
from ..runs.run import Run
from ..spec import model
from ..types.once import once
from ..types.optional import not_none

#: The buckets of slots that a group holds; and that a group with a pool of its own has beside them.
HELD = ("live", "reserved", "block_tail")
_BESIDE = ("cached", "free")


def kv_groups(run: Run) -> list[dict[str, Any]]:
    """Buckets of each KV group in the settings' window, in percent of the pool; empty without KV groups."""
    layout, span = run.replica.layout, run.window
    if run.accounts.pools:
        return _pools(run)
    if layout is None:
        return []
    accounts = _accounts(run)
    windows = {number: each.window(span.start_ticks, span.end_ticks) for number, (_, _, each) in enumerate(accounts)}
    number_of = {place: number for number, (places, _, _) in enumerate(accounts) for place in places}
    return [
        {
            "name": name,
            "layers": group.num_layers,
            "padding_layers": layout.page_layers - group.num_layers,
            "window": group.span.tokens or None,
            "page_bytes": run.replica.page_bytes,
            **_shares(windows[number_of[place]], len(accounts[number_of[place]][0]), layout.page_padding(place)),
        }
        for place, (name, group) in enumerate(zip(layout.names, layout.groups, strict=True))
    ]


def group_buckets_at_rows(run: Run, part: slice = slice(None)) -> dict[str, np.ndarray]:
    """Slots of each bucket of each group in the first step of every row, or of some rows, int64 [rows], as ``name.bucket``."""
    layout = run.replica.layout
    if run.accounts.pools:
        rows_of = [(name, held, accounts.at_rows(part)) for name, held, _, accounts in _named_pools(run)]
        beside = _beside(run)
        return {f"{name}.{bucket}": rows[bucket] for name, held, rows in rows_of for bucket in (*held, *beside)}
    if layout is None:
        return {}
    found: dict[int, dict[str, np.ndarray]] = {}
    for places, slots, accounts in _accounts(run):
        rows = accounts.at_rows(part)
        # They hold the same, but for blocks that two requests computed side by side, so one group's slots are the mean.
        mean = {bucket: slots * rows[bucket] // len(places) for bucket in (*HELD, STATE) if bucket in rows}
        found |= dict.fromkeys(places, mean)
    return {
        f"{name}.{bucket}": found[place][bucket]
        for place, (name, group) in enumerate(zip(layout.names, layout.groups, strict=True))
        for bucket in ((STATE,) if group.span.kind in (STATE, RING) else HELD)
    }


def _named_pools(run: Run) -> list[tuple[str, tuple[str, ...], int, Accounts]]:
    """Of each of two pools: the name of its group, the buckets of slots that it holds, and its entry of ``Accounts.pools``."""
    states = not_none(run.log.second_pool).kind == STATE
    named = [("full_attention", HELD), (STATE, (STATE,)) if states else ("sliding_attention", HELD)]
    return [(*each, *pool) for each, pool in zip(named, run.accounts.pools, strict=True)]


def _beside(run: Run) -> tuple[str, ...]:
    """The buckets of a pool that its group does not hold; free slots of one buffer are of no group."""
    return _BESIDE[:1] if run.log.shared_slots else _BESIDE


def _pools(run: Run) -> list[dict[str, Any]]:
    """The groups of two pools."""
    span, shape, second = run.window, model(run.settings.model), not_none(run.log.second_pool)
    found, beside = [], _beside(run)
    for number, (name, held, weight, accounts) in enumerate(_named_pools(run)):
        # A state and a window are no full span.
        groups = [each for each in shape.kv_groups() if (each.span.kind != "full") == bool(number)]
        own = accounts.window(span.start_ticks, span.end_ticks)
        shares = {
            f"mean_over_{over}_pct": {
                bucket: 100 * weight * slots[bucket] / max(1, sum(whole.values())) for bucket in (*held, *beside)
            }
            for over, slots, whole in (
                ("iterations", own.slot_steps, span.slot_steps),
                ("time", own.slot_ticks, span.slot_ticks),
            )
        }
        found.append(
            {
                "name": name,
                "layers": sum(each.num_layers for each in groups),
                "padding_layers": 0,
                "window": max((each.span.tokens for each in groups), default=0) or None,
                "page_bytes": second.slot_bytes[number] * accounts.log.block_size,
                **shares,
                "page_padding_pct": {"mean_over_iterations": 0.0, "mean_over_time": 0.0},
            }
        )
    return found


@once
def _accounts(run: Run) -> list[tuple[tuple[int, ...], int, Accounts]]:
    """The ledgers of the groups that hold the same: their numbers, slots of the pool that one of their slots is, and the ledger of
    all of them together."""
    log, groups = run.log, run.log.groups
    classes = groups.classes(log.block_size)
    if groups.sizes:
        return [(each.places, *own) for each, own in zip(classes, run.accounts.classes, strict=True)]
    return [(each.places, 1, Accounts(log, groups._replace(kinds=(each.kind,) * each.number))) for each in classes]


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
