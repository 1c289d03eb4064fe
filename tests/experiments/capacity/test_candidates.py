"""The candidates of a plan: every combination of the axes, as lines of `vllm serve` that start or do not."""

from __future__ import annotations

import json

import pytest

from fragmeter.experiments.capacity.candidates import CHECKPOINT, Choices, candidates
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.vllm_serve.line import ServeLine, parse_serve
from fragmeter.sim.spec import published_formats
from fragmeter.sim.spec.startup.capacity import capacity

#: Drafts of which 0.8 and 0.5 are accepted.
DRAFTS = {
    "method": "eagle3",
    "num_speculative_tokens": 2,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.5],
}


def test_host_memory_is_an_axis_over_the_size_of_the_line():
    line = parse_serve("vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192 --kv-offloading-size 8")
    found = candidates(line, ["h200"], Choices(kv_offloading_size=["none,40"]).axes())
    assert [each.settings and each.settings.value("kv_offloading_size") for each in found] == [0, 40]
    assert [each.name for each in found] == ["h200, kv_offloading_size=none", "h200, kv_offloading_size=40"]


def test_drafts_are_an_axis_over_those_of_the_line():
    """Two texts of one object are one value. ``none`` takes the line's drafter from the memory, too."""
    line = parse_serve(
        f"vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192 --speculative-config '{json.dumps(DRAFTS)}'"
    )
    given = [json.dumps(DRAFTS), json.dumps(dict(reversed(DRAFTS.items())), indent=1), "none"]
    drafted, plain = candidates(
        line, ["h200"], Choices(speculative_config=[*map(json.loads, given[:2]), "none"]).axes()
    )
    assert json.loads(drafted.settings.value("speculative_config")) == DRAFTS
    assert plain.settings.value("speculative_config") is None
    assert drafted.settings.num_gpu_blocks_override < plain.settings.num_gpu_blocks_override
    assert (drafted.name, plain.name) == (
        "h200, speculative_config=eagle3 0.8 0.5", "h200, speculative_config=none"
    )  # fmt: skip


def test_checkpoints_in_other_formats_are_candidates_that_may_change_answers():
    line = ServeLine("qwen3-32b", {"max-model-len": "auto"}, version=None)
    axes = {CHECKPOINT: ["none", *published_formats("qwen3-32b")], "tensor_parallel_size": ["1", "2"]}
    found = candidates(line, ["h100-80gb"], axes, "qwen3-32b", unlisted=[*axes])
    by_name = {each.name: each for each in found if each.settings is not None}
    assert {"h100-80gb, tensor_parallel_size=2", "h100-80gb, checkpoint=Qwen/Qwen3-32B-FP8"} <= by_name.keys()
    own, other = (
        by_name[f"h100-80gb, {name}tensor_parallel_size=2"] for name in ("", "checkpoint=Qwen/Qwen3-32B-FP8, ")
    )
    assert (own.settings.model, other.settings.model) == ("qwen3-32b", "Qwen/Qwen3-32B-FP8")
    assert (own.num_lossy, other.num_lossy) == (0, 1) and own.checkpoint is None
    assert other.settings.num_gpu_blocks_override > own.settings.num_gpu_blocks_override


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 2}', "how many drafts are accepted"),
        ("eagle3", "speculative_config = 'eagle3': is no JSON"),
        (
            '{"method": "medusa", "num_speculative_tokens": 2}',
            "speculative_config.method = 'medusa': must be one of",
        ),
    ],
)
def test_drafts_that_are_not_simulated_are_refused(given, complaint, capsys):
    flags = ["--goodput", "tpot:20", "--speculative-config", "none", "--speculative-config", given]
    assert status(["plan", "--model", "llama-3.1-8b", "--gpu", "h200", *flags]) == MISTAKE
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_drafts_that_no_memory_counts_are_refused(capsys):
    """Else a candidate would be measured without its drafts."""
    model = "glm-5.3-flash"
    drafts = '{"method": "eagle", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}'
    flags = ["--goodput", "tpot:20", "--speculative-config", drafts]
    assert status(["plan", "--model", model, "--gpu", "h200", *flags]) == MISTAKE
    refusal = "has an indexer beside states, beside which draft models and EAGLE are not simulated"
    assert f"{model}': {refusal}" in capsys.readouterr().err


def test_every_combination_is_a_serve_line_with_other_flags():
    axes = Choices(tensor_parallel_size=["1,2"], kv_cache_dtype=["none", "fp8"]).axes()
    line = parse_serve("vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64 --kv-cache-dtype fp8")
    found = candidates(line, ["h200"], axes)
    assert [each.axis_values for each in found] == [
        {"gpu": "h200", "tensor_parallel_size": ranks, "kv_cache_dtype": dtype}
        for ranks in ("1", "2")
        for dtype in ("none", "fp8")
    ]
    assert [each.settings.kv_cache_dtype for each in found] == ["auto", "fp8"] * 2
    assert [each.settings.tensor_parallel_size for each in found] == [1, 1, 2, 2]
    assert [each.num_gpus for each in found] == [1, 1, 2, 2]
    assert {each.settings.max_num_seqs for each in found} == {64}
    for each in found:
        assert each.settings.num_gpu_blocks_override == capacity(each.started.launch).num_blocks
    assert found[1].settings.num_gpu_blocks_override > found[0].settings.num_gpu_blocks_override
    assert found[3].name == "h200, tensor_parallel_size=2, kv_cache_dtype=fp8"


def test_another_policy_has_the_same_slots_in_its_own_blocks():
    vllm, sglang = candidates(ServeLine("llama-3.1-8b", {}), ["h200"], {"policy": ["vllm-v1", "sglang"]})
    assert sglang.settings.num_gpu_blocks_override == 16 * vllm.settings.num_gpu_blocks_override
    assert (sglang.settings.block_size, sglang.settings.max_num_seqs) == (None, None)
    assert (vllm.settings.cost, sglang.settings.cost) == ("fitted", "fitted")


@pytest.mark.slow
def test_what_does_not_start_says_why():
    (found,) = candidates(ServeLine("llama-3.1-70b", {}), ["a100-80gb"], {})
    assert found.settings is None and "CUDA out of memory" in found.refused
    # Two GPUs have room for the weights, 65.7 GiB each, but not beside them for 20 GiB each of 131,072 tokens.
    assert found.refused.endswith(" With --tensor-parallel-size 4 it would.")
    ranks = {"tensor_parallel_size": ["2", "4"]}
    two, four = candidates(ServeLine("llama-3.1-70b", {}), ["a100-80gb"], ranks)
    assert two.settings is None and four.settings is not None


def test_ranges_and_values_that_come_twice():
    assert Choices(max_num_seqs=["64:256:64", "64,512"]).axes() == {"max_num_seqs": ["64", "128", "192", "256", "512"]}


@pytest.mark.slow
def test_candidates_with_and_without_drafts(capsys, tmp_path):
    """A step has 2.3 tokens with them. Rejected drafts are in the table of one of the candidates, and 0 % in the other's."""
    drafts, out = json.dumps(DRAFTS), tmp_path / "out"
    flags = ["--dataset", "alpaca", "--num-prompts", "100", "--seeds", "1", "--request-rate", "5", "--explain"]
    flags += ["--speculative-config", "none", "--speculative-config", drafts, "--out", str(out), "--jobs", "1"]
    assert status(["plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--goodput", "tpot:7", *flags]) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    plan = json.loads((out / "plan.json").read_text())
    assert json.loads(plan["recommended"]["speculative_config"]) == DRAFTS
    assert f"--speculative-config '{json.dumps(DRAFTS, sort_keys=True)}'" in plan["flags"] and plan["flags"] in printed
    names = [line.partition(": ")[0] for line in plan["explained"]]
    assert names == ["h100-80gb, speculative_config=none"]
    assert "Steps with drafts are predicted" in printed and "no measured run has speculative decoding" in printed
    page = (out / "plan.html").read_text()
    assert "Rejected" in page and "h100-80gb, speculative_config=eagle3 0.8 0.5" in page


@pytest.mark.slow
def test_for_the_same_money_the_answers_of_the_model_are_left_alone(capsys):
    """One GPU is enough with both formats. fp8 takes more requests, so that a token costs less at the full rate."""
    flags = ["--dataset", "alpaca", "--num-prompts", "100", "--seeds", "1", "--request-rate", "2", "--jobs", "1"]
    given = ["--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--goodput", "tpot:20", *flags]
    assert status(["plan", *given, "--kv-cache-dtype", "fp8,auto", "--json", "-"]) == DONE
    plan = json.loads(capsys.readouterr().out)
    assert plan["recommended"]["kv_cache_dtype"] == "auto"
    assert status(["plan", *given, "--kv-cache-dtype", "fp8"]) == DONE
    printed = " ".join(capsys.readouterr().out.split())
    assert "--kv-cache-dtype fp8" in printed and "compare its quality first" in printed
    assert "no measured run has a KV cache in fp8" in printed
