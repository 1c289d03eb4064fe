"""The limits of ``vllm-v1`` where the user names none: those of ``vllm serve``."""

from __future__ import annotations

import pytest

from fragmeter.sim import settings
from fragmeter.sim.engine.replica import build


def limits(gpu: str, **given: int) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) of a replica."""
    found = build(settings(policy="vllm-v1", model="llama-3.1-8b", gpu=gpu, **given)).policy.limits
    return found.max_num_seqs, found.max_num_batched_tokens


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [("a100-40gb", (256, 2048)), ("a100-80gb", (256, 2048)), ("h100-80gb", (1024, 8192)), ("h200", (1024, 8192))],
)
def test_they_follow_the_memory_of_the_gpu(gpu, expected):
    assert limits(gpu) == expected


def test_one_that_is_given_bounds_the_other():
    assert limits("h100-80gb", max_num_batched_tokens=512) == (512, 512)
    assert limits("h100-80gb", max_num_seqs=2, max_model_len=1000) == (2, 2000)
    assert limits("h100-80gb", max_num_seqs=2000) == (2000, 8192)


def test_another_policy_keeps_its_own():
    found = build(settings(policy="sarathi", model="llama-3.1-8b", gpu="h100-80gb")).policy.limits
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (128, 512)
