"""What line, log, metrics and benchmark say of one server: nothing contradicts, and each planted contradiction is named, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.measured.server_metrics import read_metrics
from fragmeter.experiments.measured.statements import (
    contradictions,
    of_benchmark,
    of_line,
    of_log,
    of_metrics,
    of_probe,
)
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.traces import measured, read
from paths import DATA
from served_bench import FLAGS, Server, requests, written

LINE = (
    "docker run --gpus all vllm/vllm-openai:v0.22.1 --model facebook/opt-13b --max-num-seqs 16 --block-size 16"
    " --gpu-memory-utilization 0.9 --enable-prefix-caching --max-model-len 2048 --max-num-batched-tokens 2048"
)
LOG = """\
INFO vLLM API server version 0.22.1
INFO non-default args: {'model': 'facebook/opt-13b', 'max_num_seqs': 16, 'block_size': 16, 'gpu_memory_utilization': 0.9, \
'max_num_batched_tokens': 2048}
INFO Initializing a V1 LLM engine (v0.22.1) with config: model='facebook/opt-13b', speculative_config=None, max_seq_len=2048, \
tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, quantization=None, kv_cache_dtype=auto, seed=0, \
served_model_name=facebook/opt-13b, enable_prefix_caching=True, enable_chunked_prefill=True
INFO GPU KV cache size: 16,000 tokens
"""
METRICS = """\
vllm:num_requests_running{engine="0",model_name="facebook/opt-13b"} 6.0
vllm:num_requests_waiting{engine="0",model_name="facebook/opt-13b"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.90",\
num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
"""
ABOUT = {"model_id": "facebook/opt-13b", "max_concurrency": 8}
#: Name of the contradiction, the source, and what it says in place of what.
PLANTED = [
    ("model", "bench", ("model_id", "meta-llama/Llama-3.1-8B-Instruct")),
    ("model", "metrics", ('model_name="facebook/opt-13b"', 'model_name="Qwen/Qwen3-32B"')),
    ("model", "log", ("model='facebook/opt-13b'", "model='facebook/opt-30b'")),
    ("in_flight", "bench", ("max_concurrency", 4)),
    ("vllm", "log", ("0.22.1", "0.19.0")),
    ("vllm", "line", ("v0.22.1", "v0.18.0")),
    ("tensor_parallel_size", "log", ("tensor_parallel_size=1", "tensor_parallel_size=4")),
    ("pipeline_parallel_size", "log", ("pipeline_parallel_size=1", "pipeline_parallel_size=2")),
    ("data_parallel_size", "log", ("data_parallel_size=1", "data_parallel_size=2")),
    ("enable_prefix_caching", "metrics", ('enable_prefix_caching="True"', 'enable_prefix_caching="False"')),
    ("enable_prefix_caching", "log", ("enable_prefix_caching=True", "enable_prefix_caching=False")),
    ("block_size", "metrics", ('block_size="16"', 'block_size="32"')),
    ("block_size", "log", ("'block_size': 16", "'block_size': 32")),
    ("gpu_memory_utilization", "metrics", ('"0.90"', '"0.5"')),
    ("gpu_memory_utilization", "line", ("--gpu-memory-utilization 0.9", "--gpu-memory-utilization 0.8")),
    ("max_num_seqs", "log", ("'max_num_seqs': 16", "'max_num_seqs': 256")),
    ("max_num_batched_tokens", "line", ("--max-num-batched-tokens 2048", "--max-num-batched-tokens 4096")),
    ("max_model_len", "log", ("max_seq_len=2048", "max_seq_len=1024")),
    ("kv_cache_dtype", "log", ("kv_cache_dtype=auto", "kv_cache_dtype=fp8")),
    ("kv_cache_dtype", "line", ("--max-num-seqs", "--kv-cache-dtype fp8_e4m3 --max-num-seqs")),
    ("data_parallel_size", "line", ("--max-num-seqs", "--data-parallel-size 2 --max-num-seqs")),
]  # fmt: skip


def found(folder: Path, line: str, log: str, metrics: str, about: dict[str, object]) -> list[str]:
    """The names in which the four contradict each other."""
    bench, _ = written(folder, Server(), requests(20), **about)
    (folder / "metrics.txt").write_text(metrics)
    seen = read_metrics(folder / "metrics.txt")
    said = [*of_line(started(parse_serve(line), "h100-80gb")), *of_log(log), *of_metrics("metrics.txt", seen)]
    said += of_benchmark(bench, measured(bench, read(bench)), seen)
    return [text.split()[1] for text in contradictions(said)]


def test_of_one_server_nothing_contradicts(tmp_path):
    assert found(tmp_path, LINE, LOG, METRICS, ABOUT) == []


@pytest.mark.parametrize(("name", "source", "change"), PLANTED)
def test_each_contradiction_is_named_and_no_other(name, source, change, tmp_path):
    said = {"line": LINE, "log": LOG, "metrics": METRICS}
    about = ABOUT | ({change[0]: change[1]} if source == "bench" else {})
    if source != "bench":
        assert change[0] in said[source]
        said[source] = said[source].replace(*change)
    assert found(tmp_path, said["line"], said["log"], said["metrics"], about) == [name]


@pytest.mark.parametrize(
    ("line", "served"),
    [
        ("vllm serve facebook/opt-13b", "opt-13b"),
        ("vllm serve opt-13b", "facebook/opt-13b"),
        ("vllm serve /models/opt-13b --model-impl auto --hf-config-path opt-13b", "facebook/opt-13b"),
        ("vllm serve llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("vllm serve opt-13b --served-model-name chat mine", "mine"),
    ],
)
def test_two_names_of_one_model_agree(line, served, tmp_path):
    metrics = METRICS.replace("facebook/opt-13b", served)
    assert found(tmp_path, line, "GPU KV cache size: 16,000 tokens", metrics, {"model_id": served}) == []


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        ("--data-parallel-size 2", ("'max_num_seqs': 16", "'max_num_seqs': 16, 'data_parallel_size': 2")),
        ("--kv-cache-dtype bfloat16", ("kv_cache_dtype=auto", "kv_cache_dtype=torch.bfloat16")),
        ("", ("enable_prefix_caching=True", "enable_prefix_caching=None")),
        ("", ("model='facebook/opt-13b'", "model='/hub/models--facebook--opt-13b/snapshots/0123abcd'")),
        ("--served-model-name facebook/opt-13b", ("model='facebook/opt-13b'", "model='/models/one'")),
    ],
)
def test_other_words_for_the_same_agree(flags, change, tmp_path):
    assert found(tmp_path, f"{LINE} {flags}", LOG.replace(*change), METRICS, ABOUT) == []


def test_formats_of_8_bit_have_two_names(tmp_path):
    log, metrics = (text.replace("=auto", "=fp8_e4m3").replace('"auto"', '"fp8"') for text in (LOG, METRICS))
    assert found(tmp_path, f"{LINE} --kv-cache-dtype fp8", log, metrics, ABOUT) == []
    # By default it is 16 bit.
    assert found(tmp_path, LINE, log, metrics, ABOUT) == ["kv_cache_dtype"]


@pytest.mark.parametrize(
    ("served", "other"),
    [
        ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    ],
)
def test_equal_layers_are_not_the_same_model(served, other, tmp_path):
    said = (f"vllm serve {served}", "GPU KV cache size: 16,000 tokens", METRICS.replace("facebook/opt-13b", other))
    assert found(tmp_path, *said, {"model_id": other}) == ["model"]


def test_a_probe_is_of_the_server_of_the_line():
    (recording,) = sorted((DATA / "probe").glob("*.jsonl*"))[:1]
    said = {each.name: each.value for each in of_probe(recording)}
    assert said.keys() == {"model", "vllm", "max_model_len"}


def test_diagnose_names_them_before_any_figure_and_takes_the_servers_own_caching(tmp_path, capsys):
    (tmp_path / "metrics.txt").write_text(
        METRICS.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"').replace("opt-13b", "opt-30b")
    )
    given = ["--serve", "vllm serve facebook/opt-13b", "--gpu", "a100-80gb", "--metrics", tmp_path / "metrics.txt"]
    load = ["--input-len", 100, "--output-len", 20, "--request-rate", 2, "--num-prompts", 60, "--seeds", 1]
    assert status([*map(str, ["diagnose", *given, *load, "--json", tmp_path / "out.json"])]) == DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(
        "Contradiction: model is facebook/opt-13b by the line, facebook/opt-30b by metrics.txt. Contradiction:"
        " enable_prefix_caching is True by the line (by default), False by metrics.txt."
    )
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(content["contradictory_inputs"]) == 2
    assert "Prefix caching is off" in shown and content["settings"]["enable_prefix_caching"] is False


def test_plan_names_what_line_and_log_contradict_each_other_in(capsys):
    log = LOG.replace("tensor_parallel_size=1", "tensor_parallel_size=2")
    assert status(["plan", "--gpu", "h100-80gb", "--serve", LINE, "--startup-log", log]) == DONE
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).startswith(
        "Contradiction: tensor_parallel_size is 1 by the line, 2 by the start-up log. It starts: "
    )


def test_validate_names_a_benchmark_of_another_model(tmp_path, capsys):
    bench, metrics = written(tmp_path, Server(), requests(30), model_id="Qwen/Qwen3-8B")
    tokens = ["validate", "--against", bench, "--metrics", metrics, *FLAGS]
    assert status([*map(str, tokens)]) == DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(
        "Contradiction: model is opt-13b by --model, facebook/opt-13b by metrics.txt, Qwen/Qwen3-8B by bench.json."
    )
