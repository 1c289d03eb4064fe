"""The oracle's Orcas and static batches against stories worked out by hand from the rules."""

from __future__ import annotations

import pytest

from oracle import Limits, Pool, Request, simulate
from oracle.buddy import BuddyArena
from oracle.story import Cost, finishes, log


def test_orca_holds_up_the_queue_behind_a_head_without_a_chunk():
    """Ten blocks of four, carved 8 and 2. Request 2 needs 8 blocks in one, and 3 needs one but comes after it."""
    cost = Cost()
    requests = [Request(0, 9, 3), Request(0, 5, 2), Request(10, 13, 4), Request(20, 2, 1)]
    outcome = simulate("orca-oracle", requests, Pool(10, 4), Limits(max_model_len=32), cost)
    assert log(outcome) == [
        "0+114 | run 0 1 | prefill 0:9 1:5 | live 14 reserved 5 round_up 5 free 16",
        "114+120 | run 0 1 | live 16 reserved 3 round_up 5 stranded 16",
        "234+110 | run 0 | live 11 reserved 1 round_up 4 stranded 24",
        "344+115 | run 2 3 | prefill 2:13 3:2 | live 15 reserved 5 round_up 16 free 4",
        "459+110 | run 2 | live 14 reserved 3 round_up 15 free 8",
        "569+110 | run 2 | live 15 reserved 2 round_up 15 free 8",
        "679+110 | run 2 | live 16 reserved 1 round_up 15 free 8",
    ]
    assert cost.calls[:5] == [(0, 0, 14, 60), (2, 16, 0, 0), (1, 11, 0, 0), (0, 0, 15, 94), (1, 14, 0, 0)]
    chunks = [step.free_chunks for step in outcome.steps]
    assert chunks[:5] == [((4, 4),), ((4, 4),), ((4, 4), (8, 2)), ((9, 1),), ((8, 2),)]
    assert [step.largest_free_run_blocks for step in outcome.steps[:4]] == [4, 4, 6, 1]
    assert finishes(outcome) == [344, 234, 789, 459]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("orca-max", "0+103 | run 0 | prefill 0:3 | live 3 reserved 5 over_estimate 24 free 8"),
        ("orca-pow2", "0+103 | run 0 | prefill 0:3 | live 3 reserved 5 over_estimate 3 round_up 5 free 24"),
        ("orca-oracle", "0+103 | run 0 | prefill 0:3 | live 3 reserved 5 free 32"),
    ],
)
def test_orca_asks_for_what_it_expects(policy, expected):
    """Three in and five out: R is 32 at the most, 3 + 8 = 11 (three blocks, rounded up to four), or 8."""
    assert log(simulate(policy, [Request(0, 3, 5)], Pool(10, 4), Limits(max_model_len=32), Cost()))[0] == expected


def test_orca_pow2_keeps_a_power_of_two():
    outcome = simulate("orca-pow2", [Request(0, 3, 4)], Pool(10, 4), Limits(max_model_len=32), Cost())
    assert log(outcome)[0] == "0+103 | run 0 | prefill 0:3 | live 3 reserved 4 round_up 1 free 32"


def test_orca_frees_in_order_of_request_and_takes_the_last_freed():
    """Four blocks: 0 and 2 leave blocks 0 and 2 in that order, 4 takes 2."""
    requests = [Request(0, 1, 1), Request(0, 1, 3), Request(0, 1, 1), Request(0, 1, 3), Request(1, 1, 1)]
    outcome = simulate("orca-oracle", requests, Pool(4, 4), Limits(max_model_len=32), Cost())
    assert [step.running for step in outcome.steps] == [(0, 1, 2, 3), (1, 3, 4), (1, 3)]
    assert [step.free_chunks for step in outcome.steps] == [(), ((0, 1),), ((0, 1), (2, 1))]


@pytest.mark.parametrize("policy", ["orca-oracle", "orca"])
def test_orca_stops_at_its_budgets(policy):
    def prefills(requests, **limits) -> list[tuple[int, ...]]:
        outcome = simulate(policy, requests, Pool(64, 4), Limits(max_model_len=32, **limits), Cost())
        assert not any(step.buckets["stranded"] for step in outcome.steps)
        return [tuple(i for i, _ in step.prefilled) for step in outcome.steps]

    assert prefills([Request(0, 3, 1)] * 3, max_num_seqs=2) == [(0, 1), (2,)]
    assert prefills([Request(0, 9, 2), Request(0, 4, 1)], max_num_batched_tokens=4) == [(0,), (), (1,)]
    assert prefills([Request(0, 9, 2), Request(0, 3, 1)], max_num_batched_tokens=4) == [(0,), (1,)]


def test_orca_refuses_what_no_chunk_can_hold():
    requests = [Request(0, 1, 1), Request(0, 100, 29), Request(0, 64, 64)]
    outcome = simulate("orca-oracle", requests, Pool(300, 1), Limits(max_model_len=200), Cost())
    assert [request["refused"] is None for request in outcome.requests] == [True, False, True]
    outcome = simulate("orca-max", [Request(0, 1, 1)], Pool(10, 1), Limits(max_model_len=9), Cost())
    assert outcome.requests[0]["refused"] == "needs a chunk of 16 blocks, the arena's largest is 8"
    assert outcome.steps == []


def test_the_arena_carves_splits_and_merges():
    arena = BuddyArena(983)
    carve = tuple((start, 128) for start in range(0, 896, 128)) + ((896, 64), (960, 16), (976, 4), (980, 2), (982, 1))
    assert arena.chunks() == carve
    # Largest first would take 0; last in, first out takes the highest chunk of 128, and splits go low.
    assert [arena.allocate(128), arena.allocate(32), arena.allocate(32), arena.allocate(32)] == [768, 896, 928, 640]
    arena.release(896, 32)
    assert (896, 32) in arena.chunks()
    assert [arena.allocate(8), arena.allocate(16)] == [960, 896]
    for start, blocks in ((960, 8), (896, 16), (928, 32), (640, 32), (768, 128)):
        arena.release(start, blocks)
    assert arena.chunks() == carve


def test_orca_as_its_own_paper_has_it_reserves_max_tokens():
    """Forty slots: 15 for request 0; 1 may run to the model's 32, waits for it, and 2 waits behind."""
    cost = Cost()
    requests = [Request(0, 5, 2, 10), Request(0, 5, 1), Request(0, 1, 1, 1)]
    outcome = simulate("orca", requests, Pool(10, 4), Limits(max_model_len=32), cost)
    assert log(outcome) == [
        "0+105 | run 0 | prefill 0:5 | live 5 reserved 2 over_estimate 8 free 25",
        "105+110 | run 0 | live 6 reserved 1 over_estimate 8 free 25",
        "215+106 | run 1 2 | prefill 1:5 2:1 | live 6 reserved 2 over_estimate 26 free 6",
    ]
    assert cost.calls == [(0, 0, 5, 15), (1, 6, 0, 0), (0, 0, 6, 16)]
    assert finishes(outcome) == [215, 321, 321]


def test_a_static_batch_of_four_leaves_together():
    """Sequence 2 ends after two iterations and 1 after six; all hold their ten slots to the end, and 4 waits."""
    cost = Cost()
    requests = [Request(0, 3, 4, 4), Request(0, 2, 6, 6), Request(0, 1, 2, 3), Request(0, 3, 4, 7), Request(1, 2, 1, 1)]
    outcome = simulate("static", requests, Pool(11, 4), Limits(max_model_len=10, max_num_seqs=4), cost)
    assert log(outcome) == [
        "0+112 | run 0 1 2 3 | prefill 0:3 1:3 2:3 3:3 | live 9 reserved 16 over_estimate 12 finished_hold 3 free 4",
        "112+140 | run 0 1 2 3 | live 13 reserved 12 over_estimate 12 finished_hold 3 free 4",
        "252+140 | run 0 1 2 3 | live 14 reserved 8 over_estimate 7 finished_hold 11 free 4",
        "392+140 | run 0 1 2 3 | live 17 reserved 5 over_estimate 7 finished_hold 11 free 4",
        "532+140 | run 0 1 2 3 | live 6 reserved 2 over_estimate 1 finished_hold 31 free 4",
        "672+140 | run 0 1 2 3 | live 7 reserved 1 over_estimate 1 finished_hold 31 free 4",
        "812+102 | run 4 | prefill 4:2 | live 2 reserved 1 free 41",
    ]
    assert cost.calls == [(0, 0, 12, 24), *((4, 4 * (3 + k), 0, 0) for k in range(1, 6)), (0, 0, 2, 3)]
    assert finishes(outcome) == [812, 812, 812, 812, 914]
    assert outcome.requests[2]["token_ticks"] == [112, 252]


def test_a_static_batch_grows_to_the_pool_and_a_lone_head_may_take_it_all():
    """Twenty slots. 0 and 1 want 8 each; 2 wants the model's 30, gets 20 alone; 3 could never be held."""
    requests = [Request(0, 4, 2, 4), Request(0, 2, 2, 4), Request(0, 4, 2), Request(0, 15, 6), Request(0, 1, 1, 1)]
    outcome = simulate("static", requests, Pool(5, 4), Limits(max_model_len=30, max_num_seqs=8), Cost())
    assert [step.running for step in outcome.steps] == [(0, 1), (0, 1), (2,), (2,), (4,)]
    assert outcome.steps[2].buckets["over_estimate"] == 14 and outcome.steps[2].buckets["free"] == 0
    assert outcome.requests[3]["refused"] == "needs 21 slots of a pool of 20"


def test_a_static_batch_is_capped_at_the_model():
    """6 + 9 allowed tokens are more than the model's ten, and 6 + 2 true ones fit into that."""
    requests = [Request(0, 6, 2), Request(0, 1, 2)]
    outcome = simulate("static", requests, Pool(5, 4), Limits(max_model_len=10, max_num_seqs=2), Cost())
    assert log(outcome) == [
        "0+112 | run 0 1 | prefill 0:6 1:6 | live 7 reserved 4 over_estimate 4 finished_hold 5",
        "112+120 | run 0 1 | live 9 reserved 2 over_estimate 4 finished_hold 5",
    ]


def test_a_static_batch_pads_on_top_of_the_model():
    """Padded by five, request 1 needs fifteen slots for its own ten tokens, and so does every member."""
    requests = [Request(0, 6, 2), Request(0, 1, 9), Request(0, 1, 1, 1)]
    outcome = simulate("static", requests, Pool(10, 4), Limits(max_model_len=10, max_num_seqs=2), Cost())
    lines = log(outcome)
    assert lines[0] == "0+112 | run 0 1 | prefill 0:6 1:6 | live 7 reserved 11 over_estimate 7 finished_hold 5 free 10"
    assert lines[8] == "952+120 | run 0 1 | live 9 reserved 1 finished_hold 20 free 10"
    assert lines[9:] == ["1072+101 | run 2 | prefill 2:1 | live 1 reserved 1 free 38"]


def test_fastertransformer_stops_growing_at_its_length():
    """At most ten tokens of longest prompt and longest output: 4 + 5, then 6 + 5 is too many; 9 + 3 runs alone."""
    cost = Cost()
    requests = [Request(0, p, o, o) for p, o in ((4, 3), (3, 5), (6, 4), (9, 3))]
    limits = Limits(max_model_len=20, max_num_seqs=4, ft_max_tokens=10)
    outcome = simulate("fastertransformer", requests, Pool(15, 4), limits, cost)
    assert log(outcome) == [
        "0+108 | run 0 1 | prefill 0:4 1:4 | live 7 reserved 8 over_estimate 2 finished_hold 1 free 42",
        "108+120 | run 0 1 | live 9 reserved 6 over_estimate 2 finished_hold 1 free 42",
        "228+120 | run 0 1 | live 11 reserved 4 over_estimate 2 finished_hold 1 free 42",
        "348+120 | run 0 1 | live 6 reserved 2 finished_hold 10 free 42",
        "468+120 | run 0 1 | live 7 reserved 1 finished_hold 10 free 42",
        "588+106 | run 2 | prefill 2:6 | live 6 reserved 4 free 50",
        "694+110 | run 2 | live 7 reserved 3 free 50",
        "804+110 | run 2 | live 8 reserved 2 free 50",
        "914+110 | run 2 | live 9 reserved 1 free 50",
        "1024+109 | run 3 | prefill 3:9 | live 9 reserved 3 free 48",
        "1133+110 | run 3 | live 10 reserved 2 free 48",
        "1243+110 | run 3 | live 11 reserved 1 free 48",
    ]
    assert cost.calls[0] == (0, 0, 8, 20) and cost.calls[4] == (2, 16, 0, 0)
