"""Predicted beside measured: what is compared, and a device that takes as long as a test says."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim import Settings, Workload
from fragmeter.sim.cost import calibration as calibrations
from fragmeter.sim.engine.replica import build
from fragmeter.sim.recording.plans import Plan, record
from fragmeter.sim.spec import model
from fragmeter.sim.types.errors import SettingError
from plan_stories import CONTIGUOUS, PAGED

torch = pytest.importorskip("torch")

from fragmeter.experiments.measured import validation, validation_runs
from fragmeter.experiments.measured.repriced import priced
from fragmeter.gpu.calibrate import grid as calibrate_grid
from fragmeter.gpu.calibrate import points
from fragmeter.gpu.check.replay import check
from fragmeter.gpu.devices import devices, timing
from fragmeter.gpu.model import graphs as skeleton_graphs
from fragmeter.gpu.model.executor import Executor, batch, used_host_blocks
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.gpu.validate import (
    acceptance as validate_acceptance,
)
from fragmeter.gpu.validate import (
    attention as validate_attention,
)
from fragmeter.gpu.validate import (
    drift as validate_drift,
)
from fragmeter.gpu.validate import (
    operations as validate_operations,
)
from fragmeter.gpu.validate import (
    validate,
)

TOY = replace(model("toy-llama"), num_layers=2)
#: Any calibration will do; this one needs no measuring.
PROFILE = calibrations.PROFILES / "h100-80gb.json"


def recorded(policy: str = "vllm-sosp23", prompts=(30, 50, 9), outputs=(20, 5, 12), first_step=0, **fields) -> Plan:
    common = {"model": "toy-llama", "cost": str(PROFILE), "num_gpu_blocks_override": 16, "max_model_len": 80}
    workload = Workload("few", np.zeros(len(prompts), np.int64), np.array(prompts), np.array(outputs))
    return record(Settings(policy=policy, **common | fields), workload, first_step)[1]


def test_errors_are_signed_and_of_the_sum_too():
    found = validate.compared(np.array([110.0, 90, 100, 300]), np.array([100.0, 100, 100, 200]))
    assert found == {
        "count": 4,
        "median_error": 0.1,
        "mape": 0.175,
        "p90": 0.38,
        "p95": 0.44,
        "bias": 0.125,
        "total_bias": 0.2,
    }


def test_a_block_is_allocated_where_a_table_grows():
    """The first prompts; nothing; B's second block; C's table. A comes back with as many blocks as it had."""
    assert validate.allocates(PAGED).tolist() == [True, False, True, True]


class TestPadding:
    def test_all_rows_are_as_long_as_the_longest_until_the_last_one_ends(self):
        """Prompts of 5, 9 and 7 tokens with 3, 1 and 2 outputs; 12 slots are reserved for each."""
        plan = recorded("static", prompts=(5, 9, 7), outputs=(3, 1, 2), max_num_seqs=3, max_model_len=12)
        first, second, third = (validate.batch_of(plan, step) for step in range(3))
        assert plan.num_steps == 3 and plan.padding_tokens.tolist() == [6, 1, 2]
        assert first.query_lens.tolist() == first.context_lens.tolist() == [9, 9, 9]
        padding = [-1] * 4 + [0, 1, 2, 3, 4]
        assert first.slot_mapping.tolist() == [*padding, *range(12, 21), -1, -1, *range(24, 31)]
        assert (first.token_ids[first.slot_mapping >= 0] == plan.step(0).token_ids).all()
        for number, found in enumerate((second, third), start=1):
            assert found.query_lens.tolist() == [1, 1, 1] and found.context_lens.tolist() == [9 + number] * 3
        # What ended writes nothing, and is read where it was.
        assert second.slot_mapping.tolist() == [5, -1, 31] and third.slot_mapping.tolist() == [6, -1, -1]
        assert {tuple(found.slot_starts.tolist()) for found in (first, second, third)} == {(0, 12, 24)}

    @pytest.mark.parametrize("policy", ["static", "orca-max", "vllm-sosp23"])
    def test_what_is_replayed_is_what_is_priced(self, policy):
        """Rows, contexts, prompt tokens and pairs of every step, as the simulator asked its cost for them. On an H200 the steps of
        static batches took 4 % less time than predicted, as their contexts lacked the padding."""
        prompts, outputs = (30, 50, 9, 20, 33, 7, 7), (3, 12, 8, 14, 2, 9, 1)
        workload = Workload("few", np.zeros(7, np.int64), np.array(prompts), np.array(outputs))
        settings = Settings(
            policy=policy, model="toy-llama", max_num_seqs=3, max_model_len=80, num_gpu_blocks_override=16
        )
        one = priced(settings, workload, False, build(settings).cost)
        assert one.plan.num_steps > 15 and one.plan.padding_tokens.any() == (policy == "static")
        for step, asked in enumerate(one.questions):
            found = validate.batch_of(one.plan, step)
            decodes = found.query_lens == 1 if one.plan.decodes[step] else np.zeros(len(found.query_lens), bool)
            lens = found.query_lens[~decodes]
            sizes = (decodes.sum(), found.context_lens[decodes].sum(), lens.sum(), (lens * (lens + 1) // 2).sum())
            assert [(name, sizes) for name, sizes in asked] == [("step_ticks", (*map(int, sizes), 0))], step

    def test_a_plan_that_begins_within_a_batch_is_refused(self):
        plan = recorded("static", first_step=4, prompts=(5, 9), outputs=(9, 14), max_num_seqs=2, max_model_len=40)
        with pytest.raises(SettingError, match="plan = 4: is within a static batch"):
            validate.batch_of(plan, 0)

    @pytest.mark.slow
    def test_the_skeleton_takes_them(self):
        plan = recorded("static", max_num_seqs=3)
        assert plan.padding_tokens.any()
        skeleton = Skeleton(TOY, devices.open("cpu"), 16, 16)
        for step in range(plan.num_steps):
            computed = validate.batch_of(plan, step)
            assert computed.query_lens.sum() == plan.step(step).query_tokens.sum() + plan.padding_tokens[step]
            assert skeleton.step(computed).isfinite().all()

    def test_other_steps_do_not_change(self):
        plan = recorded()
        for found, plain in zip(validate.batch_of(plan, 0), batch(plan, 0), strict=True):
            assert np.array_equal(found, plain)


def test_a_steps_operations_add_up_to_what_was_simulated():
    """Two ways to the same calibration: the simulator's step cost, and operation by operation."""
    plan = recorded(outputs=(20, 25, 12))
    found = calibrations.read(PROFILE)
    for step in range(plan.num_steps):
        if not plan.prefill_tokens[step]:
            operations = validate_operations.predicted_us(found, model("toy-llama"), plan, step)
            assert sum(operations.values()) == pytest.approx(plan.ticks[step] / 1e6, rel=0.01)


def test_steps_that_tell_most_are_among_those_looked_at():
    plan = recorded(prompts=[30] * 6, outputs=[12, 3, 20, 30, 9, 40], num_gpu_blocks_override=9)
    special = np.flatnonzero(plan.prefill_tokens)
    found = validate_operations.selected_steps(plan, 8)
    assert found == sorted(found) and len(found) <= 8
    assert {0, int(special[-1]), plan.num_steps - 1} <= set(found)
    assert validate_operations.selected_steps(plan, 1000) == list(range(plan.num_steps))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static", "orca-max", "vllm-sosp23"])
def test_no_step_is_captured_while_it_is_timed(policy, monkeypatch):
    """Nor meets a size of GEMMs for the first time: whatever is slow once comes before the clock runs."""
    captured, met = [], []

    def capture(work):
        # It gives back torch's cached memory, which steps that are not captured would then ask for anew.
        assert set(met) <= {1, 2}
        captured.append(now)
        result = work()
        return lambda: result.copy_(work()), result

    monkeypatch.setattr(skeleton_graphs, "capture", capture)
    limits = {"max_num_seqs": 2, "num_gpu_blocks_override": 10}
    plan = recorded(policy, prompts=(30, 50, 9, 30), outputs=(20, 5, 12, 30), **limits)
    skeleton, now = Skeleton(TOY, devices.open("cpu"), 10, 16, graphs=True), "warming up"
    run = skeleton.step
    monkeypatch.setattr(skeleton, "step", lambda batch: met.append(len(batch.token_ids)) or run(batch))
    validate.warm_up(skeleton, [(plan, range(plan.num_steps))])
    warm, now = set(met), "timed"
    for step in range(plan.num_steps):
        skeleton.step(validate.batch_of(plan, step))
    assert set(captured) == {"warming up"}
    assert set(met) == warm


def test_operations_of_a_step_are_timed_separately():
    plan = recorded(prompts=(30, 50), outputs=(20, 5))
    timed = validate_operations.TimedStep(Skeleton(TOY, devices.open("cpu"), 16, 16))
    beside = {"embedding", "elementwise", "kv_write", "step", "gemm"}
    assert set(timed.operations_us(plan, 0)) == beside | {"prefill_attention"}
    decoding = timed.operations_us(plan, 1)
    assert set(decoding) == beside | {"decode_attention"}
    assert all(us > 0 for us in decoding.values())


def test_a_gpus_clock_adds_up_what_lies_between_events(monkeypatch):
    """A device that takes a millisecond between two events, and is let wait before the first."""
    calls = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("event")
            self.place = calls.count("event")

        def elapsed_time(self, end) -> float:
            return float(end.place - self.place)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("wait"), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("done"))
    clock = validate_operations.CudaClock()
    for _ in range(2):
        clock.begin()
        assert clock.timed("whole", clock.timed, "gemm", clock.timed, "gemm", int) == 0
        # One within the other is counted twice.
        assert clock.read() == {"whole": 5000.0, "gemm": 4000.0}
    assert calls == (["wait"] + ["event"] * 6 + ["done"]) * 2


@pytest.mark.slow
def test_steps_run_with_their_moves_and_count_in_the_stopwatchs_quantile(monkeypatch):
    moved, clock = Counter(), iter(range(1, 1000))

    def elapsed_us(work, numbers) -> float:
        work(0)
        return float(next(clock))

    monkeypatch.setattr(timing.CpuStopwatch, "elapsed_us", lambda self, *call: elapsed_us(*call))
    monkeypatch.setattr(validate, "move", lambda pool, plan, step: moved.update(outs=len(step.swap_outs)))
    skeleton = Skeleton(TOY, devices.open("cpu"), 8, 4)
    samples = validation.samples_us(skeleton, PAGED, 5, lambda items, total: items)
    found = validation.replay_of(skeleton, np.arange(4), PAGED.ticks, PAGED.ticks // 2, samples)
    assert found.samples_us[:, 0].tolist() == [1, 5, 9, 13, 17]
    assert found.measured_us.tolist() == [5.0, 6.0, 7.0, 8.0]
    assert moved == {"outs": 5 * 2}


def test_of_a_long_run_steps_are_timed_that_are_evenly_spread():
    plan = recorded(outputs=(20, 21, 12))
    last = plan.num_steps - 1
    assert validation.chosen_steps(plan, 3).tolist() == [0, round(last / 2), last]
    assert validation.chosen_steps(plan, last + 1).tolist() == list(range(last + 1))


def test_paged_and_contiguous_attention_are_measured_for_what_fits():
    skeleton = Skeleton(TOY, devices.open("cpu"), 8, 16)
    found = validate_attention.paged_against_contiguous(skeleton, [(2, 64), (3, 48), (2, 20)], rounds=2, seed=0)
    assert [(row["batch"], row["context"]) for row in found] == [(2, 64), (2, 20)]
    for row in found:
        assert row["overhead"] == pytest.approx(row["paged_us"] / row["contiguous_us"] - 1, abs=0.01)


def test_one_side_goes_by_tables_and_the_other_does_not(monkeypatch):
    """Where attention by tables takes twice as long, paging adds as much again."""

    class Stopwatch(timing.CpuStopwatch):
        def sampler(self, work, captured=True):
            return lambda: 10.0 if work.block_tables is None else 20.0

    monkeypatch.setattr(validate_attention, "_attending", lambda skeleton, query, rows: rows)
    monkeypatch.setattr(timing, "CpuStopwatch", Stopwatch)
    skeleton = Skeleton(TOY, devices.open("cpu"), 8, 16)
    (found,) = validate_attention.paged_against_contiguous(skeleton, [(2, 64)], rounds=2, seed=0)
    assert (found["paged_us"], found["contiguous_us"], found["overhead"]) == (20.0, 10.0, 1.0)


@pytest.mark.slow
def test_a_machine_that_has_become_slower_says_so(monkeypatch):
    """Every call takes 30 us where it took 20; calls that the calibration does not know are left out."""
    call_us = [30.0]
    monkeypatch.setattr(timing.CpuStopwatch, "elapsed_us", lambda self, work, numbers: call_us[0] * len(numbers))
    skeleton = Skeleton(TOY, devices.open("cpu"), 80, 16)
    calibrated = [points.gemm(16, *shape) | {"us": 20.0, "samples": 9} for shape in points.layer_gemms(TOY)]
    drift = validate_drift.Drift(skeleton, calibrated, 0)
    drift.look()
    drift.look()
    assert drift.as_dict() == {"calls": 4, "looks": [0.5, 0.5], "median": 0.5}
    call_us[0] = 40.0
    drift.look()
    assert drift.looks == [0.5, 0.5, 1.0]
    # By a calibration that has gone on, all looks have another meaning.
    drift.compare([point | {"us": 40.0} for point in calibrated])
    assert drift.looks == [-0.25, -0.25, 0.0]


@pytest.fixture(scope="module", params=["QUICK", "CPU"])
def tried(request) -> validation.Validation:
    return running(getattr(validation_runs, request.param))


class TestRuns:
    """That each run makes paging matter in the way that it is for, at the small scale and at that of a CPU."""

    # A short validation shows only that the command runs.
    @pytest.mark.slow
    @pytest.mark.parametrize("tried", ["CPU"], indirect=True)
    def test_more_kv_than_weights_is_read_where_contexts_are_long(self, tried):
        plan = tried.plans["long contexts"]
        found = validate_acceptance.read_bytes(plan, model("toy-llama"), 4, range(0, plan.num_steps, 25))
        assert found["kv"] > found["weights"]
        # Most of the time as many sequences decode, over longer and longer contexts.
        rows = np.diff(plan.row_offsets)
        assert np.median(rows) >= 0.6 * rows.max()

    @pytest.mark.slow
    def test_prompts_arrive_while_others_decode(self, tried):
        plan = tried.plans["arriving prompts"]
        mixed = (plan.prefill_tokens > 0) & (plan.decodes > 0)
        assert mixed.sum() >= 3 and plan.prefill_tokens.sum() > 4 * plan.decodes.sum()
        assert np.flatnonzero(plan.prefill_tokens)[-1] > plan.num_steps / 2

    def test_a_tight_pool_preempts_and_swaps(self, tried):
        plan = tried.plans["tight pool"]
        assert len(plan.swap_outs) == len(plan.swap_ins) > 0
        assert used_host_blocks(plan) * 4 < 100 * plan.meta["num_blocks"]

    def test_prefixes_are_found_in_the_cache(self, tried):
        """Most prompts are computed from behind their prefix on."""
        plan, served = tried.plans["shared prefixes"], tried.served["shared prefixes"]
        computed = int(plan.query_tokens.sum() - plan.decodes.sum())
        saved = 1 - computed / int(served.workload.prompt_tokens.sum())
        assert saved > 0.1

    def test_samples_are_copied_on_write(self, tried):
        plan, served = tried.plans["shared samples"], tried.served["shared samples"]
        assert (served.workload.n == 4).all() and len(plan.copies) >= len(served.workload)

    # The small scale has the same moves.
    @pytest.mark.slow
    @pytest.mark.parametrize("tried", ["QUICK"], indirect=True)
    def test_every_plan_is_right_on_the_device(self, tried):
        """Block tables, moves and contents of the new runs, by the replay's own check, in caches of one layer."""
        for name in ("tight pool", "shared prefixes", "shared samples"):
            executor = Executor(tried.plans[name], replace(TOY, num_layers=1), devices.open("cpu"))
            assert check(executor, 3).wrong_rows == 0

    def test_the_questions_of_steps_give_their_times(self, tried):
        """Static padding, prompts in chunks, swaps and copies; a step with the decision of the one before has no other."""
        for one in (*tried._priced.values(), tried.long_prompt):
            assert (one.ticks(tried.cost) == one.plan.ticks).all() and one.plan.ticks.all()

    def test_as_many_sequences_as_the_device_has_room_for(self):
        tried = running()
        loads = validation_runs.Loads(replace(validation_runs.QUICK, long_sequences=40), 1, tried.cost, 1200)
        assert len(loads.served("long contexts").workload) == 1200 // (96 + 16)


@pytest.fixture
def obedient(monkeypatch):
    """A device with steps a quarter longer than predicted, except the first one of each plan. Measured alone, the
    operations take twice as long."""

    def one_step_us(skeleton, plan, step, stopwatch) -> float:
        return float(plan.ticks[step]) / 1e6 * (1.25 if step else 1)

    def operations_us(timed, plan, step) -> Counter[str]:
        predicted = validate_operations.predicted_us(calibrations.read(PROFILE), model("toy-llama"), plan, step)
        return Counter({name: 2 * us for name, us in predicted.items()})

    monkeypatch.setattr(validate, "one_step_us", one_step_us)
    monkeypatch.setattr(validate_operations.TimedStep, "operations_us", operations_us)
    monkeypatch.setattr(validate, "warm_up", lambda *_: None)


def measuring_by_rote(seeds: list[int], slower=(1.0, 1.0, 1.0), events: list[str] | None = None):
    """A calibration in parts: the times of a profile, times a factor by the number of parts."""

    class Measuring:
        grid = replace(calibrate_grid.QUICK, rounds=4)

        def __init__(self, *_, seed: int, **__) -> None:
            seeds.append(seed)
            self.parts = 0

        def measure(self, rounds, watch) -> None:
            # 4 rounds in 3 parts: 2 each.
            assert rounds == 2
            self.parts += 1
            if events is not None:
                events.append("calibrate")

        def document(self) -> dict:
            document = json.loads(PROFILE.read_text()) | {"kind": "calibration", "seed": seeds[-1], "parts": self.parts}
            for entry in document["ops"].values():
                known = entry["coefficients"]
                known |= {name: known[name] * slower[self.parts - 1] for name in ("t0_us", "each_us") if name in known}
                rates = (name for name in ("flops_per_s", "bytes_per_s") if known.get(name))
                known |= {name: known[name] / slower[self.parts - 1] for name in rates}
            return document | {"points": []}

    return Measuring


def running(scale: validation_runs.Scale = validation_runs.QUICK) -> validation.Validation:
    """A validation that has not begun."""

    def watch(items, subject, total):
        return items

    return validation.Validation(devices.open("cpu"), PROFILE, scale, None, 1, watch)


class TestVerb:
    def run(self, *flags: object) -> int:
        return status(["validate", *map(str, flags)])

    def test_predicted_beside_measured(self, obedient, tmp_path, capsys):
        out = tmp_path / "out"
        assert self.run("--quick", "--calibration", PROFILE, "--out", out, "--json", tmp_path / "all.json") == DONE
        printed = capsys.readouterr().out
        for line in (
            "toy-llama on",
            "mean step error",
            "Validated: no.",
            "output tokens/s",
            "decode attention",
            "with a block allocated",
            "starts up in",
        ):
            assert line in printed
        found = json.loads((tmp_path / "all.json").read_text())
        assert json.loads((out / "validation.json").read_text()) == found
        assert [run["run"] for run in found["runs"]] == list(validation_runs.RUNS)
        for run in found["runs"]:
            steps = run["step"]["count"]
            assert run["step"]["mape"] == pytest.approx(0.2 * (steps - 1) / steps, abs=1e-4)
            assert run["step"]["bias"] == -run["step"]["mape"]
            # What others published is no earlier state of this machine.
            assert run["drift"] is None
            # Steps that are predicted too short promise too much.
            assert 0.1 < run["throughput_error"] <= 0.25
            # Every repetition takes as long.
            assert run["noise"] == {"step_mape": 0, "throughput": 0}
            # A profile has no whole steps, to which null models are fitted.
            assert run["nulls"] == {} and not run["beats_nulls"]
        assert not found["acceptance"]["validated"]
        reasons = "".join(found["acceptance"]["reasons"])
        assert "the calibration lacks whole steps" in reasons and "long contexts: a step is off by" in reasons
        start_up = found["start_up"]
        assert start_up["chunks"] == 2 and -0.2 < start_up["error"] < -0.05
        assert start_up["error"] == pytest.approx(start_up["predicted_ms"] / start_up["measured_ms"] - 1, abs=0.05)
        assert found["drift"] == {"calls": 0, "looks": [], "median": None}
        assert {"gemm", "decode_attention", "prefill_attention", "beside"} <= set(found["operations"])
        assert {(one["bias"], one["total_bias"]) for one in found["operations"].values()} == {(-0.5, -0.5)}
        assert found["allocation"]["without"]["count"]
        for one in found["allocation"].values():
            for rank in ("p50_ms", "p99_ms"):
                assert one["measured"][rank] == pytest.approx(1.25 * one["predicted"][rank], abs=2e-4)
        lines = (out / "steps.csv").read_text().splitlines()
        assert lines[0].split(",")[-3:] == ["measured_us", "repetition_1_us", "repetition_2_us"]
        assert len(lines) == 1 + sum(run["step"]["count"] for run in found["runs"])

    @pytest.mark.slow
    def test_a_kv_cache_of_fp8_is_served_priced_and_run(self, tmp_path):
        """As the calibration says; its elements have a byte, and the runs are those of 16 bits. By another flag it is priced by its bytes, and
        the report names both."""
        path = tmp_path / "calibration.json"
        measured = json.loads(PROFILE.read_text()) | {
            "kind": "calibration",
            "dtype": "fp16",
            "kv_cache_dtype": "fp8",
            "seed": 2,
        }
        path.write_text(json.dumps(measured))
        arguments = (devices.open("cpu"), path, validation_runs.QUICK, "fp16", 1, lambda items, subject, total: items)
        tried, wide = validation.Validation(*arguments), running()
        assert tried.cost.deployment.kv_dtype == "fp8"
        assert tried.skeleton.dtype == "fp16" and tried.skeleton.pool.keys[0].dtype.itemsize == 1
        for name in ("tight pool", "long contexts"):
            plans = tried.plans[name], wide.plans[name]
            assert [plan.meta["num_slots"] for plan in plans] == [plans[0].meta["num_slots"]] * 2
            assert plans[0].meta["host_blocks"] == plans[1].meta["host_blocks"]
        steps = range(3)
        replay = validation.Replay(np.arange(3), np.ones(3), np.zeros(3), np.ones((2, 3)), np.ones(3))
        found = validation.judged("", tried.skeleton, tried.plans["long contexts"], replay, None).read
        same = validate_acceptance.read_bytes(tried.plans["long contexts"], model("toy-llama"), 2, steps)
        assert (found["weights"], 2 * found["kv"]) == (same["weights"], same["kv"])
        other = validation.Validation(*arguments, kv_cache_dtype="auto")
        assert other.cost.deployment.kv_dtype == "fp16"
        assert other.cost.step_ticks(64, 64 * 9000, 0, 0) > tried.cost.step_ticks(64, 64 * 9000, 0, 0)
        for each, formats in ((tried, None), (other, "fp8")):
            parts = each.parts()
            about = dict(next(parts) for _ in range(3))["calibration"]
            assert about.get("kv_cache_dtype") == formats

    def test_a_device_has_no_other_kv_cache(self, capsys):
        assert self.run("--kv-cache-dtype", "int8") == MISTAKE
        complaint = "fragmeter: kv_cache_dtype = 'int8': a device has auto, which is the dtype, or fp8\n"
        assert capsys.readouterr().err == complaint

    @pytest.mark.slow
    def test_steps_that_allocate_are_timed_separately(self, obedient, monkeypatch):
        """As if the fourth step did alone, which decodes, and is among those that are timed."""
        monkeypatch.setattr(validate, "allocates", lambda plan: np.arange(plan.num_steps) == 3)
        found = dict(running().parts())
        steps = next(run for run in found["runs"] if run["run"] == validation_runs.PAGED)["step"]["count"]
        assert found["allocation"]["with"]["count"] == 1 < found["allocation"]["without"]["count"] < steps

    @pytest.mark.slow
    def test_predictions_are_the_calibrations_and_no_output_length_is_declared(self):
        tried = running()
        assert all(served.workload.max_tokens is None for served in tried.served.values())
        found, plan = calibrations.read(PROFILE), tried.plans[validation_runs.PAGED]
        step = int(np.flatnonzero(plan.prefill_tokens == 0)[0])
        predicted = validate_operations.predicted_us(found, model("toy-llama"), plan, step)
        assert plan.ticks[step] / 1e6 == pytest.approx(sum(predicted.values()), rel=0.02)

    @pytest.mark.slow
    @pytest.mark.parametrize(("constant", "validated"), [(True, False), (False, True)], ids=["constant", "perfect"])
    def test_a_constant_within_every_limit_is_not_validated(self, constant, validated, monkeypatch):
        """All steps of a device take within 4 % of 5.88 ms, as those of the calibration did, and a simulator that says 5.88 ms of each,
        or knows them all, and that three tenths are attention."""

        def replay_of(skeleton, steps, ticks, attention_ticks, samples_us):
            (measured, *_) = samples_us
            predicted = np.full(len(steps), 5880.0) if constant else measured
            return validation.Replay(steps, predicted, 0.3 * predicted, samples_us, measured)

        sizes = validate_acceptance.Sizes(*np.random.default_rng(1).integers(1, 40, (3, 20)))
        monkeypatch.setattr(validate_acceptance, "calibrated_steps", lambda measured: (sizes, np.full(20, 5880.0)))

        monkeypatch.setattr(
            validate, "pass_us", lambda skeleton, plan, steps, watch: 5880 * (1 + 0.04 * np.sin(np.arange(len(steps))))
        )
        monkeypatch.setattr(validate, "warm_up", lambda *_: None)
        monkeypatch.setattr(validation, "replay_of", replay_of)
        scale = replace(validation_runs.QUICK, long_sequences=40, long_tokens=1000)
        found: dict = {}
        parts = running(scale).parts()
        while "acceptance" not in found:
            found.update([next(parts)])
        for run in found["runs"]:
            assert run["step"]["mape"] < 0.04 and abs(run["throughput_error"]) < 0.01
            assert run["beats_nulls"] == validated
        assert found["acceptance"]["validated"] == validated
        named = [reason.partition(":")[0] for reason in found["acceptance"]["reasons"] if ":" in reason]
        assert named == ["long contexts"] * constant

    @pytest.mark.slow
    def test_a_plan_by_itself(self, obedient, tmp_path, capsys):
        plan = recorded()
        plan.save(tmp_path / "plan.npz")
        assert self.run("--plan", tmp_path / "plan.npz", "--json", tmp_path / "all.json") == DONE
        assert "All steps: predicted" in capsys.readouterr().out
        found = json.loads((tmp_path / "all.json").read_text())
        assert found["step"]["count"] == plan.num_steps
        assert found["measured_ms"] > found["predicted_ms"] == pytest.approx(plan.ticks.sum() / 1e9, abs=1e-3)

    @pytest.mark.parametrize(
        ("kv_dtype", "flags", "over"),
        [
            ("fp8", [], "fp8"), ("fp8", ["--kv-cache-dtype", "fp8"], "fp8"), ("bf16", [], "auto"),
            (None, [], "auto"), (None, ["--kv-cache-dtype", "fp8"], "fp8"),
        ],
    )  # fmt: skip
    def test_a_plan_is_timed_over_the_kv_cache_of_its_prediction(self, kv_dtype, flags, over, tmp_path, monkeypatch):
        """A plan of an earlier version does not say it."""
        timed = []
        monkeypatch.setattr(validation, "plan_timed", lambda *given: timed.append(given[-1]) or {})
        monkeypatch.setattr(validation, "print_plan", lambda *_: None)
        plan = recorded()
        assert plan.meta["kv_dtype"] == "fp16"
        meta = {name: value for name, value in plan.meta.items() if name != "kv_dtype"}
        replace(plan, meta=meta | ({"kv_dtype": kv_dtype} if kv_dtype else {})).save(tmp_path / "plan.npz")
        assert self.run("--plan", tmp_path / "plan.npz", *flags) == DONE
        assert timed == [over]

    @pytest.mark.parametrize(
        ("kv_dtype", "flags", "complaint"),
        [
            ("fp8", ["--kv-cache-dtype", "auto"], "kv_cache_dtype = 'auto': plan.npz was recorded with fp8; leave it out"),
            ("fp16", ["--kv-cache-dtype", "fp8"], "kv_cache_dtype = 'fp8': plan.npz was recorded with fp16; leave it out"),
            ("int8", [], "plan = 'plan.npz': was recorded with a KV cache of int8; a device has 16 bits, or fp8"),
        ],
    )  # fmt: skip
    def test_a_plan_is_not_timed_over_another_kv_cache(self, kv_dtype, flags, complaint, tmp_path, capsys):
        plan = recorded()
        replace(plan, meta=plan.meta | {"kv_dtype": kv_dtype}).save(tmp_path / "plan.npz")
        assert self.run("--plan", tmp_path / "plan.npz", *flags) == MISTAKE
        assert capsys.readouterr().err == f"fragmeter: {complaint}\n"

    @pytest.mark.slow
    def test_a_contiguous_plan_with_copies_runs(self, tmp_path):
        plan = replace(CONTIGUOUS, meta=CONTIGUOUS.meta | {"model": "toy-llama"})
        plan.save(tmp_path / "plan.npz")
        assert self.run("--plan", tmp_path / "plan.npz") == DONE

    @pytest.mark.parametrize("flags", [[], ["--check"]])
    def test_of_a_plan_without_steps_nothing_is_said(self, flags, tmp_path, capsys):
        recorded(num_gpu_blocks_override=1).save(tmp_path / "plan.npz")
        assert self.run("--plan", tmp_path / "plan.npz", *flags) == MISTAKE
        assert "plan.npz: has no steps, of which nothing can be said" in capsys.readouterr().err

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [0, 1])
    def test_its_own_calibration_has_another_seed(self, seed, obedient, tmp_path, monkeypatch):
        """Whatever the seed is, and before minutes are spent on it."""
        seeds = []
        monkeypatch.setattr("fragmeter.gpu.calibrate.calibrate.Measuring", measuring_by_rote(seeds))
        assert self.run("--quick", "--seed", seed, "--out", tmp_path) == DONE
        assert seeds == [json.loads((tmp_path / "calibration.json").read_text())["seed"]] != [seed]

    @pytest.mark.slow
    def test_parts_of_the_calibration_surround_the_passes(self, obedient, tmp_path, monkeypatch):
        """A machine that is 1.1 times slower in the first pass and 1.3 times in the second, and a calibration that ends at
        1.25 times: it predicts the steps that were recorded by its first part."""
        events, speeds, seeds = [], [1.1, 1.3], []
        measuring = measuring_by_rote(seeds, (1.0, 1.1, 1.25), events)
        monkeypatch.setattr("fragmeter.gpu.calibrate.calibrate.Measuring", measuring)

        def pass_us(skeleton, plan, steps, watch):
            events.append(plan.meta["policy"])
            return plan.ticks[np.array(steps)] / 1e6 * speeds[events.count("calibrate") - 1]

        # The long prompt comes after the passes, when there is another part.
        speeds.append(1.3)
        monkeypatch.setattr(validate, "pass_us", pass_us)
        assert self.run("--quick", "--out", tmp_path) == DONE
        names = list(validation_runs.RUNS)
        assert [place for place, event in enumerate(events) if event == "calibrate"] == [0, 9, 18]
        assert events[1:9] == events[10:18] and len(events[1:9]) == len(names)
        found = json.loads((tmp_path / "validation.json").read_text())
        assert found["calibration"]["parts"] == 3 and len(seeds) == 1
        for run in found["runs"]:
            # Of two repetitions each is predicted by the other.
            assert run["noise"]["throughput"] == pytest.approx((1.3 / 1.1 - 1.1 / 1.3) / 2, abs=1e-3)
            # The lower quartile of 1.1 and 1.3.
            assert run["step"]["bias"] == pytest.approx(1.25 / 1.15 - 1, abs=2e-3)
            assert run["step"]["mape"] == pytest.approx(run["step"]["bias"], abs=1e-4)

    @pytest.mark.slow
    def test_a_stopped_validation_has_the_passes_so_far(self, obedient):
        parts = running().parts()
        name, runs = next((name, part) for name, part in parts if name == "runs")
        assert [run["run"] for run in runs] == list(validation_runs.RUNS)
        assert all(run["noise"] is None for run in runs)
        name, runs = next((name, part) for name, part in parts if name == "runs")
        assert all(run["noise"] for run in runs)

    def test_the_calibrations_seed_is_refused(self, tmp_path, capsys):
        path = tmp_path / "calibration.json"
        path.write_text(json.dumps(json.loads(PROFILE.read_text()) | {"seed": 1}))
        assert self.run("--quick", "--calibration", path) == MISTAKE
        assert "seed = 1: is the calibration's" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flags", "complaint"),
        [
            (["--check"], "check = True: applies only to a recorded plan; give --plan"),
            (["--every", "2"], "every = 2: applies only to --check; add it"),
            (["--device", "shim"], "device = 'shim': shows that kernels are right"),
            (["--calibration", "none.json"], "none.json"),
        ],
    )
    def test_mistakes(self, flags, complaint, capsys):
        assert self.run(*flags) == MISTAKE
        assert complaint in capsys.readouterr().err

    @pytest.mark.parametrize("check", [[], ["--check"]])
    @pytest.mark.parametrize(
        ("flags", "complaint"),
        [
            (["--calibration", "none.json"], "calibration = 'none.json': a recorded plan has its own prediction"),
            (["--quick"], "quick = True: has no effect on a recorded plan; leave it out"),
            (["--seed", "1"], "seed = 1: has no effect on a recorded plan; leave it out"),
            (["--out", "folder"], "out = 'folder': a recorded plan leaves no folder; leave it out, or take --json"),
        ],
    )
    def test_what_a_plan_has_no_use_for_is_refused(self, check, flags, complaint, tmp_path, capsys):
        recorded().save(tmp_path / "plan.npz")
        assert self.run("--plan", tmp_path / "plan.npz", *check, *flags) == MISTAKE
        printed = capsys.readouterr().err
        assert complaint in printed and printed.count("\n") == 1

    def test_a_plan_that_is_timed_has_no_steps_to_leave_out(self, tmp_path, capsys):
        recorded().save(tmp_path / "plan.npz")
        assert self.run("--plan", tmp_path / "plan.npz", "--every", "1") == MISTAKE
        assert "every = 1: applies only to --check; add it" in capsys.readouterr().err
