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
    of_sizes,
)
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.log import read_log
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
ABOUT = {"model_id": "facebook/opt-13b", "max_concurrency": 8, "backend": "openai"}
#: Name of the contradiction, the source, and what it says in place of what.
PLANTED = [
    ("model", "bench", ("model_id", "meta-llama/Llama-3.1-8B-Instruct")),
    ("model", "metrics", ('model_name="facebook/opt-13b"', 'model_name="Qwen/Qwen3-32B"')),
    ("model", "log", ("model='facebook/opt-13b'", "model='facebook/opt-30b'")),
    ("server", "bench", ("backend", "sglang-oai")),
    ("server", "bench", ("backend", "tensorrt-llm")),
    ("in_flight", "bench", ("max_concurrency", 4)),
    ("vllm", "log", ("0.22.1", "0.19.0")),
    ("vllm", "line", ("v0.22.1", "v0.18.0")),
    ("tensor_parallel_size", "log", ("tensor_parallel_size=1", "tensor_parallel_size=4")),
    ("pipeline_parallel_size", "log", ("pipeline_parallel_size=1", "pipeline_parallel_size=2")),
    ("data_parallel_size", "log", ("data_parallel_size=1", "data_parallel_size=2")),
    ("enable_prefix_caching", "metrics", ('enable_prefix_caching="True"', 'enable_prefix_caching="False"')),
    ("enable_prefix_caching", "log", ("enable_prefix_caching=True", "enable_prefix_caching=False")),
    ("block_size", "metrics", ('block_size="16"', 'block_size="32"')),
    ("--block-size", "log", ("'block_size': 16", "'block_size': 32")),
    ("gpu_memory_utilization", "metrics", ('"0.90"', '"0.5"')),
    ("gpu_memory_utilization", "line", ("--gpu-memory-utilization 0.9", "--gpu-memory-utilization 0.8")),
    ("max_num_seqs", "log", ("'max_num_seqs': 16", "'max_num_seqs': 256")),
    ("max_num_batched_tokens", "line", ("--max-num-batched-tokens 2048", "--max-num-batched-tokens 4096")),
    ("max_model_len", "log", ("max_seq_len=2048", "max_seq_len=1024")),
    ("kv_cache_dtype", "log", ("kv_cache_dtype=auto", "kv_cache_dtype=fp8")),
    ("kv_cache_dtype", "line", ("--max-num-seqs", "--kv-cache-dtype fp8_e4m3 --max-num-seqs")),
    ("data_parallel_size", "line", ("--max-num-seqs", "--data-parallel-size 2 --max-num-seqs")),
    ("gpus", "line", ("docker run", "CUDA_VISIBLE_DEVICES=-1 docker run")),
    # What one of them leaves at its default: 0.9 in 0.22 is 0.92.
    ("gpu_memory_utilization", "line", ("--gpu-memory-utilization 0.9 ", "")),
    ("gpu_memory_utilization", "log", ("'gpu_memory_utilization': 0.9, ", "")),
    ("num_gpu_blocks_override", "line", ("--max-num-seqs", "--num-gpu-blocks-override 5000 --max-num-seqs")),
    ("num_gpu_blocks_override", "metrics", ('override="None"', 'override="5000"')),
    ("max_num_seqs", "line", ("--max-num-seqs 16 ", "")),
    ("max_num_seqs", "log", ("'max_num_seqs': 16, ", "")),
    ("max_num_batched_tokens", "log", ("'gpu_memory_utilization': 0.9, 'max_num_batched_tokens': 2048", "'gpu_memory_utilization': 0.9")),
    ("--block-size", "log", ("'block_size': 16, ", "'block_size': 128, ")),
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


@pytest.mark.parametrize(
    ("image", "said", "names"),
    [
        ("", "0.9", []),
        ("", "0.92", []),
        ("", "0.5", ["gpu_memory_utilization"]),
        ("docker run vllm/vllm-openai:v0.19.0 ", "0.9", []),
        ("docker run vllm/vllm-openai:v0.19.0 ", "0.92", ["gpu_memory_utilization"]),
        ("docker run vllm/vllm-openai:v0.22.0 ", "0.92", []),
    ],
)
def test_a_line_without_a_share_of_the_memory_says_that_of_its_release_or_of_any(image, said, names, tmp_path):
    line = f"{image}{'--model' if image else 'vllm serve'} facebook/opt-13b"
    metrics = METRICS.replace('"0.90"', f'"{said}"')
    assert found(tmp_path, line, "GPU KV cache size: 16,000 tokens", metrics, ABOUT) == names


@pytest.mark.parametrize("name", ["Qwen/Qwen3-Next-80B-A3B-Instruct", "deepseek-ai/DeepSeek-V2-Lite"])
def test_blocks_that_vllm_raises_are_not_those_of_the_line(name, tmp_path):
    line = f"docker run vllm/vllm-openai:v0.22.1 --model {name} --block-size 16 --max-model-len 2048 -tp 2"
    log = f"{LOG}WARNING a block size of 544\n".replace("facebook/opt-13b", name).replace(
        "tensor_parallel_size=1", "tensor_parallel_size=2"
    )
    for change in ("'max_num_seqs': 16, ", "'gpu_memory_utilization': 0.9, ", "'max_num_batched_tokens': 2048"):
        log = log.replace(change, "")
    metrics = (
        METRICS.replace("facebook/opt-13b", name).replace('block_size="16"', 'block_size="544"').replace("0.90", "0.92")
    )
    metrics = metrics.replace('caching="True"', 'caching="False"') if "Next" in name else metrics
    log = log.replace("caching=True", "caching=False") if "Next" in name else log
    assert found(tmp_path, line, log, metrics, ABOUT | {"model_id": name}) == []
    other = log.replace("'block_size': 16", "'block_size': 32")
    assert found(tmp_path, line, other, metrics, ABOUT | {"model_id": name}) == ["--block-size"]


@pytest.mark.parametrize(
    ("variables", "flags", "names"),
    [
        ("CUDA_VISIBLE_DEVICES=0", "-tp 2", ["gpus"]),
        ("CUDA_VISIBLE_DEVICES=0,1", "-tp 2", []),
        ("export CUDA_VISIBLE_DEVICES=4,5,6,7;", "-tp 2", []),
        ("CUDA_VISIBLE_DEVICES=0,1", "-tp 2 -dp 2", ["gpus"]),
        ("CUDA_VISIBLE_DEVICES=$GPUS", "-tp 2", []),
        ("CUDA_VISIBLE_DEVICES=0", "-tp 2 --distributed-executor-backend ray", []),
    ],
)
def test_a_server_has_the_gpus_that_it_sees(variables, flags, names):
    line = parse_serve(f"{variables} vllm serve facebook/opt-13b {flags}")
    assert [text.split()[1] for text in contradictions(of_line(started(line, "h100-80gb")))] == names


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


LLAMA_LOG = (
    "Model loading took {weights} GiB memory and 3 seconds\nAvailable KV cache memory: {cache} GiB\nFree memory on device (78.68/{total} GiB)"
    " on startup. Desired GPU memory utilization is ({share}, 71.27 GiB). Actual usage is {weights} GiB for weight, 1.23 GiB for peak"
    " activation, 0.13 GiB for non-torch memory, and 0.55 GiB for CUDAGraph memory."
)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, []),
        ({"total": 139.8}, ["GiB of a GPU is 79.19 by --gpu, 139.8 by the start-up log."]),
        (
            {"weights": 8.49, "cache": 61.41},
            ["GiB of weights is 14.99 by the line (computed), 8.49 by the start-up log."],
        ),
        (
            {"cache": 44.91},
            ["GiB of KV cache is 54.92 by the parts of the start-up log, 44.91 by its line with the KV cache."],
        ),
        ({"share": 0.5}, ["gpu_memory_utilization is 0.9 by the line, 0.5 by the start-up log."]),
    ],
)
def test_sizes_of_a_log_are_compared_with_card_and_checkpoint(changed, named):
    log = LLAMA_LOG.format(**{"weights": 14.99, "total": 79.19, "share": 0.9, "cache": 54.91} | changed)
    answer = started(parse_serve("vllm serve llama-3.1-8b --gpu-memory-utilization 0.9"), "h100-80gb")
    assert contradictions([*of_line(answer), *of_log(log)]) == [f"Contradiction: {each}" for each in named]


@pytest.mark.parametrize(("cache", "agrees"), [(54.92, True), (54.21, True), (53.5, False)])
def test_an_estimate_of_graphs_may_be_subtracted_from_what_the_parts_leave(cache, agrees):
    """Whether it is, depends on the release and a variable of its environment."""
    log = (
        LLAMA_LOG.format(weights=14.99, total=79.19, share=0.9, cache=cache)
        + "\nEstimated CUDA graph memory: 0.71 GiB total"
    )
    answer = started(parse_serve("vllm serve llama-3.1-8b --gpu-memory-utilization 0.9"), "h100-80gb")
    assert (contradictions([*of_line(answer), *of_log(log)]) == []) == agrees


@pytest.mark.parametrize(
    ("gib", "tokens", "sequences", "names"),
    [
        # 144 KiB a token: 20 GiB are 9,102 blocks and 145,635 tokens, 4.44 times 32,768; computed are 32.1 to 33.2.
        (32.5, 236_656, 7.22, []),
        (32.5, 45_632, 1.39, ["blocks"]),
        (32.5, 236_656, 1.39, ["blocks"]),
        (20.0, 145_632, 4.44, ["GiB"]),
        (20.0, 45_632, 1.39, ["blocks", "GiB"]),
        (-0.85, None, None, ["GiB"]),
        (None, 145_632, 4.44, []),
        (None, 145_632, 1.39, ["blocks"]),
    ],
)
def test_sizes_of_a_log_that_are_not_of_one_pool_are_named(gib, tokens, sequences, names):
    lines = ["vLLM API server version 0.25.0"]
    lines += [] if gib is None else [f"Available KV cache memory: {gib} GiB"]
    lines += [] if tokens is None else [f"GPU KV cache size: {tokens:,} tokens"]
    lines += [] if sequences is None else [f"Maximum concurrency for 32,768 tokens per request: {sequences}x"]
    log = read_log("\n".join(lines))
    answer = started(parse_serve("vllm serve Qwen/Qwen3-4B --max-model-len 32768"), "l40s", log=log)
    assert [each.split()[1] for each in contradictions(of_sizes(answer, log))] == names
