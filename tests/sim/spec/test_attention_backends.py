"""The attention backend beside the choices of vLLM's own functions, release by release (``tests/real_vllm/attention.py``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fragmeter.sim.spec import gpu, gpu_names, model, model_names
from fragmeter.sim.spec.attention_backends import (
    AttentionNeed,
    chosen_attention,
    flash_version,
    named_backend,
    need_of,
)
from fragmeter.sim.types.errors import SettingError

FACTS = json.loads((Path(__file__).parents[2] / "data" / "attention_backends.json").read_text("utf-8"))


def case_of(key: str) -> AttentionNeed:
    """The need that a key of the facts writes."""
    capability, head_dim, heads, kv, *flags = key.split()
    given = {name: name in flags for name in ("latent", "sparse", "sinks", "images")}
    return AttentionNeed(int(capability), int(head_dim), int(heads), kv == "fp8", **given)


def is_served(need: AttentionNeed, minor: int) -> bool:
    """Whether the release serves such models in the V1 engine: gpt-oss came with 0.10, sparse attention with 0.11, without a rotary key
    with 0.30, and its fp8 KV cache has a format of its own that releases before 0.18 do not know as fp8; up to 0.10 fp8 KV caches are V0's.
    """
    if minor < 11 and (need.fp8 or need.sparse):
        return False
    if need.sparse and need.head_dim == 512:
        return minor >= 30
    return minor >= (10 if need.sinks else 18 if need.sparse and need.fp8 else 8)


def choices() -> Iterator[tuple[AttentionNeed, int, str]]:
    """All choices of vLLM."""
    for key, by_release in FACTS["choices"].items():
        need, chosen = case_of(key), ""
        for minor in FACTS["releases"]:
            chosen = by_release.get(str(minor), chosen)
            if is_served(need, minor):
                yield need, minor, chosen


@pytest.mark.slow
def test_choices_are_those_of_vllm():
    compared = list(choices())
    different = [
        (need, minor, found, chosen)
        for need, minor, chosen in compared
        if (found := chosen_attention(need, minor) or "") != chosen
    ]
    assert FACTS["releases"] == list(range(8, 34)) and len(compared) > 7000
    assert different == []


def test_every_preset_on_every_card_is_a_case_that_was_compared():
    known = {case for case, _, _ in choices()}
    compared, left_out = 0, set()
    for name in model_names():
        for card in gpu_names():
            for kv_dtype in ("bf16", "fp8"):
                need = need_of(model(name), gpu(card), kv_dtype)
                if need is None:
                    continue
                heads = ({16} if need.heads <= 16 else {128}) if need.latent else {16, 32, 64}
                found = any(need._replace(heads=each) in known for each in heads)
                compared += found
                if not found:
                    left_out.add(name)
    # Layers with heads of several sizes: Gemma 4 has a rule of its own in vLLM, and MiMo V2 a backend for K and V of different sizes.
    assert left_out == {"gemma-4-26b-a4b", "gemma-4-31b", "mimo-v2-flash"} and compared > 3000


@pytest.mark.parametrize(
    ("card", "minor", "expected"),
    [("a100-80gb", 23, "TRITON_ATTN"), ("a100-80gb", 33, "TRITON_ATTN"), ("h100-80gb", 23, "TRITON_ATTN"),
     ("h100-80gb", 24, "FLASH_ATTN 4"), ("h100-80gb", 33, "TRITON_FLASH_ATTN"), ("b200", 24, "TRITON_ATTN"), ("b200", 33, "TRITON_FLASHINFER")],
)  # fmt: skip
def test_gemma_4_has_one_backend_for_heads_of_two_sizes(card, minor, expected):
    need = need_of(model("gemma-4-31b"), gpu(card))
    assert need is not None and chosen_attention(need, minor) == expected


def test_a_named_backend_replaces_the_choice():
    need = need_of(model("qwen3-14b"), gpu("h100-80gb"))
    assert need is not None
    assert chosen_attention(need, named="FLASH_ATTN") == "FLASH_ATTN 3" and flash_version(need, 33) == 3
    assert chosen_attention(need, named="FLASHINFER") == "FLASHINFER"
    assert named_backend("TRITON_ATTN_VLLM_V1") == "TRITON_ATTN" and named_backend("auto") is None
    with pytest.raises(SettingError, match="one of FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION"):
        named_backend("TURBOQUANT")
