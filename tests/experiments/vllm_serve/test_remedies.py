"""Single changes with which a line starts, or starts for sure: each is judged as a line of its own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.vllm_serve import checks
from fragmeter.experiments.vllm_serve.line import parse_serve, version
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import started

#: Release, card, line, and changes that are among the remedies.
LINES = [
    ("0.33.0", "l4", "llama-3.1-8b --max-model-len 26000", {"--enforce-eager": "", "--max-model-len": None}),
    ("0.33.0", "h100-80gb", "llama-3.1-8b --num-gpu-blocks-override 500", {"--num-gpu-blocks-override": "8193"}),
    ("0.33.0", "h100-80gb", "llama-3.1-8b --kv-cache-memory-bytes 1G", {"--kv-cache-memory-bytes": "17G"}),
    (
        "0.19.0",
        "h100-80gb",
        "qwen3-32b --kv-cache-memory-bytes 16G --enforce-eager",
        {"--kv-cache-memory-bytes": None, "--max-num-seqs": None},
    ),
    ("0.19.0", "gb10", "Qwen/Qwen3-4B --gpu-memory-utilization 0.15", {"--kv-cache-memory-bytes": "6G"}),
    (
        "0.19.0",
        "rtx-4090",
        "qwen3-8b --max-model-len 28000 --max-num-batched-tokens 16384",
        {"--max-num-batched-tokens": None},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("vllm", "card", "line", "flags"), LINES)
def test_each_remedy_starts_for_sure(vllm, card, line, flags):
    judged = started(parse_serve(f"vllm serve {line}", version(vllm)), card)
    assert judged.outcome().kind != "starts"
    found = {each.flag: each.value for each in remedies(replace(judged.launch, outlook="low"))}
    assert flags.keys() <= found.keys()
    assert all(value is None or found[flag] == value for flag, value in flags.items())
    for flag, value in found.items():
        words = f"{flag} {value}" if flag.startswith("-") else ""
        changed = started(parse_serve(f"vllm serve {line} {words}", version(vllm)), card)
        assert changed.outcome().kind == "starts", words


@pytest.mark.parametrize(
    ("vllm", "outcome"),
    [("0.19.1", "does not start"), ("0.20.0", "does not start"), ("0.20.1", "starts"), ("0.20", "starts")],
)
def test_blocks_of_the_line_replace_the_memory_since_the_second_release_of_0_20(vllm, outcome):
    line = "vllm serve llama-3.1-8b --max-model-len 100000 --gpu-memory-utilization 0.3"
    override = f"{line} --num-gpu-blocks-override 7000"
    assert started(parse_serve(line, version(vllm)), "h100-80gb").outcome().kind == "does not start"
    assert started(parse_serve(override, version(vllm)), "h100-80gb").outcome().kind == outcome
    tagged = f"docker run vllm/vllm-openai:v{vllm} --model {override.removeprefix('vllm serve ')}"
    assert started(parse_serve(tagged), "h100-80gb").outcome().kind == outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "outcome", "starts"),
    [(16_000, "starts", True), (36_000, "depends", None), (100_000, "does not start", False)],
)
def test_data_say_starts_only_of_a_sure_start(length, outcome, starts, capsys):
    line = f"vllm serve llama-3.1-8b --max-model-len {length}"
    assert status(["plan", "--gpu", "rtx-4090", "--json", "-", "--serve", line]) == DONE
    data = json.loads(capsys.readouterr().out)
    assert (data["outcome"], data["starts"]) == (outcome, starts)
    assert (data["remedies"] == []) == (outcome == "starts")


@pytest.mark.slow
def test_changes_are_judged_without_the_search_for_a_length_and_by_the_lines_own_limit(monkeypatch):
    line = "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve llama-3.1-8b --max-model-len 200000"
    found = started(parse_serve(line), "rtx-4090")
    assert "the estimated maximum model length is" in found.refusal().text

    def no_search(launch):
        raise AssertionError

    monkeypatch.setattr(checks, "longest_model_len", no_search)
    flags = {each.flag: each.value for each in remedies(found.launch)}
    assert {"--tensor-parallel-size", "--max-model-len"} <= set(flags)
    # Without the variable no change helps but a length of the model's.
    assert [each.flag for each in remedies(replace(found.launch, allows_long=False))] == ["--max-model-len"]
