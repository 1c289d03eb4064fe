"""Kernels of linear layers and experts beside the choices of vLLM's own modules, release by release (``tests/real_vllm/kernels.py``), and
beside the kernels that published tables of vLLM 0.24 name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from fragmeter.sim.spec import gpu, gpu_names, model, model_names
from fragmeter.sim.spec.deployment import ExpertRanks
from fragmeter.sim.spec.kernels import (
    EXPERTS_VARIABLES,
    MOE_BACKEND,
    MXFP4_V4,
    NAMED_EXPERTS,
    ExpertsNeed,
    chosen_experts,
    chosen_linear,
    experts_name,
    experts_need,
    scaled_form,
)
from fragmeter.sim.spec.matrix import QUANTIZATIONS

FACTS = json.loads((Path(__file__).parents[2] / "data" / "kernel_choices.json").read_text("utf-8"))
ASKED = json.loads((Path(__file__).parents[2] / "data" / "kernels_asked.json").read_text("utf-8"))
#: ``kernel_source`` of aiconfigurator-core 0.12.0's tables of vLLM 0.24, measured on each card, by compute capability.
TABLES = {
    90: {
        "16": "TRITON", "fp8-tensor": "FLASHINFER_CUTLASS", "fp8-block": "TRITON", "w4a16": "MARLIN", "mxfp4": "TRITON",
        "fp8-block ep": "FLASHINFER_CUTLASS",
    },
    89: {"16": "TRITON", "fp8-tensor": "TRITON", "fp8-block": "TRITON", "w4a16": "MARLIN", "mxfp4": "MARLIN"},
    100: {
        "16": "FLASHINFER_TRTLLM", "fp8-tensor": "FLASHINFER_TRTLLM", "fp8-block": "FLASHINFER_TRTLLM", "w4a16": "MARLIN",
        "nvfp4": "FLASHINFER_TRTLLM", "mxfp4": "FLASHINFER_TRTLLM_MXFP4_BF16",
    },
    120: {"16": "FLASHINFER_CUTLASS", "fp8-tensor": "FLASHINFER_CUTLASS", "w4a16": "MARLIN", "nvfp4": "FLASHINFER_CUTLASS", "mxfp4": "MARLIN"},
}  # fmt: skip
GEMM_TABLES = {
    (89, "fp8"): "CUTLASS", (90, "fp8"): "CUTLASS", (100, "fp8"): "CUTLASS", (120, "fp8"): "CUTLASS", (89, "fp8-block"): "TRITON",
    (100, "fp8-block"): "DEEPGEMM", (100, "nvfp4"): "FLASHINFER_CUTEDSL", (120, "nvfp4"): "FLASHINFER_CUTLASS",
}  # fmt: skip


def own_choice(key: str, minor: int) -> str:
    """Ours, of a case of the facts."""
    capability, form, size, *asked = key.split()
    if "x" in size:
        return chosen_linear(int(capability), form, minor, *map(int, size.split("x"))) or ""
    need = ExpertsNeed(int(capability), None if form == "16" else form, size != "tp", size == "dp-ep")
    return chosen_experts(need, minor, dict(each.split("=") for each in asked)) or ""


def choices() -> Iterator[tuple[str, int, str]]:
    """All choices of vLLM."""
    for key, by_release in FACTS["choices"].items():
        chosen = ""
        for minor in FACTS["releases"]:
            chosen = by_release.get(str(minor), chosen)
            yield key, minor, chosen


def test_choices_are_those_of_vllm():
    compared = list(choices())
    different = [
        (key, minor, found, chosen) for key, minor, chosen in compared if (found := own_choice(key, minor)) != chosen
    ]
    # No wheel of 0.21 is on the index.
    assert FACTS["releases"] == [20, *range(22, 34)] and len(compared) > 8000
    assert different == []


@pytest.mark.slow
def test_choices_that_a_user_asks_for_are_those_of_vllm():
    """Every case, release and wish: those that are not stored change no choice."""
    default = {(key, minor): chosen for key, minor, chosen in choices()}
    plain = [key for key in FACTS["choices"] if "x" not in key.split()[2]]
    wishes = sorted({" ".join(key.split()[3:]) for key in ASKED["choices"]})
    assert {word.partition("=")[0] for wish in wishes for word in wish.split()} == {MOE_BACKEND, *EXPERTS_VARIABLES}
    assert {wish.partition("=")[2] for wish in wishes if wish.startswith(MOE_BACKEND)} == NAMED_EXPERTS.keys()
    different = []
    for key, wish in product(plain, wishes):
        by_release = ASKED["choices"].get(f"{key} {wish}", {})
        chosen: str | None = None
        for minor in ASKED["releases"]:
            chosen = by_release.get(str(minor), chosen)
            expected = default[key, minor] if chosen is None else chosen
            if (found := own_choice(f"{key} {wish}", minor)) != expected:
                different.append((key, wish, minor, found, expected))
    assert different == []
    assert len(ASKED["releases"]) * len(plain) * len(wishes) > 50_000


def test_the_flag_asks_for_the_kernels_that_a_variable_asks_for():
    """A serve line with variables becomes a setting by the flag's name."""
    default = {(key, minor): chosen for key, minor, chosen in choices()}
    compared = 0
    for key, by_release in ASKED["choices"].items():
        plain = " ".join(key.split()[:3])
        for minor, kernel in by_release.items():
            if kernel and kernel != default[plain, int(minor)]:
                assert own_choice(f"{plain} {MOE_BACKEND}={experts_name(kernel)}", int(minor)) == kernel
                compared += 1
    assert compared > 500


@pytest.mark.parametrize(
    ("capability", "minor", "expected", "marlin", "trtllm"),
    [
        (80, 33, "MARLIN", "MARLIN", None), (90, 27, "MARLIN", "MARLIN", None), (90, 33, "HUMMING", "MARLIN", None),
        (100, 24, "FLASHINFER_TRTLLM_MXFP4_MXFP8", "MARLIN", "FLASHINFER_TRTLLM_MXFP4_BF16"),
        (103, 33, "FLASHINFER_TRTLLM_MXFP4_MXFP8", "MARLIN", "FLASHINFER_TRTLLM_MXFP4_BF16"),
        (120, 24, "DEEPGEMM_MXFP4", "MARLIN", None), (121, 33, "DEEPGEMM_MXFP4", "MARLIN", None),
    ],
)  # fmt: skip
def test_experts_of_deepseek_v4_have_a_list_of_their_own(capability, minor, expected, marlin, trtllm):
    """As ``select_deepseek_v4_mxfp4_moe_backend`` of the wheels of 0.24, 0.27 and 0.33 chose, run as on these cards; it reads no variables."""
    need = ExpertsNeed(capability, MXFP4_V4)
    asked = [{}, {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "1"}, {"VLLM_MXFP4_USE_MARLIN": "1"}]
    assert [chosen_experts(need, minor, wish) for wish in asked] == [expected] * 3
    assert chosen_experts(need, minor, {MOE_BACKEND: "marlin"}) == marlin
    assert chosen_experts(need, minor, {MOE_BACKEND: "flashinfer_trtllm"}) == trtllm
    shape = model("deepseek-ai/DeepSeek-V4-Pro")
    assert experts_need(shape, gpu("b200"), shape.quantization, ExpertRanks()) == ExpertsNeed(100, MXFP4_V4)


def test_measured_tables_ran_the_kernels_that_the_rule_has_for_their_release():
    found = {
        capability: {
            form: chosen_experts(ExpertsNeed(capability, None if form == "16" else form.split()[0], "ep" in form), 24)
            for form in forms
        }
        for capability, forms in TABLES.items()
    }
    assert found == TABLES
    assert {key: chosen_linear(*key, 24) for key in GEMM_TABLES} == GEMM_TABLES


def test_experts_of_every_preset_on_every_card_are_a_case_that_was_compared():
    known = {tuple(key.split()[:2]) for key in FACTS["choices"] if "x" not in key.split()[2]}
    compared, left_out = 0, set()
    for name in model_names():
        shape = model(name)
        for card in gpu_names():
            for quantization in {shape.quantization, *QUANTIZATIONS}:
                need = experts_need(shape, gpu(card), quantization, ExpertRanks())
                if need is None:
                    continue
                form = "16" if need.form is None else "w4a16" if need.form == "gptq" else need.form
                compared += (found := (str(need.capability), form) in known)
                if not found:
                    left_out.add((need.capability, form))
    # Cards before compute capability 7.5, which no wheel since 0.20 has code for.
    assert {capability for capability, _ in left_out} <= {70} and compared > 1000


@pytest.mark.parametrize(
    ("name", "quantization", "expected"),
    [("qwen3-14b", "fp8", "fp8-online"), ("deepseek-v3", None, "fp8-block"), ("qwen3-14b", "awq", "awq"), ("qwen3-14b", None, None)],
)  # fmt: skip
def test_fp8_has_the_scales_of_its_checkpoint(name, quantization, expected):
    shape = model(name)
    form = quantization or shape.quantization
    assert scaled_form(shape, form, form) == expected
