"""The oracle's schedulers against logs worked out by hand from docs/policies.md.

A step costs 100 ticks, 10 more a decode and 1 more a prompt token; a block takes 7 ticks to the host and 3 back.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from oracle import POLICIES, SCHEDULERS, Limits, Outcome, Pool, Request, simulate
from oracle.clock import run
from oracle.lightllm import LightLlm
from oracle.story import Cost, log, swap_in_ticks, swap_out_ticks


def serve(policy: str, requests: list[Request], pool: Pool, limits: Limits) -> tuple[Outcome, list[tuple[int, ...]]]:
    """What happened, and what each step that ran was charged for."""
    cost = Cost()
    return simulate(policy, requests, pool, limits, cost, swap_out_ticks, swap_in_ticks), cost.calls


def finishes(outcome: Outcome) -> list[int | None]:
    return [request["finish_ticks"] for request in outcome.requests]


def first_difference(outcome: Outcome, policy: str, requests: list[Request], pool: Pool, limits: Limits) -> int:
    """The first step in which ``policy`` would have decided otherwise, whatever it holds."""

    def decisions(steps: list) -> list[tuple]:
        return [(s.start_ticks, s.ticks, s.running, s.prefilled, s.preempted, s.swapped_out) for s in steps]

    other, _ = serve(policy, requests, pool, limits)
    same = [mine == theirs for mine, theirs in zip(decisions(outcome.steps), decisions(other.steps))]
    return same.index(False)


def test_vllm_v0_prefills_alone_and_swaps_out_who_came_last():
    """Five blocks of two. Step 1 admits 2 though no block is left for who decodes, and nobody decodes in it; at once
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


def test_vllm_v0_swaps_in_only_where_nobody_was_preempted():
    """Four blocks of two, one on the host. In step 2 3 could be admitted, but 2 is swapped out; 1 finds no block and
    the host full, and is recomputed. Its two blocks would do for 2, which vllm-sosp23 takes back at once, since nobody
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


def test_vllm_v0_puts_whom_it_recomputes_before_who_arrived_earlier():
    """Ten blocks of one, one on the host. 1 is recomputed in step 2, while 2 is swapped out and comes back; in step 4 2
    holds more than the host, is recomputed too and waits before 1, after whom comes 3. vllm-sosp23 keeps the order of
    arrival; it takes 2 back in step 2 already."""
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


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["vllm-v0", "sarathi", "trtllm-max-util", "vllm-v1", "fastgen"])
def test_who_keeps_a_block_free_preempts_even_itself(policy, mode):
    """Both blocks are its own and have room for its fourth token. Swapped out it could never come back with a third."""
    pool = Pool(3 if policy == "vllm-v1" else 2, 2, 5)
    outcome, _ = serve(policy, [Request(0, 3, 2)], pool, Limits(max_model_len=100, preemption_mode=mode))
    itself = ["103+0 | preempt 0 | free 4", "103+104 | run 0 | prefill 0:4 | live 4"]
    goes_on = ["103+110 | run 0 | decode 0 | live 4"]
    expected = itself if policy in ("vllm-v0", "sarathi") else goes_on
    assert log(outcome) == ["0+103 | run 0 | prefill 0:3 | live 3 reserved 1", *expected]


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


def test_tgi_waits_for_a_batch_that_is_worth_the_pause():
    """Ten blocks of two, prefills of six tokens, minimum 1.2 times the running. 2 waits in step 1, since two
    must come to two (vllm-v0 would prefill it, trtllm-no-evict would decode beside it), and is worth the pause in step
    2. In step 4 two must come: both wait, but only 3 fits, so neither. After three decode steps 3 may come alone (5).
    4 waits for its seven blocks, then comes when nothing runs."""
    requests = [
        Request(0, 2, 6, 6), Request(0, 2, 2, 2), Request(10, 1, 4, 4), Request(300, 3, 2, 4), Request(400, 6, 1, 8),
    ]  # fmt: skip
    pool = Pool(10, 2)
    limits = Limits(20, max_num_batched_tokens=6, max_num_seqs=8, max_waiting_tokens=3, waiting_served_ratio=1.2)
    outcome, calls = serve("tgi", requests, pool, limits)
    assert log(outcome) == [
        "0+104 | run 0 1 | prefill 0:2 1:2 | live 4 reserved 8 free 8",
        "104+120 | run 0 1 | decode 0 1 | live 6 reserved 6 free 8",
        "224+101 | run 0 2 | pause 0 | prefill 2:1 | live 4 reserved 8 free 8",
        "325+120 | run 0 2 | decode 0 2 | live 6 reserved 6 free 8",
        "445+120 | run 0 2 | decode 0 2 | live 8 reserved 4 free 8",
        "565+103 | run 0 2 3 | pause 0 2 | prefill 3:3 | live 11 reserved 6 over_estimate 1 free 2",
        "668+130 | run 0 2 3 | decode 0 2 3 | live 14 reserved 3 over_estimate 1 free 2",
        "798+110 | run 0 | decode 0 | live 7 reserved 1 free 12",
        "908+106 | run 4 | prefill 4:6 | live 6 reserved 1 over_estimate 6 block_tail 1 free 6",
    ]
    assert calls == [
        (0, 0, 4, 6), (2, 6, 0, 0), (0, 0, 1, 1), (2, 6, 0, 0), (2, 8, 0, 0), (0, 0, 3, 6), (3, 14, 0, 0), (1, 7, 0, 0),
        (0, 0, 6, 21),
    ]  # fmt: skip
    assert finishes(outcome) == [908, 224, 798, 798, 1014]
    assert first_difference(outcome, "vllm-v0", requests, pool, limits) == 1
    assert first_difference(outcome, "trtllm-no-evict", requests, pool, limits) == 1


def tgi_prefills(requests: list[Request], **limits) -> list[tuple[int, ...]]:
    outcome, _ = serve("tgi", requests, Pool(60, 2), Limits(max_model_len=100, **limits))
    return [tuple(i for i, _ in step.prefilled) for step in outcome.steps]


def test_tgi_counts_decode_steps_from_one():
    """Ten run and three must wait for a batch: 10 comes alone once the counter is at 4, after three decode steps."""
    ten, late = [Request(0, 1, 9, 9)] * 10, Request(1, 1, 1, 1)
    assert tgi_prefills([*ten, late], max_waiting_tokens=4) == [tuple(range(10)), (), (), (), (10,), *[()] * 5]
    assert tgi_prefills([*ten, late, late]) == [tuple(range(10)), *[()] * 8, (10, 11)]


def test_tgi_looks_before_each_decode_but_not_after_a_prefill_that_others_waited_for():
    """Three are worth the pause of ten, whose prefill takes 110 ticks. They come in it and go next, or come in the
    first decode step and go after that. Three more come in the prefill of these, and go after a decode step."""
    ten = [Request(0, 1, 9, 9)] * 10
    first, second, last = ([Request(arrival, 1, 1, 1)] * 3 for arrival in (1, 111, 112))
    begin, joined, later = tuple(range(10)), (10, 11, 12), (13, 14, 15)
    assert tgi_prefills([*ten, *first]) == [begin, joined, *[()] * 8]
    assert tgi_prefills([*ten, *second]) == [begin, (), joined, *[()] * 7]
    assert tgi_prefills([*ten, *first, *last]) == [begin, joined, (), later, *[()] * 7]


def test_tgi_looks_at_once_when_nothing_runs():
    """Both ways to it: the batch ended in its prefill, and the last one decoding ended."""
    assert tgi_prefills([Request(0, 1, 1), Request(1, 1, 1)]) == [(0,), (1,)]
    assert tgi_prefills([Request(0, 1, 2), Request(1, 1, 1)], max_num_seqs=1) == [(0,), (), (1,)]
    assert tgi_prefills([Request(0, 9, 1), Request(0, 1, 1)], max_num_batched_tokens=4) == [(0,), (1,)]


def test_trtllm_no_evict_admits_who_can_run_to_completion_beside_the_others():
    """Six blocks of two. Of what is free in step 0 (three), 0 may still take two and 1 one, and 2 would take two; in
    step 1 one more is taken; in step 2, 1 has ended, 0 may still take one, and 2 goes. trtllm-max-util would admit 2 in
    step 0, and tgi would prefill it alone in step 2."""
    requests, pool = [Request(0, 3, 3, 5), Request(0, 2, 2, 2), Request(0, 1, 2, 2)], Pool(6, 2)
    limits = Limits(max_model_len=12, max_num_batched_tokens=8, max_num_seqs=4)
    outcome, calls = serve("trtllm-no-evict", requests, pool, limits)
    assert log(outcome) == [
        "0+105 | run 0 1 | prefill 0:3 1:2 | live 5 reserved 1 free 6",
        "105+120 | run 0 1 | decode 0 1 | live 7 reserved 1 free 4",
        "225+111 | run 0 2 | decode 0 | prefill 2:1 | live 6 reserved 2 free 4",
        "336+110 | run 2 | decode 2 | live 2 free 10",
    ]
    assert calls == [(0, 0, 5, 9), (2, 7, 0, 0), (1, 5, 1, 1), (1, 2, 0, 0)]
    assert finishes(outcome) == [336, 225, 446]
    assert first_difference(outcome, "trtllm-max-util", requests, pool, limits) == 0


def test_trtllm_no_evict_refuses_who_might_outgrow_the_pool():
    requests = [Request(0, 3, 1), Request(0, 3, 1, 9), Request(0, 3, 1, 10)]
    for model, refused in ((12, [False, False, False]), (14, [True, False, True])):
        outcome, _ = serve("trtllm-no-evict", requests, Pool(6, 2), Limits(max_model_len=model))
        assert [request["refused"] is not None for request in outcome.requests] == refused


def test_trtllm_max_util_pauses_when_a_block_is_needed():
    """Four blocks of two. In step 1 no block is free and none is needed, so both decode, where vllm-sosp23 would have
    preempted 1. In step 2 0 needs one, and 1 is paused; 2 waits behind it. trtllm-no-evict would not admit 1."""
    requests, pool = [Request(0, 3, 4, 4), Request(0, 3, 3, 3), Request(50, 1, 2, 2)], Pool(4, 2)
    limits = Limits(max_model_len=100, max_num_batched_tokens=8)
    outcome, calls = serve("trtllm-max-util", requests, pool, limits)
    assert log(outcome) == [
        "0+106 | run 0 1 | prefill 0:3 1:3 | live 6 reserved 2",
        "106+120 | run 0 1 | decode 0 1 | live 8",
        "226+110 | run 0 | preempt 1 | decode 0 | live 5 reserved 1 free 2",
        "336+110 | run 0 | decode 0 | live 6 free 2",
        "446+106 | run 1 2 | prefill 1:5 2:1 | live 6 reserved 2",
        "552+110 | run 2 | decode 2 | live 2 free 6",
    ]
    assert calls == [(0, 0, 6, 12), (2, 8, 0, 0), (1, 5, 0, 0), (1, 6, 0, 0), (0, 0, 6, 16), (1, 2, 0, 0)]
    assert finishes(outcome) == [446, 552, 662]
    assert first_difference(outcome, "vllm-sosp23", requests, pool, limits) == 1
    assert first_difference(outcome, "trtllm-no-evict", requests, pool, limits) == 0


def test_lightllm_admits_by_the_peak_to_come():
    """Twelve slots. Left and held after step 0: (5,3), (2,4), (1,2), peaks 8, 11, 12, so 0, 1 and 2 go; with 3's (3,1)
    they would be 8, 10, 14. In step 1: (4,4), (3,1), (1,5), (0,3), peaks 8, 11, 13; in step 2, 1 has ended: (3,5),
    (3,1), (0,6), peaks 8, 12, 12. trtllm-no-evict adds up completions, 9 + 4 > 12; trtllm-max-util admits 3 at once."""
    requests = [Request(0, 3, 4, 6), Request(0, 2, 2, 2), Request(0, 4, 3, 3), Request(0, 1, 3, 4)]
    pool, limits = Pool(12, 1), Limits(max_model_len=100, max_num_batched_tokens=10, max_num_seqs=4)
    outcome, calls = serve("lightllm", requests, pool, limits)
    assert log(outcome) == [
        "0+109 | run 0 1 2 | prefill 0:3 1:2 2:4 | live 9 free 3",
        "109+130 | run 0 1 2 | decode 0 1 2 | live 12",
        "239+121 | run 0 2 3 | decode 0 2 | prefill 3:1 | live 12",
        "360+120 | run 0 3 | decode 0 3 | live 8 free 4",
        "480+110 | run 3 | decode 3 | live 3 free 9",
    ]
    assert calls == [(0, 0, 9, 19), (3, 12, 0, 0), (2, 11, 1, 1), (2, 8, 0, 0), (1, 3, 0, 0)]
    assert finishes(outcome) == [480, 239, 360, 590]
    assert first_difference(outcome, "trtllm-no-evict", requests, pool, limits) == 0
    assert first_difference(outcome, "trtllm-max-util", requests, pool, limits) == 0


def run_lightllm(requests: list[Request], slots: int) -> Outcome:
    """Without the check that no output is longer than told."""
    return run(LightLlm(Pool(slots, 1), Limits(max_model_len=100)), requests, Cost(), swap_out_ticks, swap_in_ticks)


def test_lightllm_pauses_the_last_where_it_was_told_too_little():
    """Six slots. Both say one token and write more. In step 2 both need a slot and none is free: 1 goes, and nobody
    comes; in step 3 the peak of its four tokens and 0's five is nine."""
    outcome = run_lightllm([Request(0, 2, 4, 1), Request(0, 2, 3, 1)], 6)
    assert log(outcome) == [
        "0+104 | run 0 1 | prefill 0:2 1:2 | live 4 free 2",
        "104+120 | run 0 1 | decode 0 1 | live 6",
        "224+110 | run 0 | preempt 1 | decode 0 | live 4 free 2",
        "334+110 | run 0 | decode 0 | live 5 free 1",
        "444+104 | run 1 | prefill 1:4 | live 4 free 2",
    ]
    assert finishes(outcome) == [444, 548]


@hypothesis_settings(max_examples=50)
@given(
    requests=st.lists(st.builds(Request, st.just(0), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))),
    slots=st.integers(10, 20),
)
@example(requests=[Request(0, 2, 4, 1), Request(0, 2, 3, 1)], slots=6)
def test_lightllm_ends_whatever_it_is_told(requests, slots):
    outcome = run_lightllm(requests, slots)
    assert None not in finishes(outcome)


def test_lightllm_holds_single_tokens():
    with pytest.raises(ValueError, match="block_size = 2"):
        simulate("lightllm", [], Pool(5, 2), Limits(max_model_len=9), Cost())


def test_fastgen_skips_who_finds_no_block():
    """Five blocks of two, four tokens a step: the pool of vllm-v1's log. 1 lacks a block for its fifth token in step 2,
    where vllm-v1 would preempt it; here it keeps its blocks, and goes on in step 4 beside 2."""
    requests, pool = [Request(0, 3, 4), Request(0, 5, 3), Request(20, 1, 1)], Pool(5, 2)
    limits = Limits(max_model_len=100, max_num_batched_tokens=4, max_num_seqs=4)
    outcome, calls = serve("fastgen", requests, pool, limits)
    assert log(outcome) == [
        "0+104 | run 0 1 | prefill 0:3 1:1 | live 4 reserved 2 free 4",
        "104+113 | run 0 1 | decode 0 | prefill 1:3 | live 8 free 2",
        "217+110 | run 0 1 | decode 0 | pause 1 | live 9 reserved 1",
        "327+110 | run 0 1 | decode 0 | pause 1 | live 10",
        "437+102 | run 1 2 | prefill 1:1 2:1 | live 6 reserved 2 free 2",
        "539+110 | run 1 | decode 1 | live 6 free 4",
        "649+110 | run 1 | decode 1 | live 7 reserved 1 free 2",
    ]
    assert calls[:5] == [(0, 0, 4, 7), (1, 4, 3, 9), (1, 5, 0, 0), (1, 6, 0, 0), (0, 0, 2, 6)]
    assert finishes(outcome) == [437, 759, 539]
    assert first_difference(outcome, "vllm-v1", requests, Pool(6, 2), limits) == 2


def test_fastgen_flushes_the_last_when_nobody_can_go_on():
    """Four blocks of two. In step 2 1 is skipped, where trtllm-max-util would pause it, and 0 goes on in its own block;
    in step 3 both lack one: 1 is flushed, and at once 0 goes on."""
    requests, pool = [Request(0, 2, 5), Request(0, 3, 3), Request(50, 2, 1)], Pool(4, 2)
    limits = Limits(max_model_len=100, max_num_batched_tokens=8)
    outcome, calls = serve("fastgen", requests, pool, limits)
    assert log(outcome) == [
        "0+105 | run 0 1 | prefill 0:2 1:3 | live 5 reserved 1 free 2",
        "105+120 | run 0 1 | decode 0 1 | live 7 reserved 1",
        "225+110 | run 0 1 | decode 0 | pause 1 | live 8",
        "335+0 | preempt 1 | pause 0 | live 4 free 4",
        "335+110 | run 0 | decode 0 | live 5 reserved 1 free 2",
        "445+110 | run 0 | decode 0 | live 6 free 2",
        "555+107 | run 1 2 | prefill 1:5 2:2 | live 7 reserved 1",
    ]
    assert calls == [(0, 0, 5, 9), (2, 7, 0, 0), (1, 4, 0, 0), (1, 5, 0, 0), (1, 6, 0, 0), (0, 0, 7, 18)]
    assert finishes(outcome) == [555, 662, 662]
    assert first_difference(outcome, "trtllm-max-util", requests, pool, limits) == 2


def test_sglang_looks_at_the_queue_a_decode_after_a_finish():
    """Twenty slots. 0 and 1 ask for 4 + 3 and 5 + 6 of them, which leaves 2 too little: the batch is full. In step 3
    0 has finished, and its six tokens (the last has none) stay cached; but the batch is full until it has decoded again.
    Then 14 slots - 8 of 1 and 2 * 0.697 for its last outputs are more than 2's 6 + 2. In step 5 two slots are needed and
    none is free: the end of 0's string goes, in step 6 the rest of it. LightLLM sees that all three fit at their peaks."""
    requests = [Request(0, 4, 3, 3), Request(0, 5, 6, 6), Request(0, 6, 2, 2)]
    pool, limits = Pool(20, 1), Limits(max_model_len=100)
    outcome, calls = serve("sglang", requests, pool, limits)
    assert log(outcome) == [
        "0+109 | run 0 1 | prefill 0:4 1:5 | live 9 free 11",
        "109+120 | run 0 1 | decode 0 1 | live 11 free 9",
        "229+120 | run 0 1 | decode 0 1 | live 13 free 7",
        "349+110 | run 1 | decode 1 | live 8 cached 6 free 6",
        "459+106 | run 1 2 | pause 1 | prefill 2:6 | live 14 cached 6",
        "565+120 | run 1 2 | decode 1 2 | live 16 cached 4",
        "685+110 | run 1 | decode 1 | live 10 cached 7 free 3",
    ]
    assert calls == [
        (0, 0, 9, 25), (2, 11, 0, 0), (2, 13, 0, 0), (1, 8, 0, 0), (0, 0, 6, 21), (2, 16, 0, 0), (1, 10, 0, 0),
    ]  # fmt: skip
    assert finishes(outcome) == [349, 795, 685]
    assert first_difference(outcome, "lightllm", requests, pool, limits) == 0


def test_sglang_retracts_the_longest_prompt_of_those_who_generated_least():
    """Thirty slots, and 0.7 of 9 outputs each that are reserved let 2 in. In step 10 two slots are left for three who have
    generated eight tokens each: 1 goes, which has the longest prompt, where vLLM 0.x takes the last arrival. The prompt
    that it leaves in the tree is evicted, as 20 slots for each of the others are not free. It waits for both of them: they
    would use 10 slots that its 11 + 2 do not fit into, at a ratio of 1. Its prefill evicts 11 tokens: two strings end
    with 9 tokens, and before that the older one's 2. Once admitted it counts with all ten outputs again, so that 3 waits."""
    requests = [Request(0, 2, 10, 10), Request(50, 3, 10, 10), Request(150, 2, 10, 10), Request(1300, 2, 8, 8)]
    pool, limits = Pool(30, 1), Limits(max_model_len=100)
    outcome, _ = serve("sglang", requests, pool, limits)
    decodes = [f"{307 + 130 * i}+130 | run 0 1 2 | decode 0 1 2 | live {10 + 3 * i} free {20 - 3 * i}" for i in range(7)]
    assert log(outcome) == [
        "0+102 | run 0 | prefill 0:2 | live 2 free 28",
        "102+103 | run 0 1 | pause 0 | prefill 1:3 | live 5 free 25",
        "205+102 | run 0 1 2 | pause 0 1 | prefill 2:2 | live 7 free 23",
        *decodes,
        "1217+120 | run 0 2 | preempt 1 | decode 0 2 | live 20 free 10",
        "1337+120 | run 0 2 | decode 0 2 | live 22 free 8",
        "1457+111 | run 1 | prefill 1:11 | live 11 cached 11 free 8",
        "1568+110 | run 1 | decode 1 | live 12 cached 11 free 7",
        "1678+102 | run 3 | prefill 3:2 | live 2 cached 23 free 5",
        *(f"{1780 + 110 * i}+110 | run 3 | decode 3 | live {3 + i} cached 23 free {4 - i}" for i in range(4)),
        "2220+110 | run 3 | decode 3 | live 7 cached 23",
        "2330+110 | run 3 | decode 3 | live 8 cached 14 free 8",
        "2440+110 | run 3 | decode 3 | live 9 cached 14 free 7",
    ]
    assert finishes(outcome) == [1457, 1678, 1457, 2550]
    assert first_difference(outcome, "vllm-v0", requests, pool, limits) == 10


def test_sglang_holds_single_tokens():
    with pytest.raises(ValueError, match="block_size = 2"):
        simulate("sglang", [], Pool(5, 2), Limits(max_model_len=9), Cost())


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
    split, and beside whom."""
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
    ("vllm-v1", [(0,), (1,)], [(0,), (1,)]),
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
    assert [step.running for step in outcome.steps] == [(0, 1), (2,)]


def test_every_system_is_one_or_the_other():
    assert not set(POLICIES) & set(SCHEDULERS)
