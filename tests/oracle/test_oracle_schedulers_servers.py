"""The oracle's schedulers of other servers than vLLM against logs worked out by hand from docs/policies.

A step costs 100 ticks, 10 more a decode and 1 more a prompt token; a block takes 7 ticks to the host and 3 back.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from oracle import Limits, Outcome, Pool, Request, simulate
from oracle.decode_step import run
from oracle.lightllm import LightLlm
from oracle.llama_cpp import ContextExceededError
from oracle.story import Cost, finishes, first_difference, log, serve, swap_in_ticks, swap_out_ticks


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
    """Three are worth the pause of ten with a prefill of 110 ticks. They come in it and go next, or come in the
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


def test_trtllm_no_evict_admits_requests_that_can_run_to_completion_beside_the_others():
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


def test_trtllm_no_evict_refuses_a_request_that_might_outgrow_the_pool():
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
    """Without the check that no output is longer than declared."""
    return run(LightLlm(Pool(slots, 1), Limits(max_model_len=100)), requests, Cost(), swap_out_ticks, swap_in_ticks)


def test_lightllm_pauses_the_last_where_too_little_was_declared():
    """Six slots. Both declare one token and write more. In step 2 both need a slot and none is free: 1 goes, and none
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
def test_lightllm_ends_whatever_is_declared(requests, slots):
    outcome = run_lightllm(requests, slots)
    assert None not in finishes(outcome)


def test_lightllm_holds_single_tokens():
    with pytest.raises(ValueError, match="block_size = 2"):
        simulate("lightllm", [], Pool(5, 2), Limits(max_model_len=9), Cost())


def test_fastgen_skips_a_sequence_that_finds_no_block():
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


def test_fastgen_flushes_the_last_when_no_sequence_can_compute():
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


def test_sglang_looks_at_the_queue_when_one_has_finished():
    """21 slots. 0 and 1 ask for 4 + 3 and 5 + 6 of them and one more each, which leaves 2 too little. They decode, and as
    there is no room the batch is full. After step 2 0 has finished, and its six tokens (the last has none) stay cached: 14 slots
    less 0.698 for each of 1's last three outputs are more than 2's 6 + 2 + 1. In step 5 a slot is needed and none is free: the
    output of 0 goes. LightLLM sees that all three fit at their peaks."""
    requests = [Request(0, 4, 3, 3), Request(0, 5, 6, 6), Request(0, 6, 2, 2)]
    pool, limits = Pool(21, 1), Limits(max_model_len=100)
    outcome, calls = serve("sglang", requests, pool, limits)
    assert log(outcome) == [
        "0+109 | run 0 1 | prefill 0:4 1:5 | live 9 free 12",
        "109+120 | run 0 1 | decode 0 1 | live 11 free 10",
        "229+120 | run 0 1 | decode 0 1 | live 13 free 8",
        "349+106 | run 1 2 | pause 1 | prefill 2:6 | live 13 cached 6 free 2",
        "455+120 | run 1 2 | decode 1 2 | live 15 cached 6",
        "575+110 | run 1 | decode 1 | live 9 cached 11 free 1",
        "685+110 | run 1 | decode 1 | live 10 cached 11",
    ]
    assert calls == [
        (0, 0, 9, 25), (2, 11, 0, 0), (2, 13, 0, 0), (0, 0, 6, 21), (2, 15, 0, 0), (1, 9, 0, 0), (1, 10, 0, 0),
    ]  # fmt: skip
    assert finishes(outcome) == [349, 795, 575]
    assert first_difference(outcome, "lightllm", requests, pool, limits) == 0


def test_sglang_retracts_the_longest_prompt_of_those_with_the_fewest_generated_tokens():
    """31 slots, and 0.7 of 9 outputs each that are reserved let 2 in. In step 11 no slot is left for three with nine
    generated tokens each: 1 goes, which has the longest prompt, where vLLM 0.x takes the last arrival. The prompt that it leaves in
    the tree is evicted, as 20 slots for each of the others are not free. It waits behind 3, for both of them."""
    requests = [Request(0, 2, 10, 10), Request(50, 3, 10, 10), Request(150, 2, 10, 10), Request(1300, 2, 8, 8)]
    pool, limits = Pool(31, 1), Limits(max_model_len=100)
    outcome, _ = serve("sglang", requests, pool, limits)
    decodes = [
        f"{307 + 130 * i}+130 | run 0 1 2 | decode 0 1 2 | live {10 + 3 * i} free {21 - 3 * i}" for i in range(7)
    ]
    assert log(outcome) == [
        "0+102 | run 0 | prefill 0:2 | live 2 free 29",
        "102+103 | run 0 1 | pause 0 | prefill 1:3 | live 5 free 26",
        "205+102 | run 0 1 2 | pause 0 1 | prefill 2:2 | live 7 free 24",
        *decodes,
        "1217+130 | run 0 1 2 | decode 0 1 2 | live 31",
        "1347+120 | run 0 2 | preempt 1 | decode 0 2 | live 22 free 9",
        "1467+114 | run 3 1 | prefill 3:2 1:12 | live 14 cached 13 free 4",
        *(f"{1581 + 110 * i}+110 | run 3 | decode 3 | live {3 + i} cached 25 free {3 - i}" for i in range(3)),
        "1911+110 | run 3 | decode 3 | live 6 cached 25",
        "2021+110 | run 3 | decode 3 | live 7 cached 23 free 1",
        "2131+110 | run 3 | decode 3 | live 8 cached 23",
        "2241+110 | run 3 | decode 3 | live 9 cached 14 free 8",
    ]
    assert finishes(outcome) == [1467, 1581, 1467, 2351]
    assert first_difference(outcome, "vllm-v0", requests, pool, limits) == 11


def test_sglang_holds_single_tokens():
    with pytest.raises(ValueError, match="block_size = 2"):
        simulate("sglang", [], Pool(5, 2), Limits(max_model_len=9), Cost())


def test_llama_cpp_fills_a_batch_in_the_order_of_its_slots():
    """Two slots of 8 cells, batches of 4. 0 takes slot 1, the last of the unused ones, and 1 takes slot 0: its prompt goes
    first, where sarathi would begin with 0. 2 follows it into slot 0, and so it comes before the rest of 0's prompt."""
    requests = [Request(0, 3, 2), Request(0, 6, 1), Request(0, 2, 1)]
    pool, limits = Pool(8, 2), Limits(max_model_len=100, max_num_seqs=2, max_num_batched_tokens=4)
    outcome, calls = serve("llama-cpp", requests, pool, limits)
    assert log(outcome) == [
        "0+104 | run 1 | prefill 1:4 | live 4 reserved 3 over_estimate 1 free 8",
        "104+104 | run 1 0 | prefill 1:2 0:2 | live 8 reserved 4 over_estimate 4",
        "208+103 | run 0 2 | prefill 0:1 2:2 | live 5 reserved 3 over_estimate 8",
        "311+110 | run 0 | decode 0 | live 4 reserved 1 over_estimate 3 free 8",
    ]
    assert calls == [(0, 0, 4, 10), (0, 0, 4, 14), (0, 0, 3, 6), (1, 4, 0, 0)]
    assert finishes(outcome) == [421, 208, 311]
    assert first_difference(outcome, "sarathi", requests, pool, limits) == 0


def test_llama_cpp_purges_an_idle_slot_of_a_unified_cache_and_ends_where_none_has_cells():
    """Two slots, 9 cells. 1 leaves 2 cells in slot 0. 0, in slot 1, takes the last free ones for its sixth and seventh tokens,
    and one of slot 0 for its eighth. Beside a third request, which has slot 0, one cell is left for the two of the third step."""
    requests = [Request(0, 5, 4), Request(0, 2, 1)]
    pool, limits = Pool(9, 1), Limits(max_model_len=100, max_num_seqs=2, max_num_batched_tokens=8)
    outcome, _ = serve("llama-cpp-unified", requests, pool, limits)
    assert log(outcome) == [
        "0+107 | run 1 0 | prefill 1:2 0:5 | live 7 free 2",
        "107+110 | run 0 | decode 0 | live 6 cached 2 free 1",
        "217+110 | run 0 | decode 0 | live 7 cached 2",
        "327+110 | run 0 | decode 0 | live 8 free 1",
    ]
    with pytest.raises(ContextExceededError) as error:
        serve("llama-cpp-unified", [*requests, Request(100, 2, 4)], pool, limits)
    assert error.value.args == (2, 1)
