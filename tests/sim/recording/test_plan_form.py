"""Files that are no plans, or no longer: each is refused in a line, and none is carried out."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fragmeter.sim.recording.plans import Plan, load
from fragmeter.sim.types.errors import UserError
from plan_cases import swapping_plan
from plan_stories import CONTIGUOUS, PAGED


def arrays_of(plan: Plan) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(plan).items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("plan", [PAGED, CONTIGUOUS], ids=["paged", "contiguous"])
def test_plans_by_hand_are_well_formed(plan, tmp_path):
    plan.save(tmp_path / "plan.npz")
    assert load(tmp_path / "plan.npz").meta == plan.meta


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("block_ids", lambda ids: ids + 0.5, "block_ids is float64"),
        ("copies", lambda _: np.zeros((0, 3), np.int64), "copies is int64 [0, 3]"),
        ("ticks", lambda ticks: ticks[0], "ticks is int64 []"),
        ("ticks", lambda ticks: ticks[1:], "has"),
        ("row_offsets", lambda offsets: offsets[:-3], "row_offsets has"),
        ("row_offsets", lambda offsets: offsets[::-1], "row_offsets must rise from 0"),
        ("table_offsets", lambda offsets: offsets + 1, "table_offsets must rise from 0"),
        ("query_tokens", lambda tokens: tokens + 1, "query_tokens are not those that slot_offsets tell"),
        ("context_lens", lambda lens: -lens, "context_lens must hold the query_tokens"),
        ("slot_mapping", lambda slots: slots[1:], "slot_mapping has"),
        ("copied_slots", lambda slots: np.append(slots, 1), "copied_slots has"),
        ("initial_positions", lambda positions: np.append(positions, 1), "initial_positions has"),
    ],
)
def test_arrays_that_do_not_belong_together(name, change, complaint, tmp_path):
    plan = swapping_plan()
    changed = arrays_of(plan)
    changed[name] = change(changed[name])
    np.savez(tmp_path / "plan.npz", meta=np.array(json.dumps(dict(plan.meta))), **changed)
    refused(tmp_path / "plan.npz", complaint)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_slots": None}, "meta.num_slots = None: must be a whole number"),
        ({"block_size": True}, "meta.block_size = True: must be a whole number"),
        ({"layout": "radix"}, "meta.layout = 'radix': must be paged or contiguous"),
        ({"model": 3}, "meta.model = 3: must be text"),
        ({"schema_version": 2}, "schema_version = 2: this version reads 1"),
    ],
)
def test_what_a_plan_says_of_itself(change, complaint, tmp_path):
    plan = swapping_plan()
    np.savez(tmp_path / "plan.npz", meta=np.array(json.dumps(dict(plan.meta) | change)), **arrays_of(plan))
    refused(tmp_path / "plan.npz", complaint)


@pytest.mark.slow
def test_damaged_files(tmp_path):
    """The end of the file is missing, or zeros lie in it: zip, zlib and numpy have their words for each."""
    plan = swapping_plan()
    plan.save(tmp_path / "whole.npz")
    whole, path = (tmp_path / "whole.npz").read_bytes(), tmp_path / "plan.npz"
    for place in range(0, len(whole) - 40, len(whole) // 40):
        path.write_bytes(whole[:place])
        refused(path, "is not a recorded plan")
        path.write_bytes(whole[:place] + bytes(40) + whole[place + 40 :])
        try:
            found = load(path)
        except UserError as refusal:
            assert str(refusal).startswith(f"{path}: ")
        else:
            assert all(np.array_equal(array, getattr(found, name)) for name, array in arrays_of(plan).items())


def refused(path, complaint: str) -> None:
    with pytest.raises(UserError) as refusal:
        load(path)
    text = str(refusal.value)
    assert text.startswith(f"{path}: ") and complaint in text and "\n" not in text
    assert text.endswith("record it anew with fragmeter simulate --record-plan")
