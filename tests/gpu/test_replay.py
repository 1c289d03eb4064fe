"""Recorded plans carried out: attention over their tables against dense attention, and faults planted in them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import plan_stories
from fragmeter.experiments.cli.app import DONE, FAULT, MISTAKE, status
from fragmeter.sim import Settings, Workload
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.recording.plans import Plan, record
from fragmeter.sim.spec import model
from fragmeter.sim.types.errors import SettingError
from plan_cases import caching_case, swapping_case, with_stale_table, with_swapped_ids, without_move
from plan_stories import CONTIGUOUS, PAGED, changed

torch = pytest.importorskip("torch")

from fragmeter.gpu.check.replay import LIMITS, Checked, check
from fragmeter.gpu.devices import devices
from fragmeter.gpu.devices.cpu import CpuDevice
from fragmeter.gpu.model import executor
from fragmeter.gpu.model.executor import MOVES, Executor
from fragmeter.gpu.model.pool import KvPool

torch.set_num_threads(1)
SHAPE = replace(model("toy-llama"), num_layers=2)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
STORIES = {"paged": PAGED, "contiguous": CONTIGUOUS}


def checked(plan: Plan, device: str = "cpu", dtype: str = "fp32", every: int = 1, kept: str = "auto") -> Checked:
    return check(Executor(plan, SHAPE, devices.open(device), dtype, kept), every)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("shim", marks=needs_compiler)])
@pytest.mark.parametrize("story", STORIES)
def test_what_tables_hold_is_what_sequences_hold(story, device, dtype):
    """With ``shim`` these are the kernels of a GPU, over the simulator's tables."""
    found = checked(STORIES[story], device, dtype)
    assert (found.wrong_rows, found.mismatches) == (0, [])
    assert found.checked_rows == len(STORIES[story].sequence)
    assert 0 < found.worst_error <= LIMITS[dtype]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "fp32"),
        ("cpu", "bf16"),
        *(pytest.param("shim", dtype, marks=needs_compiler) for dtype in ("fp16", "bf16")),
    ],
)
@pytest.mark.parametrize("story", STORIES)
def test_caches_of_fp8_hold_what_sequences_hold(story, device, dtype):
    """To the bit, and attention over them with the tolerance of caches of the dtype."""
    found = checked(STORIES[story], device, dtype, kept="fp8")
    assert (found.wrong_rows, found.mismatches) == (0, [])
    assert 0 < found.worst_error <= LIMITS[dtype]


@pytest.mark.parametrize("fault", ["a scale is another head's", "keys have the scales of values"])
def test_a_wrong_scale_is_found(fault):
    subject = Executor(PAGED, SHAPE, devices.open("cpu"), "fp16", "fp8")
    k_scale, v_scale = subject.pool.scales[1]
    numbers = subject.numbers
    wrong = {
        "a scale is another head's": (k_scale.flip(0), v_scale),
        "keys have the scales of values": (v_scale, v_scale),
    }

    def of_right(kind, layer, held):
        right, subject.pool.scales[1] = subject.pool.scales[1], (k_scale, v_scale)
        found = numbers(kind, layer, held)
        subject.pool.scales[1] = right
        return found

    # Reads have the wrong scale, and the reference the right one, as all writes had.
    attention = subject.attention

    def attended(step, inputs):
        subject.pool.scales[1] = wrong[fault]
        out = attention(step, inputs)
        subject.pool.scales[1] = (k_scale, v_scale)
        return out

    subject.numbers, subject.attention = of_right, attended
    found = check(subject)
    assert found.wrong_rows and all(one.layer == 1 and one.position is None for one in found.mismatches)


@pytest.mark.parametrize("fault", ["two ids of a table change places", "a copy is skipped"])
def test_a_fault_of_a_plan_is_found_in_fp8(fault):
    plan, places = FAULTS[fault]
    found = checked(plan, kept="fp8")
    assert [(one.step, one.sequence, one.position) for one in found.mismatches] == places


def recorded(name: str) -> Plan:
    """What the simulator's tables did, block ids shuffled."""
    settings, workload = CASES[name]
    return record(settings, workload, shuffle_ids=True)[1]


def with_blocks(case: tuple[Settings, Workload], num_blocks: int) -> tuple[Settings, Workload]:
    return replace(case[0], num_gpu_blocks_override=num_blocks), case[1]


CASES = {
    "samples": swapping_case(beams=False),
    "beams": with_blocks(swapping_case(), 20),
    "cached prefixes": with_blocks(caching_case(), 13),
}


def computed_again(plan: Plan) -> bool:
    """Whether a sequence computes a position twice: it was preempted, and its blocks were lost."""
    ends = np.repeat(plan.context_lens - plan.slot_offsets[1:], plan.query_tokens)
    positions = ends + np.arange(len(plan.token_ids))
    places = np.stack([np.repeat(plan.sequence, plan.query_tokens), positions])
    return np.unique(places, axis=1).shape[1] < len(positions)


def test_all_that_can_happen_is_recorded():
    samples, beams, cached = map(recorded, CASES)
    for plan in (samples, beams):
        assert len(plan.swap_outs) and len(plan.swap_ins) and len(plan.copies)
    assert computed_again(samples) and computed_again(cached)
    # Found in the cache.
    assert len(cached.held_token_ids)
    assert all(plan.meta["shuffle_ids"] for plan in (samples, beams, cached))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("shim", marks=needs_compiler)])
def test_the_simulators_tables_hold_what_its_sequences_do(name, device):
    """Invariant 8."""
    plan = recorded(name)
    found = checked(plan, device)
    assert (found.checked_rows, found.wrong_rows) == (len(plan.sequence), 0)
    assert found.worst_error <= LIMITS["fp32"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_carried_out(policy):
    """Contiguous pieces, page groups and slots of a radix tree among them."""
    block_size = None if policy in ("lightllm", "sglang") else 4
    settings = Settings(
        policy=policy,
        model="toy-opt",
        block_size=block_size,
        num_gpu_blocks_override=96 // (block_size or 1),
        max_model_len=64,
    )
    prompts, outputs = np.array([9, 6, 30, 5, 11, 7]), np.array([12, 20, 9, 16, 4, 5])
    plan = record(settings, Workload("six", np.arange(6) * 10**11, prompts, outputs))[1]
    assert len(plan.sequence)
    assert checked(plan).wrong_rows == 0


@pytest.mark.slow
@pytest.mark.parametrize("move", ["swap_out", "swap_in", "copy"])
def test_a_move_that_is_left_out_of_a_recorded_plan_is_found(move):
    plan = recorded("samples")
    assert checked(without_move(plan, move, 0)).wrong_rows


def test_rows_of_some_steps_are_looked_at_and_all_steps_carried_out():
    found = checked(PAGED, every=3)
    assert (found.steps, found.checked_steps, found.checked_rows, found.wrong_rows) == (4, 2, 5, 0)


#: A fault in a plan: the plan, and (step, sequence, first position) of the first row of each sequence that is wrong.
FAULTS = {
    "a copy is skipped": (without_move(PAGED, "copy", 0), [(3, 1, 4)]),
    "a swap out is skipped": (without_move(PAGED, "swap_out", 0), [(3, 0, 0)]),
    "a swap in is skipped": (without_move(PAGED, "swap_in", 0), [(3, 0, 0)]),
    "two ids of a table change places": (with_swapped_ids(PAGED, 0), [(0, 0, 0)]),
    "ids of two tables change places": (changed(PAGED, "block_ids", [8, 10], [6, 2]), [(3, 0, 0), (3, 1, 0)]),
    "a table is stale": (with_stale_table(PAGED, 5, 2), [(3, 0, 0)]),
    "a prefix is another's": (changed(PAGED, "block_ids", [12], [2]), [(3, 2, 0)]),
    "a token goes to the slot after its own": (changed(PAGED, "slot_mapping", [8], [6]), [(1, 0, 5)]),
    "a token goes to another's slot": (changed(PAGED, "slot_mapping", [9], [13]), [(1, 0, 1), (1, 1, 3), (3, 2, 3)]),
    "a contiguous copy is skipped": (without_move(CONTIGUOUS, "copy", 0), [(1, 1, 0)]),
    "a contiguous copy is too short": (changed(CONTIGUOUS, "copied_slots", [0], [2]), [(1, 1, 2)]),
    "a piece begins a slot too late": (changed(CONTIGUOUS, "slot_starts", [4], [18]), [(2, 1, 0)]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_plan_is_found_where_it_is(fault):
    plan, where = FAULTS[fault]
    found = checked(plan)
    assert [(one.step, one.sequence, one.position) for one in found.mismatches] == where
    # Attention alone would have shown it: its reference uses no table.
    assert not any(one.error <= one.limit for one in found.mismatches)


def test_unwritten_slots_are_nan():
    found = checked(FAULTS["a swap out is skipped"][0])
    assert np.isnan(found.worst_error) and found.as_dict()["worst_error"] is None
    assert str(found.mismatches[0]) == (
        "step 3, sequence 0, layer 0: attention is off by nan (at most 1e-05); token 0 is another's"
    )


def test_attention_is_looked_at_and_not_only_what_tables_hold(monkeypatch):
    attend = CpuDevice._decode_attention

    def forgetful(self, call):
        tables, context_lens, *sizes = call.step
        attend(self, replace(call, step=(tables, context_lens - 1, *sizes)))

    monkeypatch.setattr(CpuDevice, "_decode_attention", forgetful)
    found = checked(PAGED)
    assert [(one.step, one.sequence, one.position) for one in found.mismatches] == [(1, 0, None), (1, 1, None)]
    assert found.wrong_rows == 5
    assert all(0.1 < one.error < 2 for one in found.mismatches)


def test_a_copy_in_the_first_layer_only_is_found_in_the_second(monkeypatch):
    def copy(pool: KvPool, pairs: np.ndarray) -> None:
        pool.device.copy_blocks(pool.keys[:1], pool.values[:1], torch.from_numpy(pairs))

    monkeypatch.setitem(MOVES, "block_copy", copy)
    assert [(one.step, one.sequence, one.layer) for one in checked(PAGED).mismatches] == [(3, 1, 1)]


def test_a_window_begins_with_what_pool_and_host_hold():
    """Only the story's last step: A waits on the host, B lies in two blocks."""
    found = checked(plan_stories.LAST_STEP)
    assert (found.steps, found.checked_rows, found.wrong_rows) == (1, 3, 0)
    unknown = changed(plan_stories.LAST_STEP, "initial_host_token_ids", [0], [999])
    assert [(one.sequence, one.position) for one in checked(unknown).mismatches] == [(0, 0)]


WILD = {
    "block_ids[8] = 8: must be from 0 to 7": changed(PAGED, "block_ids", [8], [8]),
    "slot_mapping[3] = -1: must be from 0 to 31": changed(PAGED, "slot_mapping", [3], [-1]),
    "swap_outs[:, 1][0] = 2: must be from 0 to 1": changed(PAGED, "swap_outs", [0], [(3, 2)]),
    "swap_ins[:, 1][0] = 8: must be from 0 to 7": changed(PAGED, "swap_ins", [0], [(0, 8)]),
    "context_lens[0] = 9: its block table is shorter": changed(PAGED, "context_lens", [0], [9]),
    "slot_starts[4] = 27: leaves the pool": changed(CONTIGUOUS, "slot_starts", [4], [27]),
    "copied_slots[0] = 16: leaves the pool": changed(CONTIGUOUS, "copied_slots", [0], [16]),
}


@pytest.mark.parametrize("complaint", WILD)
def test_a_plan_that_leaves_its_pool_is_refused(complaint):
    with pytest.raises(SettingError) as caught:
        checked(WILD[complaint])
    assert str(caught.value).startswith(complaint)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(SettingError, match="dtype = 'int4': one of fp32, fp16, bf16"):
        checked(PAGED, dtype="int4")


def splitmix64(counter: int) -> int:
    """With integers that do not wrap."""
    mixed = (counter + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


def test_values_are_the_hash_that_they_are_said_to_be():
    tokens, places = [7, 2**40 + 3, 7], [0, 5, 6]
    drawn = executor.drawn(executor.VALUE, 3, torch.tensor(tokens), torch.tensor(places), 2, 4)
    assert drawn.dtype == torch.float32
    for token, place, row in zip(tokens, places, drawn.flatten(1).tolist(), strict=True):
        counter = splitmix64(splitmix64(token % 2**64) + place)
        for element, value in enumerate(row):
            bits = splitmix64((counter + splitmix64((3 * 3 + 2 << 32) + element)) % 2**64) >> 40
            signed = bits - 2**24 if bits >= 2**23 else bits
            assert value == pytest.approx(signed * 12**0.5 / 2**24, rel=1e-6)


def test_values_have_mean_0_and_variance_1_and_no_two_tokens_agree():
    places = torch.arange(2000)
    drawn = executor.drawn(executor.KEY, 0, places % 100, places // 100, 2, 64).flatten(1)
    assert abs(float(drawn.mean())) < 0.01 and abs(float(drawn.var()) - 1) < 0.01
    assert float(torch.corrcoef(drawn).fill_diagonal_(0).abs().max()) < 0.6


class TestVerb:
    """``fragmeter validate --plan FILE --check``."""

    def run(self, plan: Plan, folder: Path, *flags: object) -> int:
        plan.save(folder / "plan.npz")
        return status(["validate", "--plan", str(folder / "plan.npz"), "--check", *map(str, flags)])

    def test_a_plan_that_holds(self, tmp_path, capsys):
        assert self.run(PAGED, tmp_path, "--json", tmp_path / "found.json") == DONE
        printed = capsys.readouterr().out
        assert "plan.npz: by hand, 4 steps on cpu" in printed
        assert "8 rows of 4 steps: what tables hold is what sequences hold" in printed
        found = json.loads((tmp_path / "found.json").read_text())
        assert (found["checked_rows"], found["wrong_rows"], found["mismatches"]) == (8, 0, [])

    def test_a_mismatch_is_a_line_and_exit_status_1(self, tmp_path, capsys):
        assert self.run(FAULTS["a copy is skipped"][0], tmp_path, "--every", 3) == FAULT
        printed, complaint = capsys.readouterr()
        assert "5 rows of 2 steps: 1 are wrong. The first of each sequence:" in printed
        assert "step 3, sequence 1, layer 0: attention is off by " in printed
        assert "1 of 5 rows are not what the plan says" in complaint

    def test_mistakes(self, tmp_path, capsys):
        wrong = tmp_path / "wrong.npz"
        wrong.write_text("no plan")
        for flags, complaint in {
            ("--plan", wrong): "wrong.npz: is not a recorded plan; record it anew",
            ("--plan", tmp_path / "none.npz"): "none.npz: cannot be read (No such file or directory); check the path",
        }.items():
            assert status(["validate", "--check", *map(str, flags)]) == MISTAKE
            assert complaint in capsys.readouterr().err
        assert self.run(PAGED, tmp_path, "--every", 0) == MISTAKE
        assert "every = 0: must be 1 or more" in capsys.readouterr().err
