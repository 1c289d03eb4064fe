"""Requests served on a device's own clock: the engine's decisions follow the device, and the report what was predicted before."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim import Settings, Workload
from fragmeter.sim.cost import calibration as calibrations
from fragmeter.sim.cost.base import ScaledCost
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.ledger import LEAP
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.recording.plans import record
from fragmeter.sim.spec import model
from fragmeter.sim.types.errors import SettingError

torch = pytest.importorskip("torch")

from fragmeter.experiments.measured import serving as served
from fragmeter.experiments.measured import validation_runs
from fragmeter.gpu.devices import devices
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.gpu.validate import acceptance, serving, validate

#: Any calibration will do; this one needs no measuring.
PROFILE = calibrations.PROFILES / "h100-80gb.json"
POLICIES = ["static", "orca-max", "vllm-sosp23"]
COMMON = {"model": "toy-llama", "num_gpu_blocks_override": 16, "max_model_len": 80}


def load(gap_us: int = 300) -> Workload:
    prompts, outputs = (30, 50, 9, 20, 33, 7, 40), (23, 12, 38, 14, 20, 29, 30)
    return Workload("few", np.arange(7) * gap_us * 10**6, np.array(prompts), np.array(outputs))


@pytest.fixture(scope="module")
def skeleton() -> Skeleton:
    return Skeleton(replace(model("toy-llama"), num_layers=1), devices.open("cpu"), 16, 16)


def obeying(monkeypatch, cost):
    """A device whose steps take as long as a cost says of the batch that the skeleton would have run."""

    def one_step_us(skeleton, plan, step, stopwatch) -> float:
        found = validate.batch_of(plan, step)
        decodes = found.query_lens == 1 if plan.decodes[step] else np.zeros(len(found.query_lens), bool)
        lens = found.query_lens[~decodes]
        sizes = decodes.sum(), found.context_lens[decodes].sum(), lens.sum(), (lens * (lens + 1) // 2).sum()
        return cost.step_ticks(*map(int, sizes)) / 1e6

    monkeypatch.setattr(serving, "one_step_us", one_step_us)


@pytest.mark.parametrize("slower", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_follow_the_clock_of_the_device(policy, slower, skeleton, monkeypatch):
    """A device that takes as long as a step cost says serves exactly the run that this cost simulates: every step, start and
    residency. One that is three times slower serves another one, in which more requests wait."""
    settings = Settings(policy=policy, **COMMON)
    cost = ScaledCost(build(settings).cost, slower)
    obeying(monkeypatch, cost)
    measured = serving.DeviceCost(skeleton, settings, load(), set())
    run = simulate(replace(settings, ids=True), load(), measured, observers=(measured,))
    expected = simulate(replace(settings, leap=False, core=False), load(), cost)
    # Of single steps the line to the next ones is not used.
    for name in set(LEAP) - {"next_ticks", "slope_ticks"}:
        assert (run.log.rows[name] == expected.log.rows[name]).all(), name
    for name, column in expected.log.residencies.items():
        assert (run.log.residencies[name] == column).all(), name
    assert measured.steps == len(run.log.rows["ticks"]) > 30
    if policy == "vllm-sosp23":
        assert request_times(run).recomputed.sum() > 0


def test_the_skeleton_runs_the_batches_of_a_recorded_plan(skeleton, monkeypatch):
    """The same rows, slots and tables as ``record`` has of the run by the same times."""
    settings, ran = Settings(policy="vllm-sosp23", **COMMON), []
    cost = build(settings).cost
    obeying(monkeypatch, cost)
    own = serving.one_step_us

    def remembered(skeleton, plan, step, stopwatch) -> float:
        ran.append(validate.batch_of(plan, step))
        return own(skeleton, plan, step, stopwatch)

    monkeypatch.setattr(serving, "one_step_us", remembered)
    measured = serving.DeviceCost(skeleton, settings, load(), set())
    simulate(replace(settings, ids=True), load(), measured, observers=(measured,))
    _, plan = record(settings, load(), step_cost=cost)
    assert len(ran) == plan.num_steps
    for step, found in enumerate(ran):
        for one, other in zip(found, validate.batch_of(plan, step), strict=True):
            assert np.array_equal(one, other), step


def test_the_first_step_of_a_size_does_not_count(skeleton, monkeypatch):
    """On the clock of the CPU each size runs once more than it counts. A second apart each request runs alone, whatever its steps
    take, so that another run has no new size."""
    ran, settings, warm = [], Settings(policy="vllm-sosp23", **COMMON), set()
    own = skeleton.step
    monkeypatch.setattr(skeleton, "step", lambda found: (ran.append(found), own(found))[1])
    extra = []
    for _ in range(2):
        ran.clear()
        cost = serving.DeviceCost(skeleton, settings, load(10**6), warm)
        run = simulate(replace(settings, ids=True), load(10**6), cost, observers=(cost,))
        extra.append(len(ran) - cost.steps)
        assert (run.log.rows["ticks"] > 0).all()
    assert extra == [len(warm), 0] and len(warm) > 1


def test_a_policy_that_decides_ahead_is_refused(skeleton):
    settings = Settings(policy="vllm-v1", **COMMON, async_scheduling=True)
    cost = serving.DeviceCost(skeleton, settings, load(), set())
    with pytest.raises(SettingError, match="policy = 'vllm-v1': decides a step while the one before it runs"):
        simulate(replace(settings, ids=True), load(), cost, observers=(cost,))


def test_a_pool_that_is_too_small_is_refused(skeleton):
    settings = Settings(policy="vllm-sosp23", **COMMON | {"num_gpu_blocks_override": 17})
    cost = serving.DeviceCost(skeleton, settings, load(), set())
    with pytest.raises(SettingError, match="num_slots = 272: the skeleton has 256"):
        simulate(replace(settings, ids=True), load(), cost, observers=(cost,))


def test_null_models_are_the_planes_of_the_calibration():
    """Steps of 1 ms, 0.1 ms a sequence, 2 us a context token and 0.5 us a prompt token: the plane finds it, and serves with it."""
    rng = np.random.default_rng(3)
    sizes = [(int(a), int(b), int(c)) for a, b, c in rng.integers(1, 500, (20, 3))]
    steps = [
        {"decodes": a, "context_tokens": b, "tokens": a + c, "whole_us": 1000 + 100 * a + 2 * b + c / 2}
        for a, b, c in sizes
    ]
    constant, tokens, plane = served.NullCost.fitted({"points": steps}, (1, 1))
    assert [null.name for null in (constant, tokens, plane)] == list(acceptance.NULLS)
    assert plane.step_ticks(7, 300, 40, 10**6) / 1e6 == pytest.approx(1000 + 700 + 600 + 20, rel=1e-6)
    assert plane.decode_line(7, 300) == (plane.step_ticks(7, 300, 0, 0), 0, 301)
    assert constant.step_ticks(1, 1, 0, 0) == constant.step_ticks(9, 900, 90, 900)
    assert served.NullCost.fitted({}, (1, 1)) == []


def predicting(on_gpu=False) -> served.Predicting:
    scale = replace(validation_runs.QUICK, requests=12)
    found = served.Predicting(PROFILE, scale, "fp32", None, on_gpu, 1)
    # The profile has no whole steps; one time and a time a sequence stand for what would be fitted to them.
    vars(found)["nulls"] = [served.NullCost("constant", (9000, 0, 0, 0)), served.NullCost("tokens", (8000, 900, 0, 9))]
    return found


def measured_by(found: served.Predicting, factors, longer: float = 1):
    """What a device would show whose steps take so many times as long as predicted, in each repetition."""
    return {
        run: [found.predicted(run, ScaledCost(found.cost(run.policy), longer * factor)) for factor in factors]
        for run in served.RUNS
    }


class TestVerdict:
    @pytest.mark.slow
    def test_a_device_as_predicted_passes_and_would_have_shown_planted_errors(self):
        found = predicting()
        document = found.document()
        compared = served.compared(document, measured_by(found, (1, 1)), found)
        assert compared["acceptance"] == {"passes": True, "reasons": []}
        for run in compared["runs"]:
            assert all(run[figure]["error"] == 0 and run[figure]["spread"] == 0 for figure in served.LIMITS)
            # TPOT is off by as much as the steps, and 3 % pass; a queue makes TTFT off by more.
            assert 0 < run["noticed"]["time"] <= 0.04
            assert run["of_limits"]["ours"] == 0 < min(run["of_limits"][null.name] for null in found.nulls)
        assert compared["same_preemptions"] == {"runs": 4, "same": 4}

    @pytest.mark.slow
    def test_a_slower_device_fails_by_name(self):
        found = predicting()
        compared = served.compared(found.document(), measured_by(found, (1, 1), 1.2), found)
        assert not compared["acceptance"]["passes"]
        assert any(
            reason.startswith("vllm-sosp23 at 1.25: TPOT, ms is off by -1")
            for reason in compared["acceptance"]["reasons"]
        )

    @pytest.mark.slow
    def test_a_null_model_that_is_nearer_is_a_reason(self):
        """Within every limit, and no better than what one would fit without a simulator."""
        found = predicting()
        document, run = found.document(), served.Served("static", 0.75)
        measured = measured_by(found, (1, 1))
        [entry] = [one for one in document["runs"] if (one["policy"], one["load"]) == run]
        entry["predicted"]["tpot_ms"] *= 1.01
        entry["nulls"]["tokens"] = dict(measured[run][0])
        reasons = served.compared(document, measured, found)["acceptance"]["reasons"]
        assert len(reasons) == 1
        assert reasons[0].startswith("static at 0.75: its figures are off by 0.")
        assert reasons[0].endswith("in the mean, and by 0.00 with a line in tokens")

    def test_where_kv_is_little_the_spread_is_allowed_and_where_it_is_much_nothing_is(self):
        figures = {name: served.Judged(1.0, (1.01, 1.03), limit) for name, limit in served.LIMITS.items()}
        nearer = {"tokens": dict.fromkeys(figures, 1.005)}
        assert not served.JudgedRun(figures, nearer, kv_share=0.1).reasons()
        [reason] = served.JudgedRun(figures, nearer, kv_share=0.4).reasons().values()
        assert "with a line in tokens" in reason
        same = {"constant": dict.fromkeys(figures, 1.0)}
        assert not served.JudgedRun(figures, same, kv_share=0.1).reasons()
        assert served.JudgedRun(figures, same, kv_share=0.4).reasons(), "a null model is not better than itself"

    def test_the_share_of_kv_is_that_of_the_steps(self):
        """One request: a step for its prompt, and one for each further token."""
        found = predicting()
        vars(found)["count"] = 1
        workload = found.workload(1.0)
        [prompt], [output] = workload.prompt_tokens.tolist(), workload.output_tokens.tolist()
        weights, of_token = acceptance.elements(model("toy-llama"))
        read = sum(range(prompt, prompt + output)) * of_token
        share = found.kv_share(served.Served("vllm-sosp23", 0.75))
        assert share == pytest.approx(read / (read + output * weights), abs=1e-4)

    @pytest.mark.slow
    def test_twice_the_spread_passes_and_is_blind_to_it(self):
        """Repetitions of 0.9 and 1.1 differ by 20 %: no error of 10 % would be noticed."""
        found = predicting()
        compared = served.compared(found.document(), measured_by(found, (0.9, 1.1)), found)
        for run in compared["runs"]:
            assert run["tpot_ms"]["passes"] and run["tpot_ms"]["allowed"] > 0.3
            assert run["noticed"]["time"] is None or run["noticed"]["time"] > 0.1

    @pytest.mark.slow
    def test_preemptions_count(self):
        found = predicting()
        measured = measured_by(found, (1, 1))
        for one in measured[served.Served("vllm-sosp23", 1.25)]:
            one["preemptions"] += 1
        reasons = served.compared(found.document(), measured, found)["acceptance"]["reasons"]
        assert reasons == ["as many preemptions as predicted in 2 of 4 runs of vllm-sosp23"]


def test_another_number_format_is_predicted_by_its_bytes(tmp_path):
    """A calibration in fp32, for weights in bf16 and a KV cache in fp8: what moves bytes takes less, and so do null models."""
    rng = np.random.default_rng(5)
    points = [
        {"decodes": a, "context_tokens": b, "tokens": a + c, "whole_us": 1000 + 100 * a + 2 * b + c}
        for a, b, c in rng.integers(1, 500, (20, 3)).tolist()
    ]
    path = tmp_path / "calibration.json"
    about = {"kind": "calibration", "dtype": "fp32", "model": "toy-llama", "points": points}
    path.write_text(json.dumps(json.loads(PROFILE.read_text()) | about))
    own = served.Predicting(path, validation_runs.QUICK, "fp32", None, False, 1)
    other = served.Predicting(path, validation_runs.QUICK, "bf16", "fp8", False, 1)
    run = served.Served("vllm-sosp23", 1.25)
    assert other.predicted(run)["requests_per_s"] != own.predicted(run)["requests_per_s"]
    assert own.cost(run.policy).step_ticks(8, 4000, 0, 0) > other.cost(run.policy).step_ticks(8, 4000, 0, 0)
    plane, narrow = (each.nulls[-1].step_ticks for each in (own, other))
    # Half the bytes of weights, and a quarter of those of KV.
    assert narrow(3, 0, 40, 0) / plane(3, 0, 40, 0) == pytest.approx(0.5, rel=1e-6)
    assert (narrow(3, 1000, 0, 0) - narrow(3, 0, 0, 0)) / 1e9 == pytest.approx(2 / 4, rel=1e-3)


def test_fewer_requests_where_all_would_take_too_long(monkeypatch):
    whole = predicting().count
    found = predicting(on_gpu=True)
    most = found._seconds(whole) * len(served.LOADS) * validation_runs.QUICK.rounds * 0.6
    monkeypatch.setattr(served, "MOST_SECONDS", most)
    assert whole == predicting().count == 12 and found.count < whole
    fits, twice = (found._seconds(found.count * times) * len(served.LOADS) * 2 for times in (1, 2))
    assert fits <= most < twice


class TestVerb:
    def run(self, *flags: object) -> int:
        return status(["validate", *map(str, flags)])

    @pytest.mark.slow
    def test_the_prediction_is_there_before_the_device_runs(self, tmp_path, monkeypatch, capsys, brief_drift):
        prediction, seen = tmp_path / "prediction.json", []

        def one_step_us(skeleton, plan, step, stopwatch) -> float:
            seen.append(sha256(prediction.read_bytes()).hexdigest())
            return float(100 + step)

        monkeypatch.setattr(serving, "one_step_us", one_step_us)
        flags = ("--quick", "--calibration", PROFILE, "--predict", prediction, "--json", tmp_path / "all.json")
        assert self.run(*flags) == DONE
        document, written = json.loads((tmp_path / "all.json").read_text()), json.loads(prediction.read_text())
        assert set(seen) == {document["prediction"]["sha256"]} and len(seen) > 100
        assert {name: document[name] for name in ("model", "requests", "seed")} == {
            name: written[name] for name in ("model", "requests", "seed")
        }
        printed = capsys.readouterr().out
        assert document["prediction"]["sha256"] in printed.replace("\n", "")
        for text in ("requests/s", "TPOT", "TTFT", "ratio", "preemptions", "Within its limits: no."):
            assert text in printed
        # The same file again: nothing in it is measured.
        before = prediction.read_bytes()
        assert self.run(*flags) == DONE and prediction.read_bytes() == before

    @pytest.mark.parametrize(
        ("flags", "complaint"),
        [
            ([], "predicts before the device runs, by a calibration; give --calibration"),
            (["--calibration", PROFILE, "--out", "folder"], "out = 'folder': has no effect with --predict"),
            (["--against", "bench.json"], "has no effect with --against; leave it out"),
        ],
    )
    def test_mistakes(self, flags, complaint, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert self.run("--predict", "p.json", *flags) == MISTAKE
        printed = capsys.readouterr().err
        assert complaint in printed and printed.count("\n") == 1 and not (tmp_path / "p.json").exists()

    def test_the_calibrations_seed_is_refused(self, tmp_path, capsys):
        path = tmp_path / "calibration.json"
        path.write_text(json.dumps(json.loads(PROFILE.read_text()) | {"seed": 1}))
        assert self.run("--quick", "--calibration", path, "--predict", tmp_path / "p.json") == MISTAKE
        assert "seed = 1: is the calibration's" in capsys.readouterr().err
