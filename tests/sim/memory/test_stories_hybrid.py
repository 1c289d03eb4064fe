"""Stories of KV groups, worked out by hand: the oracle tells them, and the engine too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_runs import times_of
from fragmeter.sim.memory.paged.group_cache import NULL_BLOCK
from fragmeter.sim.metrics.summary import summary
from hybrid_runs import HybridCase, group_buckets_at_rows, serve
from oracle import Limits, Pool, Request
from oracle.hybrid import Groups, simulate_hybrid
from oracle.story import log
from schedulers import StoryCost, log_of
from strategies import Case, LineCost
from walk_hybrid import HybridWalk

LIMITS = Limits(max_model_len=40, max_num_batched_tokens=10, max_num_seqs=4, watermark_fraction=0.0)


def log_lines(policy: str, requests: list[Request], pool: Pool, groups: Groups, limits: Limits = LIMITS) -> list[str]:
    """The oracle's log, once the engine has the same times and buckets."""
    hybrid = HybridCase(Case(requests, pool, limits, StoryCost()), groups)
    outcome, in_groups = simulate_hybrid(policy, requests, pool, limits, groups, StoryCost().step_ticks)
    run = serve(policy, hybrid, leap=False)
    assert log_of(run) == [(step.start_ticks, step.ticks, step.buckets) for step in outcome.steps]
    assert group_buckets_at_rows(run) == in_groups
    return log(outcome)


def test_a_sequence_crosses_its_window():
    """A full group and one with a window of 4, blocks of 2. With c tokens computed the next one sees c - 3 and later,
    so from c = 5 on a page comes back in every other step, and the step after it takes one. Twelve pages."""
    groups = Groups(full=1, sliding=1, window=4)
    assert log_lines("vllm-v1", [Request(0, 3, 8)], Pool(13, 2), groups) == [
        # Two pages in either group, for 3 tokens and one to come.
        "0+103 | run 0 | prefill 0:3 | live 6 reserved 2 free 16",
        "103+110 | run 0 | decode 0 | live 8 free 16",
        "213+110 | run 0 | decode 0 | live 10 reserved 2 free 12",
        # 5 computed: 0 and 1 lie before the window. 6 live in the full group, 4 in the other.
        "323+110 | run 0 | decode 0 | live 10 free 14",
        "433+110 | run 0 | decode 0 | live 12 reserved 2 free 10",
        "543+110 | run 0 | decode 0 | live 12 free 12",
        "653+110 | run 0 | decode 0 | live 14 reserved 2 free 8",
        "763+110 | run 0 | decode 0 | live 14 free 10",
    ]


def test_tables_keep_null_entries():
    """In its last step it has computed 9 tokens and computes one more: five pages, of which the sliding group has given
    back those of tokens 0 to 5. The page that came back first is taken again by the next step, in the full group."""
    case = Case([Request(0, 3, 8)], Pool(13, 2), LIMITS, StoryCost())
    walk = HybridWalk("vllm-v1", HybridCase(case, Groups(1, 1, 4)))
    tables = [moment.tables[0] for moment in walk.moments() if moment.running]
    assert tables[0] == ([0, 1], [2, 3])
    assert tables[2] == ([0, 1, 4], [2, 3, 5])
    assert tables[3] == ([0, 1, 4], [NULL_BLOCK, 3, 5])
    assert tables[4] == ([0, 1, 4, 2], [NULL_BLOCK, 3, 5, 6])
    assert tables[5] == ([0, 1, 4, 2], [NULL_BLOCK, NULL_BLOCK, 5, 6])
    assert tables[7] == ([0, 1, 4, 2, 3], [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 6, 7])


def test_a_prompt_longer_than_its_window_gives_back_in_the_step_after():
    """Only the window is left of nine tokens once they are computed. vLLM V1 admits 1 in that very step, to pages that
    0 gave back in it; vLLM 0.x looks at the queue before, and finds one where it needs two."""
    requests, groups = [Request(0, 9, 3), Request(0, 4, 1)], Groups(full=0, sliding=1, window=4)
    assert log_lines("vllm-v1", requests, Pool(7, 2), groups) == [
        "0+109 | run 0 | prefill 0:9 | live 9 reserved 1 free 2",
        "109+114 | run 0 1 | decode 0 | prefill 1:4 | live 8 free 4",
        "223+110 | run 0 | decode 0 | live 5 reserved 1 free 6",
    ]
    assert log_lines("vllm-v0", requests, Pool(6, 2), groups) == [
        "0+109 | run 0 | prefill 0:9 | live 9 reserved 1 free 2",
        "109+110 | run 0 | decode 0 | live 4 free 8",
        "219+104 | run 0 1 | pause 0 | prefill 1:4 | live 8 free 4",
        "323+110 | run 0 | decode 0 | live 5 reserved 1 free 6",
    ]


def test_a_page_serves_sequences_behind_the_one_that_frees_it_and_not_those_before():
    """Five pages, all held in step 2. There 0 needs one, and 1 is to give one back; but 0 goes first, and 1 gives
    way with all that it has. With a page more none does."""
    requests, groups = [Request(0, 5, 3), Request(0, 4, 3)], Groups(full=0, sliding=1, window=4)
    assert log_lines("vllm-v1", requests, Pool(6, 2), groups) == [
        "0+109 | run 0 1 | prefill 0:5 1:4 | live 9 reserved 1",
        # 0 gives back tokens 0 and 1, and 1 takes their page.
        "109+120 | run 0 1 | decode 0 1 | live 9 reserved 1",
        "229+110 | run 0 | preempt 1 | decode 0 | live 5 reserved 1 free 4",
        "339+106 | run 1 | prefill 1:6 | live 6 free 4",
    ]
    assert log_lines("vllm-v1", requests, Pool(7, 2), groups) == [
        "0+109 | run 0 1 | prefill 0:5 1:4 | live 9 reserved 1 free 2",
        "109+120 | run 0 1 | decode 0 1 | live 9 reserved 1 free 2",
        "229+120 | run 0 1 | decode 0 1 | live 9 reserved 1 free 2",
    ]


def test_a_long_prompt_asks_for_a_window_and_a_chunk():
    """Nineteen tokens in chunks of 4: an admission asks for ceil((4 - 1 + 4) / 2) + 1 = 5 pages in the sliding group, and
    so five do, where the whole prompt would ask for ten. The chunks hold 4, 4, 4, ... tokens and what they see."""
    limits = replace(LIMITS, max_num_batched_tokens=4)
    groups = Groups(full=0, sliding=1, window=4)
    assert log_lines("vllm-v1", [Request(0, 19, 1)], Pool(6, 2), groups, limits) == [
        "0+104 | run 0 | prefill 0:4 | live 4 free 6",
        # 4 computed, and the fifth sees the second: nothing is given back yet.
        "104+104 | run 0 | prefill 0:4 | live 8 free 2",
        "208+104 | run 0 | prefill 0:4 | live 8 free 2",
        "312+104 | run 0 | prefill 0:4 | live 8 free 2",
        "416+103 | run 0 | prefill 0:3 | live 7 reserved 1 free 2",
    ]
    refused = serve("vllm-v1", HybridCase(Case([Request(0, 19, 1)], Pool(5, 2), limits, LineCost()), groups))
    assert summary(refused)["refused_requests"] == [{"request": 0, "smallest_pool_blocks": 6}]


@pytest.mark.parametrize(
    ("policy", "arrival_ticks", "scheduled_ticks"), [("vllm-sosp23", 250, 438), ("vllm-v0", 150, 328)]
)
def test_a_leap_stops_where_pages_that_come_back_serve_the_head(policy, arrival_ticks, scheduled_ticks):
    """Past its window 0 holds three pages of ten after every other step and two after those between, so seven or eight
    are free. 1 asks for five of them with three to spare, and comes when seven are free: it waits for a step, and not
    for 0 to finish. Steps start at 0, 108, 218, 328, 438; vLLM 0.x looks before 0 gives back, the other one after it."""
    limits = Limits(max_model_len=40, max_num_batched_tokens=30, max_num_seqs=4, watermark_fraction=0.3)
    requests, groups = [Request(0, 8, 12), Request(arrival_ticks, 10, 2)], Groups(full=0, sliding=1, window=4)
    case = HybridCase(Case(requests, Pool(10, 2), limits, StoryCost()), groups)
    outcome, _ = simulate_hybrid(policy, requests, case.case.pool, limits, groups, StoryCost().step_ticks)
    assert outcome.requests[1]["first_scheduled_ticks"] == scheduled_ticks
    assert [times_of(serve(policy, case, leap=leap))[1][0] for leap in (True, False)] == [scheduled_ticks] * 2


@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-v0", "vllm-sosp23"])
def test_a_pool_that_preempts_without_windows_and_not_with_them(policy):
    """Four layers, three with a window of 4, blocks of 2; two requests of 16 tokens. Kept whole, either needs 8 blocks
    of four layers at its end, of 12. In pages of one layer the same bytes are 48: each holds at most 8 in the full group
    and 3 in either other one, 34 in all."""
    requests = [Request(0, 4, 13), Request(0, 4, 13)]
    null, groups = int(policy == "vllm-v1"), Groups(full=1, sliding=3, window=4)

    def run(blocks: int, off: bool):
        case = HybridCase(Case(requests, Pool(blocks, 2), LIMITS, LineCost()), groups)
        return serve(policy, case, disable_hybrid_kv_cache_manager=off)

    kept, windowed = run(12 + null, True), run(4 * 12 + null, False)
    assert sum(summary(kept)["preemptions"].values()) > 0
    assert sum(summary(windowed)["preemptions"].values()) == 0
    assert max(48 - windowed.accounts.at_rows()["free"] // 2) <= 34
    finished = [{i: times[2] for i, times in times_of(each).items()} for each in (kept, windowed)]
    assert finished[0][1] > finished[1][1] == finished[1][0]
