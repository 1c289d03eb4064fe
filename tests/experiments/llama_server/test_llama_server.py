"""A ``llama-server`` line: sizes as logged by servers in public, slots and cells as in llama.cpp's source, and the answer."""

from __future__ import annotations

import json
import shlex

import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.llama_server.line import read_llama
from fragmeter.experiments.llama_server.memory import FIT_CTX, FIT_TARGET, llama_server
from fragmeter.sim.spec import gpu, model

MIB = 1 << 20
LLAMA_8B = "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf"


def server(arguments: str, card: str = "h100-80gb", given: str | None = None):
    return llama_server(read_llama(f"llama-server {arguments}"), gpu(card), given)


@pytest.mark.parametrize(
    ("arguments", "given", "mib"),
    [
        # ggml-org/llama.cpp#11200: "KV self size = 4352.00 MiB, K (q8_0): 2176.00 MiB", 64 layers.
        ("-m qwen2.5-coder-32b-Q4_K_M.gguf -c 32768 -np 1 -ctk q8_0 -ctv q8_0", "qwen2.5-32b", 4352.0),
        # SciSharp/LLamaSharp#1099: 36 layers of 256 elements, "KV self size = 144.00 MiB".
        ("-m x-Q8_0.gguf -c 4096 -np 1", "Qwen/Qwen2.5-3B-Instruct", 144.0),
        # Logs of Ollama's runner in public notes, of Llama 3 8B: "n_seq_max = 4", "n_ctx = 8192"; "n_ctx = 512".
        (f"-m {LLAMA_8B} -c 8192 -np 4", None, 1024.0),
        (f"-m {LLAMA_8B} -c 512 -np 1", None, 64.0),
        # A log of Qwen2.5 7B on a Jetson Thor: "CUDA0 KV buffer size = 112.00 MiB".
        ("-m x-F16.gguf -c 2048 -np 1", "qwen2.5-7b", 112.0),
        # A log of gpt-oss 20B on eight NPUs: 3072.00 MiB in 131072 cells of 12 layers, and 12 layers of 768 cells (18 MiB).
        ("-m gpt-oss-20b-mxfp4.gguf -c 131072 -np 1 -ub 512", None, 3072.0 + 18.0),
    ],
)
def test_kv_caches_are_those_of_logs(arguments, given, mib):
    assert server(arguments, given=given).kv_bytes == mib * MIB


@pytest.mark.parametrize(
    ("arguments", "given", "mib", "error"),
    [
        # "CUDA0 model buffer size = 4403.49 MiB" beside "CPU_Mapped model buffer size = 281.81 MiB" (the token embedding).
        (f"-m {LLAMA_8B}", None, 4403.49, 0.001),
        # ggml-org/llama.cpp#14235: "file size = 17.28 GiB (4.86 BPW)", less an embedding of 151936 x 2048 in 4.5 bits.
        ("-m Qwen3-30B-A3B-Q4_K_M.gguf", None, 17.28 * 1024 - 166.92, 0.02),
        # ollama/ollama#6279: "model size = 37.22 GiB (4.53 BPW)", less one of 128256 x 8192.
        ("-m Llama-3.1-70B-Q4_0.gguf", "llama-3.1-70b", 37.22 * 1024 - 563.6, 0.02),
        # ollama/ollama#14774: Qwen3 32B, "18.81 GiB (4.93 BPW)", less one of 151936 x 5120.
        ("-m Qwen3-32B-Q4_K_M.gguf", None, 18.81 * 1024 - 417.3, 0.02),
        # A log of gpt-oss 20B on a Vulkan device: 4699.90 and, in the host's memory, 7218.45 MiB, less one of 201088 x 2880 in 8.5 bits.
        ("-m gpt-oss-20b-mxfp4.gguf", None, 4699.9 + 7218.45 - 586.83, 0.04),
    ],
)
def test_weights_of_logs_are_within_the_interval(arguments, given, mib, error):
    found = server(f"{arguments} -c 4096", given=given).weights
    assert found.low <= mib * MIB <= found.high
    assert found.likely == pytest.approx(mib * MIB, rel=error)


@pytest.mark.parametrize(
    ("arguments", "given", "mib"),
    [
        (f"-m {LLAMA_8B} -c 512 -np 1", None, 258.5),
        ("-m x-Q8_0.gguf -c 4096 -np 1", "Qwen/Qwen2.5-3B-Instruct", 300.75),
        ("-m x-F16.gguf -c 2048 -np 1", "qwen2.5-7b", 304.0),
        # Without flash attention all scores of a micro-batch are kept.
        (f"-m {LLAMA_8B} -c 8192 -kvu -np 4 -fa off", None, 560.0),
    ],
)
def test_compute_buffers_are_those_of_logs(arguments, given, mib):
    assert server(arguments, given=given).compute.likely == mib * MIB


def test_states_are_those_of_a_log():
    # Qwen3.5 9B, 24 layers: 50.25 MiB a slot, by a log with --parallel 2. A layer of Qwen3.5 35B-A3B has the same shape; it has 30.
    found = server("-m Qwen3.5-35B-A3B-Q4_K_M.gguf -c 65536 -np 2")
    assert found.state_bytes == 2 * 30 / 24 * 50.25 * MIB
    # Only the layers with attention have cells.
    assert found.kv_bytes == 65_536 * 10 * 2 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("arguments", "slots", "unified", "slot_cells", "cells"),
    [
        ("-c 8192", 4, True, 8192, 8192),
        ("-c 8192 -np 4", 4, False, 2048, 8192),
        ("-c 8192 -np 4 --kv-unified", 4, True, 8192, 8192),
        ("-c 8192 --no-kv-unified", 4, False, 2048, 8192),
        # unslothai/unsloth#7530, measured: three slots of 1024 tokens have 1536 cells, and four 1024.
        ("-c 1024 -np 3", 3, False, 512, 1536),
        ("-c 1024 -np 4", 4, False, 256, 1024),
        ("-c 5000 -np 1", 1, False, 5120, 5120),
        ("--ctx-size=4096 --parallel=2", 2, False, 2048, 4096),
        ("--ctx_size 4096 -np 2", 2, False, 2048, 4096),
        ("-c 0 -np 1", 1, False, 131_072, 131_072),
    ],
)
def test_slots_and_cells(arguments, slots, unified, slot_cells, cells):
    found = server(f"-m {LLAMA_8B} {arguments}")
    assert (found.line.slots, found.line.kv_unified) == (slots, unified)
    assert (found.slot_cells, found.cells) == (slot_cells, cells)


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ("--port 8080 -ngl 99 -fa on --temp 0.6 --jinja -ctk q8_0 --control-vector-layer-range 3 20 --mirostat 2", []),
        ("--foo 3 -c 8192", ["error: invalid argument: --foo"]),
        ("extra -c 8192 --no-mmap", ["error: invalid argument: extra", "error: invalid argument: --no-mmap"]),
        ("--ctx-size=8192", ["error: invalid argument: --ctx-size=8192; write --ctx-size 8192"]),
        ("--draft-max 8", ['error while handling argument "--draft-max": the argument has been removed.']),
    ],
)
def test_words_that_llama_server_does_not_take(arguments, refused):
    found = server(f"-m {LLAMA_8B} {arguments}").line
    assert len(found.refused) == len(refused)
    assert all(said.startswith(text) for said, text in zip(found.refused, refused, strict=True))
    assert found.values.get("ctx-size", "8192") == "8192"


def test_a_context_of_0_is_the_models_which_fit_does_not_lower():
    given, free = server(f"-m {LLAMA_8B} -c 0", "rtx-4070-ti-super"), server(f"-m {LLAMA_8B}", "rtx-4070-ti-super")
    assert given.ctx_size == 131_072 > free.ctx_size > FIT_CTX
    assert given.gpu_layers < free.gpu_layers
    # As it is without --fit, where all layers are on the GPU.
    assert server(f"-m {LLAMA_8B} -c 0 -fit off", "rtx-4070-ti-super").free.high < 0


def test_windows_have_cells_of_their_own():
    # llama-kv-cache-iswa.cpp: n_swa (of all slots where they share one cache) and a micro-batch, in multiples of 256.
    def windows(arguments):
        found = server(f"-m gemma-3-27b-it-Q4_K_M.gguf -c 16384 {arguments}")
        layer = 2 * 16 * 128 * 2
        return (found.kv_bytes - 10 * found.cells * layer) / (52 * layer)

    assert windows("-np 1") == 1024 + 512
    assert windows("-np 1 -ub 100") == 1280
    assert windows("-np 4 -kvu") == 4 * 1024 + 512
    assert windows("-np 4") == 4 * (1024 + 512)
    assert windows("-np 1 --swa-full") == 16_384


def test_quantised_caches_keep_windows_in_16_bits():
    arguments = "-m gemma-3-27b-it-Q4_K_M.gguf -c 16384 -np 1"
    whole, halved = server(arguments).kv_bytes, server(f"{arguments} -ctk q8_0 -ctv q8_0").kv_bytes
    full = 16_384 * 10 * 2 * 16 * 128 * 2
    assert whole - halved == full - full * 34 // 64


def test_latent_vectors_are_cached_once():
    found = server("-m DeepSeek-V3-Q4_K_M.gguf -c 4096 -np 1 -fit off", given="deepseek-v3")
    assert found.kv_bytes == 4096 * 61 * 576 * 2


def test_layers_on_the_host_take_nothing():
    whole, half = (server(f"-m {LLAMA_8B} -c 8192 -np 1 -ngl {layers}") for layers in (99, 17))
    # The head counts as a layer.
    assert half.kv_bytes == whole.kv_bytes // 2
    assert half.weights.likely == pytest.approx(whole.weights.likely * 17 / 33, rel=1e-6)
    assert server(f"-m {LLAMA_8B} -c 8192 -np 1 -nkvo").parts()["KV cache"].likely == 0


@pytest.mark.slow
def test_fit_lowers_what_is_not_given():
    card = "rtx-3090"
    lowered = server("-m gemma-3-27b-it-Q4_K_M.gguf", card)
    assert FIT_CTX < lowered.ctx_size < model("gemma-3-27b").max_model_len and lowered.gpu_layers > 62
    assert lowered.free.likely >= FIT_TARGET
    assert server("-m gemma-3-27b-it-Q4_K_M.gguf -fit off", card).free.likely < 0
    # A context that is given stays, and layers move to the host.
    given = server("-m Qwen3-32B-Q8_0.gguf -c 8192", card)
    assert given.ctx_size == 8192 and 0 < given.gpu_layers < 64 and given.free.likely >= FIT_TARGET
    assert server("-m Qwen3-32B-Q8_0.gguf -c 8192 -ngl 99", card).free.high < 0


@pytest.mark.parametrize(
    "line",
    [
        f"docker run --gpus all -v /m:/models ghcr.io/ggml-org/llama.cpp:server-cuda -m /models/{LLAMA_8B} -c 8192 -np 2",
        f"docker run -e LLAMA_ARG_MODEL=/m/{LLAMA_8B} -e LLAMA_ARG_CTX_SIZE=8192 -e LLAMA_ARG_N_PARALLEL=2 x/llama.cpp:server",
        f"CUDA_VISIBLE_DEVICES=0 ./build/bin/llama-server -m {LLAMA_8B} --ctx-size 8192 --parallel 2 -fa --port 8080",
        "llama-server -hf bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M -c 8192 -np 2 --temp -1 --jinja",
        "llama-server -hf bartowski/Meta-Llama-3.1-8B-Instruct-GGUF -c 8192 -np 2 2>&1 | tee -a log",
        f"bash -c 'exec llama-server -m {LLAMA_8B} -c 8192 -np 2'",
        f'["/app/llama-server", "-m", "{LLAMA_8B}", "-c", "8192", "-np", "2"]',
    ],
)
def test_lines_of_all_forms(line):
    found = llama_server(read_llama(line), gpu("h100-80gb"))
    named = found.model.name, found.line.quantization(), found.cells, found.line.slots
    assert named == ("llama-3.1-8b", "Q4_K_M", 8192, 2)


@pytest.mark.parametrize("line", ["vllm serve opt-13b", "llama-cli -m x.gguf", "echo 'open"])
def test_other_programs_are_left_alone(line):
    assert read_llama(line) is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("-m Qwen3-8B.gguf", "names no quantisation"),
        ("-m Qwen3-8B-Q9_Z.gguf", "is none of"),
        ("-m unheard-of-Q4_K_M.gguf", "no known model"),
        ("-c 4096", "names no model"),
        ("-m Qwen3-8B-Q8_0.gguf -c many", "whole number"),
        ("-m Qwen3-8B-Q8_0.gguf -np 0", "whole number"),
        ("-m Qwen3-8B-Q8_0.gguf -ctk q9", "one of f32"),
        ("-m Qwen3-8B-Q8_0.gguf -ctv q8_0 -fa off", "needs flash attention"),
        ("-m Qwen3-8B-Q8_0.gguf -c", "lacks its value"),
    ],
)
def test_bad_lines_are_refused_in_one_line(arguments, complaint, capsys):
    assert status(["plan", "--gpu", "h100-80gb", "--serve", f"llama-server {arguments}"]) == MISTAKE
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_a_line_in_a_file_is_read_as_pasted(tmp_path, capsys):
    line, script = f"llama-server -m {LLAMA_8B} -c 8192 -np 2", tmp_path / "start.sh"
    script.write_text(f"#!/bin/sh\n# on the card\nexec {line} \\\n  --port 8080\n")
    answers = []
    for given in (line, str(script)):
        assert status(["plan", "--gpu", "h100-80gb", "--serve", given]) == DONE
        answers.append(capsys.readouterr().out)
    assert answers[1].startswith(answers[0].partition("Of no effect")[0].rstrip())
    # A fault of the line names the file; and no other command takes a line of llama-server, from either.
    script.write_text("llama-server -m unheard-of-Q4_K_M.gguf")
    assert status(["plan", "--gpu", "h100-80gb", "--serve", str(script)]) == MISTAKE
    for given in (line, str(script)):
        assert status(["diagnose", "--gpu", "h100-80gb", "--serve", given]) == MISTAKE
        assert "starts llama-server, which plan alone reads" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [["--mean-tokens", "100"], ["--goodput", "ttft:500"], ["--vllm", "0.30"], ["--gpu", "l4"], ["--input-len", "9"]],
)
def test_flags_that_are_not_read_beside_it(more, capsys):
    line = f"llama-server -m {LLAMA_8B} -c 8192"
    assert status(["plan", "--gpu", "h100-80gb", "--serve", line, *more]) == MISTAKE
    assert capsys.readouterr().err.count("\n") == 1


def answer(folder, arguments: str, card: str) -> dict:
    out = folder / "answer.json"
    assert status(["plan", "--gpu", card, "--serve", f"llama-server {arguments}", "--json", str(out)]) == DONE
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        (f"-m {LLAMA_8B} -c 32768 -np 4", "fits"),
        ("-m Qwen3-32B-Q8_0.gguf -c 8192 -ngl 99", "does not fit"),
        ("-m Qwen3-32B-Q4_K_M.gguf -c 16384 -ngl 99", "depends"),
    ],
)
def test_the_answer(arguments, outcome, tmp_path):
    found = answer(tmp_path, arguments, "rtx-4090")
    assert found["outcome"] == outcome
    low, _, high = found["bytes"]["free"]
    assert {"fits": low >= 0, "does not fit": high < 0, "depends": low < 0 <= high}[outcome]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "block"), [("-np 4", 256), ("-np 4 -kvu", 1)])
def test_the_printed_command_runs_with_the_slots_of_the_line(flags, block, tmp_path):
    command = shlex.split(answer(tmp_path, f"-m {LLAMA_8B} -c 32768 {flags}", "rtx-4090")["simulate"])
    run = tmp_path / "run"
    assert (
        status([*command[1:], "--input-len", "64", "--output-len", "16", "--num-prompts", "12", "--out", str(run)])
        == DONE
    )
    resolved = json.loads((run / "run.json").read_text())["replica"]
    assert resolved["max_num_seqs"] == 4
    assert resolved["block_size"] == block and resolved["num_gpu_blocks"] * block == 32_768
