"""Quantised checkpoints that tensor-parallel ranks cannot divide, by the rules of vLLM's ``validate_fp8_block_shape`` and its siblings."""

from __future__ import annotations

import pytest

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import started


def answer(line: str, minor: int = 33, card: str = "h200"):
    found = started(parse_serve(f"vllm serve {line} --max-model-len 4096", (0, minor)), card)
    return found, found.refusal()


@pytest.mark.parametrize(
    ("line", "minor", "said"),
    [
        # 1,536 / 8 = 192: no multiple of 128, but of 64.
        ("Qwen/Qwen3-235B-A22B-FP8 -tp 8", 28, "The output_size of gate's and up's weight = 192 is not divisible by"),
        ("Qwen/Qwen3-235B-A22B-FP8 -tp 8", 33, None),
        ("Qwen/Qwen3-235B-A22B-FP8 -tp 8 --enable-expert-parallel", 28, None),
        ("Qwen/Qwen3-235B-A22B-FP8 -tp 4", 28, None),
        # 18,432 / 32 = 576 of the dense layers.
        ("deepseek-ai/DeepSeek-V3 -tp 32", 33, "Weight input_size_per_partition = 576 is not divisible by"),
        ("deepseek-ai/DeepSeek-V3 -tp 16", 33, None),
        # 25,600 / 8 = 3,200 is 25 blocks; 16 bits and fp8 without blocks divide.
        ("Qwen/Qwen3-32B-FP8 -tp 8", 33, None),
        ("qwen3-235b-a22b -q fp8 -tp 8", 28, None),
        # 13,824 / 8 = 1,728 is 13.5 groups.
        ("qwen2.5-14b -q awq -tp 8", 33, "The input size is not aligned with the quantized weight shape."),
        ("qwen2.5-14b -q awq -tp 4", 33, None),
        ("qwen2.5-14b -tp 8", 33, None),
    ],
)
def test_blocks_and_groups_that_ranks_do_not_divide(line, minor, said):
    _, refused = answer(line, minor)
    if said is None:
        assert refused is None or refused.kind != "parallel"
    else:
        assert refused.kind == "parallel" and refused.text.startswith(said)


def test_the_remedy_has_ranks_that_divide_the_blocks():
    found, refused = answer("Qwen/Qwen3-235B-A22B-FP8 -tp 8", 28)
    assert refused is not None
    ranks = {each.flag: each.value for each in remedies(found.launch)}
    assert ranks["--tensor-parallel-size"] == "2"
    # On 80 GB cards two are too few.
    found, _ = answer("Qwen/Qwen3-235B-A22B-FP8 -tp 8", 28, "h100-80gb")
    assert {each.flag: each.value for each in remedies(found.launch)}["--tensor-parallel-size"] == "4"


@pytest.mark.parametrize(
    ("flags", "split"), [("-q gptq -tp 8", True), ("-q gptq -tp 4", False), ("-q awq -tp 4", False)]
)
def test_split_groups_of_gptq_are_named_as_kernels_decide(flags, split):
    # 13,824 / 8 = 1,728 is 13.5 groups of 128.
    found, refused = answer(f"qwen2.5-14b {flags}")
    assert refused is None
    assert any("1728 inputs of a rank in groups of 128" in text for text in found.line.not_simulated) == split


_NO_KERNEL, _UNALIGNED = (
    "Failed to find a kernel that can implement the WNA16 linear layer.",
    "The input size is not aligned",
)


@pytest.mark.parametrize(
    ("flags", "minor", "card", "said"),
    [
        # Up to 0.22 Exllama's kernels take split groups in float16, Machete's on Hopper; Humming's take them since.
        ("-q gptq_marlin -tp 8 --dtype bfloat16", 22, "a100-80gb", _NO_KERNEL),
        ("-q gptq_marlin -tp 8 --dtype bfloat16", 23, "a100-80gb", None),
        ("-q gptq_marlin -tp 8 --dtype half", 22, "a100-80gb", None),
        ("-q gptq_marlin -tp 8", 22, "a100-80gb", None),
        ("-q gptq_marlin -tp 4 --dtype bfloat16", 22, "a100-80gb", None),
        ("-q gptq_marlin -tp 8 --dtype bfloat16", 22, "h100-80gb", None),
        ("-q gptq_marlin -tp 8 --dtype bfloat16", 22, "rtx-5090", _NO_KERNEL),
        # A method of its own, which the name asks for, or a card without Marlin's kernels.
        ("-q gptq -tp 8 --dtype half", 20, "a100-80gb", _UNALIGNED),
        ("-q gptq -tp 8 --dtype half", 22, "a100-80gb", None),
        ("-q gptq -tp 8", 18, "v100-32gb", _UNALIGNED),
        ("-q gptq -tp 4", 18, "v100-32gb", None),
    ],
)
def test_split_groups_of_gptq_that_no_kernel_takes(flags, minor, card, said):
    _, refused = answer(f"qwen2.5-14b {flags}", minor, card)
    if said is None:
        assert refused is None or refused.kind != "parallel"
    else:
        assert refused.kind == "parallel" and refused.text.startswith(said)
