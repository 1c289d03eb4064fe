"""What the fuzzer's cases begin with: command lines, and a folder with one of every file that commands read."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from calibrations import document as calibration_document
from fragmeter.experiments.cli.app import DONE
from fuzzing import run_here
from paths import SAMPLES
from served_bench import FLAGS, Server, requests, written

LOAD = {"--num-prompts": "3", "--request-rate": "5"}
SERVE = "vllm serve facebook/opt-13b"
TRACE = """arrival_s,prompt_tokens,output_tokens,max_tokens,n
0,5,3,8,2
0.1,20,4,9,1
0.1,7,1,1,3
2,33,6,6,1
"""
#: A run of several replicas, which serve requests of one sequence each.
CLUSTER = ["--num-prompts", "4", "--request-rate", "5", "--num-gpu-blocks-override", "200", "--num-replicas", "2"]
SMALL_POOL = ["--block-size", "4", "--num-gpu-blocks-override", "30", "--max-model-len", "64"]


@cache
def stock() -> Path:
    """A folder with one of everything that commands read, made once by the commands themselves."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-stock-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "trace.csv").write_text(TRACE)
    (folder / "curve.csv").write_text("start_s,request_rate\n0,2\n1,5.5\n3,1\n")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "cost.json").write_text(json.dumps(calibration_document()))
    (folder / "prices.json").write_text('{"currency": "USD", "per_gpu_hour": {"a100-80gb": 1.5, "h200": 4.5}}')
    written(folder, Server(), requests(4))
    shutil.copy(SAMPLES / "mooncake.jsonl", folder / "hashed.jsonl")
    run = ["simulate", "--trace", f"{folder}/trace.csv", *SMALL_POOL]
    made = [
        [*run, "--out", "run", "--record-blocks", "--record-plan", "--record-steps", "0:6"],
        ["simulate", *CLUSTER, "--out", "cluster"],
        ["sweep", *run[1:], "--grid", "seed=0:1", "--jobs", "1", "--goodput", "ttft:500", "--out", "sweep"],
        ["validate", "--against", "bench.json", "--metrics", "metrics.txt", *map(str, FLAGS), "--out", "against"],
        ["traces", "synth", "trace.csv", "--out", "load.json"],
        ["reproduce", "fig1", "--jobs", "1", "--out", "figures"],
        ["traces", "convert", "hashed.jsonl", "hashed.parquet"],
        ["plan", *flat(GOODPUT), "--out", "planned"],
    ]
    before = os.getcwd()
    os.chdir(folder)
    try:
        for tokens in made:
            ran = run_here(tokens)
            assert ran.status == DONE, (tokens, ran.stderr)
    finally:
        os.chdir(before)
    return folder


#: A model's config.json, of those that are read most.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 1000, "head_dim": 64,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "sliding_window": 128,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "quantization_config": {"quant_method": "awq", "bits": 4},
}  # fmt: skip
GOODPUT = {
    "--model": "opt-13b", "--gpu": "a100-80gb", "--goodput": "ttft:2000", "--num-prompts": "100", "--jobs": "1",
    "--seeds": "1",
}  # fmt: skip


def copied(*names: str) -> None:
    """Put files or folders of the stock into the current folder; ``out-`` of a name copies it to where it may be written."""
    for name in names:
        source = stock() / name.removeprefix("out-")
        if source.is_dir():
            shutil.copytree(source, name)
        else:
            shutil.copy(source, name)


def flat(flags: dict[str, str]) -> list[str]:
    return [token for each in flags.items() for token in each]
