"""A line of SGLang's server: its flags as settings, its parser's errors, and the answer of ``plan``."""

from __future__ import annotations

import json

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.sglang_server.line import read_sglang
from fragmeter.experiments.sglang_server.start import parse_line, started
from fragmeter.sim.types.errors import SettingError, UserError

START = "python3 -m sglang.launch_server --model-path qwen3-8b"


def test_flags_are_settings():
    line = read_sglang(
        f"CUDA_VISIBLE_DEVICES=0,1 {START} --tp 2 --chunked-prefill-size=4k --page-size 64 --disable-radix-cache"
        " --kv-cache-dtype fp8_e4m3 --quantization w8a8_int8 --enable-priority-scheduling --host 0.0.0.0 | tee log"
    )
    assert line.model == "qwen3-8b"
    assert line.flags == {
        "tensor-parallel-size": "2",
        "max-num-batched-tokens": "4000",
        "block-size": "64",
        "enable-prefix-caching": False,
        "kv-cache-dtype": "fp8",
        "quantization": "int8",
        "enable-priority-scheduling": True,
    }
    assert line.ignored == ["--host"]
    # Read again, its words are the same flags.
    assert read_sglang(f"{START} {line.words()}").flags == line.flags


@pytest.mark.parametrize(
    "text",
    [
        "sglang serve qwen3-8b --tp 2",
        "docker run --gpus all lmsysorg/sglang:v0.5.23 python3 -m sglang.launch_server --model qwen3-8b --tp-size 2",
        'bash -c "python -m sglang.launch_server --model-path qwen3-8b --tensor-parallel-size=2"',
    ],
)
def test_ways_to_start_it(text):
    line = read_sglang(text)
    assert (line.model, line.flags) == ("qwen3-8b", {"tensor-parallel-size": "2"})


@pytest.mark.parametrize("text", ["vllm serve qwen3-8b", "llama-server -m x.gguf", "python -m sglang.bench_serving"])
def test_other_programs(text):
    assert read_sglang(text) is None


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            "--gpu-memory-utilization 0.9",
            "--gpu-memory-utilization: SGLang 0.5.23, the release that was read, does not have it",
        ),
        (
            "--max-running-request 5 --sloo",
            "--sloo: SGLang 0.5.23, the release that was read, does not have it; leave it out",
        ),
        ("--max-runing-requests 5", "does not have it; did you mean --max-running-requests?"),
        ("--schedule lpm", "--schedule: may be --schedule-conservativeness, "),
        ("lpm", "serve = 'lpm': is neither a flag nor the value of one"),
    ],
)
def test_what_its_parser_does_not_take_is_refused(flags, error, capsys):
    """As a flag that no release of vLLM has: a mistake of the line, which no answer is made of."""
    assert status(["plan", "--gpu", "h100-80gb", "--serve", f"{START} {flags}"]) == MISTAKE
    assert error in " ".join(capsys.readouterr().err.split())
    vllm = "vllm serve qwen3-8b --of-no-release 5"
    assert status(["plan", "--gpu", "h100-80gb", "--serve", vllm]) == MISTAKE


def test_a_flag_of_another_release_is_named():
    image = "docker run lmsysorg/sglang:v0.5.{} python3 -m sglang.launch_server --model qwen3-8b --of-tomorrow 5 --tp 2"
    line = read_sglang(image.format(24))
    assert line.uncounted_names == ["--of-tomorrow"] and line.flags == {"tensor-parallel-size": "2"}
    with pytest.raises(UserError, match="does not have it"):
        read_sglang(image.format(23))


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--page-size", "serve = '--page-size': lacks its value"),
        ("--mem-fraction-static 2.0", "mem_fraction_static = 2.0: must be below 1"),
        (
            "--chunked-prefill-size -1",
            "--chunked-prefill-size = '-1': must be a whole number from 1 on to be simulated",
        ),
        (
            "--mamba-radix-cache-strategy extra_buffer_lazy",
            "--mamba-radix-cache-strategy = 'extra_buffer_lazy': is not simulated; one of ",
        ),
        ("--quantization gguf", "--quantization = 'gguf': is not simulated; one of "),
        ("--schedule-policy dfs-weight", "--schedule-policy = 'dfs-weight': is not simulated; one of fcfs, lpm, lof"),
        ("--hicache-write-policy write_back", "--hicache-write-policy = 'write_back': is not simulated; one of "),
        ("--kv-cache-dtype nvfp4", "--kv-cache-dtype = 'nvfp4': is not simulated; one of "),
        # SGLang does not start.
        (
            "--kv-cache-dtype int8",
            "--kv-cache-dtype = 'int8': SGLang 0.5.23 has no such value; one of auto, fp8_e5m2, ",
        ),
        ("--dtype fp16", "--dtype = 'fp16': SGLang 0.5.23 has no such value; one of auto, half, "),
        (
            "--schedule-policy priority",
            "--schedule-policy = 'priority': ends SGLang's start (Unknown schedule_policy); ",
        ),
    ],
)
def test_values_that_are_not_simulated(flags, error):
    with pytest.raises(SettingError) as raised:
        started(parse_line(f"{START} {flags}"), "h100-80gb")
    assert str(raised.value).startswith(error)


def test_defaults_and_formats_of_16_bits_are_of_no_effect():
    flags = "--ep-size 1 --dtype bfloat16 --schedule-conservativeness 1.0 --radix-eviction-policy lru --nnodes 1"
    line = read_sglang(f"{START} {flags}")
    assert line.ignored == [
        "--ep-size",
        "--dtype",
        "--schedule-conservativeness",
        "--radix-eviction-policy",
        "--nnodes",
    ]
    assert line.not_simulated == [] and line.flags == {}
    others = read_sglang(f"{START} --ep 2 --dtype float32 --radix-eviction-policy lfu")
    assert others.uncounted_names == ["--ep-size", "--dtype", "--radix-eviction-policy"]


@pytest.mark.parametrize(
    "flags",
    [
        "--attention-data-parallel-size 4",
        "--moe-a2a-backend deepep",
        "--cuda-graph-bs-decode 1 2 4",
        "--disable-prefill-cuda-graph",
        "--language-model-only",
        '--json-model-override-args {"num_hidden_layers":4}',
        "--load-balance-method total_tokens",
    ],
)
def test_what_changes_memory_or_decisions_is_named(flags):
    """As these were passed over as of no effect."""
    line = read_sglang(f"{START} {flags} --load-balance-method round_robin --moe-dp-size 1")
    assert len(line.not_simulated) == 1 and line.ignored == ["--load-balance-method", "--moe-dp-size"]


@pytest.mark.parametrize("name", ["fp8", "w8a8_fp8", "modelopt_fp8"])
def test_weights_of_8_bits_are_one_format(name):
    assert read_sglang(f"{START} --quantization {name}").flags == {"quantization": "fp8"}


def test_other_spellings_are_the_same_flags():
    flags = "--enable-hicache --data-parallel-size 2 --pipeline-parallel-size 2 --expert-parallel-size 2"
    line = read_sglang(f"{START} {flags}")
    assert line.flags == {"enable-hierarchical-cache": True, "dp-size": "2", "pipeline-parallel-size": "2"}
    assert line.uncounted_names == ["--ep-size"] and read_sglang(f"{START} {line.words()}").flags == line.flags


def test_replicas_are_dispatched_in_turn(capsys, tmp_path):
    """With attention by ranks they share the GPUs, which is not simulated."""
    for flags, replicas, more in (("--dp 2", 2, " --num-replicas 2"), ("--tp 2 --dp 2 --enable-dp-attention", 1, "")):
        out = tmp_path / "answer.json"
        assert status(["plan", "--gpu", "h200", "--serve", f"{START} {flags}", "--json", str(out)]) == DONE
        found = json.loads(out.read_text())
        assert found["replicas"] == replicas and found["simulate"].count("--num-replicas") == (replicas > 1)
        assert found["simulate"].endswith(more)
    assert found["not_simulated"] == ["--enable-dp-attention (attention by ranks)"]
    assert "on 1 x h200 (each of 2 replicas); " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "card", "page"),
    [
        ("", "b200", 64),
        ("--attention-backend triton", "b200", 1),
        ("--attention-backend fa4", "b200", 128),
        ("--attention-backend trtllm_mha --page-size 32", "b200", 32),
        ("--page-size 1", "b200", 64),
        ("--page-size 1", "h200", 1),
        ("--attention-backend flashinfer", "h100-80gb", 1),
        ("--attention-backend hpc_ops", "h100-80gb", 64),
    ],
)
def test_kernels_decide_the_pages(flags, card, page):
    assert started(parse_line(f"{START} {flags}"), card).replica.block_size == page


def test_the_answer(capsys, tmp_path):
    """``max_total_num_tokens`` of a published start without flags: 1,707,904."""
    out = tmp_path / "answer.json"
    line = f"{START} --schedule-conservativeness 0.3"
    assert status(["plan", "--gpu", "gb300", "--serve", line, "--json", str(out)]) == DONE
    found = json.loads(out.read_text())
    assert found["slots"] == pytest.approx(1_707_904, rel=0.006) and found["page_size"] == 64
    assert found["simulate"] == "fragmeter simulate --policy sglang --model qwen3-8b --gpu gb300"
    assert found["not_simulated"] == ["--schedule-conservativeness (another share of outputs)"]
    text = " ".join(capsys.readouterr().out.split())
    assert "Without --schedule-conservativeness, not counted, it starts: qwen3-8b on 1 x " in text


def test_pools_of_windows_are_counted(tmp_path, capsys):
    """12 layers of gpt-oss-20b keep every token and 12 a window, of 0.8 slots for each of the others."""
    found = []
    for flags in ("", " --disable-hybrid-swa-memory"):
        line = f"python -m sglang.launch_server --model-path openai/gpt-oss-20b{flags}"
        assert status(["plan", "--gpu", "h100-80gb", "--serve", line, "--json", str(tmp_path / "out.json")]) == DONE
        found.append(json.loads((tmp_path / "out.json").read_text()))
    apart, together = found
    assert apart["slots"] == pytest.approx(together["slots"] * 2 / 1.8, abs=2) and "window_slots" not in together
    assert apart["window_slots"] == int(apart["slots"] * 0.8)
    assert "swa_max_total_num_tokens" in capsys.readouterr().out


def test_pools_of_states_are_counted(tmp_path):
    """0.9 bytes of states for each of the KV cache: 4 ranks of Qwen3-Next hold 684 states, a fifth of them requests."""
    line = "python -m sglang.launch_server --model-path Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4"
    found = []
    for flags in (
        "",
        " --max-mamba-cache-size 100 --mamba-ssm-dtype bfloat16 --mamba-radix-cache-strategy extra_buffer",
        " --enable-unified-memory",
    ):
        path = tmp_path / "out.json"
        assert status(["plan", "--gpu", "h100-80gb", "--serve", line + flags, "--json", str(path)]) == DONE
        found.append(json.loads(path.read_text()))
    plain, few, together = found
    assert plain["max_running_requests"] == plain["states"] // 5 and few["max_running_requests"] == 20
    assert few["states"] == 100 and few["slots"] > plain["slots"]
    assert few["simulate"].endswith(
        "--mamba-radix-cache-strategy extra_buffer --mamba-ssm-dtype bf16 --max-mamba-cache-size 100"
    )
    same = ("slots", "states", "max_running_requests")
    assert [together[name] for name in same] == [plain[name] for name in same]
    assert together["simulate"].endswith("--enable-unified-memory") and together["not_simulated"] == []


def test_weights_that_leave_no_slots_are_an_answer(tmp_path, capsys):
    """As a line of vLLM that does not start: the answer, with the status of an answer."""
    out = tmp_path / "answer.json"
    assert status(["plan", "--gpu", "l4", "--serve", START, "--json", str(out)]) == DONE
    found = json.loads(out.read_text())
    assert (found["outcome"], found["starts"]) == ("does not start", False) and "slots" not in found
    assert "qwen3-8b leaves no slots on l4" in " ".join(capsys.readouterr().out.split())


def test_the_host_of_hicache_is_counted(tmp_path, capsys):
    """One and a half of the device's slots, in pages of 64 and one page more; where the flags go, and a store that is not simulated."""
    out = tmp_path / "answer.json"
    flags = "--enable-hierarchical-cache --hicache-ratio 1.5 --hicache-write-policy write_through_selective"
    line = f"{START} --max-total-tokens 100000 {flags} --hicache-storage-backend mooncake"
    assert status(["plan", "--gpu", "gb300", "--serve", line, "--json", str(out)]) == DONE
    found = json.loads(out.read_text())
    assert (found["slots"], found["host_slots"]) == (99_968, 64 * (99_968 * 3 // 2 // 64 + 1))
    assert found["simulate"].endswith(f"--num-gpu-blocks-override 1562 {flags}")
    assert found["not_simulated"] == ["--hicache-storage-backend (a store behind the host)"]
    assert "HiCache, tokens" in capsys.readouterr().out


def test_fewer_slots_than_the_memory_has(tmp_path):
    out = tmp_path / "answer.json"
    line = f"{START} --max-total-tokens 100000 --disable-overlap-schedule"
    assert status(["plan", "--gpu", "gb300", "--serve", line, "--json", str(out)]) == DONE
    found = json.loads(out.read_text())
    assert found["slots"] == 99_968
    assert found["simulate"].endswith("--gpu gb300 --num-gpu-blocks-override 1562 --disable-overlap-schedule")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--gpu", "h100-80gb,h200"], "the line of SGLang is read for one kind of GPU"),
        (["--gpu", "h100-80gb", "--vllm", "0.16"], "vllm = '0.16': is of vLLM, and the line starts SGLang"),
        (["--gpu", "h100-80gb", "--mean-tokens", "900"], "--mean-tokens is not read beside a line of SGLang"),
        (["--gpu", "h100-80gb", "--startup-log", "GPU KV cache size: 9 tokens"], "has no max_total_num_tokens"),
        (["--gpu", "h100-80gb", "--goodput", "ttft:500", "--watermark", "0.1"], "watermark = '0.1': is of vLLM"),
        (
            ["--gpu", "h100-80gb", "--goodput", "ttft:500", "--deploy", "compose", "--out", "x"],
            "writes manifests of vLLM",
        ),
    ],
)
def test_what_is_not_answered(flags, error, capsys):
    assert status(["plan", "--serve", START, *flags]) == MISTAKE
    assert error in " ".join(capsys.readouterr().err.split())
