"""Number formats that a card does not have, by the decisions of vLLM's own checks."""

from __future__ import annotations

import pytest

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec.startup.activations import phases
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


@pytest.mark.slow
def test_no_remedy_takes_a_format_that_the_card_does_not_have():
    found, refused = answer("qwen2.5-14b", "v100-16gb", (0, 18))
    assert refused.kind == "weights"
    assert "--quantization" not in [each.flag for each in remedies(found.launch)]
    found, _ = answer("qwen2.5-1.5b --dtype bfloat16", "t4")
    assert [(each.flag, each.value) for each in remedies(found.launch)] == [("--dtype", "auto")]


def test_a_model_in_float32_has_four_bytes_an_element():
    """Gemma 3 takes no float16, and a T4 has no bfloat16."""
    line = "vllm serve gemma-3-1b --max-model-len 2048 --max-num-seqs 64"
    whole, named, half = (
        started(parse_serve(f"{line}{more}"), card)
        for more, card in (("", "t4"), (" --dtype float32", "rtx-4090"), ("", "rtx-4090"))
    )
    memory, wide, narrow = (stage_memories(each.launch)[0] for each in (whole, named, half))
    assert whole.refusal() is None and named.refusal() is None
    assert memory.block_bytes == wide.block_bytes == 2 * narrow.block_bytes
    # Ends of segments in multiples of 2 MiB do not double.
    assert wide.weights.likely == pytest.approx(2 * narrow.weights.likely, rel=0.02)
    for each in (whole, named):
        with pytest.raises(NotSimulated, match="float32"):
            each.require_simulated()
    # A checkpoint in float32 has 16 bits by default, and so has Gemma on later cards.
    assert half.launch.element_bytes == 2


def test_the_profile_in_float32_by_hand():
    """Llama 3.1 8B with 2,048 tokens: 3.75 hidden states, gate, up and their product, of 4 bytes. A logit has 12 bytes in place of 14, as there is no copy
    in fp32."""
    line = (
        "vllm serve llama-3.1-8b --max-model-len 4096 --max-num-batched-tokens 2048 --max-num-seqs 16 --dtype float32"
    )
    launch = started(parse_serve(line, (0, 20)), "a100-80gb").launch
    found = phases(launch, range(32), last=True)
    assert found.forward == 4 * 2048 * (15 * 4096 // 4 + 3 * 14336)
    rows = 12 * 16 + 4 * 16
    assert found.sampler == rows * 128_256 + 4 * (2048 + 2 * 16) * 4096


@pytest.mark.parametrize(
    ("line", "card", "said"),
    [
        ("gpt-oss-20b --dtype half", "h100-80gb", "torch.float16 is not supported for quantization method mxfp4. Supported dtypes: [torch.bfloat16]"),
        ("gpt-oss-20b --dtype float32", "h100-80gb", "torch.float32 is not supported for quantization method mxfp4."),
        ("gemma-3-1b -q awq", "t4", "torch.float32 is not supported for quantization method awq. Supported dtypes: [torch.float16, torch.bfloat16]"),
        ("gemma-3-1b -q awq", "rtx-4090", None),
        ("qwen3-8b --dtype float32 -q fp8", "h100-80gb", "torch.float32 is not supported for quantization method fp8."),
        ("deepseek-v3 -tp 8 --dtype float32", "h200", "No valid attention backend"),
        ("qwen3-8b --dtype float32 --attention-backend FLASHINFER", "h100-80gb", "FLASHINFER is not valid for this configuration"),
        ("qwen3-8b --dtype float32 --attention-backend TRITON_ATTN", "h100-80gb", None),
    ],
)  # fmt: skip
def test_a_dtype_that_a_method_or_a_backend_does_not_take(line, card, said):
    _, refused = answer(line, card)
    assert refused is None if said is None else refused.kind == "format" and said in refused.text


@pytest.mark.parametrize(("method", "last"), [("awq", 23), ("gptq", 21)])
def test_methods_that_took_float16_alone(method, last):
    """Where a line names them; a checkpoint without a name has Marlin's kernels, which take both."""
    line = f"qwen2.5-1.5b -q {method} --dtype bfloat16"
    _, refused = answer(line, "a100-80gb", (0, last))
    assert (
        refused.text
        == f"torch.bfloat16 is not supported for quantization method {method}. Supported dtypes: [torch.float16]"
    )
    for minor, other in (
        (last + 1, line),
        (last, line.replace(method, f"{method}_marlin")),
        (last, line.replace("bfloat16", "half")),
    ):
        assert answer(other, "a100-80gb", (0, minor))[1] is None


def test_states_and_experts_in_float32_are_not_counted():
    for model in ("qwen3-30b-a3b", "nemotron-h-8b"):
        with pytest.raises(NotSimulated, match="not counted"):
            answer(f"{model} --dtype float32", "h200")


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
        found.require_simulated()
        assert found.settings().kv_cache_dtype == "nvfp4"
    else:
        assert refused.kind == "format" and refused.text.startswith(said)
        others = {each.flag: each.value for each in remedies(found.launch)}
        # Of a model with latent vectors 16 cards are too few in 16 bits, and eight have room for none.
        assert others.get("--kv-cache-dtype") == "fp8"
