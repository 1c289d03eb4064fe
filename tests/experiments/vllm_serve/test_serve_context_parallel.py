"""``vllm serve ... -dcp N``: its memory, vLLM's refusals, remedies, and the simulation that it names."""

from __future__ import annotations

import json

import pytest

from fragmeter.experiments.capacity.candidates import Choices, candidates
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.vllm_serve.checks import refusal
from fragmeter.experiments.vllm_serve.line import ServeLine, parse_serve
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import Started, started
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.types.errors import SettingError

DEEPSEEK = "vllm serve deepseek-ai/DeepSeek-V3 -tp 8"


def line(text: str) -> ServeLine:
    return parse_serve(text)


def on_h200(text: str) -> Started:
    return started(line(text), "h200")


def test_the_flag_and_those_beside_it_are_read():
    found = line(f"{DEEPSEEK} -dcp 4 --cp-kv-cache-interleave-size 16 --dcp-comm-backend a2a --dcp-q-replicate")
    assert found.whole("decode-context-parallel-size") == 4
    assert found.ignored == ["--cp-kv-cache-interleave-size"]
    assert [each.partition(" ")[0] for each in found.not_simulated] == ["--dcp-comm-backend", "--dcp-q-replicate"]
    assert line(f"{DEEPSEEK} --dcp-kv-cache-interleave-size=16").ignored == ["--dcp-kv-cache-interleave-size"]


def test_the_pool_holds_as_many_times_the_tokens(capsys: pytest.CaptureFixture):
    plain, divided = on_h200(f"{DEEPSEEK} --block-size 64"), on_h200(f"{DEEPSEEK} --block-size 64 -dcp 8")
    assert capacity(divided.launch).num_blocks == capacity(plain.launch).num_blocks
    assert divided.launch.block_tokens == 512
    found = divided.settings()
    assert (found.value("decode_context_parallel_size"), found.block_size) == (8, 64)
    assert plain.settings().value("decode_context_parallel_size") == 1
    assert status(["plan", "--gpu", "h200", "--serve", f"{DEEPSEEK} -dcp 8", "--json", "-"]) == DONE
    data = json.loads(capsys.readouterr().out)
    assert data["block_size"] == 128 and data["decode_context_parallel_size"] == 8
    # Whole sequences of the model's length, as vLLM logs it.
    longest = plain.launch.max_model_len
    assert data["kv_cache_tokens"] == data["num_gpu_blocks"] * longest // (longest // 128)


def test_the_simulation_that_is_named_runs(capsys: pytest.CaptureFixture):
    assert status(["plan", "--gpu", "h200", "--serve", f"{DEEPSEEK} -dcp 8"]) == DONE
    text = capsys.readouterr().out
    command = next(each for each in text.splitlines() if each.startswith("As a simulation: "))
    assert command.endswith("--decode-context-parallel-size 8")
    assert status([*command.split()[4:], "--request-rate", "1", "--num-prompts", "3"]) == DONE
    evidence = "No measured server is like this, so its error is not known."
    assert evidence in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (f"{DEEPSEEK} -dcp 3", "parallel", "tp_size=8 must be divisible by dcp_size=3."),
        (
            "vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 8 -dcp 2",
            "parallel",
            "Decode context parallelism for GQA/MQA requires `--tensor-parallel-size` (8) to be greater than",
        ),
        (
            "vllm serve Qwen/Qwen3-235B-A22B -tp 8 -dcp 4",
            "parallel",
            "`--decode-context-parallel-size` (4) exceeds the maximum supported value (2)",
        ),
        (
            "vllm serve Qwen/Qwen2.5-0.5B-Instruct -tp 2 -dcp 2",
            "parallel",
            "Decode context parallelism for GQA/MQA requires",
        ),
        ("vllm serve openai/gpt-oss-120b -tp 16 -dcp 2", "KV groups", "DCP not support sliding window."),
    ],
)
def test_vllms_refusals_are_the_answer(text, kind, words):
    refused = refusal(on_h200(text).launch)
    assert refused is not None and refused.kind == kind and refused.text.startswith(words)


@pytest.mark.slow
def test_remedies_are_other_ranks():
    fewer = [*remedies(on_h200("vllm serve Qwen/Qwen3-235B-A22B -tp 8 -dcp 4").launch)]
    assert ("--decode-context-parallel-size", "2") in [(each.flag, each.value) for each in fewer]
    windows = [*remedies(on_h200("vllm serve openai/gpt-oss-120b -tp 16 -dcp 2").launch)]
    assert [(each.flag, each.value) for each in windows] == [("--decode-context-parallel-size", "1")]
    tight = on_h200(f"{DEEPSEEK} --gpu-memory-utilization 0.65")
    assert refusal(tight.launch).kind == "KV cache"
    more = {each.flag: each for each in remedies(tight.launch)}["--decode-context-parallel-size"]
    assert capacity(more.launch).max_concurrency >= 1
    states = [*remedies(on_h200("vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct -tp 2 --max-model-len 300000").launch)]
    assert "--decode-context-parallel-size" not in [each.flag for each in states]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'{DEEPSEEK} -dcp 2 -sc \'{{"method": "ngram", "num_speculative_tokens": 2}}\'', "with --speculative-config"),
        ("vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 -dcp 2", "layers that all keep every token"),
        ("vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 -dcp 2", "is not simulated with the indexer"),
        (
            "vllm serve openai/gpt-oss-120b -tp 16 -dcp 2 --disable-hybrid-kv-cache-manager",
            "layers that all keep every token",
        ),
    ],
)
def test_memory_that_is_not_known_is_refused(text, words):
    with pytest.raises(SettingError, match=words):
        on_h200(text)


def test_a_command_that_vllm_would_not_start_is_one_line(capsys: pytest.CaptureFixture):
    flags = ["--policy", "vllm-v1", "--model", "llama-3.1-70b", "--gpu", "h200", "--tensor-parallel-size", "8"]
    assert status(["simulate", *flags, "--decode-context-parallel-size", "2"]) == MISTAKE
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("fragmeter: decode_context_parallel_size = 2: needs more ranks")


def test_ranks_are_an_axis_of_a_plan():
    axes = Choices(decode_context_parallel_size=["none,2,8"], policy=["vllm-v1,vllm-v0"]).axes()
    found = candidates(line(f"{DEEPSEEK} --max-model-len 8K"), ["h200"], axes)
    by_policy = {name: [each for each in found if each.axis_values["policy"] == name] for name in axes["policy"]}
    chosen = [each.settings for each in by_policy["vllm-v1"]]
    assert [each and each.value("decode_context_parallel_size") for each in chosen] == [1, 2, 8]
    # Another policy has the memory of a rank, in which each keeps every token.
    pools = {each.settings.num_gpu_blocks_override for each in by_policy["vllm-v0"] if each.settings}
    assert pools == {chosen[0].num_gpu_blocks_override}
