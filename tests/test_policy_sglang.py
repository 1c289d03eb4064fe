"""SGLang: prompts that begin alike, against logs worked out by hand, an independent oracle, and a walk over the tree."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from engine_runs import buckets_at_rows, serve
from fragmeter.sim.content import PromptContent
from fragmeter.sim.errors import SettingError, SimulationFault
from fragmeter.sim.memory import RadixMemory
from fragmeter.sim.memory.radix_memory import Holding
from fragmeter.sim.policy import sglang
from fragmeter.sim.policy.sglang import NewTokenRatio
from fragmeter.sim.replica import build
from fragmeter.sim.result import requests_table
from fragmeter.sim.run import Run, simulate
from fragmeter.sim.sequence import Sequence
from fragmeter.sim.settings import settings
from fragmeter.sim.state import State
from fragmeter.sim.summary import summary
from fragmeter.sim.workload import Workload
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from oracle import Limits, Outcome, Pool, Request
from oracle import sglang as oracle
from oracle.clock import run as run_oracle
from oracle.story import log
from strategies import Case, LineCost, crowded_cases, shared_cases
from test_engine_leaps import same
from test_engine_schedulers import StoryCost, expected, log_of, same_requests

A, B = 1, 2


def story(requests: list[tuple[int, int, list[tuple[int, int]]]], slots: int, **limits) -> Case:
    """A case of requests as (arrival, output, pieces of the prompt as (kind, tokens)), told their outputs; a kind below
    nought is nobody else's."""
    told, ids, tokens, offsets = [], [], [], [0]
    for index, (arrival, output, pieces) in enumerate(requests):
        prompt = tuple((kind, place) for kind, length in pieces for place in range(length))
        answer = tuple((index, "out", place) for place in range(output))
        told.append(Request(arrival, len(prompt), output, output, prompt, answer))
        ids += [kind for kind, _ in pieces]
        tokens += [length for _, length in pieces]
        offsets.append(len(ids))
    bounds = Limits(max_model_len=100, **({"max_num_seqs": 64} | limits))
    return Case(told, Pool(slots, 1), bounds, StoryCost(), PromptContent(offsets, ids, tokens))


def tell(case: Case) -> list[str]:
    """The oracle's log, to which the engine keeps."""
    outcome = expected("sglang", case)
    check(case, outcome)
    return log(outcome)


def check(case: Case, outcome: Outcome) -> None:
    """Stepping gives the oracle's log, stepping and leaping its times; and both are the same bits."""
    stepped, leapt = serve("sglang", case, leap=False), serve("sglang", case, leap=True)
    assert log_of(stepped) == [(step.start_ticks, step.ticks, step.buckets) for step in outcome.steps]
    for run in (stepped, leapt):
        same_requests(run, outcome)
    same(leapt, stepped)


class TestStories:
    # 1 and 2 come while 0 runs alone, as only one may. 2 begins as 0 did.
    QUEUE = [(0, 2, [(A, 4), (-1, 2)]), (10, 1, [(-2, 5)]), (20, 2, [(A, 4), (-3, 1)])]

    def test_the_longest_prefix_goes_first(self):
        """2 finds four tokens of its five, computes one, and leaves the other three of 0 to who will evict them. With its
        finish the batch is looked at at once, as nothing runs."""
        assert tell(story(self.QUEUE, 24, max_num_seqs=1)) == [
            "0+106 | run 0 | prefill 0:6 | live 6 free 18",
            "106+110 | run 0 | decode 0 | live 7 free 17",
            "216+101 | run 2 | prefill 2:1 | live 5 cached 3 free 16",
            "317+110 | run 2 | decode 2 | live 6 cached 3 free 15",
            "427+105 | run 1 | prefill 1:5 | live 5 cached 9 free 10",
        ]

    def test_but_not_under_fcfs(self):
        assert tell(story(self.QUEUE, 24, max_num_seqs=1, schedule_policy="fcfs")) == [
            "0+106 | run 0 | prefill 0:6 | live 6 free 18",
            "106+110 | run 0 | decode 0 | live 7 free 17",
            "216+105 | run 1 | prefill 1:5 | live 5 cached 7 free 12",
            "321+101 | run 2 | prefill 2:1 | live 5 cached 8 free 11",
            "422+110 | run 2 | decode 2 | live 6 cached 8 free 10",
        ]

    def test_nor_where_nothing_is_shared(self):
        case = story(self.QUEUE, 24, max_num_seqs=1)
        alone = [replace(request, prompt_ids=None, output_ids=None) for request in case.requests]
        assert tell(replace(case, requests=alone, content=None))[2:] == [
            "216+105 | run 1 | prefill 1:5 | live 5 cached 7 free 12",
            "321+105 | run 2 | prefill 2:5 | live 5 cached 12 free 7",
            "426+110 | run 2 | decode 2 | live 6 cached 12 free 6",
        ]

    def test_what_two_compute_at_once_is_held_once_afterwards_and_the_last_token_is_never_found(self):
        """0 and 1 compute the same prompt beside each other; when they have, one copy is free. 2 finds three tokens of the
        same four, computes the last one for the sake of its first output, and gives that slot back."""
        prompt = [(A, 4)]
        assert tell(story([(0, 3, prompt), (0, 3, prompt), (150, 3, prompt)], 30)) == [
            "0+108 | run 0 1 | prefill 0:4 1:4 | live 8 free 22",
            "108+120 | run 0 1 | decode 0 1 | live 6 free 24",
            "228+101 | run 0 1 2 | pause 0 1 | prefill 2:1 | live 7 free 23",
            "329+130 | run 0 1 2 | decode 0 1 2 | live 9 free 21",
            "459+110 | run 2 | decode 2 | live 6 cached 4 free 20",
        ]

    def test_who_is_retracted_finds_its_prompt_again(self):
        """0 and 1 have one prompt. Of those who generated least 0 and 1 have the longest, and 1 was admitted last. What 0
        locks cannot be evicted, so that of the 11 tokens that 1 knows by then 3 are found; the other 8 take nine slots,
        the end of 0's string, which is older than 2's."""
        prompt = [(A, 3)]
        told = tell(story([(0, 10, prompt), (50, 10, prompt), (150, 10, [(-1, 2)])], 28))
        assert told[-5:] == [
            "1086+130 | run 0 1 2 | decode 0 1 2 | live 26 free 2",
            "1216+120 | run 0 2 | preempt 1 | decode 0 2 | live 21 free 7",
            "1336+120 | run 0 2 | decode 0 2 | live 23 free 5",
            "1456+108 | run 1 | prefill 1:8 | live 11 cached 11 free 6",
            "1564+110 | run 1 | decode 1 | live 12 cached 11 free 5",
        ]

    def test_whose_prefix_another_one_computes_is_put_off(self):
        """Two may run. 1 begins with 32 tokens of 0, so that 2 goes first; when 1's turn comes they are there. 31 are too few."""
        shared = [(A, 32)]
        told = tell(story([(0, 1, shared), (0, 1, [*shared, (-1, 3)]), (0, 1, [(-2, 5)])], 150, max_num_seqs=2))
        assert told == [
            "0+137 | run 0 2 | prefill 0:32 2:5 | live 37 free 113",
            "137+103 | run 1 | prefill 1:3 | live 35 cached 5 free 110",
        ]
        told = tell(story([(0, 1, [(A, 31)]), (0, 1, [(A, 31), (-1, 3)]), (0, 1, [(-2, 5)])], 150, max_num_seqs=2))
        assert told[0] == "0+165 | run 0 1 | prefill 0:31 1:34 | live 65 free 85"

    def test_a_prefix_that_is_locked_makes_no_room(self):
        """2 would find ten tokens of 0's eleven that are cached, and asks for 1 + 4 slots. Before that prefix is locked 19
        could be had less 4.2 reserved for 1, after it 9. So the batch is full; it is looked at again a decode after 0's
        finish, and then when 1 has finished. The end of 0's string goes first, then 1's."""
        told = tell(story([(0, 2, [(A, 10)]), (30, 8, [(-1, 4)]), (300, 4, [(A, 10), (-2, 1)])], 24))
        assert told == [
            "0+110 | run 0 | prefill 0:10 | live 10 free 14",
            "110+104 | run 0 1 | pause 0 | prefill 1:4 | live 14 free 10",
            "214+120 | run 0 1 | decode 0 1 | live 16 free 8",
            *(f"{334 + 110 * i}+110 | run 1 | decode 1 | live {6 + i} cached 11 free {7 - i}" for i in range(6)),
            "994+101 | run 2 | prefill 2:1 | live 11 cached 12 free 1",
            "1095+110 | run 2 | decode 2 | live 12 cached 12",
            "1205+110 | run 2 | decode 2 | live 13 cached 11",
            "1315+110 | run 2 | decode 2 | live 14 cached 4 free 6",
        ]

    def test_of_equals_who_was_admitted_last_is_retracted(self):
        """2 finds what 0 left, and is admitted before 1. Both have generated eight tokens when two slots are left for
        three, and both have longer prompts than 3: 1 goes."""
        told = tell(story([(0, 1, [(A, 2)]), (10, 10, [(-1, 3)]), (10, 10, [(A, 2), (-2, 1)]), (150, 10, [(-3, 2)])], 31))
        assert told[:3] + told[9:11] == [
            "0+102 | run 0 | prefill 0:2 | live 2 free 29",
            "102+104 | run 2 1 | prefill 2:1 1:3 | live 6 free 25",
            "206+102 | run 2 1 3 | pause 2 1 | prefill 3:2 | live 8 free 23",
            "1088+130 | run 2 1 3 | decode 2 1 3 | live 29 free 2",
            "1218+120 | run 2 3 | preempt 1 | decode 2 3 | live 21 free 10",
        ]

    def test_of_who_finish_at_once_the_first_admitted_is_the_longest_ago(self):
        """2 finds what 0 left, is admitted before 1, and leaves with it. 3 needs six slots and finds four. The end of 2's
        string goes, what was before it and what was 0's: four tokens; then 1's last one, and its prompt of three."""
        assert tell(story([(0, 1, [(A, 2)]), (10, 2, [(-1, 3)]), (10, 2, [(A, 2), (-2, 1)]), (200, 1, [(-3, 6)])], 12)) == [
            "0+102 | run 0 | prefill 0:2 | live 2 free 10",
            "102+104 | run 2 1 | prefill 2:1 1:3 | live 6 free 6",
            "206+120 | run 2 1 | decode 2 1 | live 8 free 4",
            "326+106 | run 3 | prefill 3:6 | live 6 free 6",
        ]

    def test_no_more_than_the_input_is_computed_at_once(self):
        """Five tokens leave four of nine, which are as many as 1 has: too few."""
        with mock.patch.object(sglang, "MAX_PREFILL_TOKENS", 9), mock.patch.object(oracle, "INPUT_TOKENS", 9):
            assert tell(story([(0, 1, [(-1, 5)]), (0, 1, [(-2, 4)])], 40)) == [
                "0+105 | run 0 | prefill 0:5 | live 5 free 35",
                "105+104 | run 1 | prefill 1:4 | live 4 cached 5 free 31",
            ]


class TestAgainstTheOracle:
    @hypothesis_settings(max_examples=120)
    @given(case=shared_cases())
    def test_every_step_and_slot(self, case):
        check(case, expected("sglang", case))

    @hypothesis_settings(max_examples=60)
    @given(case=shared_cases())
    def test_every_step_and_slot_where_queue_input_and_outputs_are_long(self, case):
        """The fixed numbers of SGLang are beyond these cases; so others stand for them."""
        quick = Fraction(NewTokenRatio.DECAY * 50, NewTokenRatio.UNIT)
        with (
            mock.patch.multiple(sglang, MOST_SORTED=4, IN_BATCH_TOKENS=2, MAX_PREFILL_TOKENS=9, CLIP_MAX_NEW_TOKENS=6),
            mock.patch.object(NewTokenRatio, "DECAY", NewTokenRatio.DECAY * 50),
            mock.patch.multiple(oracle, MOST_SORTED=4, ALIKE=2, INPUT_TOKENS=9, LONGEST_OUTPUT=6, DECAY=quick),
        ):
            check(case, expected("sglang", case))

    @pytest.mark.slow
    @hypothesis_settings(max_examples=4000)
    @given(case=shared_cases())
    def test_every_step_and_slot_at_length(self, case):
        check(case, expected("sglang", case))

    @hypothesis_settings(max_examples=60)
    @given(case=shared_cases(), data=st.data())
    def test_leaps_are_the_same_bits_over_any_window(self, case, data):
        """Invariant 6, and 1 in the integrals."""
        end = serve("sglang", case).book.end_ticks
        window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 999), min_size=2, max_size=2, unique=True))))
        leapt, stepped = (serve("sglang", case, window, leap=leap) for leap in (True, False))
        same(leapt, stepped)
        total = stepped.accounts.window()
        assert sum(total.slot_steps.values()) == case.pool.slots * total.num_steps
        assert min(total.slot_ticks.values()) >= 0


def spelled(runs) -> tuple:
    return tuple((stream, start + i) for stream, start, length in runs for i in range(length))


def nodes_of(memory: RadixMemory) -> list:
    """Every node of the tree but its root."""
    todo, found = [memory.tree.root], []
    while todo:
        children = list(todo.pop().children.values())
        found += children
        todo += children
    return found


class TestTheCache:
    def test_what_is_said_of_it(self):
        """Of the retraction above: 1 finds two of 0's three tokens at first, and three of eleven when it comes again, for
        which nine slots are evicted."""
        prompt = [(A, 3)]
        case = story([(0, 10, prompt), (50, 10, prompt), (150, 10, [(-1, 2)])], 28)
        run = serve("sglang", case)
        assert summary(run)["prefix_cache"] == {
            "queried_tokens": 8,
            "hit_tokens": 2,
            "hit_rate": 2 / 8,
            "preempted_queried_tokens": 11,
            "preempted_hit_tokens": 3,
            "evicted_blocks": 9,
        }
        assert requests_table(run)["cached_tokens"].tolist() == [0, 2, 0]

    @hypothesis_settings(max_examples=60)
    @given(case=shared_cases(), leap=st.booleans())
    def test_who_finds_what_is_what_the_oracle_says(self, case, leap):
        cost, system = case.cost, oracle.SgLang(case.pool, case.limits)
        run_oracle(system, case.requests, cost.step_ticks, cost.swap_out_ticks, cost.swap_in_ticks)
        run = serve("sglang", case, leap=leap)
        told, found = summary(run)["prefix_cache"], requests_table(run)["cached_tokens"]
        assert told["queried_tokens"] + told["preempted_queried_tokens"] == system.queried
        assert told["hit_tokens"] + told["preempted_hit_tokens"] == system.hit
        assert found[~run.refused].to_dict() == system.first_hits

    @hypothesis_settings(max_examples=40)
    @given(case=shared_cases(), leap=st.booleans())
    def test_may_be_off(self, case, leap):
        """Then all is computed, and what nobody holds is free."""
        run = serve("sglang", case, leap=leap, enable_prefix_caching=False)
        assert summary(run)["prefix_cache"] is None and "cached_tokens" not in requests_table(run)
        assert not any(buckets["cached"] for buckets in buckets_at_rows(run))
        tokens, served = summary(run)["work"]["tokens"], [r for r, no in zip(case.requests, run.refused) if not no]
        assert tokens["useful"] == sum(r.prompt_tokens + r.output_tokens - 1 for r in served)
        assert not run.replica.memory.tree.root.children and run.replica.memory.free == case.pool.slots


class TestInvariants:
    @hypothesis_settings(max_examples=80)
    @given(case=st.one_of(shared_cases(), crowded_cases()), leap=st.booleans())
    def test_1_and_2_slots_and_locks_are_those_of_who_runs(self, case, leap):
        """Invariant 1: free, own, locked and evictable slots are the pool; live counts a shared token once; cached is
        what nobody locks. Invariant 2: a node's locks are the sequences whose strings pass through it."""
        pass_steps, looks, cached = RadixMemory.pass_steps, [], []

        def watch(memory: RadixMemory, state: State, steps: int):
            meter = pass_steps(memory, state, steps)
            held = {s: s.held_tokens(state.clock + steps) for s in state.running if s in memory.holdings}
            own = sum(tokens - memory.holdings[s].tokens for s, tokens in held.items())
            nodes, paths = nodes_of(memory), [memory.tree.path(h.node) for h in memory.holdings.values()]
            assert [node.locks for node in nodes] == [sum(node in path for path in paths) for node in nodes]
            locked = sum(node.tokens for node in nodes if node.locks)
            evictable = sum(node.tokens for node in nodes if not node.locks)
            assert (locked, evictable) == (memory.tree.protected_tokens, memory.tree.evictable_tokens)
            strings = {s: spelled(memory.known(s))[: h.tokens] for s, h in memory.holdings.items()}
            assert locked == len({string[:end] for string in strings.values() for end in range(1, len(string) + 1)})
            assert memory.free + own + locked + evictable == memory.capacity_slots and memory.free >= 0
            if steps:
                looks.append(meter[0] == locked + own - state.width * (steps - 1))
            cached.append(evictable if steps == 1 else None)
            return meter

        with mock.patch.object(RadixMemory, "pass_steps", watch):
            run = serve("sglang", case, leap=leap)
        assert all(looks)
        assert all(there in (None, buckets["cached"]) for there, buckets in zip(cached, buckets_at_rows(run), strict=True))
        assert all(sum(buckets.values()) == case.pool.slots for buckets in buckets_at_rows(run))
        # All is over: nobody holds anything.
        assert not run.replica.memory.holdings and not run.replica.memory.tree.protected_tokens

    @hypothesis_settings(max_examples=30)
    @given(case=shared_cases())
    def test_4_every_request_ends_once_with_all_its_tokens(self, case):
        run = serve("sglang", case)
        tokens = summary(run)["work"]["tokens"]
        served = [r for r, refused in zip(case.requests, run.refused) if not refused]
        computed = sum(len(step.decodes) + sum(n for _, n in step.prefilled) for step in expected("sglang", case).steps)
        assert sum(tokens.values()) == computed and tokens["padding"] == 0
        assert tokens["useful"] <= sum(r.prompt_tokens + r.output_tokens - 1 for r in served)


def interleaved_sessions(sessions: int, turns: int, prefix_tokens: int, rate: float) -> Workload:
    """Questions of 40 tokens, each behind the long prefix of its session; sessions take turns."""
    count = sessions * turns
    prompts = np.full(count, prefix_tokens + 40)
    gaps = np.random.default_rng(0).exponential(size=count) / rate
    content = PromptContent(np.arange(count + 1), np.arange(count) % sessions, np.full(count, prefix_tokens))
    arrivals = (np.cumsum(gaps) * 1e12).astype(np.int64)
    outputs = np.full(count, 60)
    return Workload("sessions", arrivals, prompts, outputs, outputs, content)


def test_the_longest_prefix_first_beats_first_come_first_served():
    """Sixteen sessions of 1,400 tokens take turns, in a pool that holds four of them: in order of arrival each finds its
    prefix evicted; sorted by what is there they follow on each other. 61 % of the tokens are found, and the first
    token comes after 8 s in place of 29."""
    work = interleaved_sessions(sessions=16, turns=20, prefix_tokens=1400, rate=3.0)
    told = {}
    for name in ("lpm", "fcfs"):
        run = simulate(settings(policy="sglang", num_gpu_blocks_override=6000, schedule_policy=name), work)
        told[name] = summary(run)["prefix_cache"]["hit_rate"], summary(run)["mean_ttft_ms"]
    assert told["fcfs"][0] == 0.0 and told["lpm"][0] > 0.5
    assert told["lpm"][1] < told["fcfs"][1] / 3


def test_the_ratio_falls_with_every_decode_and_not_below_its_least():
    ratio = NewTokenRatio()
    assert [ratio.at(clock) / ratio.UNIT for clock in (0, 300, 600, 5000)] == [0.7, 0.399, 0.098, 0.098]
    ratio.estimate(generated=30, running=2, told=99, clock=700)
    # (30 + 2 * 20) / 100, from the next step on.
    assert [ratio.at(701) / ratio.UNIT, ratio.at(702)] == [0.7, ratio.UNIT * 7 // 10 - ratio.DECAY]
    ratio.estimate(generated=1, running=1, told=999, clock=800)
    assert [ratio.at(801), ratio.at(802)] == [ratio.UNIT * 21 // 1000, ratio.LEAST]
    ratio.estimate(generated=500, running=9, told=100, clock=900)
    assert ratio.at(901) == ratio.UNIT
    ratio.reset(950)
    assert ratio.at(950) == ratio.FIRST


def test_above_128_that_wait_nobody_is_sorted():
    """All but the first begin as the second last; in a queue of 129 it does not help."""

    def first_two(waiting: int) -> list[int]:
        requests = [(0, 2, [(A, 4)])] + [(1, 1, [(-index, 5)]) for index in range(1, waiting)] + [(1, 1, [(A, 4), (B, 1)])]
        case = story(requests, 2000, max_num_seqs=1)
        return serve("sglang", case).book.stays["index"][:2].tolist()

    assert first_two(127 + 1) == [0, 128]
    assert first_two(128 + 1) == [0, 1]


def test_leaps_pass_over_evictions():
    """Ten of 41 slots are cached when 1 comes, the last two on an edge of their own. Of its 33 further tokens 28 find a free
    slot, the next one evicts two, one is left, and the next one evicts eight: all in one leap."""
    requests = [Request(0, 8, 3, 3), Request(5000, 3, 34, 34)]
    case = Case(requests, Pool(41, 1), Limits(64), LineCost())
    leapt, stepped = (serve("sglang", case, leap=leap) for leap in (True, False))
    assert leapt.book.rows["steps"].tolist() == [0, 2, 0, 33]
    cached = [0] * 3 + [10] * 29 + [8] * 2 + [0] * 3
    assert stepped.accounts.at_rows()["cached"].tolist() == cached
    assert leapt.accounts.at_rows()["cached"].tolist() == [0, 0, 10, 10]
    assert leapt.window.slot_steps["cached"] == stepped.window.slot_steps["cached"] == sum(cached)
    # From the finish of 0 at 129 + 28 + 2 * 114 to the arrival of 1 its string is cached, though nobody runs.
    assert leapt.window.slot_ticks == stepped.window.slot_ticks
    assert leapt.window.slot_ticks["cached"] > 10 * (5000 - 500)


def test_what_two_lock_has_room_when_both_are_retracted():
    """Each has two slots of its own beside the four that they share."""
    memory, clock = RadixMemory(20), 5
    node, _ = memory.tree.insert([(A, 0, 4)], memory.tick())
    sequences = [Sequence(index, 4, 9, 9) for index in range(2)]
    for sequence in sequences:
        memory.tree.lock(node)
        memory.holdings[sequence] = Holding(node, 4)
        sequence.lag = 4 + 2 - (clock - 1)
    memory.free = 20 - 4 - 2 * 2
    transaction = memory.transaction(clock)
    assert [transaction.room, *(transaction.retract(s, clock) or transaction.room for s in sequences)] == [12, 14, 20]
    assert memory.transaction(clock).room == 12, "retractions are tentative"


class TestMistakes:
    def test_blocks_of_more_than_a_token(self):
        with pytest.raises(SettingError, match="block_size = 16: sglang's tree has pages of one token; leave it out"):
            build(settings(policy="sglang", block_size=16))
        assert build(settings(policy="sglang")).block_size == 1

    def test_another_order(self):
        with pytest.raises(SettingError, match="schedule_policy"):
            settings(policy="sglang", schedule_policy="lof")

    def test_more_slots_than_there_are(self):
        memory, state = RadixMemory(3), State()
        state.width = 4
        with pytest.raises(SimulationFault, match="1 more slots are taken than there are"):
            memory.pass_steps(state, 1)
