"""The oracle's schedulers, all of them, on what tells one from the other.

A step costs 100 ticks, 10 more a decode and 1 more a prompt token; a block takes 7 ticks to the host and 3 back.
"""

from __future__ import annotations

import pytest

from oracle import POLICIES, SCHEDULERS, Limits, Pool, Request
from oracle.story import finishes, log, serve


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["vllm-v0", "sarathi", "trtllm-max-util", "vllm-v1", "fastgen"])
def test_a_policy_that_keeps_a_block_free_preempts_even_the_sequence_itself(policy, mode):
    """Both blocks are its own and have room for its fourth token. Swapped out it could never come back with a third."""
    pool = Pool(3 if policy == "vllm-v1" else 2, 2, 5)
    outcome, _ = serve(policy, [Request(0, 3, 2)], pool, Limits(max_model_len=100, preemption_mode=mode))
    itself = ["103+0 | preempt 0 | free 4", "103+104 | run 0 | prefill 0:4 | live 4"]
    goes_on = ["103+110 | run 0 | decode 0 | live 4"]
    expected = itself if policy in ("vllm-v0", "sarathi") else goes_on
    assert log(outcome) == ["0+103 | run 0 | prefill 0:3 | live 3 reserved 1", *expected]


@pytest.mark.parametrize(
    ("policy", "two_short", "long_first", "long_second", "beside_a_decode"),
    [
        ("vllm-v0", [(0,), (1,)], [(0,), (1,), ()], [(0,), (1,), ()], [(0,), (1,), (), ()]),
        ("tgi", [(0,), (1,)], [(0,), (1,), ()], [(0,), (1,), ()], [(0,), (1,), (), ()]),
        ("trtllm-no-evict", [(0,), (1,)], [(0,), (1,)], [(0,), (), (1,)], [(0,), (), (), (1,)]),
        ("trtllm-max-util", [(0,), (1,)], [(0,), (1,)], [(0,), (), (1,)], [(0,), (), (), (1,)]),
        ("lightllm", [(0,), (1,)], [(0,), (1,)], [(0,), (), (1,)], [(0,), (), (), (1,)]),
        ("vllm-v1", [(0, 1), (1,)], [(0,), (0,), (0, 1), ()], [(0, 1), (1,), (1,)], [(0,), (1,), (1,)]),
        ("sarathi", [(0, 1), (1,)], [(0,), (0,), (0, 1), ()], [(0, 1), (1,), (1,)], [(0,), (1,), (1,)]),
        ("fastgen", [(0, 1), (1,)], [(0,), (0,), (0, 1), ()], [(0, 1), (1,), (1,)], [(0,), (1,), (1,)]),
    ],
)
def test_the_tokens_of_a_step(policy, two_short, long_first, long_second, beside_a_decode):
    """Prompts of 3 and 3 within 5 tokens, of 9 and 3 within 4, of 3 and 9 within 5, of 2 and then 4 within 4: whole or
    split, and beside which others."""
    assert prefills(policy, [Request(0, 3, 1, 1), Request(0, 3, 1, 1)], 5) == two_short
    assert prefills(policy, [Request(0, 9, 2, 2), Request(0, 3, 1, 1)], 4) == long_first
    assert prefills(policy, [Request(0, 3, 2, 2), Request(0, 9, 1, 1)], 5) == long_second
    assert prefills(policy, [Request(0, 2, 3, 3), Request(1, 4, 1, 1)], 4) == beside_a_decode


def prefills(policy: str, requests: list[Request], tokens: int, blocks: int = 200) -> list[tuple[int, ...]]:
    limits = Limits(max_model_len=100, max_num_batched_tokens=tokens, max_num_seqs=3)
    outcome, _ = serve(policy, requests, Pool(blocks, 1), limits)
    return [tuple(i for i, _ in step.prefilled) for step in outcome.steps]


@pytest.mark.parametrize(("policy", "blocks"), [("vllm-v1", 7), ("sarathi", 6), ("fastgen", 6)])
def test_a_chunk_starts_only_where_the_whole_prompt_would_fit(policy, blocks):
    """Three blocks are free for 1 in step 0, which would do for its first token, and two in step 1; five for all."""
    assert prefills(policy, [Request(0, 3, 2), Request(0, 5, 1)], 4, blocks) == [(0,), (), (1,), (1,)]


@pytest.mark.parametrize(("policy", "without", "with_two"), [
    ("vllm-v0", [(0,), (1,), ()], [(0,), (), (1,)]),
    ("sarathi", [(0,), (1,)], [(0,), (), (1,)]),
    ("vllm-v1", [(0,), (1,)], [(0,), (), (1,)]),
    ("fastgen", [(0,), (1,)], [(0,), (1,)]),
])  # fmt: skip
def test_the_watermark_is_kept_while_something_runs(policy, without, with_two):
    """Ten blocks of two; 0 holds two or three when 1 asks for seven."""
    for fraction, expected in ((0.0, without), (0.2, with_two)):
        pool = Pool(11 if policy == "vllm-v1" else 10, 2)
        limits = Limits(max_model_len=100, watermark_fraction=fraction)
        outcome, _ = serve(policy, [Request(0, 4, 2), Request(1, 14, 1)], pool, limits)
        assert [tuple(i for i, _ in step.prefilled) for step in outcome.steps] == expected
        # The one that finds nothing running need not keep it.
        outcome, _ = serve(policy, [Request(0, 18, 1)], pool, limits)
        assert finishes(outcome) == [118]


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_no_more_than_so_many_run(policy):
    outcome, _ = serve(policy, [Request(0, 2, 1)] * 3, Pool(50, 1), Limits(max_model_len=10, max_num_seqs=2))
    assert [sorted(step.running) for step in outcome.steps] == [[0, 1], [2]]


def test_every_system_is_one_or_the_other():
    assert not set(POLICIES) & set(SCHEDULERS)
