"""``fragmeter compare``: differences worked out by hand, Student's t against scipy, and runs against runs."""

from __future__ import annotations

import json
import random
from math import sqrt
from pathlib import Path

import pytest

import fragmeter.experiments.cli.compare as compare_module
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.runs.student_t import student_t
from fragmeter.experiments.sweep.paired import differences
from fragmeter.sim.engine.replica import build

LOAD = ["--num-prompts", "40", "--request-rate", "2"]


def compared(capsys: pytest.CaptureFixture, *tokens: object) -> dict:
    assert status(["compare", *map(str, tokens), "--json", "-"]) == DONE
    return json.loads(capsys.readouterr().out)


class TestPaired:
    def test_by_hand(self):
        base, other = [{"a": 10, "b": 1}, {"a": 20}, {"a": 30}], [{"a": 11, "b": 1}, {"a": 22}, {"a": 33}]
        (found,) = differences(base, other, 0.95)
        # Differences 1, 2, 3: their standard error is 1 / sqrt(3), and t of 2 degrees is 4.3027.
        assert (found.metric, found.base, found.other, found.difference, found.percent) == ("a", 20, 22, 2, 10)
        assert found.interval == pytest.approx((2 - 4.302653 / sqrt(3), 2 + 4.302653 / sqrt(3)))
        assert not found.is_sure

    def test_one_pair_has_no_interval_and_no_change_is_no_difference(self):
        (found,) = differences([{"a": 0}], [{"a": 3}], 0.95)
        assert (found.interval, found.is_sure, found.percent) == (None, None, None)
        (found,) = differences([{"a": 5}] * 2, [{"a": 5}] * 2, 0.95)
        assert (found.interval, found.is_sure) == ((0, 0), False)

    def test_students_t_is_scipys(self):
        scipy = pytest.importorskip("scipy.stats")
        for confidence in (0.5, 0.9, 0.95, 0.999):
            for degrees in (*range(1, 9), 30, 31, 200):
                expected = scipy.t.ppf((1 + confidence) / 2, degrees)
                assert student_t(confidence, degrees) == pytest.approx(expected, rel=1e-9)

    def test_the_interval_holds_the_truth_as_often_as_it_says(self):
        """The pairs share what differs from seed to seed; 1,000 comparisons, at most four standard deviations off."""
        rng, hits = random.Random(0), 0
        for _ in range(1000):
            shared = [rng.gauss(0, 50) for _ in range(4)]
            base = [{"a": value + rng.gauss(0, 1)} for value in shared]
            other = [{"a": value + 3 + rng.gauss(0, 1)} for value in shared]
            low, high = differences(base, other, 0.9)[0].interval
            hits += low <= 3 <= high
        assert abs(hits - 900) < 4 * sqrt(1000 * 0.9 * 0.1)


@pytest.mark.slow
def test_settings_are_run_over_the_same_seeds(capsys):
    sides = ["--set", "policy=orca-max,max_num_seqs=2", "--set", "policy=vllm-v1", "--set", "policy=vllm-v1,ids=yes"]
    comparison = compared(capsys, *sides, *LOAD, "--seeds", "3", "--jobs", "1", "--seed", "5", "--own-defaults")
    assert (comparison["base"], comparison["runs"], comparison["confidence"]) == (
        "policy=orca-max,max_num_seqs=2",
        3,
        0.95,
    )
    v1, with_ids = comparison["compared"]
    assert v1["same_requests"] and with_ids["same_requests"]
    metrics = {each["metric"]: each for each in v1["metrics"]}
    low, high = metrics["mean_ttft_ms"]["interval"]
    assert low <= metrics["mean_ttft_ms"]["difference"] <= high < 0
    # Block ids change nothing, in no pair.
    assert [each["interval"] for each in with_ids["metrics"]] == [each["interval"] for each in v1["metrics"]]
    # The mean over three runs of simulate.
    values = []
    for seed in (5, 6, 7):
        assert status(["simulate", *LOAD, "--policy", "vllm-v1", "--seed", str(seed), "--json", "-"]) == DONE
        values.append(json.loads(capsys.readouterr().out)["mean_ttft_ms"])
    assert metrics["mean_ttft_ms"]["other"] == pytest.approx(sum(values) / 3)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for name, more in {"a": [], "b": ["--block-size", "32"], "c": ["--seed", "1"]}.items():
        assert status(["simulate", *LOAD, *more, "--out", str(folder / name)]) == DONE
    return folder


@pytest.mark.slow
def test_replicas_that_differ_are_named(capsys):
    """Pool, CUDA graphs and cost differ between policies by default; a block size changes none of them."""
    load = ("--num-prompts", "20", "--request-rate", "2", "--seeds", "1")
    sides = ("policy=vllm-sosp23,cost=paper", "policy=vllm-v1,cost=roofline")
    assert status(["compare", "--set", sides[0], "--set", sides[1], *load, "--own-defaults"]) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "differ, by flags or by the defaults of their policies: tokens of the pool 15728 and 14592," in printed
    assert "enforce_eager True and False, cost paper and roofline." in printed
    assert status(["compare", "--set", "block_size=8", "--set", "block_size=16", *load]) == DONE
    assert "replicas differ" not in capsys.readouterr().out


def _replicas(capsys, *flags):
    """Pool in tokens, CUDA graphs and limits of a step of each side, by its runs' settings."""
    load = ("--num-prompts", "20", "--request-rate", "2", "--seeds", "1")
    given = [text for each in flags for text in (("--set", each) if "=" in each else (each,))]
    asked, kept = [], compare_module.sweep_points
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compare_module, "sweep_points", lambda points, workers: asked.extend(points) or kept(points, workers)
        )
        assert status(["compare", *given, *load]) == DONE
    built = [build(point.inputs.settings) for point in asked]
    limits = [(each.policy.limits.max_num_seqs, each.policy.limits.max_num_batched_tokens) for each in built]
    replicas = [
        (each.num_blocks * each.block_size, each.enforce_eager, *limit)
        for each, limit in zip(built, limits, strict=True)
    ]
    return replicas, " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_policies_have_the_pool_graphs_and_limits_of_the_first(capsys):
    sides = ("policy=vllm-v1,max_num_seqs=100", "policy=vllm-sosp23,block_size=32", "policy=static,max_num_seqs=4")
    (first, second, batches), printed = _replicas(capsys, *sides)
    assert batches[:3] == (*first[:2], 4)
    # A limit that a side was given is that side's.
    assert (second[:2], second[3]) == (first[:2], first[3]) and first[2] == 100 < second[2]
    assert (
        "policy=vllm-sosp23,block_size=32 has the pool, CUDA graphs and limits of policy=vllm-v1,max_num_seqs=100;"
        in printed
    )
    assert "replicas differ" not in printed
    (own_first, own_second, _), printed = _replicas(capsys, *sides, "--own-defaults")
    assert own_first == first and own_second[0] > first[0] and own_second[1] and not first[1]
    assert "has the pool" not in printed and "replicas differ" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", ["gpu=h200", "gpu_memory_utilization=0.8", "tensor_parallel_size=2", "num_gpu_blocks_override=700"]
)
def test_a_pool_that_a_side_states_or_computes_is_its_own(more, capsys):
    (first, second), _ = _replicas(capsys, "policy=vllm-sosp23", f"policy=vllm-v1,{more}")
    own, _ = _replicas(capsys, "policy=vllm-sosp23", f"policy=vllm-v1,{more}", "--own-defaults")
    assert first[0] != second[0] == own[1][0]


@pytest.mark.slow
def test_a_policy_that_delegates_to_another_has_no_difference(tmp_path, monkeypatch, capsys):
    (tmp_path / "delegating.py").write_text(
        "from fragmeter.sim.policy.vllm_v1 import VllmV1\n\n\nclass Mine(VllmV1):\n    name = 'mine'\n"
        "\n    @classmethod\n    def step_limits(cls, server, pool, seqs, tokens):\n        return seqs or 4, tokens or 256\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    load = ("--num-prompts", "30", "--request-rate", "4", "--num-gpu-blocks-override", "300", "--seeds", "2")
    sides = ("--set", "policy=vllm-v1", "--set", "policy=delegating:Mine")
    assert status(["compare", *sides, *load, "--json", "-"]) == DONE
    moved = json.loads(capsys.readouterr().out)["compared"][0]["metrics"]
    assert len(moved) > 50 and not [each["metric"] for each in moved if each["difference"]]
    assert status(["compare", *sides, *load, "--own-defaults", "--json", "-"]) == DONE
    moved = json.loads(capsys.readouterr().out)["compared"][0]["metrics"]
    assert [each["metric"] for each in moved if each["difference"]]


@pytest.mark.slow
def test_result_folders(results, capsys):
    comparison = compared(capsys, results / "a", results / "b", results / "c")
    assert [side["same_requests"] for side in comparison["compared"]] == [True, False]
    moved = {each["metric"]: each for each in comparison["compared"][0]["metrics"]}
    assert moved["block_size"] == {
        "metric": "block_size", "base": 16, "other": 32, "difference": 16, "percent": 100, "interval": None,
    }  # fmt: skip
    assert status(["compare", str(results / "a"), str(results / "c")]) == DONE
    printed = capsys.readouterr().out
    assert "mean TTFT, ms" in printed and "The two served different requests" in printed


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["a"], "takes two or more result folders"),
        (["a", "b", "--set", "seed=1"], "takes two or more result folders"),
        (["--set", "block_size=8"], "or --set two or more times"),
        (["nowhere", "a"], "nowhere: is not a result folder (No such file or directory: run.json)"),
        (["broken", "a"], "broken: holds a damaged result, or another version's ("),
        (["--set", "block_size=8", "--set", "block=8"], "set = 'block=8': block is not a setting"),
        (["--set", "block_size=8", "--set", "block_size"], "set = 'block_size': must be NAME=VALUE"),
        (["--set", "n=1", "--set", "seed=8"], "both sides have the same seeds"),
        (["--set", "n=1", "--set", "n=1"], "is compared with itself"),
        (["--set", "n=1", "--set", "n=2", "--seeds", "0"], "seeds = 0: must be at least 1"),
        (["--set", "n=1", "--set", "n=2", "--confidence", "95"], "confidence = 95.0: must lie between 0 and 1"),
        (["--set", "block_size=8", "--set", "gpu=h100-80gb,cost=paper", "--jobs", "1", *LOAD], "is fitted to opt-13b"),
    ],
)
def test_what_cannot_be_compared(tokens, message, results, monkeypatch, capsys):
    broken = results / "broken"
    broken.mkdir(exist_ok=True)
    for name in ("summary", "run"):
        (broken / f"{name}.json").write_text("[")
    monkeypatch.chdir(results)
    assert status(["compare", *tokens]) == MISTAKE
    assert message in capsys.readouterr().err
