"""The oracle against stories worked out by hand from the rules, and against what must hold of every run."""

from __future__ import annotations

from collections import Counter

import pytest

from oracle import POLICIES, Limits, Pool, Request, classify_slot, simulate
from oracle.story import Cost, finishes, log, random_case, swap_in_ticks, swap_out_ticks


@pytest.mark.parametrize(
    ("computed", "final", "requested", "expected"),
    [
        (8, 10, 2048, {"live": 8, "reserved": 2, "over_estimate": 2038}),
        (4, 5, 512, {"live": 4, "reserved": 1, "over_estimate": 507}),
    ],
)
def test_the_papers_worked_example(computed, final, requested, expected):
    assert Counter(classify_slot(i, computed, final, requested, requested) for i in range(requested)) == expected


def test_a_demand_paged_block_ends_in_its_tail_and_a_chunk_in_what_was_rounded_up():
    assert Counter(classify_slot(i, 5, 6, 5, 8) for i in range(8)) == {"live": 5, "reserved": 1, "block_tail": 2}
    assert Counter(classify_slot(i, 5, 6, 7, 7) for i in range(16)) == {
        "live": 5, "reserved": 1, "over_estimate": 1, "round_up": 9,
    }  # fmt: skip


def test_vllm_recomputes_the_last_arrival():
    """Four blocks of two. Request 0 finds no block free, so 1 goes, and comes back with its two tokens as prompt."""
    cost = Cost()
    requests = [Request(0, 3, 4), Request(0, 2, 3), Request(5, 1, 1)]
    outcome = simulate("vllm-sosp23", requests, Pool(4, 2), Limits(max_model_len=100), cost)
    assert log(outcome) == [
        "0+105 | run 0 1 | prefill 0:3 1:2 | live 5 reserved 1 free 2",
        "105+120 | run 0 1 | live 7 reserved 1",
        "225+110 | run 0 | preempt 1 | live 5 reserved 1 free 2",
        "335+110 | run 0 | live 6 free 2",
        "445+105 | run 1 2 | prefill 1:4 2:1 | live 5 reserved 1 free 2",
    ]
    assert cost.calls == [(0, 0, 5, 9), (2, 7, 0, 0), (1, 5, 0, 0), (1, 6, 0, 0), (0, 0, 5, 11)]
    assert outcome.requests[1] == {
        "first_scheduled_ticks": 0, "first_token_ticks": 105, "finish_ticks": 550, "preemptions": 1,
        "token_ticks": [105, 225, 550], "refused": None,
    }  # fmt: skip
    assert finishes(outcome) == [445, 550, 550]


def test_vllm_swaps_out_and_back():
    """Four blocks of four and two on the host; a swapped sequence needs its blocks and one, and holds up admission."""
    cost = Cost()
    requests = [Request(0, 7, 4), Request(0, 4, 3), Request(50, 1, 2)]
    limits = Limits(max_model_len=100, preemption_mode="swap")
    outcome = simulate("vllm-sosp23", requests, Pool(4, 4, 2), limits, cost, swap_out_ticks, swap_in_ticks)
    assert log(outcome) == [
        "0+111 | run 0 1 | prefill 0:7 1:4 | live 11 reserved 1 free 4",
        "111+120 | run 0 1 | live 13 reserved 2 block_tail 1",
        "231+124 | run 0 | preempt 1 | out 1 | live 9 reserved 2 block_tail 1 free 4",
        "355+110 | run 0 | live 10 reserved 1 block_tail 1 free 4",
        "465+117 | run 1 2 | in 1 | prefill 2:1 | live 7 reserved 3 block_tail 2 free 4",
        "582+110 | run 2 | live 2 reserved 1 block_tail 1 free 12",
    ]
    assert cost.calls == [(0, 0, 11, 38), (2, 13, 0, 0), (1, 9, 0, 0), (1, 10, 0, 0), (1, 6, 1, 1), (1, 2, 0, 0)]
    assert finishes(outcome) == [465, 582, 692]
    assert [request["preemptions"] for request in outcome.requests] == [0, 1, 0]


def test_vllm_recomputes_where_the_host_is_full():
    requests = [Request(0, 7, 4), Request(0, 4, 3)]
    limits = Limits(max_model_len=100, preemption_mode="swap")
    outcome = simulate("vllm-sosp23", requests, Pool(4, 4, 1), limits, Cost())
    assert log(outcome)[2:] == [
        "231+110 | run 0 | preempt 1 | live 9 reserved 2 block_tail 1 free 4",
        "341+110 | run 0 | live 10 reserved 1 block_tail 1 free 4",
        "451+106 | run 1 | prefill 1:6 | live 6 reserved 1 block_tail 1 free 8",
    ]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_vllm_preempts_itself_when_the_whole_pool_is_its_own(mode):
    """The step after schedules again at once. It holds both blocks and could never come back with a third, so it is
    recomputed though the host has room."""
    limits = Limits(max_model_len=100, preemption_mode=mode)
    pool = Pool(2, 2, 5)
    outcome = simulate("vllm-sosp23", [Request(0, 3, 2)], pool, limits, Cost(), swap_out_ticks, swap_in_ticks)
    assert log(outcome) == [
        "0+103 | run 0 | prefill 0:3 | live 3 reserved 1",
        "103+0 | preempt 0 | free 4",
        "103+104 | run 0 | prefill 0:4 | live 4",
    ]
    assert outcome.requests[0]["preemptions"] == 1


def test_vllm_swaps_out_a_sequence_that_can_come_back_with_one_block_more():
    """Three blocks of two: 1 leaves with two, which is one less than there are, and comes back to all of them."""
    requests = [Request(0, 1, 2), Request(0, 4, 2)]
    limits = Limits(max_model_len=100, preemption_mode="swap")
    outcome = simulate("vllm-sosp23", requests, Pool(3, 2, 5), limits, Cost(), swap_out_ticks, swap_in_ticks)
    assert log(outcome) == [
        "0+105 | run 0 1 | prefill 0:1 1:4 | live 5 reserved 1",
        "105+124 | run 0 | preempt 1 | out 1 | live 2 free 4",
        "229+116 | run 1 | in 1 | live 5 reserved 1",
    ]
    assert finishes(outcome) == [229, 345]


def first_steps(requests, pool, **limits) -> list[tuple[int, ...]]:
    """The sequences that prefill, step by step, under vLLM."""
    outcome = simulate("vllm-sosp23", requests, pool, Limits(max_model_len=100, **limits), Cost())
    return [tuple(i for i, _ in step.prefilled) for step in outcome.steps]


def test_vllm_keeps_the_watermark_only_while_something_runs():
    pool = Pool(10, 2)  # a fifth of it is two blocks
    seven_blocks, nine_blocks = Request(1, 14, 1), Request(1, 18, 1)
    assert first_steps([Request(0, 4, 2), seven_blocks], pool, watermark_fraction=0.2) == [(0,), (), (1,)]
    assert first_steps([Request(0, 4, 2), seven_blocks], pool, watermark_fraction=0.0) == [(0,), (1,)]
    assert first_steps([nine_blocks], pool, watermark_fraction=0.2) == [(0,)]
    # It is waived for the first of a phase alone: the second one finds that something runs, and 10 - 2 - 7 = 1 < 2.
    assert first_steps([Request(1, 4, 2), seven_blocks], pool, watermark_fraction=0.2) == [(0,), (), (1,)]
    six_blocks = Request(1, 12, 1)
    assert first_steps([Request(1, 4, 2), six_blocks], pool, watermark_fraction=0.2) == [(0, 1), ()]


@pytest.mark.parametrize(
    ("fraction", "ran"),
    [
        (0.0, [(0, 1, 2), (0, 1, 2), (0, 1), (0, 2), (0,), (0,), (0,), (0,)]),
        (0.45, [(0, 1, 2), (0, 1, 2), (0, 1), (0,), (0,), (0,), (0,), (0,), (2,)]),
    ],
)
def test_vllm_swaps_in_above_the_watermark_while_something_runs(fraction, ran):
    """Seven blocks of four. 2 is swapped out with two and needs three; when 1 ends five are free, which leaves two:
    less than a watermark of three."""
    requests = [Request(0, 4, 8), Request(0, 8, 3), Request(0, 4, 3)]
    limits = Limits(max_model_len=100, preemption_mode="swap", watermark_fraction=fraction)
    outcome = simulate("vllm-sosp23", requests, Pool(7, 4, 2), limits, Cost())
    assert [step.running for step in outcome.steps] == ran
    back = [k for k, step in enumerate(outcome.steps) if step.swapped_in == (2,)]
    assert back == [k for k, ids in enumerate(ran) if k > 2 and 2 in ids]


def test_vllm_swaps_in_below_the_watermark_when_nothing_runs():
    """Seven blocks of four, two of them the watermark. 1 finds none free for itself when it holds five; to come back
    it needs six, and one is left."""
    limits = Limits(max_model_len=100, preemption_mode="swap", watermark_fraction=0.3)
    outcome = simulate("vllm-sosp23", [Request(0, 1, 6), Request(0, 16, 6)], Pool(7, 4, 5), limits, Cost())
    assert [step.running for step in outcome.steps] == [(0, 1)] * 4 + [(0,)] * 2 + [(1,)] * 2
    assert [step.swapped_out for step in outcome.steps].index((1,)) == 4
    assert [step.swapped_in for step in outcome.steps].index((1,)) == 6


def test_vllm_stops_at_its_budgets():
    pool = Pool(50, 2)
    assert first_steps([Request(0, 3, 1), Request(0, 3, 1)], pool, max_num_batched_tokens=5) == [(0,), (1,)]
    assert first_steps([Request(0, 9, 2), Request(0, 3, 1)], pool, max_num_batched_tokens=4) == [(0,), (1,)]
    assert first_steps([Request(0, 9, 2), Request(0, 4, 1)], pool, max_num_batched_tokens=4) == [(0,), (), (1,)]
    assert first_steps([Request(0, 2, 1)] * 3, pool, max_num_seqs=2) == [(0, 1), (2,)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_what_holds_of_every_run(policy):
    """Slots add up, time never runs back, requests start in arrival order and end once, with all their tokens."""
    seen = Counter()
    for seed in range(40):
        requests, pool, limits = random_case(seed)
        outcome = simulate(policy, requests, pool, limits, Cost(), swap_out_ticks, swap_in_ticks)
        for step, after in zip(outcome.steps, outcome.steps[1:]):
            assert after.start_ticks >= step.start_ticks + step.ticks
        for step in outcome.steps:
            assert sum(step.buckets.values()) == pool.slots
            seen.update(name for name, slots in step.buckets.items() if slots)
            seen.update(preempted=len(step.preempted), swapped_in=len(step.swapped_in))
            # A free slot is in a chunk exactly where there are chunks.
            if step.free_chunks is not None:
                free = step.buckets["free"] + step.buckets["stranded"]
                assert free == pool.block_size * sum(blocks for _, blocks in step.free_chunks)
        for request, sent in zip(outcome.requests, requests):
            finished = request["refused"] is None
            assert len(request["token_ticks"]) == (sent.output_tokens if finished else 0)
            assert (request["finish_ticks"] is not None) == finished
            assert not finished or request["first_scheduled_ticks"] >= sent.arrival_ticks
        started = [request["first_scheduled_ticks"] for request in outcome.requests if request["refused"] is None]
        assert started == sorted(started)
        seen.update(refused=sum(request["refused"] is not None for request in outcome.requests))
    expected = {"vllm-sosp23": {"block_tail", "preempted", "swapped_in"}, "orca": {"over_estimate"}}
    hold, chunks = {"finished_hold", "over_estimate"}, {"round_up", "stranded"}
    expected |= {"static": hold, "fastertransformer": hold, "orca-max": chunks, "orca-pow2": chunks}
    happened = {name for name, times in seen.items() if times}
    assert expected.get(policy, chunks) | {"live", "reserved", "free", "refused"} <= happened
    assert "cached" not in happened


@pytest.mark.parametrize("request_", [Request(0, 5, 6), Request(0, 0, 1), Request(0, 1, 0), Request(0, 1, 3, 2)])
def test_a_request_that_cannot_be_true_is_the_users_mistake(request_):
    with pytest.raises(ValueError, match="request 0"):
        simulate("orca", [request_], Pool(10, 4), Limits(max_model_len=10), Cost())
