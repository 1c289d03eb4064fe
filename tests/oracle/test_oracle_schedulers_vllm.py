"""The oracle's vllm-v0, vllm-v1 and sarathi against logs worked out by hand from docs/policies.md.

A step costs 100 ticks, 10 more a decode and 1 more a prompt token; a block takes 7 ticks to the host and 3 back.
"""

from __future__ import annotations

import pytest

from oracle import Limits, Pool, Request, simulate
from oracle.story import Cost, finishes, first_difference, log, serve


def test_vllm_v0_prefills_alone_and_swaps_out_the_last_arrival():
    """Five blocks of two. Step 1 admits 2 though no block is left for decodes, and none decodes in it; at once
    (step 2) 2 has to make room. vllm-sosp23 decodes 0 and 1 in step 1, which leaves 2 too little. 1 goes in step 3;
    both come back when their blocks and one more each are free, and decode in that step."""
    requests, pool = [Request(0, 3, 5), Request(0, 2, 4), Request(50, 3, 2)], Pool(5, 2, 4)
    limits = Limits(max_model_len=100, preemption_mode="swap")
    outcome, calls = serve("vllm-v0", requests, pool, limits)
    assert log(outcome) == [
        "0+105 | run 0 1 | prefill 0:3 1:2 | live 5 reserved 1 free 4",
        "105+103 | run 0 1 2 | pause 0 1 | prefill 2:3 | live 8 reserved 2",
        "208+134 | run 0 1 | preempt 2 | out 2 | decode 0 1 | live 7 reserved 1 free 2",
        "342+124 | run 0 | preempt 1 | out 1 | decode 0 | live 5 reserved 1 free 4",
        "466+110 | run 0 | decode 0 | live 6 free 4",
        "576+110 | run 0 | decode 0 | live 7 reserved 1 free 2",
        "686+132 | run 1 2 | in 1 2 | decode 1 2 | live 8 free 2",
        "818+110 | run 1 | decode 1 | live 5 reserved 1 free 4",
    ]
    assert calls == [
        (0, 0, 5, 9), (0, 0, 3, 6), (2, 7, 0, 0), (1, 5, 0, 0), (1, 6, 0, 0), (1, 7, 0, 0), (2, 8, 0, 0), (1, 5, 0, 0),
    ]  # fmt: skip
    assert finishes(outcome) == [686, 928, 818]
    assert first_difference(outcome, "vllm-sosp23", requests, pool, limits) == 1


def test_vllm_v0_swaps_in_only_without_preemptions():
    """Four blocks of two, one on the host. In step 2 3 could be admitted, but 2 is swapped out; 1 finds no block and
    the host full, and is recomputed. Its two blocks would do for 2, which vllm-sosp23 takes back at once, since none
    was swapped out now; here 2 comes back a step later."""
    requests, pool = [Request(0, 1, 5), Request(0, 3, 3), Request(0, 1, 3), Request(30, 1, 1)], Pool(4, 2, 1)
    limits = Limits(max_model_len=100, preemption_mode="swap")
    outcome, calls = serve("vllm-v0", requests, pool, limits)
    assert log(outcome) == [
        "0+105 | run 0 1 2 | prefill 0:1 1:3 2:1 | live 5 reserved 3",
        "105+127 | run 0 1 | preempt 2 | out 2 | decode 0 1 | live 6 free 2",
        "232+110 | run 0 | preempt 1 | decode 0 | live 3 reserved 1 free 4",
        "342+123 | run 0 2 | in 2 | decode 0 2 | live 6 free 2",
        "465+117 | run 0 | preempt 2 | out 2 | decode 0 | live 5 reserved 1 free 2",
        "582+113 | run 2 | in 2 | decode 2 | live 3 reserved 1 free 4",
        "695+106 | run 1 3 | prefill 1:5 3:1 | live 6 reserved 2",
    ]
    assert calls == [(0, 0, 5, 8), (2, 6, 0, 0), (1, 3, 0, 0), (2, 6, 0, 0), (1, 5, 0, 0), (1, 3, 0, 0), (0, 0, 6, 16)]
    assert finishes(outcome) == [582, 801, 695, 801]
    assert first_difference(outcome, "vllm-sosp23", requests, pool, limits) == 2


def test_vllm_v0_puts_recomputed_sequences_before_earlier_arrivals():
    """Ten blocks of one, one on the host. 1 is recomputed in step 2, while 2 is swapped out and comes back; in step 4 2
    holds more than the host, is recomputed too and waits before 1, and 3 comes after both. vllm-sosp23 keeps the order
    of arrival; it takes 2 back in step 2 already."""
    requests, pool = [Request(0, 4, 5), Request(0, 4, 3), Request(0, 1, 5), Request(500, 1, 1)], Pool(10, 1, 1)
    limits = Limits(max_model_len=100, preemption_mode="swap")
    outcome, _ = serve("vllm-v0", requests, pool, limits)
    assert log(outcome) == [
        "0+109 | run 0 1 2 | prefill 0:4 1:4 2:1 | live 9 free 1",
        "109+127 | run 0 1 | preempt 2 | out 2 | decode 0 1 | live 10",
        "236+110 | run 0 | preempt 1 | decode 0 | live 6 free 4",
        "346+123 | run 0 2 | in 2 | decode 0 2 | live 9 free 1",
        "469+110 | run 0 | preempt 2 | decode 0 | live 8 free 2",
        "579+110 | run 2 1 3 | prefill 2:3 1:6 3:1 | live 10",
        "689+110 | run 2 | decode 2 | live 4 free 6",
        "799+110 | run 2 | decode 2 | live 5 free 5",
    ]
    assert finishes(outcome) == [579, 689, 909, 689]
    assert first_difference(outcome, "vllm-sosp23", requests, pool, limits) == 2


def test_vllm_v1_computes_chunks_and_preempts_the_last_running():
    """Five usable blocks of two, four tokens a step. 1 is computed a token, then three; its fifth (step 2) finds no
    block, so it loses all and starts again when its whole prompt's blocks are free. Sarathi would have taken all its
    blocks at once and, having none free, preempted it for 0's decode in step 1."""
    requests, pool = [Request(0, 3, 4), Request(0, 5, 3), Request(60, 2, 2)], Pool(6, 2)
    limits = Limits(max_model_len=100, max_num_batched_tokens=4, max_num_seqs=3)
    outcome, calls = serve("vllm-v1", requests, pool, limits)
    assert log(outcome) == [
        "0+104 | run 0 1 | prefill 0:3 1:1 | live 4 reserved 2 free 4",
        "104+113 | run 0 1 | decode 0 | prefill 1:3 | live 8 free 2",
        "217+110 | run 0 | preempt 1 | decode 0 | live 5 reserved 1 free 4",
        "327+110 | run 0 | decode 0 | live 6 free 4",
        "437+104 | run 1 | prefill 1:4 | live 4 free 6",
        "541+103 | run 1 2 | prefill 1:1 2:2 | live 7 reserved 1 free 2",
        "644+120 | run 1 2 | decode 1 2 | live 9 reserved 1",
        "764+110 | run 1 | decode 1 | live 7 reserved 1 free 2",
    ]
    assert calls == [
        (0, 0, 4, 7), (1, 4, 3, 9), (1, 5, 0, 0), (1, 6, 0, 0), (0, 0, 4, 10), (0, 0, 3, 8), (2, 9, 0, 0), (1, 7, 0, 0),
    ]  # fmt: skip
    assert finishes(outcome) == [437, 874, 764]
    assert [request["token_ticks"] for request in outcome.requests][1:] == [[644, 764, 874], [644, 764]]
    assert first_difference(outcome, "sarathi", requests, Pool(5, 2), limits) == 1


def test_vllm_v1_recomputes_in_chunks():
    """Four usable blocks of one, two tokens a step. 1 makes room for 0 and comes back as a prompt of three tokens, two
    of them in step 4 and one in step 5, beside 2; trtllm-max-util would compute all three in step 4, over the limit,
    since nothing else runs."""
    requests = [Request(0, 1, 4), Request(0, 1, 3), Request(0, 1, 2)]
    limits = Limits(max_model_len=100, max_num_batched_tokens=2, max_num_seqs=2)
    outcome, calls = serve("vllm-v1", requests, Pool(5, 1), limits)
    assert log(outcome) == [
        "0+102 | run 0 1 | prefill 0:1 1:1 | live 2 free 2",
        "102+120 | run 0 1 | decode 0 1 | live 4",
        "222+110 | run 0 | preempt 1 | decode 0 | live 3 free 1",
        "332+110 | run 0 | decode 0 | live 4",
        "442+102 | run 1 | prefill 1:2 | live 2 free 2",
        "544+102 | run 1 2 | prefill 1:1 2:1 | live 4",
        "646+110 | run 2 | decode 2 | live 2 free 2",
    ]
    assert calls[4:6] == [(0, 0, 2, 3), (0, 0, 2, 4)]
    assert outcome.requests[1]["token_ticks"] == [102, 222, 646]
    assert first_difference(outcome, "trtllm-max-util", requests, Pool(4, 1), limits) == 4


def test_vllm_v1_needs_a_token_a_sequence():
    with pytest.raises(ValueError, match="max_num_batched_tokens = 7"):
        simulate("vllm-v1", [], Pool(5, 1), Limits(max_model_len=9, max_num_batched_tokens=7, max_num_seqs=8), Cost())


def test_vllm_v1_cannot_use_its_null_block():
    requests = [Request(0, 3, 3), Request(0, 3, 2)]
    outcome, _ = serve("vllm-v1", requests, Pool(3, 2), Limits(max_model_len=100))
    assert [request["refused"] for request in outcome.requests] == ["needs 3 blocks of a pool of 2", None]


def test_sarathi_takes_a_prompts_blocks_at_once_and_keeps_one_free():
    """Six blocks of two, one of them the watermark; four tokens a step. In step 3 neither 0 nor 1 needs a block, yet
    none is free, so 1 goes: under vllm-v1, with as many usable, both would decode. 1 comes back with all its six
    tokens' blocks and computes four, then two beside 2."""
    requests, pool = [Request(0, 3, 4), Request(0, 5, 2), Request(10, 1, 1)], Pool(6, 2)
    limits = Limits(max_model_len=100, max_num_batched_tokens=4, max_num_seqs=3, watermark_fraction=0.2)
    outcome, calls = serve("sarathi", requests, pool, limits)
    assert log(outcome) == [
        "0+104 | run 0 1 | prefill 0:3 1:1 | live 4 reserved 6 free 2",
        "104+113 | run 0 1 | decode 0 | prefill 1:3 | live 8 reserved 2 free 2",
        "217+111 | run 0 1 | decode 0 | prefill 1:1 | live 10 reserved 2",
        "328+110 | run 0 | preempt 1 | decode 0 | live 6 free 6",
        "438+104 | run 1 | prefill 1:4 | live 4 reserved 2 free 6",
        "542+103 | run 1 2 | prefill 1:2 2:1 | live 7 reserved 1 free 4",
    ]
    assert calls == [(0, 0, 4, 7), (1, 4, 3, 9), (1, 5, 1, 5), (1, 6, 0, 0), (0, 0, 4, 10), (0, 0, 3, 12)]
    assert finishes(outcome) == [438, 645, 645]
    assert first_difference(outcome, "vllm-v1", requests, Pool(7, 2), limits) == 3
