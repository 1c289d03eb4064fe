"""Start-up logs of servers: public ones, and those that each meaning of their tokens would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.log import read_log
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import Started, started
from fragmeter.sim.spec.startup.capacity import capacity, warm_up
from fragmeter.sim.spec.startup.launch import Launch

GIB = 1 << 30


def blocks(line: str, card: str, log: str, vllm: str | None = None) -> int:
    return capacity(answer(line, card, log, vllm).launch).num_blocks


def answer(line: str, card: str, log: str, vllm: str | None = None) -> Started:
    parsed = parse_serve(f"vllm serve {line}", None if vllm is None else version(vllm))
    return started(parsed, card, log=read_log(log))


# vllm#40691, talos-argocd-proxmox#1995 and club-3090#612; the blocks of the first are in the report's discussion.
PUBLIC = [
    (
        "Qwen/Qwen3.5-27B --max-model-len 32768 --max-num-seqs 16 --max-num-batched-tokens 16384",
        "h200",
        "(EngineCore pid=1) Initializing a V1 LLM engine (v0.19.0) with config: model='Qwen3.5-27B'\n"
        "INFO [kv_cache_utils.py:1319] GPU KV cache size: 290,864 tokens\n"
        "INFO [kv_cache_utils.py:1324] Maximum concurrency for 32,768 tokens per request: 33.04x",
        1487,
    ),
    (
        "qwen3.6-27b -q fp8 -tp 2 --max-model-len 131072 --max-num-seqs 2 --kv-cache-dtype fp8_e4m3 --max-num-batched-tokens 8192",
        "rtx-3090",
        "vLLM API server version 0.27.1\nAvailable KV cache memory: 4.99 GiB\nGPU KV cache size: 302,921 tokens\n"
        "Maximum concurrency for 131,072 tokens per request: 2.31x",
        208,
    ),
    (
        "nvidia/Qwen3.6-35B-A3B-NVFP4 --dtype bfloat16 --max-model-len 131072 --kv-cache-dtype fp8 --enable-prefix-caching --max-num-seqs 1",
        "rtx-5090",
        "(EngineCore pid=107) INFO [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: mo\n"
        "Available KV cache memory: 5.98 GiB\nGPU KV cache size: 567,978 tokens\n"
        "Maximum concurrency for 131,072 tokens per request: 4.33x",
        299,
    ),
]


@pytest.mark.parametrize(("line", "card", "log", "expected"), PUBLIC)
def test_public_logs_have_the_blocks_of_their_servers(line, card, log, expected):
    assert blocks(line, card, log) == expected
    # What the tokens mean follows from their product with the concurrency, too.
    without = "\n".join(text for text in log.splitlines() if "LLM" not in text)
    vllm = read_log(log).version
    assert blocks(line, card, without, f"{vllm[0]}.{vllm[1]}") == expected


# club-3090#46: dev16 after 0.20.0, with the layers of a drafter in other groups.
RUNNING = """(Worker_TP0 pid=118) INFO 05-04 01:05:57 [gpu_worker.py:440] Available KV cache memory: 9.74 GiB
(EngineCore pid=109) INFO 05-04 01:05:57 [kv_cache_utils.py:1713] GPU KV cache size: 67,728 tokens
(EngineCore pid=109) INFO 05-04 01:05:57 [kv_cache_utils.py:1718] Maximum concurrency for 180,000 tokens per request: 1.06x"""


@pytest.mark.parametrize("vllm", [None, "0.20", "0.33"])
def test_a_running_server_with_other_groups_has_the_memory_of_its_log(vllm):
    line = "Qwen/Qwen3.6-27B -q awq -tp 2 --kv-cache-dtype fp8 --max-model-len 180000 --max-num-seqs 2"
    found = answer(line, "rtx-4090", RUNNING, vllm)
    assert found.refusal() is None
    assert capacity(found.launch).stage.kv_cache_bytes == int(9.74 * GIB)


LINES = {
    "states": "qwen3.6-27b -q fp8 --max-model-len 32768 --max-num-seqs 16",
    "states, cached": "qwen3.6-27b -q fp8 --max-model-len 32768 --max-num-seqs 16 --enable-prefix-caching",
    "windows": "gemma-3-27b -tp 2 --max-model-len 32768 --max-num-seqs 16",
    "latent vectors and states": "kimi-linear-48b-a3b -tp 2 --max-model-len 32768 --max-num-seqs 16",
    "one group": "llama-3.1-8b --max-model-len 32768 --max-num-seqs 16",
    "divided sequences": "deepseek-v3 -tp 8 -dcp 8 --max-model-len 32768 --max-num-seqs 16",
}


def groups_of(launch: Launch) -> tuple[int, int]:
    """Groups, and tokens of the smallest block."""
    layout = launch.layout
    if layout is None:
        return 1, launch.block_tokens
    sizes = [group.block_size for group in layout.config.groups] if layout.config else [launch.block_size]
    return len(layout.groups), min(sizes)


def log_of(launch: Launch, number: int, release: str | None, lines: str) -> str:
    """What vLLM would log with that many blocks; ``lines`` has T, C and M for tokens, concurrency and memory."""
    length, needed = launch.max_model_len, launch.sequence_blocks(launch.max_model_len)
    groups, size = groups_of(launch)
    tokens = number // groups * size if launch.release.since < (0, 20) else int(number / needed * length)
    memory = number * capacity(launch).stage.block_bytes + capacity(launch).stage.block_bytes // 2
    written = [f"Initializing a V1 LLM engine (v{release}) with config"] if release else []
    written += [f"Available KV cache memory: {memory / GIB:.2f} GiB"] if "M" in lines else []
    written += [f"GPU KV cache size: {tokens:,} tokens"] if "T" in lines else []
    written += (
        [f"Maximum concurrency for {length:,} tokens per request: {number / needed:.2f}x"] if "C" in lines else []
    )
    return "\n".join(written)


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
@settings(max_examples=30)
@given(number=st.integers(60, 6000), vllm=st.sampled_from(["0.17.1", "0.19.0", "0.25.1", "0.33.0"]), data=st.data())
def test_every_log_says_its_blocks(name, number, vllm, data):
    lines = data.draw(st.sampled_from(["TCM", "TC", "TM", "T"]))
    line, card = LINES[name], "h200"
    launch = started(parse_serve(f"vllm serve {line}", version(vllm)), card).launch
    number += launch.sequence_blocks(launch.max_model_len) + 1
    names_release = lines == "T" or data.draw(st.booleans())
    text = log_of(launch, number, vllm if names_release else None, lines)
    # A command of another release than the log's own changes nothing.
    found = answer(line, card, text, None if names_release else vllm)
    read, (groups, _) = capacity(found.launch).num_blocks, groups_of(launch)
    assert found.refusal() is None
    old = launch.release.since < (0, 20)
    assert number <= read < number + (groups if old else 1)
    if "C" in lines and number < 100:
        assert read == number


def test_lines_of_a_build_between_releases_say_what_its_tokens_mean():
    line = LINES["states"]
    builds = {
        "0.20.1rc1.dev16+g7a1eb8ac2": "0.19",
        "0.20.2rc1.dev9+g01d4d1ad3": "0.25",
        "0.20.0": "0.19",
        "0.20.1": "0.25",
    }
    for build, alike in builds.items():
        launch = started(replace(parse_serve(f"vllm serve {line}"), version=version(alike)), "h200").launch
        text = log_of(launch, 800, build, "TCM")
        assert blocks(line, "h200", text) == 800
    assert read_log("vLLM API server version 0.20.1rc1.dev16+g7a1eb8ac2\n# GPU blocks: 9").version == (0, 20, None)
    assert read_log("Initializing a V1 LLM engine (v0.20.1) with\n# GPU blocks: 9").version == (0, 20, 1)
    assert read_log("INFO  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.17.0\n# GPU blocks: 9").version == (0, 17, 0)
    assert read_log("NCCL version 2.27.5\n# GPU blocks: 9").version is None


def test_a_line_without_a_release_is_of_the_release_of_its_log():
    line, log = (
        "vllm serve qwen3.6-27b -q fp8 --num-gpu-blocks-override 600",
        "LLM engine (v0.19.1) with\n# GPU blocks: 600",
    )
    found = started(parse_serve(line), "h100-80gb", log=read_log(log))
    assert found.launch.release.since == (0, 19)
    # The default of 1,024 sequences is more than its blocks, which that release does not mind.
    assert found.refusal() is None
    assert started(replace(parse_serve(line), version=(0, 20)), "h100-80gb", log=read_log(log)).refusal() is not None


def test_what_is_assumed_of_tokens_alone_is_said(capsys):
    def says(line: str, log: str) -> bool:
        assert status(["plan", "--gpu", "h200", "--serve", f"vllm serve {line}", "--startup-log", log]) == DONE
        return "tokens are read as since 0.20.1" in " ".join(capsys.readouterr().out.split())

    tokens = "GPU KV cache size: 290,864 tokens"
    assert says(LINES["states"], tokens)
    assert not says(LINES["states"], f"{tokens}\nMaximum concurrency for 32,768 tokens per request: 8.88x")
    assert not says(LINES["states"], f"LLM engine (v0.33.0) with\n{tokens}")
    assert not says(LINES["one group"], tokens)


GEMMA = "nvidia/Gemma-4-26B-A4B-NVFP4 --kv-cache-dtype fp8_e4m3"


@pytest.mark.parametrize(
    ("flags", "vllm", "gib", "sequences"),
    [
        # Public docker compose files with their logs, April and May 2026.
        ("--max-model-len 98304", "0.19.2", 8.29, 6.73),
        ("--max-model-len 256000 --max-num-seqs 2 --max-num-batched-tokens 16384", "0.20.2", 4.58, 1.12),
    ],
)
def test_windows_of_running_servers_keep_one_step(flags, vllm, gib, sequences):
    found = answer(f"{GEMMA} {flags}", "rtx-5090", f"Available KV cache memory: {gib} GiB", vllm)
    assert found.refusal() is None
    assert capacity(found.launch).max_concurrency == pytest.approx(sequences, rel=0.005)


#: Steps in flight of the second model runner, which dense models have first: one more than stages.
@pytest.mark.parametrize(("model", "steps_of_stages"), [("gemma-4-31b", 3), ("gpt-oss-20b", 2)])
@pytest.mark.parametrize(
    ("flags", "vllm", "steps"),
    [
        ("", "0.25", 1),
        ("", "0.26", 2),
        ("--no-async-scheduling", "0.26", 1),
        ("-pp 2", "0.25", 1),
        ("-pp 2", "0.28", None),
        ("-pp 2", "0.29", 3),
        ("-pp 2", "0.33", 3),
        ("-pp 2 --no-async-scheduling", "0.33", 2),
    ],
)
def test_windows_keep_the_steps_in_flight_since_0_26(model, steps_of_stages, flags, vllm, steps):
    def needed(tokens: int) -> int:
        line = f"{model} --max-model-len 131072 --max-num-batched-tokens {tokens} {flags}"
        launch = started(replace(parse_serve(f"vllm serve {line}"), version=version(vllm)), "h200").launch
        return launch.sequence_blocks(launch.max_model_len)

    layout = started(parse_serve(f"vllm serve {model}"), "h200").launch.layout
    sizes = [group.block_size for group in layout.config.groups if group.kind == "sliding"] if layout.config else None
    per_step = sum(4096 // size for size in sizes) if sizes else layout.num_sliding * 4096 // 16
    assert needed(8192) - needed(4096) == (steps or steps_of_stages) * per_step


def test_what_was_free_decides_as_in_the_log():
    # One RTX 5090 under WSL2, September 2026, which refuses 0.95 and runs with 0.94.
    text = "Free memory on device cuda:0 (30.2/31.84 GiB) on startup is less than desired GPU memory utilization (0.95, 30.25 GiB)."
    line = "nvidia/Qwen3.6-27B-NVFP4 --max-num-seqs 2 --max-model-len 65536 --gpu-memory-utilization"
    refused = answer(f"{line} 0.95", "rtx-5090", text, "0.27").outcome()
    assert refused.kind == "does not start" and refused.refusal.kind == "free memory"
    unsaid = "Estimated CUDA graph memory: 0.44 GiB total"
    assert answer(f"{line} 0.95", "rtx-5090", unsaid, "0.27").outcome().kind != "does not start"
    assert answer(f"{line} 0.94", "rtx-5090", text, "0.27").outcome().kind == "starts"


def test_the_rank_with_the_least_free_memory_decides():
    ranks = [
        f"Free memory on device cuda:{rank} ({free}/31.84 GiB) on startup." for rank, free in enumerate((31.2, 29.0))
    ]
    line = "llama-3.1-8b -tp 2 --max-model-len 8192 --gpu-memory-utilization 0.95"
    assert answer(line, "rtx-5090", "\n".join(ranks)).outcome().kind == "does not start"


def test_a_server_with_a_kv_cache_had_the_memory_free():
    line = "llama-3.1-8b --max-model-len 8192"
    assert answer(line, "gb10", "Model loading took 14.99 GiB").outcome().kind == "depends"
    assert answer(line, "gb10", "Available KV cache memory: 90.12 GiB").outcome().kind == "starts"


DIED = "llama-3.1-8b -q awq --max-model-len 8192"
SIZES = """vLLM API server version 0.17.1
INFO [gpu_worker.py:437] Available KV cache memory: 12.97 GiB
INFO [kv_cache_utils.py:1319] GPU KV cache size: 106,240 tokens
"""
OUT_OF_MEMORY = (
    "ERROR [core.py:900] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. in capture_model"
)
SAMPLER = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering"
)
ENDED = "RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        ("", None),
        (OUT_OF_MEMORY, "warm-up"),
        (SAMPLER, "warm-up"),
        (f"{OUT_OF_MEMORY}\n{ENDED}", "warm-up"),
        ("ValueError: There is no module or parameter named 'x'", "log"),
        (ENDED, "log"),
        # Of a request of a server that runs, of a warning, and of a start before the last one.
        (f"Application startup complete.\n{OUT_OF_MEMORY}", None),
        ("WARNING ImportError: flash_attn is not installed", None),
        (f"{OUT_OF_MEMORY}\n{SIZES}", None),
    ],
)
def test_the_log_of_a_server_that_died_is_no_start(after, kind):
    found = answer(DIED, "rtx-4090", f"{SIZES}{after}").outcome()
    assert (found.refusal and found.refusal.kind) == kind
    assert found.kind == ("starts" if kind is None else "does not start")
    if kind == "warm-up":
        assert "out of memory" in found.refusal.text


def test_what_a_dead_server_lacked_its_remedies_leave():
    started_line = answer(DIED, "rtx-4090", SIZES)
    dead = answer(DIED, "rtx-4090", f"{SIZES}{OUT_OF_MEMORY}")
    assert warm_up(dead.launch).room.high < 0 < warm_up(started_line.launch).room.likely
    found = {each.flag: each for each in remedies(replace(dead.launch, outlook="low"))}
    share = float(found["--gpu-memory-utilization"].value)
    assert 0.8 < share < 0.9
    assert warm_up(found["--gpu-memory-utilization"].launch).room.low >= 0


def test_a_refusal_that_is_checked_again_is_of_the_line_and_not_of_the_log():
    text = f"{SIZES}ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each\n{ENDED}"
    line = "qwen3.6-27b -q fp8 --gpu-memory-utilization 0.95 --max-num-seqs"
    assert answer(f"{line} 512", "h100-80gb", text, "0.22").outcome().kind == "starts"
    assert answer(f"{line} 1024", "h100-80gb", text, "0.22").outcome().refusal.kind == "states"
