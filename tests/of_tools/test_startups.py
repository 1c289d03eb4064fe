"""The public start-ups of tools/startups.json: lines that are read, cards that exist, figures that agree with each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fragmeter.experiments.vllm_serve.line import ServeLine, parse_serve, version
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.spec.releases import release
from fragmeter.sim.spec.startup.capacity import stage_memories

GIB = 1 << 30
CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "tools" / "startups.json").read_text("utf-8"))[
    "cases"
]
LINES = [case for case in CASES if "serve" in case]
DATED = [case for case in LINES if {"vllm", "log_lines_of"} & set(case)]
KEYS = {"source", "gpu", "card", "vllm", "log_lines_of", "serve", "checkpoint", "like", "logged", "note"}
SIZES = {
    "total_gib",
    "free_gib",
    "weights_gib",
    "consumed_gib",
    "peak_activation_gib",
    "non_torch_gib",
    "graphs_estimated_gib",
    "graphs_captured_gib",
    "kv_gib",
}
COUNTS = {"kv_tokens", "blocks"}
DIFFERENCES = {"non_torch_gib", "graphs_captured_gib"}  # of free memory before and after, so that they can be negative
LACKING = "kv_gib"  # of a server that is refused: it can be negative as well
# Models of the lines of which neither a preset nor a stored file is ours: their memory cannot be computed by name.
UNKNOWN = {
    "Inferact/Qwen3.8-2.4T-A95B-NVFP4",
    "Lorbus/Qwen3.6-27B-int4-AutoRound",
    "Qwen/Qwen2-7B-Instruct",
    "Qwen/Qwen2.5-72B-Instruct-AWQ",
    "Qwen/Qwen2.5-7B-Instruct-AWQ",
    "Qwen/Qwen3-14B-AWQ",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
    "Qwen/Qwen3-32B-AWQ",
    "Qwen/Qwen3-8B-AWQ",
    "Qwen/Qwen3-8B-FP8",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
    "Qwen/Qwen3-VL-30B-A3B-Instruct-FP8",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.6-27B-FP8",
    "Qwen/Qwen3.8-27B",
    "Qwen/Qwen3.8-27B-FP8",
    "RedHatAI/Qwen3.8-27B-INT4",
    "TechxGenus/Meta-Llama-3-70B-Instruct-AWQ",
    "cyankiwi/Kimi-Linear-48B-A3B-Instruct-AWQ-4bit",
    "cyankiwi/MiniMax-M2.7-AWQ-4bit",
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic",
    "llava-hf/llava-v1.6-mistral-7b-hf",
    "microsoft/phi-2",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    "moonshotai/Kimi-VL-A3B-Instruct",
    "nvidia/Llama-3.3-70B-Instruct-FP8",
    "nvidia/Qwen3.8-27B-NVFP4",
    "zai-org/GLM-4.7-FP8",
}
# Weights outside of the interval: drafts that are weighed in 4 bits, states of Zamba 2 that are kept twice, and encoders that are not counted.
OUTSIDE = {
    "nvidia/Qwen3.6-27B-NVFP4",
    "Zyphra/Zamba2-2.7B",
    "RedHatAI/gemma-4-31B-it-FP8-block",
    "google/gemma-3-27b-it",
    "RedHatAI/Mistral-Small-3.1-24B-Instruct-2503-quantized.w8a8",
}


def name(case: dict[str, Any]) -> str:
    return f"{CASES.index(case)}-{case['source'][:40]}"


def line(case: dict[str, Any]) -> ServeLine:
    stated = case.get("vllm") or case.get("log_lines_of")
    return parse_serve(case["serve"], version(stated) if stated else None)


def share(case: dict[str, Any]) -> float:
    parsed = line(case)
    return float(parsed.flags.get("gpu-memory-utilization") or release(parsed.version).gpu_memory_utilization)


def shape(case: dict[str, Any]) -> str:
    return case["like"]["model"] if "like" in case else line(case).model


def quantized(case: dict[str, Any]) -> list[str]:
    quantization = case.get("like", {}).get("quantization")
    return ["--quantization", quantization] if quantization else []


def weighed(case: dict[str, Any]) -> bool:
    """Whether weights are logged of a checkpoint and a card that we have."""
    named = line(case).model
    known = "like" in case or named not in UNKNOWN and "checkpoint" not in case
    return known and named not in OUTSIDE and bool(case["gpu"]) and "weights_gib" in case["logged"]


def accounted(case: dict[str, Any]) -> bool:
    """Whether the log states every part that KV cache and requested memory differ by."""
    logged = case["logged"]
    outside = "consumed_gib" in logged or {"weights_gib", "non_torch_gib"} <= set(logged)
    return outside and {"total_gib", "kv_gib", "peak_activation_gib"} <= set(logged)


def test_the_cases_are_many_and_of_many_cards() -> None:
    assert len(DATED) >= 60
    assert len({case["gpu"] or case["card"]["name"] for case in DATED}) >= 12
    assert sum(accounted(case) for case in DATED) >= 20


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_case_has_a_source_a_card_and_a_figure(case: dict[str, Any]) -> None:
    assert set(case) <= KEYS
    assert case["source"] and case["card"]["name"] and case["logged"]
    assert "serve" in case or case["note"]
    logged = case["logged"]
    assert set(logged) <= SIZES | COUNTS | {"concurrency", "refused"}
    signed = DIFFERENCES | ({LACKING} if "refused" in logged else set())
    assert all(0 < logged[key] < 300 for key in SIZES & set(logged) - signed)
    assert all(isinstance(logged[key], int) and logged[key] > 0 for key in COUNTS & set(logged))
    if "concurrency" in logged:
        length, concurrency = logged["concurrency"]
        assert isinstance(length, int) and concurrency > 0


@pytest.mark.parametrize("case", LINES, ids=name)
def test_a_line_is_read_in_its_release(case: dict[str, Any]) -> None:
    parsed = line(case)
    assert "vllm" not in case or not parsed.of_other_releases
    if "like" in case or parsed.model not in UNKNOWN:
        assert model(shape(case)).num_layers > 0


@pytest.mark.parametrize("case", [case for case in DATED if weighed(case)], ids=name)
def test_the_weights_are_those_of_the_shape(case: dict[str, Any]) -> None:
    parsed = parse_serve(" ".join([case["serve"], *quantized(case)]), line(case).version)
    weights = [stage.weights for stage in stage_memories(started(parsed, case["gpu"], shape(case)).launch)]
    logged = case["logged"]["weights_gib"]
    assert min(size.low for size in weights) / GIB - 0.005 <= logged <= max(size.high for size in weights) / GIB + 0.005


@pytest.mark.parametrize("case", [case for case in CASES if case["gpu"]], ids=name)
def test_a_card_is_a_preset_of_the_logged_size(case: dict[str, Any]) -> None:
    card = gpu(case["gpu"])
    total = card.memory_bytes / GIB
    # What is left of a unified memory differs between systems.
    assert case["logged"].get("total_gib", total) == pytest.approx(total, rel=0.02 if card.unified_memory else 0.005)


@pytest.mark.parametrize("case", [case for case in DATED if accounted(case)], ids=name)
def test_the_parts_add_up_to_the_requested_memory(case: dict[str, Any]) -> None:
    logged = case["logged"]
    outside = logged.get("consumed_gib") or logged["weights_gib"] + logged["non_torch_gib"]
    parts = outside + logged["peak_activation_gib"] + logged["kv_gib"]
    # Where all that is consumed is logged, the peak has the estimate of graphs in it.
    parts += 0 if "consumed_gib" in logged else logged.get("graphs_estimated_gib", 0)
    assert parts == pytest.approx(share(case) * logged["total_gib"], abs=0.03)


@pytest.mark.parametrize("case", [case for case in LINES if "concurrency" in case["logged"]], ids=name)
def test_the_concurrency_is_of_a_length_of_the_line(case: dict[str, Any]) -> None:
    length, _ = case["logged"]["concurrency"]
    assert int(line(case).flags.get("max-model-len", length)) == length
