"""Every size of a start-up log, in the words of each release."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.log import corrected, read_log
from fragmeter.experiments.vllm_serve.log_parts import LoggedParts, read_parts
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec.startup.capacity import capacity

GIB = 1 << 30
#: Formats of ``worker.py`` of 0.6 (V0), of ``gpu_worker.py`` and ``mem_utils.py`` of 0.10.2, 0.19.1 and 0.28, and of a refusal.
LOGS = {
    "0.6": (
        "the current vLLM instance can use total_gpu_memory (79.11GiB) x gpu_memory_utilization (0.90) = 71.20GiB\nmodel weights take"
        " 14.99GiB; non_torch_memory takes 0.07GiB; PyTorch activation peak memory takes 1.23GiB; the rest of the memory reserved for KV"
        " Cache is 54.91GiB.\nGraph capturing finished in 14 secs, took 0.25 GiB",
        LoggedParts(total=79.11, utilization=0.9, requested=71.2, weights=14.99, non_torch=0.07, peak_activation=1.23, graphs_captured=0.25),
        54.91,
    ),
    "0.10.2": (
        "Model loading took 74.2812 GiB and 30.0 seconds\nMemory profiling takes 9.1 seconds. Total non KV cache memory: 81.24GiB; torch peak"
        " memory increase: 5.58GiB; non-torch forward increase memory: 1.38GiB; weights memory: 74.28GiB.\nAvailable KV cache memory: 44.59"
        " GiB\nGraph capturing finished in 20 secs, took 2.37 GiB\nFree memory on device (139.21/139.81 GiB) on startup. Desired GPU memory"
        " utilization is (0.9, 125.83 GiB). Actual usage is 74.28 GiB for weight, 5.58 GiB for peak activation, 1.38 GiB for non-torch"
        " memory, and 2.37 GiB for CUDAGraph memory.",
        LoggedParts(139.81, 139.21, 0.9, 125.83, 74.2812, 5.58, 1.38, None, None, 2.37),
        44.59,
    ),
    "0.19": (
        "Model loading took 33.98 GiB memory and 1.0 seconds\nEstimated CUDA graph memory: 2.73 GiB total\nAvailable KV cache memory: 5.11"
        " GiB\nCUDA graph pool memory: 2.62 GiB (actual), 2.73 GiB (estimated), difference: 0.11 GiB (4.2%).",
        LoggedParts(weights=33.98, graphs_estimated=2.73, graphs_captured=2.62),
        5.11,
    ),
    "0.28": (
        "Model loading took 38.24 GiB memory\nFree memory on device (137.64/139.80 GiB) on startup. Desired GPU memory utilization is (0.9,"
        " 125.82 GiB). Actual usage is 39.98 GiB for consumed memory (weights + non-torch), 4.04 GiB for peak activation, and 1.20 GiB for"
        " CUDAGraph memory.\nAvailable KV cache memory: 81.79 GiB",
        LoggedParts(total=139.8, free=137.64, utilization=0.9, requested=125.82, weights=38.24, consumed=39.98, peak_activation=4.04),
        81.79,
    ),
    "refusal of the length": (
        "ValueError: To serve at least one request with the models's max seq len (196608), (23.24 GiB KV cache is needed, which is larger"
        " than the available KV cache memory (22.50 GiB). Based on the available memory, the estimated maximum model length is 190272.",
        LoggedParts(),
        22.5,
    ),
    "refusal of the share": (
        "ValueError: Free memory on device cuda:0 (78.42/79.19 GiB) on startup is less than desired GPU memory utilization (0.995, 78.79"
        " GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        LoggedParts(total=79.19, free=78.42, utilization=0.995, requested=78.79),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_the_sizes_of_a_log(name):
    text, parts, kv_gib = LOGS[name]
    assert read_parts(text) == parts
    log = read_log(text)
    assert log.memory_bytes == (None if kv_gib is None else int(kv_gib * GIB))
    assert log.has_kv_cache == (kv_gib is not None)


@pytest.mark.parametrize("name", ["0.6", "0.10.2", "0.28"])
def test_the_parts_of_a_whole_log_leave_its_kv_cache(name):
    """They are rounded to 0.01 GiB each, up to four of them."""
    text, parts, kv_gib = LOGS[name]
    assert parts.left() == pytest.approx(kv_gib, abs=0.03)


def test_the_blocks_of_a_refusal_are_those_of_the_pool():
    log = read_log("ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (856). Each decode sequence")
    assert log.num_blocks == 856


def launch(line: str = "llama-3.1-8b --max-model-len 8192"):
    return started(parse_serve(f"vllm serve {line}", version("0.16")), "h100-80gb").launch


def test_parts_replace_the_computed_ones_where_a_log_has_no_kv_cache():
    before = capacity(launch()).stage
    log = read_log("Model loading took 16.99 GiB memory and 3 seconds")
    after = capacity(corrected(launch(), log)).stage
    assert before.kv_cache.likely - after.kv_cache.likely == round(16.99 * GIB) - before.weights.likely
    assert after.weights == (round(16.99 * GIB),) * 3 and after.activations == before.activations
    # Only the weights are known: the interval gets narrower, and no point.
    assert 0 < after.kv_cache.high - after.kv_cache.low < before.kv_cache.high - before.kv_cache.low


def test_a_kv_cache_in_a_log_leaves_no_interval_and_moves_with_a_change():
    log = read_log(LOGS["0.6"][0])
    found = corrected(launch(), log)
    assert capacity(found).stage.kv_cache == (int(54.91 * GIB),) * 3
    assert [name for name, _ in found.corrections] == ["kv_cache"]
    more = capacity(replace(found, gpu_memory_utilization=0.95)).stage.kv_cache
    assert more.low == more.high == more.likely
    assert more.likely - capacity(found).stage.kv_cache.likely == pytest.approx(0.05 * found.gpu.memory_bytes, abs=1)


def test_the_table_and_the_data_have_both_sizes(tmp_path, capsys):
    """What is computed, and what follows with the logged parts in their place; the answer is the second."""
    file, log = tmp_path / "plan.json", "Model loading took 16.99 GiB memory and 3 seconds"
    line = ["--gpu", "h100-80gb", "--vllm", "0.16", "--serve", "vllm serve llama-3.1-8b --max-model-len 8192"]
    sizes = {}
    for name, more in (("computed", []), ("logged", ["--startup-log", log])):
        assert status(["plan", *line, *more, "--json", str(file)]) == DONE
        sizes[name] = json.loads(file.read_text())["memory"], capsys.readouterr().out
    (computed, _), (logged, text) = sizes["computed"], sizes["logged"]
    assert logged["weight_bytes"] == computed["weight_bytes"] and logged["logged_gib"]["weights"] == 16.99
    assert logged["kv_cache_bytes"] - computed["kv_cache_bytes"] == logged["correction_bytes"] < 0
    low, high = logged["intervals"]["kv_cache"]
    assert low < logged["kv_cache_bytes"] < high < computed["intervals"]["kv_cache"][1]
    rows = dict(re.findall(r"^(KV cache[a-z ]*?)  +(\d+\.\d\d)", text, re.MULTILINE))
    assert [round(float(each), 2) for each in rows.values()] == [
        round(each["kv_cache_bytes"] / GIB, 2) for each in (computed, logged)
    ]
