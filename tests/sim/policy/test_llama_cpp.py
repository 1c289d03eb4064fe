"""llama.cpp's slots: logs worked out by hand from its server's source, of a split cache and of one that slots share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import schedulers
from engine_runs import serve, times_of
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool, Request
from oracle.llama_cpp import ContextExceededError
from radix_cases import A, B, shared_cases, story
from same_runs import same
from schedulers import StoryCost, cases, check, expected, log_of, same_requests
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


@pytest.mark.parametrize("leap", [False, True])
def test_requests_that_waited_take_slots_of_one_step_in_reverse_order(leap):
    """0 and 1 finish in step 1, in which 4 arrives. Of 2 and 3, which waited before it, 3 comes first and takes slot 0, so its
    prompt is in the batch of step 2, and of 2's in slot 1 one token. 4 takes the slot of 3."""
    requests = [Request(0, 2, 2), Request(0, 2, 2), Request(0, 3, 1), Request(0, 3, 1), Request(110, 2, 1)]
    times = times_of(served(requests, Pool(8, 2), 2, 4, leap))
    assert times[0][2] == times[1][2] == times[2][0] == times[3][0]
    assert times[3][2] == times[4][0] < times[2][2]


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


@pytest.mark.slow
@hypothesis_settings(max_examples=40)
@given(case=cases, slots=st.sampled_from([1, 2, 3]), tokens=st.sampled_from([1, 2, 3, 5, 12]), more=st.integers(1, 4))
def test_every_step_and_slot_is_the_oracles_where_batches_are_small(case, slots, tokens, more):
    """In a pool with room for most requests in each of its slots."""
    limits = replace(case.limits, max_num_seqs=slots, max_num_batched_tokens=tokens)
    pool = Pool(slots * more * case.pool.num_blocks, case.pool.block_size, case.pool.host_blocks)
    check("llama-cpp", replace(case, limits=limits, pool=pool))


def shared(requests: list[Request], cells: int, max_num_seqs: int, max_num_batched_tokens: int, **switches):
    """Served from a unified cache."""
    limits = Limits(100, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return serve("llama-cpp", Case(requests, Pool(cells, 1), limits, StoryCost()), kv_unified=True, **switches)


def test_cells_of_an_idle_slot_are_cached_until_a_request_is_given_a_slot():
    """Two requests of 8 tokens and 5 of output, of which 12 have KV at the end. The first one's cells stay with its slot until the
    second comes at 100,000."""
    run = shared([Request(0, 8, 5), Request(100_000, 8, 5)], 100, 2, 64)
    (end, last) = (times[2] for times in times_of(run).values())
    assert end < 1000 and last == 100_000 + end
    assert run.accounts.window().slot_ticks["cached"] == 12 * (100_000 - end)
    assert run.accounts.window(2000, 3000).slot_ticks["cached"] == 12 * 1000


def cells(live: int, cached: int, free: int) -> dict[str, int]:
    empty = dict.fromkeys(("reserved", "over_estimate", "block_tail", "round_up", "finished_hold", "stranded"), 0)
    return {"live": live, **empty, "cached": cached, "free": free}


def test_idle_slots_keep_their_cells_until_a_request_is_given_a_slot_or_a_batch_lacks_cells():
    """Two slots, 12 cells, batches of 6. 0 has slot 1, 1 has slot 0. 1 finishes in step 0 and leaves 2 cells; 2 is given slot
    0, and they are free as its prompt begins in that step. It leaves 4 cells. 0 takes the last unused ones for its seventh
    and eighth tokens, and the cells of slot 0 are freed for its ninth."""
    requests = [Request(0, 4, 6), Request(0, 2, 1), Request(50, 4, 1)]
    assert log_of(shared(requests, 12, 2, 6, leap=False)) == [
        (0, 106, cells(live=6, cached=0, free=6)),
        (106, 114, cells(live=9, cached=0, free=3)),
        (220, 110, cells(live=6, cached=4, free=2)),
        (330, 110, cells(live=7, cached=4, free=1)),
        (440, 110, cells(live=8, cached=4, free=0)),
        (550, 110, cells(live=9, cached=0, free=3)),
    ]
    leapt = [(row[0], row[1]) for row in log_of(shared(requests, 12, 2, 6))]
    assert leapt == [(0, 106), (106, 114), (220, 330), (550, 110)]


@pytest.mark.parametrize(("caching", "cached"), [(False, 0), (True, 3)])
def test_a_request_that_is_given_a_slot_frees_what_idle_slots_keep_unless_prefixes_are_cached(caching, cached):
    """Slots 2 and 1 keep 2 cells and 1; the third request is given slot 0."""
    requests = [Request(0, 2, 1), Request(0, 1, 1), Request(150, 4, 1)]
    run = shared(requests, 20, 3, 9, leap=False, enable_prefix_caching=caching)
    assert [row[2]["cached"] for row in log_of(run)] == [0, cached]


def test_stale_cells_are_not_freed_before_the_prompt_begins():
    """Two slots, batches of 3. 0 leaves 3 cells in slot 1, which 2 is given next. Its prompt waits for two steps, as batches
    are full with the prompt of 1 in slot 0, and so long the cells are stale: of 10 cells 2 are left for the last 3 tokens."""
    requests = [Request(0, 2, 2), Request(50, 8, 1), Request(150, 2, 1)]
    assert log_of(shared(requests, 11, 2, 3, leap=False)) == [
        (0, 102, cells(live=2, cached=0, free=9)),
        (102, 112, cells(live=5, cached=0, free=6)),
        (214, 103, cells(live=5, cached=3, free=3)),
        (317, 103, cells(live=8, cached=3, free=0)),
        (420, 102, cells(live=2, cached=8, free=1)),
    ]
    with pytest.raises(SettingError, match="a batch of 3 tokens lacks 1 of the 10 cells"):
        shared(requests, 10, 2, 3)


def test_a_run_ends_with_one_line_where_no_cell_is_left():
    """12 cells: after four steps two sequences have six tokens each, and their next two find no cell."""
    requests = [Request(0, 3, 9), Request(0, 3, 9)]
    expected = (
        "kv_unified = True: a batch of 2 tokens lacks 2 of the 12 cells in step 4, where llama.cpp's server would end all"
        " running requests with an error, which is not simulated; give a larger pool, a smaller max_num_seqs or --no-kv-unified"
    )
    for leap in (False, True):
        with pytest.raises(SettingError) as error:
            shared(requests, 12, 2, 9, leap=leap)
        assert str(error.value) == expected
    assert not shared(requests, 23, 2, 9).refused.any()


def test_a_request_may_have_the_whole_cache_and_longer_ones_are_refused():
    run = shared([Request(0, 8, 4), Request(0, 8, 5)], 12, 2, 16)
    assert run.refused.tolist() == [False, True]


def test_the_unified_cache_has_the_cells_of_the_blocks_and_four_slots_by_default():
    chosen = settings(policy="llama-cpp", kv_unified=True, num_gpu_blocks_override=3)
    replica = build(chosen)
    assert (replica.num_blocks, replica.block_size) == (768, 1)
    assert replica.policy.limits.max_num_seqs == 4


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(case=cases, slots=st.sampled_from([1, 2, 3]), tokens=st.sampled_from([1, 3, 5, 12]), spare=st.integers(0, 12))
def test_every_step_of_a_unified_cache_is_the_oracles_and_the_same_runs_lack_cells(case, slots, tokens, spare):
    """In a cache with little more room than for the longest request, so that idle slots are purged."""
    limits = replace(case.limits, max_num_seqs=slots, max_num_batched_tokens=tokens)
    longest = max(request.prompt_tokens + request.output_tokens for request in case.requests)
    case = replace(case, limits=limits, pool=Pool(longest + spare, 1))
    try:
        expected("llama-cpp-unified", case)
    except ContextExceededError as error:
        batch, lacking = error.args
        for leap in (False, True):
            with pytest.raises(SettingError, match=f"a batch of {batch} tokens lacks {lacking} of"):
                schedulers.served("llama-cpp-unified", case, leap=leap)
    else:
        check("llama-cpp-unified", case)


def turns(*requests: tuple[int, int, list[tuple[int, int]]], cells: int, slots: int, batch: int) -> Case:
    """Requests as (arrival, output, pieces of the prompt as (kind, tokens))."""
    return story(list(requests), cells, max_num_seqs=slots, max_num_batched_tokens=batch)


@pytest.mark.parametrize("unified", [False, True])
def test_a_prompt_is_not_computed_as_far_as_its_slot_keeps_it(unified):
    """Two slots. 0 leaves A A A A and a token of its output in slot 1, 1 leaves B B B in slot 0. 2 begins with A A A and goes to
    slot 1, though slot 0 was released first, and computes its two other tokens. 3 is B B B, of which the last is computed
    anyhow."""
    case = turns(
        (0, 2, [(A, 4)]), (0, 1, [(B, 3)]), (400, 1, [(A, 3), (-1, 2)]), (800, 1, [(B, 3)]), cells=24, slots=2, batch=9
    )
    name = "llama-cpp-unified-caching" if unified else "llama-cpp-caching"
    runs = held_to_the_oracle(name, case)
    rows = runs[0].log.rows
    assert rows["prefill_tokens"].tolist() == [7, 0, 2, 1]
    assert [row[2]["cached"] for row in log_of(runs[0])] == [0, 3, 3, 5]
    hits = runs[0].replica.cache_log.look_up_columns()["hit_tokens"].tolist()
    assert hits == [0, 0, 3, 2]


def test_a_slot_is_chosen_for_its_tokens_only_if_they_are_more_than_a_tenth_of_the_prompt():
    """Slot 1 keeps A and was released last. Of a prompt of 10 tokens A is a tenth, and slot 0 is taken; of 9 it is more."""
    for rest, slot in ((9, 0), (8, 1)):
        case = turns((0, 2, [(A, 1)]), (0, 1, [(B, 1)]), (400, 1, [(A, 1), (-1, rest)]), cells=40, slots=2, batch=99)
        run = held_to_the_oracle("llama-cpp-caching", case)[0]
        assert run.replica.cache_log.look_up_columns()["hit_tokens"].tolist() == [0, 0, slot]


def test_a_unified_cache_keeps_what_idle_slots_have_until_a_batch_lacks_cells():
    """With prefix caching (no prompt cache in host memory) a request that is given a slot frees nothing. 2 takes
    over 3 cells of slot 1 and needs 8 more, of which 7 are free: slot 0 is purged, so that 3 finds nothing of B there."""
    case = turns(
        (0, 1, [(A, 3)]), (0, 1, [(B, 3)]), (400, 1, [(A, 3), (-1, 8)]), (800, 1, [(B, 2)]), cells=13, slots=2, batch=99
    )
    runs = held_to_the_oracle("llama-cpp-unified-caching", case)
    assert [row[2]["cached"] for row in log_of(runs[0])] == [0, 0, 11]
    assert runs[0].replica.memory.evicted_blocks == 3
    assert runs[0].replica.cache_log.look_up_columns()["hit_tokens"].tolist() == [0, 0, 3, 0]


def test_of_slots_that_keep_as_much_of_a_prompt_the_lowest_is_chosen():
    """Slot 1 was released first, and both keep A A A."""
    case = turns((0, 1, [(A, 3)]), (0, 3, [(A, 3)]), (900, 1, [(A, 3), (-1, 4)]), cells=20, slots=2, batch=99)
    run = held_to_the_oracle("llama-cpp-unified-caching", case)[0]
    assert run.replica.memory.kept == {0: 7, 1: 3}


def test_the_lowest_idle_slot_is_purged_first():
    """Slot 2 keeps 2 cells and slot 1 keeps 3. 2, in slot 0, needs 6 of 10 cells, of which 5 are free."""
    case = turns((0, 1, [(A, 2)]), (0, 1, [(B, 3)]), (400, 2, [(-1, 6)]), cells=10, slots=3, batch=99)
    run = held_to_the_oracle("llama-cpp-unified-caching", case)[0]
    assert [row[2]["cached"] for row in log_of(run)] == [0, 2, 2]


@pytest.mark.parametrize("unified", [False, True])
def test_chats_find_all_that_was_computed_if_each_has_a_slot_and_nothing_if_one_more_takes_turns(unified):
    """Prompts of 20, 60 and 100 tokens, outputs of 10, one request at a time: a turn finds all tokens of the one before but the
    last. Of one chat more than slots, each takes the slot of the chat that comes next."""
    for chats, hits in ((3, 3 * (29 + 69)), (4, 0)):
        place = np.arange(3 * chats)
        content = PromptContent.of_sessions(place % chats)
        work = Workload("chats", place * 10**13, 20 + place // chats * 40, np.full(len(place), 10), content=content)
        run = simulate(
            settings(policy="llama-cpp", max_num_seqs=3, num_gpu_blocks_override=6, kv_unified=unified), work
        )
        assert summary(run)["prefix_cache"]["hit_tokens"] == hits


def held_to_the_oracle(name: str, case: Case):
    """Runs step by step and in leaps, which are those of the oracle, and the same bits."""
    outcome = expected(name, case)
    stepped, leapt = (schedulers.served(name, case, leap=leap) for leap in (False, True))
    assert log_of(stepped) == [(step.start_ticks, step.ticks, step.buckets) for step in outcome.steps]
    for run in (stepped, leapt):
        same_requests(run, outcome)
    same(leapt, stepped)
    return stepped, leapt


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(
    case=shared_cases(),
    slots=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([1, 2, 5]),
    unified=st.booleans(),
    apart=st.sampled_from([0, 300, 2000]),
)
def test_every_step_with_prompts_that_begin_alike_is_the_oracles(case, slots, size, unified, apart):
    """Also where requests come so far apart that several slots are idle."""
    requests = [replace(each, arrival_ticks=each.arrival_ticks + i * apart) for i, each in enumerate(case.requests)]
    case = replace(case, requests=requests, limits=replace(case.limits, max_num_seqs=slots))
    name = "llama-cpp-unified-caching" if unified else "llama-cpp-caching"
    if not unified:
        case = replace(case, pool=Pool(slots * -(-case.pool.slots // size), size))
    try:
        expected(name, case)
    except ContextExceededError:
        with pytest.raises(SettingError, match="lacks"):
            schedulers.served(name, case)
    else:
        held_to_the_oracle(name, case)
