"""llama.cpp's slots: logs worked out by hand from its server's source, and the cells that a split cache wastes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import serve, times_of
from oracle import Limits, Pool, Request
from schedulers import StoryCost, cases, check, log_of
from strategies import Case


def served(requests: list[Request], pool: Pool, max_num_seqs: int, max_num_batched_tokens: int, leap: bool = False):
    limits = Limits(100, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return serve("llama-cpp", Case(requests, pool, limits, StoryCost()), leap=leap)


def buckets(live: int, reserved: int, over_estimate: int, free: int) -> dict[str, int]:
    empty = dict.fromkeys(("block_tail", "round_up", "finished_hold", "stranded", "cached"), 0)
    return {"live": live, "reserved": reserved, "over_estimate": over_estimate, **empty, "free": free}


@pytest.mark.parametrize("leap", [False, True])
def test_prompts_fill_a_batch_in_the_order_of_their_slots(leap):
    """Two slots of 8 cells, batches of 4. 0 takes slot 1, as the last of the unused slots comes first, and 1 takes slot
    0: its prompt goes first. 2 follows it into slot 0, and so it comes before the rest of 0's prompt."""
    run = served([Request(0, 3, 2), Request(0, 6, 1), Request(0, 2, 1)], Pool(8, 2), 2, 4, leap)
    assert log_of(run) == [
        (0, 104, buckets(live=4, reserved=3, over_estimate=1, free=8)),
        (104, 104, buckets(live=8, reserved=4, over_estimate=4, free=0)),
        (208, 103, buckets(live=5, reserved=3, over_estimate=8, free=0)),
        (311, 110, buckets(live=4, reserved=1, over_estimate=3, free=8)),
    ]
    assert {i: times[:3] for i, times in times_of(run).items()} == {
        0: (104, 311, 421),
        1: (0, 208, 208),
        2: (208, 311, 311),
    }


def test_the_slot_that_was_idle_for_longest_is_taken_first():
    """Slots 2, 1 and 0 have 0, 1 and 2. 0 finishes in step 0, 2 in step 1; so 3 takes slot 2 and 4 takes slot 0, and with
    three tokens left beside the decode of 1 the batch has no room for 3."""
    early = [Request(0, 1, 1), Request(0, 1, 9), Request(0, 1, 2)]
    times = times_of(served([*early, Request(150, 3, 1), Request(150, 3, 1)], Pool(30, 1), 3, 4))
    assert times[0][2] < times[2][2]
    assert times[4][0] < times[3][0]


def test_a_request_holds_its_share_of_the_cache_and_longer_ones_are_refused():
    """Of 11 blocks of 2 three slots have 3 blocks each, and two blocks are left over."""
    run = served([Request(0, 2, 4), Request(0, 2, 5), Request(0, 6, 1)], Pool(11, 2), 3, 9)
    assert run.refused.tolist() == [False, True, True]
    assert log_of(run)[0][2] == buckets(live=2, reserved=4, over_estimate=0, free=16)


@hypothesis_settings(max_examples=40)
@given(case=cases, slots=st.sampled_from([1, 2, 3]), tokens=st.sampled_from([1, 2, 3, 5, 12]), more=st.integers(1, 4))
def test_every_step_and_slot_is_the_oracles_where_batches_are_small(case, slots, tokens, more):
    """In a pool with room for most requests in each of its slots."""
    limits = replace(case.limits, max_num_seqs=slots, max_num_batched_tokens=tokens)
    pool = Pool(slots * more * case.pool.num_blocks, case.pool.block_size, case.pool.host_blocks)
    check("llama-cpp", replace(case, limits=limits, pool=pool))
