"""The limits of ``vllm-v1`` where the user names none: those of ``vllm serve``."""

from __future__ import annotations

import pytest

from fragmeter.sim import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.types.errors import SettingError


def limits(card: str, **given: int) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) of a replica."""
    found = build(settings(policy="vllm-v1", model="llama-3.1-8b", gpu=card, **given)).policy.limits
    return found.max_num_seqs, found.max_num_batched_tokens


@pytest.mark.parametrize(
    ("card", "expected"),
    [("a100-40gb", (256, 2048)), ("a100-80gb", (256, 2048)), ("h100-80gb", (1024, 8192)), ("h200", (1024, 8192))],
)
def test_they_follow_the_memory_of_the_gpu(card, expected):
    assert limits(card) == expected


def test_one_that_is_given_bounds_the_other():
    assert limits("h100-80gb", max_num_batched_tokens=512) == (512, 512)
    assert limits("h100-80gb", max_num_seqs=2, max_model_len=1000) == (2, 2000)
    assert limits("h100-80gb", max_num_seqs=2000) == (2000, 8192)


def test_another_policy_keeps_its_own():
    found = build(settings(policy="sarathi", model="llama-3.1-8b", gpu="h100-80gb")).policy.limits
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (128, 512)


def test_run_json_says_where_each_value_comes_from():
    server = "default of vllm serve 0.33"
    chosen = settings(policy="vllm-v1", model="llama-3.1-8b", gpu="h200", max_num_seqs=8, watermark=0.1)
    found = build(chosen).describe()["sources"]
    assert {name for name, source in found.items() if source == "given"} == {"max_num_seqs", "watermark"}
    assert found["max_num_batched_tokens"] == found["enforce_eager"] == found["async_scheduling"] == server
    assert found["num_gpu_blocks"] == "computed from the GPU memory as by vllm serve 0.33"
    assert found["max_model_len"] == "model llama-3.1-8b"
    paper = build(settings(policy="vllm-sosp23", num_gpu_blocks_override=100)).describe()["sources"]
    assert paper["num_gpu_blocks"] == "given" and paper["max_num_seqs"] == "default of the policy"
    assert "async_scheduling" not in paper


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-27b", "nemotron-h-8b"])
def test_the_pool_is_the_one_that_plan_computes(name):
    """And a share of the memory that holds no sequence of the model's length is refused, as vLLM does not start."""
    chosen = settings(policy="vllm-v1", model=name, gpu="h100-80gb", max_model_len=8192)
    launch = Launch(
        model=model(name),
        gpu=gpu("h100-80gb"),
        max_model_len=8192,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    built = build(chosen)
    assert built.num_blocks == capacity(launch).num_blocks and built.block_size == launch.block_tokens
    assert built.describe()["sources"]["num_gpu_blocks"] == "computed from the GPU memory as by vllm serve 0.33"
    with pytest.raises(SettingError, match="max_model_len = 131072: the KV cache holds a sequence of"):
        build(settings(policy="vllm-v1", model="llama-3.1-8b", gpu="h100-80gb", gpu_memory_utilization=0.3))


@pytest.mark.parametrize("name", ["llama-3.1-70b", "glm-5.3-flash"])
def test_weights_that_leave_no_pool_ask_for_more_gpus(name):
    """Not for a shorter sequence, which would not help."""
    with pytest.raises(SettingError, match=f"tensor_parallel_size = 1: {name} leaves no KV blocks on h200; use more"):
        build(settings(policy="vllm-v1", model=name, gpu="h200", gpu_memory_utilization=0.8))
