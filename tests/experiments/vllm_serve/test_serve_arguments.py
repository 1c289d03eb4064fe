"""Values that vLLM's parser and configuration refuse, by the rules in its wheels."""

from __future__ import annotations

import pytest

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import started


def answer(flags: str, minor: int = 33):
    found = started(parse_serve(f"vllm serve qwen3-8b --max-model-len 32768 {flags}", (0, minor)), "h100-80gb")
    return found, found.refusal()


@pytest.mark.parametrize(
    ("flags", "minor", "said", "remedy"),
    [
        ("--no-enable-chunked-prefill --max-num-batched-tokens 2048", 33, "max_num_batched_tokens (2048) is smaller than max_model_len (32768)",
         ("--max-num-batched-tokens", "32768")),
        ("--no-enable-chunked-prefill --max-num-batched-tokens 2048", 33, "max_num_batched_tokens (2048) is smaller", ("--max-model-len", "2048")),
        ("--no-enable-chunked-prefill", 33, None, None),
        ("--max-num-batched-tokens 2048", 33, None, None),
        ("--max-num-active-seqs 2000", 33, "max_num_active_seqs (2000) cannot be greater than max_num_seqs (1024)", ("--max-num-active-seqs", "1024")),
        ("--max-num-active-seqs 1024", 33, None, None),
        ("--long-prefill-token-threshold 50000", 33, "long_prefill_token_threshold (50000) cannot be greater", ("--long-prefill-token-threshold", "32768")),
        ("--long-prefill-token-threshold 50000", 26, None, None),
        ("--enable-lora --max-lora-rank 24", 33, "argument --max-lora-rank: invalid choice: 24", ("--max-lora-rank", "32")),
        ("--enable-lora --max-lora-rank 1", 10, "argument --max-lora-rank: invalid choice: 1 ", ("--max-lora-rank", "8")),
        ("--enable-lora --max-lora-rank 1", 33, None, None),
        ("--max-lora-rank 24", 33, None, None),
        ("--enable-lora --max-loras 4 --max-cpu-loras 2", 33, "max_cpu_loras (2) must be >= max_loras (4).", ("--max-cpu-loras", "4")),
        ("--block-size 7", 33, "No valid attention backend found", ("--block-size", "16")),
        ("--block-size 48", 17, "argument --block-size: invalid choice: 48", ("--block-size", "16")),
        ("--block-size 48", 33, None, None),
        ("--cudagraph-capture-sizes 1 2 9000 8 --max-cudagraph-capture-size 64", 33,
         "customized max_cudagraph_capture_size(=64) should be consistent with the max value of cudagraph_capture_sizes(=8)",
         ("--max-cudagraph-capture-size", "8")),
        ("--cudagraph-capture-sizes 1 2 9000 8 --max-cudagraph-capture-size 8", 33, None, None),
        ("--cudagraph-capture-sizes 1 2 --max-cudagraph-capture-size 64 --enforce-eager", 33, None, None),
        ("--block-size 256", 11, "argument --block-size: invalid choice: 256", ("--block-size", "16")),
    ],
)  # fmt: skip
def test_values_that_vllm_refuses(flags, minor, said, remedy):
    found, refused = answer(flags, minor)
    if said is None:
        assert refused is None
    else:
        assert refused.kind in ("argument", "batch", "attention") and refused.text.startswith(said)
        assert remedy in [(each.flag, each.value) for each in remedies(found.launch)]
