"""Texts of flags that have a form of their own: lines of servers, start-up logs, axes, and objectives."""

from __future__ import annotations

import random
from pathlib import Path

from fragmeter.experiments.runs.grid import PART_OF
from fuzz_damage import NUMBERS, TEXTS, any_text, damaged_bytes, damaged_lines
from fuzz_flags import commands, right_values
from fuzz_stock import GOODPUT, SERVE, SMALL_POOL, copied, flat
from fuzzing import Case, kind

Rng = random.Random

_LINES = [
    SERVE,
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 16K --enable-auto-tool-choice --port 8000",
    "export HF_TOKEN=secret; VLLM_LOGGING_LEVEL=INFO vllm serve Qwen/Qwen2.5-7B \\\n  --tensor-parallel-size 2",
    "python -m vllm.entrypoints.openai.api_server --model facebook/opt-13b --gpu-memory-utilization 0.8",
    "docker run --gpus all -p 8000:8000 -v ~/x:/models vllm/vllm-openai:v0.11.0 --model facebook/opt-13b -tp 2",
    "vllm serve facebook/opt-13b --hf-overrides '{\"max_position_embeddings\": 4096}' --max-num-seqs=64 -O3",
]
_WORDS = [
    "--max-model-len", "--max-model-len=1k", "--block-size", "--tensor-parallel-size", "-tp", "-pp", "--quantization", "fp8",
    "--kv-cache-dtype", "--gpu-memory-utilization", "--swap-space", "--cpu-offload-gb", "--enforce-eager", "--max-num-seqs",
    "--data-parallel-size", "--enable-prefix-caching", "--no-enable-prefix-caching", "--speculative-config", "{}", "'{", "&&",
    "|", ">", ";", "\\", "\n", "#", "$X", "'", '"', "(", "`", "A=b", "--", "-", "--x", "--compilation-config", "--dtype",
    "--num-gpu-blocks-override", "--model", "auto", "64k", "1e3", "0.5", "--config", "vllm", "serve", "docker", "-e", "{\"a\": 1",
]  # fmt: skip


def _line(rng: Rng) -> str:
    words = rng.choice(_LINES).split(" ")
    for _ in range(rng.choice([1, 1, 2, 3])):
        place, how = rng.randrange(len(words) + 1), rng.random()
        if how < 0.3:
            words += [rng.choice(_WORDS), any_text(rng, *NUMBERS, "fp8", "auto", "16k", "1.5M", "{}")]
        elif how < 0.7:
            words[place:place] = [rng.choice(_WORDS)] if rng.random() < 0.5 else [rng.choice(_WORDS), any_text(rng)]
        elif how < 0.8:
            del words[place : place + 1]
        else:
            words[place : place + 1] = [rng.choice(TEXTS)]
    return " ".join(words)


@kind("serve", 400)
def serve(rng: Rng, folder: Path) -> Case:
    """Pasted command lines of servers."""
    line = _line(rng)
    if rng.random() < 0.2:
        Path("line.sh").write_bytes(damaged_bytes(rng, line.encode("utf-8", "surrogateescape")))
        line = "line.sh"
    more = rng.choice(
        [[], [], ["--mean-tokens", "100"], ["--model", "opt-13b"], ["--vllm", rng.choice(["0.6", "0.16", *TEXTS])]]
    )
    return Case(["plan", f"--serve={line}", "--gpu", rng.choice(["h200", "a100-40gb"]), *more])


_LOG = """INFO 01-22 10:10:10 gpu_worker.py:298] Available KV cache memory: 12.34 GiB
INFO 01-22 10:10:10 kv_cache_utils.py:864] GPU KV cache size: 15,696 tokens
INFO 01-22 10:10:10 kv_cache_utils.py:868] Maximum concurrency for 2,048 tokens per request: 7.66x
INFO 01-22 10:10:10 executor_base.py:117] # CUDA blocks: 981, # CPU blocks: 0
"""


@kind("log", 100)
def log(rng: Rng, folder: Path) -> Case:
    """Start-up logs of a server."""
    lines = rng.sample(_LOG.splitlines(), rng.randint(1, 4))
    data = damaged_lines(rng, "\n".join(lines), " ")
    for _ in range(rng.randint(0, 1)):
        data = data.replace(
            rng.choice([b"12.34", b"15,696", b"2,048", b"7.66", b"981"]),
            rng.choice([b"0", b",", b".", b"-1", b"9" * 400, b"1.2.3", b"-.", b"0.0"]),
        )
    Path("start.log").write_bytes(data)
    return Case(["plan", "--serve", SERVE, "--gpu", "a100-40gb", "--startup-log", "start.log"])


def _axis(rng: Rng) -> str:
    name = rng.choice([*PART_OF, *PART_OF, "policy", "block_size", "request_rate", "seed"])
    name = rng.choice(TEXTS) if rng.random() < 0.1 else name
    if name == "num_prompts":
        return f"{name}={rng.choice(['2', '0', '-1', 'x', 'none'])}"
    right = [
        each
        for flag in commands()["simulate",]
        if flag.name == f"--{name.replace('_', '-')}"
        for each in right_values(flag)
    ]
    values = [any_text(rng, *right, *NUMBERS, "none") for _ in range(rng.randint(1, 3))]
    ranges = [
        "1:2",
        "2:1",
        "1:2:0",
        "1:2:-1",
        "0:1e9:1e-9",
        "nan:1",
        "1:inf",
        "a:b",
        "1:2:0.5",
        "::",
        "1:1",
        "0:0",
        "1:8:log",
        "0.1:1:log",
    ]
    return f"{name}={','.join(values) if rng.random() < 0.7 else rng.choice(ranges)}"


@kind("grid", 250)
def grid(rng: Rng, folder: Path) -> Case:
    """Axes of a sweep, and the sides of a comparison."""
    copied("trace.csv")
    axes = [_axis(rng) for _ in range(rng.choice([1, 1, 2]))]
    run = ["--trace", "trace.csv", *SMALL_POOL[2:], "--jobs", "1"]
    if rng.random() < 0.6:
        return Case(["sweep", *run, *(f"--grid={axis}" for axis in axes), "--out", "out"])
    return Case(["compare", *run, "--seeds", "1", f"--set={axes[0]}", f"--set={_axis(rng)}"])


@kind("goal", 80)
def goal(rng: Rng, folder: Path) -> Case:
    """Objectives, and candidates of a plan."""
    names = ["ttft", "tpot", "e2el", "itl", "x", ""]
    texts = [
        f"{rng.choice(names[:3] if rng.random() < 0.8 else names)}:{any_text(rng)}"
        if rng.random() < 0.9
        else rng.choice(TEXTS)
        for _ in range(rng.choice([1, 1, 2]))
    ]
    if rng.random() < 0.5:
        flags = GOODPUT | {"--goodput": texts[0]}
        choice = rng.choice(
            ["--tensor-parallel-size", "--block-size", "--max-num-seqs", "--policy", "--kv-cache-dtype", "--attainment"]
        )
        return Case(["plan", *flat(flags), f"{choice}={rng.choice(['1,2', 'none,64', 'none', *TEXTS])}"])
    copied("trace.csv", "run")
    return Case(rng.choice([
        ["sweep", "--trace", "trace.csv", *SMALL_POOL, "--grid", "seed=0:1", "--jobs", "1", "--out", "out", "--goodput", *texts],
        ["report", "run", "--out", "out.html", "--goodput", *texts],
    ]))  # fmt: skip
