"""Number formats that a card does not have, by the decisions of vLLM's own checks."""

from __future__ import annotations

import pytest

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec.startup.capacity import capacity, stage_memories
from fragmeter.sim.types.errors import NotSimulated


def answer(line: str, card: str, release: tuple[int, int] | None = None):
    found = started(parse_serve(f"vllm serve {line} --max-model-len 2048", release), card)
    return found, found.refusal()


@pytest.mark.parametrize(
    ("line", "card", "minor", "said"),
    [
        ("qwen2.5-1.5b --dtype bfloat16", "t4", 33, "Bfloat16 is only supported"),
        ("qwen2.5-1.5b --dtype half", "t4", 33, None),
        ("qwen2.5-1.5b", "t4", 33, None),
        ("gpt-oss-20b -tp 4", "t4", 33, "Minimum capability: 80. Current capability: 75."),
        ("qwen2.5-1.5b -q awq", "v100-32gb", 18, "Minimum capability: 75. Current capability: 70."),
        ("qwen2.5-1.5b -q gptq", "v100-32gb", 18, None),
        ("qwen2.5-1.5b -q gptq_marlin", "t4", 13, "Minimum capability: 80."),
        ("qwen2.5-1.5b -q gptq_marlin", "t4", 14, None),
        ("qwen2.5-1.5b -q fp8", "t4", 13, "The quantization method fp8 is not supported for the current GPU. Minimum capability: 80."),
        ("qwen2.5-1.5b -q fp8", "t4", 14, None),
        ("qwen2.5-1.5b -q fp8", "v100-32gb", 18, "Minimum capability: 75."),
        ("qwen2.5-1.5b -q modelopt", "a100-80gb", 26, "method modelopt is not supported for the current GPU. Minimum capability: 89."),
        ("qwen2.5-1.5b -q modelopt", "a100-80gb", 27, None),
        # Wheels of CUDA 13 have no code for Volta.
        ("qwen2.5-1.5b", "v100-32gb", 19, None),
        ("qwen2.5-1.5b", "v100-32gb", 20, "no kernel image is available"),
        ("gemma-3-27b --dtype float16", "h100-80gb", 33, "'gemma3' does not support float16"),
    ],
)  # fmt: skip
def test_a_format_that_the_card_does_not_have(line, card, minor, said):
    _, refused = answer(line, card, (0, minor))
    if said is None:
        assert refused is None
    else:
        assert refused.kind == "format" and said in refused.text


def test_no_remedy_takes_a_format_that_the_card_does_not_have():
    found, refused = answer("qwen2.5-14b", "v100-16gb", (0, 18))
    assert refused.kind == "weights"
    assert "--quantization" not in [each.flag for each in remedies(found.launch)]
    found, _ = answer("qwen2.5-1.5b --dtype bfloat16", "t4")
    assert [(each.flag, each.value) for each in remedies(found.launch)] == [("--dtype", "auto")]


def test_what_would_have_32_bits_is_not_counted():
    with pytest.raises(NotSimulated, match="float32"):
        answer("gemma-3-1b", "t4")


@pytest.mark.parametrize(
    ("model", "last"),
    [("gpt-oss-20b", 9), ("qwen3.6-27b", 16), ("gemma-4-31b", 18), ("deepseek-v3.2", 10), ("qwen3-vl-8b", 10)],
)
def test_a_release_without_the_model(model, last):
    """By the registries in the wheels."""
    _, before = answer(f"{model} -tp 8", "h200", (0, last))
    assert before.kind == "model"
    _, since = answer(f"{model} -tp 8", "h200", (0, last + 1))
    assert since is None or since.kind != "model"


def test_a_kv_cache_in_nvfp4_has_nine_sixteenths_of_a_byte_a_number():
    line = "vllm serve qwen3-8b --max-model-len 8192 --max-num-batched-tokens 4096"
    found, plain = (started(parse_serve(f"{line} --kv-cache-dtype {form}"), "b200").launch for form in ("nvfp4", "fp8"))
    # 36 layers of 8 heads with 64 + 8 bytes of K and as many of V; 32 heads write 128 numbers of a token in 8 bits.
    assert stage_memories(found)[0].block_bytes == 16 * 36 * 8 * 2 * (64 + 8)
    outputs = 36 * 4096 * 32 * 128
    weights = [stage_memories(each)[0].weights.likely for each in (found, plain)]
    assert weights[0] - weights[1] == outputs
    # Kernels of FlashAttention 2 allocate none.
    others = [started(parse_serve(f"{line} --kv-cache-dtype {form}"), "rtx-5090").launch for form in ("nvfp4", "fp8")]
    assert stage_memories(others[0])[0].weights == stage_memories(others[1])[0].weights
    # A hybrid has blocks as large as a state, of more tokens.
    hybrid, wide = (
        started(parse_serve(f"vllm serve qwen3.5-35b-a3b --kv-cache-dtype {form}"), "b200").launch
        for form in ("nvfp4", "fp8")
    )
    assert hybrid.block_tokens == pytest.approx(wide.block_tokens * 16 / 9, rel=0.05)


@pytest.mark.parametrize(
    ("card", "model", "minor", "said"),
    [
        ("b200", "qwen3-8b", 19, "argument --kv-cache-dtype: invalid choice: 'nvfp4'"),
        ("b200", "qwen3-8b", 20, "nvfp4 KV cache is not yet supported"),
        ("b200", "qwen3-8b", 21, None),
        ("h100-80gb", "qwen3-8b", 28, "--kv-cache-dtype nvfp4 requires sm100f"),
        ("h100-80gb", "qwen3-8b", 31, "No valid attention backend found"),
        ("h100-80gb", "qwen3-8b", 32, None),
        ("h100-80gb", "gpt-oss-20b", 33, "No valid attention backend found"),
        ("b200", "deepseek-v3", 33, "No valid attention backend found"),
    ],
)
def test_releases_and_cards_with_kernels_for_nvfp4(card, model, minor, said):
    line = f"vllm serve {model} --kv-cache-dtype nvfp4 --max-model-len 4096 -tp 8"
    found = started(parse_serve(line, (0, minor)), card)
    refused = found.refusal()
    if said is None:
        assert refused is None
        assert found.settings().num_gpu_blocks_override == capacity(found.launch).num_blocks
        with pytest.raises(NotSimulated, match="nvfp4"):
            found.require_simulated()
    else:
        assert refused.kind == "format" and refused.text.startswith(said)
        others = {each.flag: each.value for each in remedies(found.launch)}
        # Of a model with latent vectors 16 cards are too few in 16 bits, and eight have room for none.
        assert others.get("--kv-cache-dtype") == "fp8"
