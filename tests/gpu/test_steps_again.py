"""Steps of a calibration, measured again: a host that got slower changes the rest of steps, and nothing else."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")

from fragmeter.experiments.cli import validate
from fragmeter.experiments.measured import validation
from fragmeter.experiments.measured.validation_runs import QUICK as QUICK_SCALE
from fragmeter.gpu.calibrate import calibrate, points, steps_again
from fragmeter.gpu.calibrate.fitting import fit
from fragmeter.gpu.calibrate.grid import QUICK
from fragmeter.gpu.calibrate.probes import Probes
from fragmeter.gpu.calibrate.steps_again import OF_STEPS, StepsAgain
from fragmeter.gpu.devices import devices, timing
from fragmeter.gpu.model.skeleton import Skeleton
from fragmeter.gpu.validate import validate as passes
from fragmeter.sim.cost.calibration import PROFILES, read
from fragmeter.sim.cost.op_model import OpModel
from fragmeter.sim.cost.operations import OPERATIONS
from fragmeter.sim.spec import ModelSpec

PROFILE = PROFILES / "h100-80gb.json"
SPEC = ModelSpec("small", 3, 96, 6, 2, 16, 160, 211, 256, gated_mlp=True)


class Host:
    """A stopwatch by which operations take 10 us, and whole steps as long as the host makes them take."""

    quantile, cold_bytes, how = 0.5, 1 << 20, "by rote"

    def __init__(self, monkeypatch, step_us: float) -> None:
        self.step_us, self.warmed = step_us, 0
        monkeypatch.setattr(timing, "stopwatch", lambda _: self)

    def sampler(self, work, captured=True):
        self.warmed += 1
        return lambda: 10.0 if captured else self.step_us

    def aside(self, between):
        pass

    before = aside


def skeleton(blocks: int = 64) -> Skeleton:
    return Skeleton(SPEC, devices.open("cpu"), blocks, 16, host_blocks=4)


def calibrated() -> dict:
    """As a GPU's file: the rest of a step is what its measured operations leave. Read from JSON, by a host on which steps take 1,000 us."""
    return json.loads(calibration_text(Skeleton.captures is True))


@cache
def calibration_text(captures: bool) -> str:
    """Measured once, with and without captured steps: the host is the same stopwatch in every test."""
    samples = calibrate.Samples(skeleton(), QUICK, 5)
    samples.take(QUICK.rounds, calibrate.unwatched)
    points = samples.points()
    ops = calibrate.with_spread(fit(points, overlapped=True), points)
    what = {"kind": "calibration", "model": SPEC.name, "dtype": "fp32", "kv_cache_dtype": "auto", "parts": 1}
    return json.dumps(what | {"points": points, "ops": ops, "quick": True, "seed": 5})


@pytest.mark.slow
def test_a_slower_host_is_found_by_the_parts_and_operations_are_kept(monkeypatch):
    """Of 1,000 us a step takes 770 beyond its calls; then 1,500, 1,500 and 1,200 us, of which the median is 1,500."""
    host = Host(monkeypatch, 1000.0)
    then = calibrated()
    before = deepcopy(then)
    again, warmed = StepsAgain(skeleton(), then), host.warmed
    for host.step_us in (1500.0, 1500.0, 1200.0):
        again.measure(3)
    assert host.warmed == warmed + len(QUICK.steps)
    assert again.drifts == pytest.approx([0.5, 0.5, 0.2])
    found = again.document()
    assert then == before
    assert found["step_drifts"] == [0.5, 0.5, 0.2]
    assert found.keys() == {*then, "step_drifts"}
    operations = [point for point in then["points"] if point["op"] not in OF_STEPS]
    assert found["points"][: len(operations)] == operations
    for name, entry in then["ops"].items():
        assert (found["ops"][name] == entry) == (name not in OF_STEPS), name
    steps = found["points"][len(operations) :]
    assert [step["us"] - (1500 - step["parts_us"]) for step in steps] == [0] * len(QUICK.steps)
    assert {step["samples"] for step in steps} == {3}
    for document, rest_us in ((then, 770), (found, 1270)):
        entry = document["ops"]["step"]
        assert OpModel(**entry).us(OPERATIONS["step"](rows=4)) == pytest.approx(rest_us, rel=0.05)


def test_a_host_as_before_gives_the_same_file(monkeypatch):
    Host(monkeypatch, 1000.0)
    then = calibrated()
    again = StepsAgain(skeleton(), then)
    again.measure(1)
    found = again.document()
    assert found.pop("step_drifts") == [0.0]
    assert found == then


def test_steps_that_the_calibration_lacks_are_left_out(monkeypatch):
    """A calibration of another version, of which a GEMM, or the attention of prompts, is missing; and runs over a pool that is too
    small for some steps. What was not measured again is as it was, and nothing is lost."""
    host = Host(monkeypatch, 1000.0)
    then = calibrated()
    assert len(QUICK.steps) == 5
    no_gemm = then | {"points": [point for point in then["points"] if (point["op"], point.get("m")) != ("gemm", 20)]}
    no_prompts = then | {"points": [point for point in then["points"] if point["op"] != "prefill_attention"]}
    host.step_us = 1100.0
    for given, blocks, measured in ((no_gemm, 64, 4), (no_prompts, 64, 2), (then, 8, 3)):
        again = StepsAgain(skeleton(blocks), given)
        again.measure(2)
        found = again.document()
        whole = [point["whole_us"] for point in found["points"] if point["op"] in OF_STEPS]
        assert sorted(whole) == [1000.0] * (5 - measured) + [1100.0] * measured
        assert again.count == measured and np.isclose(again.drifts, [0.1]).all()
        assert found["ops"].keys() == then["ops"].keys()


@pytest.mark.slow
def test_steps_of_equal_rows_differ_by_their_operations(monkeypatch):
    """Two decodes of one row, over 16 and over 100 tokens, on a GPU, where nothing else says which is which."""
    host = Host(monkeypatch, 1000.0)
    monkeypatch.setattr(Skeleton, "captures", True)
    monkeypatch.setattr(steps_again, "QUICK", replace(QUICK, steps=((1, 16, 0), (1, 100, 0))))
    then = calibrated()
    steps = [
        {"op": "step", "rows": 1, "us": 1.0, "iqr_us": 0.0, "samples": 1, "parts_us": 0.0, "whole_us": whole}
        for whole in (2000.0, 4000.0)
    ]
    operations = {}
    for step, point in zip(Probes(skeleton(), steps_again.QUICK, host, 5).steps(), steps, strict=True):
        assert step.point == {"op": "step", "rows": 1}
        for count, part in step.parts:
            us = 10.0 if part["op"] != "decode_attention" else float(part["context_tokens"])
            operations[points.key(part)] = part | {"us": us, "iqr_us": 0.0, "samples": 1}
            point["parts_us"] += count * us
    again = StepsAgain(skeleton(), then | {"points": [*operations.values(), *steps]})
    host.step_us = 3000.0
    again.measure(1)
    # 3,000 is 1.5 times 2,000 and 0.75 times 4,000.
    assert again.count == 2 and again.drifts == pytest.approx([0.125])


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bf16"}, {"model": "another"}, {"kv_cache_dtype": "fp8"}, {"quick": False}, {"points": []}],
    ids=lambda changes: next(iter(changes)),
)
def test_of_a_file_of_something_else_nothing_is_measured(changes, monkeypatch):
    """Of another model, of other numbers, of the large grid, and without points."""
    Host(monkeypatch, 1000.0)
    assert StepsAgain(skeleton(), calibrated()).count == len(QUICK.steps)
    assert StepsAgain(skeleton(), calibrated() | changes).count == 0


class TestInAValidation:
    """Of a GPU, which a CPU plays."""

    GPU = SimpleNamespace(torch_device=torch.device("cuda"), describe=lambda: {"name": "card"})

    def given(self, tmp_path, **changes):
        path = tmp_path / "given.json"
        content = {"schema_version": 1, "source": "measured", "device": {"name": "card"}} | calibrated() | changes
        path.write_text(json.dumps(content))
        return path

    def calibrated(self, path, **options):
        scale = SimpleNamespace(model="toy-llama", rounds=3)
        return validate._calibrated(self.GPU, path, scale, None, None, True, 1, **({"out": None} | options))

    def test_the_file_of_each_part_predicts_and_the_given_one_is_unchanged(self, tmp_path, monkeypatch):
        host = Host(monkeypatch, 1000.0)
        given = self.given(tmp_path)
        before, us = given.read_bytes(), []
        with self.calibrated(given) as (path, again):
            assert path == given and again is not None
            runs = skeleton()
            for host.step_us in (1300.0, 1300.0, 1000.0):
                found = read(again(runs))
                us.append(float(found.ops["step"].us(OPERATIONS["step"](rows=4))))
        assert us == pytest.approx([1070.0] * 3, rel=0.05)
        assert given.read_bytes() == before

    def test_a_file_of_another_device_or_of_a_table_is_taken_as_it_is(self, tmp_path, monkeypatch):
        Host(monkeypatch, 1000.0)
        for changes in ({"device": {"name": "another"}}, {"kind": "profile"}):
            with self.calibrated(self.given(tmp_path, **changes)) as (_, again):
                assert again is None

    def test_a_file_without_points_is_taken_as_it_is(self, tmp_path, monkeypatch):
        Host(monkeypatch, 1000.0)
        path = self.given(tmp_path)
        content = {name: part for name, part in json.loads(path.read_text()).items() if name not in ("points", "seed")}
        path.write_text(json.dumps(content))
        with self.calibrated(path) as (_, again):
            assert [again(skeleton()) for _ in range(2)] == [None, None]

    @pytest.mark.slow
    def test_the_last_part_predicts_and_the_first_comes_before_all_steps(self, tmp_path, monkeypatch):
        """Parts of one, two, ... times the profile's times, each in a file of its own."""
        events, profile = [], json.loads(PROFILE.read_text())
        monkeypatch.setattr(Skeleton, "captures", True)
        monkeypatch.setattr(passes, "warm_up", lambda *_: events.append("warm up"))
        monkeypatch.setattr(passes, "pass_us", lambda skeleton, plan, steps, watch: np.full(len(steps), 1000.0))
        files = []

        def again(runs):
            assert runs is running.skeleton
            events.append("part")
            files.append(tmp_path / f"{len(files)}.json")
            ops = deepcopy(profile["ops"])
            for entry in ops.values():
                entry["coefficients"] = {"t0_us": 10.0 * len(files)}
                entry.pop("residuals", None)
            files[-1].write_text(json.dumps(profile | {"ops": ops, "step_drifts": [0.5] * len(files)}))
            return files[-1]

        running = validation.Validation(
            devices.open("cpu"), PROFILE, QUICK_SCALE, None, 1, lambda items, *_: items, again
        )
        found, predicted = [], []
        for name, part in running.parts():
            if name == "calibration":
                found.append(part)
            if name == "runs":
                predicted.append(running.replays["static"].predicted_us.sum())
            if name == "acceptance":
                break
        assert events == ["part", "warm up", *["part"] * QUICK_SCALE.rounds]
        assert "step_drifts" not in found[0] and found[-1]["step_drifts"] == [0.5] * (QUICK_SCALE.rounds + 1)
        assert found[-1]["sha256"] == read(files[-1]).sha256
        assert predicted[-1] / predicted[0] == pytest.approx((QUICK_SCALE.rounds + 1) / 2, rel=1e-3)
