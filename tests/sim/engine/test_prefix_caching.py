"""vllm-v1 with prefix caching, in a run: against the oracle, step against leap, and logs worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import same_runs as leaps
import schedulers
from engine_runs import engine_to_step, settings_of
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.prefix import FreeKVCacheBlockQueue, LeastRecentlyUsed
from fragmeter.sim.metrics.result import requests_table
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.runs.moments import ticks_of
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import SimulationFault
from observed import observed_ticks
from oracle import Limits, Pool
from oracle.slots import BUCKETS, CACHED, FREE, SlotMap, classify_slot
from oracle.story import log
from shared_prefixes import (
    SharedCase,
    caching_settings,
    expected,
    of_pieces,
    of_sessions,
    serve_cached,
    shared_cases,
)


def look_ups(run: Run) -> list[tuple[int, int, int]]:
    """(request, tokens known, tokens found) of every admission."""
    return [*zip(*(column.tolist() for column in run.replica.memory.cache_log.look_up_columns().values()))]


def check(case: SharedCase) -> None:
    """Stepping gives the oracle's log; stepping and leaping its times and its hits."""
    outcome, oracle = expected(case)
    stepped, leapt = serve_cached(case, leap=False), serve_cached(case)
    assert schedulers.log_of(stepped) == [(step.start_ticks, step.ticks, step.buckets) for step in outcome.steps]
    for run in (stepped, leapt):
        schedulers.same_requests(run, outcome)
        assert sorted(look_ups(run)) == sorted(oracle.look_ups)
        assert run.replica.memory.evicted_blocks == oracle.evicted


@hypothesis_settings(max_examples=50)
@given(case=shared_cases())
def test_every_step_and_slot_is_what_the_oracle_says(case):
    check(case)


@pytest.mark.slow
@hypothesis_settings(max_examples=5000)
@given(case=shared_cases())
def test_every_step_and_slot_is_what_the_oracle_says_at_length(case):
    check(case)


@hypothesis_settings(max_examples=50)
@given(case=shared_cases(), data=st.data())
def test_leap_and_step_are_the_same_bits(case, data):
    """Invariant 6, with prefixes that are shared and evicted."""
    end = serve_cached(case).log.end_ticks
    window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 1000), min_size=2, max_size=2, unique=True))))
    leapt, stepped = serve_cached(case, window), serve_cached(case, window, leap=False)
    leaps.same(leapt, stepped)
    assert look_ups(leapt) == look_ups(stepped)


@hypothesis_settings(max_examples=15)
@given(case=shared_cases())
def test_a_memory_of_kv_groups_logs_the_same_lives_of_blocks(case):
    """By priority blocks are taken in turn, in that memory; where all are alike the run is the same."""
    alike = replace(case.workload, priority=np.zeros(len(case.requests), dtype=np.int64))
    chosen = caching_settings(case)
    by_priority = replace(chosen, scheduling_policy="priority")
    plain, in_turn = (simulate(each, alike, case.cost) for each in (chosen, by_priority))
    assert (plain.replica.memory.is_plain, in_turn.replica.memory.is_plain) == (True, False)
    assert summary(plain)["prefix_cache"] == summary(in_turn)["prefix_cache"]


def story(requests, content, num_blocks: int, **limits) -> tuple[list[str], SharedCase, Run]:
    """The oracle's log of a case in blocks of four, once the engine has the same, in steps."""
    case = SharedCase(
        requests, Pool(num_blocks, 4), Limits(100, max_num_seqs=64, **limits), schedulers.StoryCost(), content
    )
    outcome, oracle = expected(case)
    for run in (serve_cached(case, leap=False), serve_cached(case)):
        schedulers.same_requests(run, outcome)
        assert sorted(look_ups(run)) == sorted(oracle.look_ups)
    stepped = serve_cached(case, leap=False)
    assert schedulers.log_of(stepped) == [(step.start_ticks, step.ticks, step.buckets) for step in outcome.steps]
    return log(outcome), case, run


def test_two_share_a_prefix_and_another_comes_after_eviction():
    """Six usable blocks of four. 0 and 1 begin with the same ten tokens, 3 and 4 with the first eight of them.

    110: 1 finds two full blocks, the half one it computes itself. At 344 both are done: of the blocks 0 to 4 only 4 is not
         full, and goes to the head of the queue, before 5, which was never taken; the others to its tail, as 2, 3, 1, 0.
    1000: 2 takes 4, 5, 2, 3 and 1. Block 0 stays.
    2000: 3 knows eight tokens and finds four; it takes block 1 from the head of the queue.
    3000: 4 knows the same eight, and both blocks of them are there. It still finds but one, as the second would cover
          its last token."""
    shared = (7, 10)
    pieces = [[shared], [shared], [], [(7, 8)], [(7, 8)]]
    requests, content = of_pieces([0, 50, 1000, 2000, 3000], pieces, [0, 2, 20, 0, 0], [3, 2, 1, 1, 1])
    lines, case, run = story(requests, content, 7)
    assert lines == [
        "0+110 | run 0 | prefill 0:10 | live 10 reserved 2 free 12",
        "110+114 | run 0 1 | decode 0 | prefill 1:4 | live 15 reserved 1 free 8",
        "224+120 | run 0 1 | decode 0 1 | live 17 reserved 1 block_tail 2 free 4",
        "1000+120 | run 2 | prefill 2:20 | live 20 cached 4",
        "2000+104 | run 3 | prefill 3:4 | live 8 cached 16",
        "3000+104 | run 4 | prefill 4:4 | live 8 cached 16",
    ]
    assert look_ups(run) == [(0, 10, 0), (1, 12, 8), (2, 20, 0), (3, 8, 4), (4, 8, 4)]
    idle = 16 * (1000 - 344) + 24 * (2000 - 1120) + 24 * (3000 - 2104)
    assert run.accounts.window().slot_ticks["cached"] == idle + 4 * 120 + 16 * 104 + 16 * 104
    assert run.accounts.window().slot_steps["cached"] == 4 + 16 + 16
    # In the window's first idle time and the step after it, and long after the run.
    assert run.accounts.window(344, 1120).slot_ticks["cached"] == 16 * 656 + 4 * 120
    assert run.accounts.window(3104, 4104).slot_ticks["cached"] == 24 * 1000
    plain = serve_cached(case, enable_prefix_caching=False)
    # 1 has to give way to 0, and its prompt and first token are computed once more.
    assert plain.log.rows["prefill_tokens"].sum() == 10 + 12 + 13 + 20 + 8 + 8


def test_samples_find_the_prompt_of_the_first_one():
    """Ten tokens in blocks of four, three times: one computes them, and each of the others finds eight of them."""
    _, case, _ = story(*of_pieces([0], [[(7, 10)]], [0], [3]), 20)
    run = simulate(caching_settings(case), replace(case.workload, n=np.array([3])), case.cost)
    cache = summary(run)["prefix_cache"]
    assert requests_table(run)["cached_tokens"].tolist() == [8]
    assert (cache["queried_tokens"], cache["hit_tokens"]) == (30, 16)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-v1", "sglang"])
@hypothesis_settings(max_examples=40)
@given(case=shared_cases(), counts=st.lists(st.integers(1, 4), min_size=8, max_size=8))
def test_of_several_samples_a_request_has_the_cached_tokens_of_the_last(policy, case, counts):
    """Fewer than its prompt has; all of them count in the hit rate, as if each were a request of its own."""
    chosen = settings_of(policy, case.pool, case.limits, enable_prefix_caching=True)
    work = replace(case.workload, n=np.array(counts[: len(case.requests)]))
    run, alone = simulate(chosen, work, case.cost), simulate(chosen, work.sequences, case.cost)
    table, each = requests_table(run), requests_table(alone)
    expected = []
    for first, count in zip(work.first_sequences.tolist(), work.num_sequences.tolist()):
        samples = each.iloc[first : first + count]
        ends = samples["finish_ticks"].tolist()
        last = max(range(count), key=lambda sample: (ends[sample], sample)) if not samples["refused"].any() else 0
        expected.append(samples["cached_tokens"].tolist()[last])
    assert table["cached_tokens"].tolist() == expected
    served = ~run.refused
    assert (table["cached_tokens"] < table["prompt_tokens"])[served].all()
    cache = summary(run)["prefix_cache"]
    assert cache == summary(alone)["prefix_cache"]
    assert cache["queried_tokens"] == (work.n * work.prompt_tokens)[served].sum()
    assert cache["hit_tokens"] == each["cached_tokens"].sum()


def test_what_is_said_of_the_cache():
    """The story above. 2 takes four blocks anew: 4 (born 224), 2 (0), 3 (110) and 1 (0, hit at 110). 3 takes 1 and 4
    takes 3, both born at 1000. A request that is done counts as it was admitted first."""
    shared = (7, 10)
    pieces = [[shared], [shared], [], [(7, 8)], [(7, 8)]]
    requests, content = of_pieces([0, 50, 1000, 2000, 3000], pieces, [0, 2, 20, 0, 0], [3, 2, 1, 1, 1])
    _, case, run = story(requests, content, 7)
    observed = observed_ticks(run.replica.memory.cache_log.residency, partial(ticks_of, run.log))
    assert [sorted(np.repeat(ticks, blocks).tolist()) for ticks, blocks in observed.values()] == [
        [776, 890, 1000, 1000, 1000, 2000],
        [776, 890, 890, 1000, 1000, 2000],
        [],
    ]
    cache = summary(run)["prefix_cache"]
    assert (cache["queried_tokens"], cache["hit_tokens"], cache["hit_rate"]) == (58, 16, 16 / 58)
    assert (cache["preempted_queried_tokens"], cache["preempted_hit_tokens"], cache["evicted_blocks"]) == (0, 0, 5)
    lifetime = cache["vllm:kv_block_lifetime_seconds"]
    assert (lifetime["count"], lifetime["mean"], lifetime["median"]) == (6, 6666 / 6 / 1e12, 1000 / 1e12)
    assert lifetime["buckets"]["0.001"] == lifetime["buckets"]["+Inf"] == 6
    assert cache["vllm:kv_block_reuse_gap_seconds"] | {"buckets": {}} == {
        "count": 0, "mean": None, "median": None, "buckets": {},
    }  # fmt: skip
    assert requests_table(run)["cached_tokens"].tolist() == [0, 8, 0, 4, 4]
    plain = serve_cached(case, enable_prefix_caching=False)
    assert summary(plain)["prefix_cache"] is None and "cached_tokens" not in requests_table(plain)


def test_a_waiting_request_is_let_in_by_a_block_that_a_running_one_fills():
    """Five usable blocks: two for 0, two for 1, one free. 2 begins with what 1 says: it needs three blocks. At 111 it
    finds one in a table, and the two others are too many. At 231 1 fills its second one, which 2 finds as well. A leap
    would pass over that: none is done before 472, and there is a block for all growth. In the end 1 grows
    into a block that 0 left cached, in the middle of a leap."""
    requests, content = of_sessions([0, 0, 1], [-1, 0, 0], [5, 6, 9], [4, 8, 1])
    lines, case, run = story(requests, content, 6)
    assert lines == [
        "0+111 | run 0 1 | prefill 0:5 1:6 | live 11 reserved 5 free 4",
        "111+120 | run 0 1 | decode 0 1 | live 13 reserved 3 free 4",
        "231+121 | run 0 1 2 | decode 0 1 | prefill 2:1 | live 16 reserved 2 block_tail 2",
        "352+120 | run 0 1 | decode 0 1 | live 17 reserved 3",
        "472+110 | run 1 | decode 1 | live 10 reserved 2 cached 8",
        "582+110 | run 1 | decode 1 | live 11 reserved 1 cached 8",
        "692+110 | run 1 | decode 1 | live 12 cached 8",
        "802+110 | run 1 | decode 1 | live 13 reserved 1 block_tail 2 cached 4",
    ]
    rows = run.log.rows
    assert [*zip(rows["start_ticks"].tolist(), rows["steps"].tolist())] == [
        (0, 1), (111, 1), (231, 1), (352, 1), (472, 4),
    ]  # fmt: skip
    assert run.accounts.window().slot_ticks["cached"] == 8 * 330 + 4 * 110


def test_a_block_that_is_not_published_is_a_fault_and_no_hang():
    """The story above, and 1 forgets to cache what it fills while it decodes."""
    requests, content = of_sessions([0, 0, 1], [-1, 0, 0], [5, 6, 9], [4, 8, 1])
    with mock.patch("fragmeter.sim.memory.paged.cached.CachedTables._cache_filled"):
        with pytest.raises(SimulationFault, match="block 1 of request 2 is full and was not cached"):
            story(requests, content, 6)


def test_a_victim_frees_only_what_no_other_table_holds():
    """Seven usable blocks: one each for 0, 1 and 2, three for 3, of which 4, admitted in the same step, finds two and
    takes one more. At 122 0, 1 and 2 want a block each. 4 gives up one; the two that it shares are held by 3, which
    has to go as well. At 252 3 finds the first block of the two again, and 4 the second too, which 3 computes. What they
    take besides are blocks without a name: the full ones of 0, 1 and 2 stay cached."""
    pieces = [[], [], [], [(7, 8)], [(7, 8)]]
    requests, content = of_pieces([0] * 5, pieces, [4, 4, 4, 1, 1], [2, 2, 2, 3, 3])
    lines, case, run = story(requests, content, 8)
    assert lines == [
        "0+122 | run 0 1 2 3 4 | prefill 0:4 1:4 2:4 3:9 4:1 | live 22 reserved 6",
        "122+130 | run 0 1 2 | preempt 4 3 | decode 0 1 2 | live 15 reserved 3 block_tail 6 cached 4",
        "252+108 | run 3 4 | prefill 3:6 4:2 | live 12 reserved 4 cached 12",
        "360+120 | run 3 4 | decode 3 4 | live 14 reserved 2 cached 12",
    ]
    results = summary(run)
    assert results["work"]["tokens"]["recomputed"] == 5 + 1
    cache = results["prefix_cache"]
    assert (cache["queried_tokens"], cache["hit_tokens"]) == (30, 8)
    assert (cache["preempted_queried_tokens"], cache["preempted_hit_tokens"]) == (20, 12)
    assert requests_table(run)["cached_tokens"].tolist() == [0, 0, 0, 0, 8]


class CacheWalk:
    """One engine, stopped wherever it waits: tables, references and the free queue are read, slots looked up."""

    def __init__(self, case: SharedCase, leap: bool) -> None:
        self.engine = engine_to_step(caching_settings(case, leap=leap, ids=True), case.cost, case.workload, leap)
        self.case, self.env, self.memory = case, self.engine.env, self.engine.memory

    def moments(self):
        """When, for how long, whether a sequence runs, and the slots that are in no table, by bucket, and live."""
        while True:
            self.env.step()
            if not self.engine.process.is_alive:
                return
            # The tables of the step that begins, which a leap goes on with.
            state, busy = self.engine.state, any(self.memory.tables.tables)
            self.memory.tables.grow_until(state.decode_step + bool(state.running))
            self.check_references()
            yield self.env.now, self.env.peek(), busy, self.buckets()

    def check_references(self) -> None:
        """Invariant 2: as many references as table entries, and in the queue just those blocks that have none."""
        queue, tables = self.memory.pool, self.memory.tables.tables
        named = Counter(block for table in tables.values() for block in table)
        assert self.memory.pool.num_shared == named.total() - len(named)
        assert sorted([*named, *queue.free_ids]) == list(range(self.memory.num_blocks))
        assert all(len(set(table)) == len(table) for table in tables.values())

    def buckets(self) -> dict[str, int]:
        """Invariant 3 in passing: a block in two tables is full, at the same place of both."""
        size, cached, state = self.case.pool.block_size, {*self.memory.cached_block_ids()}, self.engine.state
        places: dict[int, tuple[int, str]] = {}
        for sequence, table in self.memory.tables.tables.items():
            request = self.case.requests[sequence.index]
            running = sequence in state.running
            computed = sequence.held_tokens(state.decode_step) + 1 if running else sequence.computed_tokens
            end = len(table) * size
            for i in range(end):
                bucket = classify_slot(i, computed, request.prompt_tokens + request.output_tokens, computed, end)
                slot = table[i // size] * size + i % size
                assert places.setdefault(slot, (i, bucket)) == (i, bucket)
        slots = SlotMap(self.memory.num_blocks * size)
        for slot, (_, bucket) in places.items():
            slots.put(slot, bucket)
        for block in self.memory.pool.free_ids:
            for slot in range(block * size, (block + 1) * size):
                slots.put(slot, CACHED if block in cached else FREE)
        return slots.census()


@pytest.mark.slow
@hypothesis_settings(max_examples=80)
@given(case=shared_cases(), leap=st.booleans())
def test_invariants_1_and_2_hold_and_the_ledger_is_what_the_walk_finds(case, leap):
    """Invariant 1: the buckets add up to the capacity. Step by step the walk's sums over time, idle time included, are
    those of the ledger. Invariant 2: references are table entries; free and cached blocks have none."""
    walked = [*CacheWalk(case, leap).moments()]
    run = serve_cached(case, leap=leap)
    ledger = schedulers.buckets_at_rows(run)
    capacity = run.log.capacity_slots
    assert all(sum(buckets.values()) == capacity and min(buckets.values()) >= 0 for buckets in ledger)
    starts, ran = run.log.rows["start_ticks"].tolist(), run.log.rows["iterations"].tolist()
    assert [(at, buckets) for at, until, busy, buckets in walked if busy] == [
        (start, buckets) for start, count, buckets in zip(starts, ran, ledger) if count
    ]
    window = run.accounts.window()
    assert sum(window.slot_ticks.values()) == capacity * (window.end_ticks - window.start_ticks)
    assert sum(window.slot_steps.values()) == capacity * window.num_steps
    if not leap:
        assert window.slot_ticks == {
            bucket: sum(buckets[bucket] * (until - at) for at, until, _, buckets in walked) for bucket in BUCKETS
        }


@pytest.mark.slow
@pytest.mark.parametrize("order", [FreeKVCacheBlockQueue, LeastRecentlyUsed])
@hypothesis_settings(max_examples=60)
@given(case=shared_cases(), data=st.data())
def test_nothing_changes_where_blocks_have_ids(order, case, data):
    """Recordings ask for ids; blocks have them anyway."""
    with mock.patch.object(VllmV1, "eviction_order", order):
        same_with_ids(case, data)


def same_with_ids(case, data):
    end = serve_cached(case).log.end_ticks
    window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 1000), min_size=2, max_size=2, unique=True))))
    without, with_ids = serve_cached(case, window), serve_cached(case, window, ids=True)
    leaps.same(without, with_ids)
    assert summary(without)["prefix_cache"] == summary(with_ids)["prefix_cache"]
    assert requests_table(without).equals(requests_table(with_ids))


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(case=shared_cases(), events=st.integers(1, 40), ahead=st.booleans())
def test_what_is_known_of_a_run_that_is_stopped(case, events, ahead):
    """While sequences hold blocks the logs say how many are cached, with ids and without."""
    with_ids, without = (stopped(case, events, ids, ahead) for ids in (True, False))
    cached = {*with_ids.memory.cached_block_ids().tolist()}.intersection(with_ids.memory.pool.free_ids)
    changes = [engine.memory.cache_log.change_columns() for engine in (with_ids, without)]
    assert changes[0]["slots"].sum() == len(cached) * with_ids.memory.block_size
    levels = [Counter() for _ in changes]
    for level, change in zip(levels, changes):
        for moment, blocks in zip(change["moment"].tolist(), change["slots"].tolist()):
            level[moment] += blocks
    assert +levels[0] == +levels[1] and -levels[0] == -levels[1]
    assert with_ids.memory.evicted_blocks == without.memory.evicted_blocks


def stopped(case: SharedCase, events: int, ids: bool, ahead: bool) -> Engine:
    """An engine that ends with the step, or leap, that is under way after so many events."""
    engine = engine_to_step(caching_settings(case, ids=ids, async_scheduling=ahead), case.cost, case.workload)
    for _ in range(events):
        if engine.process.is_alive:
            engine.env.step()
    engine.stop()
    engine.env.run()
    engine.memory.settle(engine.state, 0)
    return engine


def turns(tmp_path):
    """A trace of four sessions that take turns."""
    rows = [
        {"arrival_s": place, "prompt_tokens": 40 + 20 * (place // 4), "output_tokens": 9, "session_id": place % 4}
        for place in range(40)
    ]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def printed(capsys, *tokens: object) -> str:
    assert status(["simulate", "--trace", *map(str, tokens)]) == DONE
    return capsys.readouterr().out


class TestCommand:
    @pytest.mark.parametrize(
        ("policy", "flag", "on"),
        [
            ("vllm-v1", None, True),
            ("vllm-v1", "--enable-prefix-caching", True),
            ("vllm-v1", "--no-enable-prefix-caching", False),
            ("vllm-v0", None, False),
        ],
    )
    def test_caches_where_the_trace_has_contents_and_the_policy_can(self, policy, flag, on, tmp_path, capsys):
        out = tmp_path / "out"
        output = printed(capsys, turns(tmp_path), "--policy", policy, *([flag] if flag else []), "--out", out)
        cache = json.loads((out / "summary.json").read_text())["prefix_cache"]
        rerun = json.loads((out / "run.json").read_text())["replica"]
        assert rerun["enable_prefix_caching"] == on == (cache is not None)
        lines = [line.split() for line in output.splitlines() if "prefix cache hits" in line]
        assert [line[3] for line in lines] == ([f"{cache['hit_rate']:.1%}"] if on else [])
        assert cache is None or cache["hit_rate"] > 0.5

    @pytest.mark.parametrize("flag", [None, "--enable-prefix-caching", "--no-enable-prefix-caching"])
    def test_without_contents_only_preempted_requests_find_anything(self, flag, tmp_path, capsys):
        trace = tmp_path / "pairs.csv"
        trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,30,30\n" * 4)
        small = ["--policy", "vllm-v1", "--num-gpu-blocks-override", 10, "--json", "-"]
        cache = json.loads(printed(capsys, trace, *small, *([flag] if flag else [])))["prefix_cache"]
        if flag == "--no-enable-prefix-caching":
            assert cache is None
        else:
            assert cache["hit_tokens"] == 0 < cache["preempted_hit_tokens"]

    def test_a_policy_that_cannot_cache_names_those_that_can(self, tmp_path, capsys):
        assert (
            status(["simulate", "--trace", str(turns(tmp_path)), "--policy", "sarathi", "--enable-prefix-caching"]) == 2
        )
        output = capsys.readouterr().err
        assert "enable_prefix_caching = True: sarathi keeps no prefixes; use " in output
        assert "vllm-v1" in output and len(output.splitlines()) == 1

    @pytest.mark.slow
    def test_layers_with_a_window_keep_less_for_others(self, tmp_path, capsys):
        """Windows of 1,024 tokens hold these prompts whole, but the blocks of outputs are not kept in their groups."""
        model = ["--policy", "vllm-v1", "--model", "gemma-3-27b", "--gpu", "h100-80gb", "--json", "-"]
        model += ["--max-model-len", "8192"]
        trace = turns(tmp_path)
        windows = json.loads(printed(capsys, trace, *model))["prefix_cache"]["hit_rate"]
        every = json.loads(printed(capsys, trace, *model, "--disable-hybrid-kv-cache-manager"))["prefix_cache"][
            "hit_rate"
        ]
        off = json.loads(printed(capsys, trace, *model, "--no-enable-prefix-caching"))["prefix_cache"]
        assert 0.4 < windows < every and off is None
