"""Whether a plan stays within its own pool; a GPU would reach outside it without a word."""

from __future__ import annotations

import numpy as np

from ...sim.recording.plans import Plan
from ...sim.types.errors import SettingError


def require_within(plan: Plan) -> None:
    """Refuse a plan that names a block or a slot that its pool does not have.

    Raises:
        SettingError: The first such entry, by array and place.
    """
    meta = plan.meta
    slots, blocks, host_blocks = meta["num_slots"], meta["num_blocks"], meta["host_blocks"]
    _require("slot_mapping", plan.slot_mapping, slots)
    _require("initial_slots", plan.initial_slots, slots)
    _require("initial_host_slots", plan.initial_host_slots, host_blocks * meta["block_size"])
    for name, (source, destination) in {
        "swap_outs": (blocks, host_blocks),
        "swap_ins": (host_blocks, blocks),
        "copies": (blocks, blocks) if plan.is_paged else (slots, slots),
    }.items():
        _require(f"{name}[:, 0]", getattr(plan, name)[:, 0], source)
        _require(f"{name}[:, 1]", getattr(plan, name)[:, 1], destination)
    if plan.is_paged:
        _require("block_ids", plan.block_ids, blocks)
        room = np.diff(plan.table_offsets) * meta["block_size"]
        _refuse("context_lens", plan.context_lens, plan.context_lens > room, "its block table is shorter")
    else:
        ends = plan.slot_starts + plan.context_lens
        _refuse("slot_starts", plan.slot_starts, (plan.slot_starts < 0) | (ends > slots), "leaves the pool")
        ends = plan.copies.max(axis=1, initial=0) + plan.copied_slots
        _refuse("copied_slots", plan.copied_slots, ends > slots, "leaves the pool")


def _require(field: str, ids: np.ndarray, end: int) -> None:
    _refuse(field, ids, (ids < 0) | (ids >= end), f"must be from 0 to {end - 1}; record the plan anew")


def _refuse(field: str, values: np.ndarray, wrong: np.ndarray, why: str) -> None:
    for place in np.flatnonzero(wrong)[:1]:
        raise SettingError(f"{field}[{place}]", int(values[place]), why)
