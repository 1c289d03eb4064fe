"""What the slots of a paged device hold when a recorded plan is carried out on integers, step by step.

A token's id stands for its keys and values. Every row should find in its block table the tokens that its sequence
holds; one that finds others has been overwritten.
"""

from __future__ import annotations

import numpy as np

from ...sim.recording.plans import Plan


def wrong_rows(plan: Plan, skipped_copy: int | None = None) -> int:
    """Rows (sequences of a step) that find another token than their own somewhere in their table.

    Args:
        plan: Paged, recorded from the first step, without swaps.
        skipped_copy: Number of a copy that is left out.
    """
    size = plan.meta["block_size"]
    slots = np.full((plan.meta["num_blocks"], size), -1, dtype=np.int64)
    slots.reshape(-1)[plan.initial_slots] = plan.initial_token_ids
    wrong = row = done = 0
    for number in range(plan.num_steps):
        step = plan.step(number)
        carried_out = [place for place in range(len(step.copies)) if done + place != skipped_copy]
        source, target = step.copies[carried_out].reshape(-1, 2).T
        slots[target] = slots[source]
        done += len(step.copies)
        slots.reshape(-1)[step.slot_mapping] = step.token_ids
        for place, context in enumerate(step.context_lens.tolist()):
            found = slots[plan.block_table(number, place)].reshape(-1)[:context]
            wrong += not np.array_equal(found, plan.logical_tokens(number, place))
            row += 1
    return wrong
