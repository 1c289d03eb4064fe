"""SGLang's radix tree within a run, against an independent oracle, and a walk over its nodes and locks."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import buckets_at_rows, serve
from fragmeter.sim.memory import RadixMemory
from fragmeter.sim.memory.paged.radix_holdings import Holding
from fragmeter.sim.metrics.result import requests_table
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.policy import sglang, sglang_prefill
from fragmeter.sim.policy.sglang_prefill import NewTokenRatio
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.types.state import State
from oracle import Limits, Pool, Request
from oracle import sglang as oracle
from oracle.decode_step import run as run_oracle
from radix_cases import A, check, shared_cases, story
from same_runs import same
from schedulers import expected
from strategies import Case, LineCost, crowded_cases


class TestAgainstTheOracle:
    @hypothesis_settings(max_examples=50)
    @given(case=shared_cases())
    def test_every_step_and_slot(self, case):
        check(case, expected("sglang", case))

    @pytest.mark.slow
    @hypothesis_settings(max_examples=60)
    @given(case=shared_cases())
    def test_every_step_and_slot_where_queue_input_and_outputs_are_long(self, case):
        """The fixed numbers of SGLang are beyond these cases; so others stand for them."""
        quick = NewTokenRatio.DECAY * 50
        with (
            mock.patch.multiple(sglang, MOST_SORTED=4, IN_BATCH_TOKENS=2),
            mock.patch.multiple(sglang_prefill, MAX_PREFILL_TOKENS=9, CLIP_MAX_NEW_TOKENS=6),
            mock.patch.object(NewTokenRatio, "DECAY", quick),
            mock.patch.multiple(oracle, MOST_SORTED=4, ALIKE=2, INPUT_TOKENS=9, LONGEST_OUTPUT=6, DECAY=quick),
        ):
            check(case, expected("sglang", case))

    @pytest.mark.slow
    @hypothesis_settings(max_examples=4000)
    @given(case=shared_cases())
    def test_every_step_and_slot_at_length(self, case):
        check(case, expected("sglang", case))

    @pytest.mark.slow
    @hypothesis_settings(max_examples=60)
    @given(case=shared_cases(), data=st.data())
    def test_leaps_are_the_same_bits_over_any_window(self, case, data):
        """Invariant 6, and 1 in the integrals."""
        end = serve("sglang", case).log.end_ticks
        window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 999), min_size=2, max_size=2, unique=True))))
        leapt, stepped = (serve("sglang", case, window, leap=leap) for leap in (True, False))
        same(leapt, stepped)
        total = stepped.accounts.window()
        assert sum(total.slot_steps.values()) == case.pool.slots * total.num_steps
        assert min(total.slot_ticks.values()) >= 0


class TestTheCache:
    def test_what_is_said_of_it(self):
        """Of such a retraction: 1 finds two of 0's three tokens at first, and three of twelve when it comes again, for
        which the output of one that finished is evicted."""
        prompt = [(A, 3)]
        case = story([(0, 10, prompt), (50, 10, prompt), (150, 10, [(-1, 2)])], 29)
        run = serve("sglang", case)
        assert summary(run)["prefix_cache"] == {
            "queried_tokens": 8,
            "hit_tokens": 2,
            "hit_rate": 2 / 8,
            "preempted_queried_tokens": 12,
            "preempted_hit_tokens": 3,
            "evicted_blocks": 9,
        }
        assert requests_table(run)["cached_tokens"].tolist() == [0, 2, 0]

    @pytest.mark.slow
    @hypothesis_settings(max_examples=60)
    @given(case=shared_cases(), leap=st.booleans())
    def test_hits_are_those_of_the_oracle(self, case, leap):
        cost, system = case.cost, oracle.SgLang(case.pool, case.limits)
        run_oracle(system, case.requests, cost.step_ticks, cost.swap_out_ticks, cost.swap_in_ticks)
        run = serve("sglang", case, leap=leap)
        cache, found = summary(run)["prefix_cache"], requests_table(run)["cached_tokens"]
        assert cache["queried_tokens"] + cache["preempted_queried_tokens"] == system.queried
        assert cache["hit_tokens"] + cache["preempted_hit_tokens"] == system.hit
        assert found[~run.refused].to_dict() == system.first_hits

    @pytest.mark.slow
    @hypothesis_settings(max_examples=40)
    @given(case=shared_cases(), leap=st.booleans())
    def test_may_be_off(self, case, leap):
        """Then all is computed, and what no sequence holds is free."""
        run = serve("sglang", case, leap=leap, enable_prefix_caching=False)
        assert summary(run)["prefix_cache"] is None and "cached_tokens" not in requests_table(run)
        assert not any(buckets["cached"] for buckets in buckets_at_rows(run))
        tokens, served = summary(run)["work"]["tokens"], [r for r, no in zip(case.requests, run.refused) if not no]
        assert tokens["useful"] == sum(r.prompt_tokens + r.output_tokens - 1 for r in served)
        assert not run.replica.memory.tree.root.children and run.replica.memory.free == case.pool.slots


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


class TestInvariants:
    @pytest.mark.slow
    @hypothesis_settings(max_examples=80)
    @given(case=st.one_of(shared_cases(), crowded_cases()), leap=st.booleans())
    def test_1_and_2_slots_and_locks_are_those_of_running_sequences(self, case, leap):
        """Invariant 1: free, own, locked and evictable slots are the pool; live counts a shared token once; cached is
        what is unlocked. Invariant 2: a node's locks are the sequences with strings that end at it, and its children that are locked."""
        advance, looks, cached = RadixMemory.advance, [], []

        def watch(memory: RadixMemory, state: State, steps: int):
            meter = advance(memory, state, steps)
            held = {s: s.held_tokens(state.decode_step + steps) for s in state.running if s in memory.holdings}
            own = sum(tokens - memory.holdings[s].pages for s, tokens in held.items())
            nodes, paths = nodes_of(memory), [memory.tree.path(h.node) for h in memory.holdings.values()]
            on_paths = {node for path in paths for node in path}
            for node in nodes:
                ending = sum(path[:1] == [node] for path in paths)
                assert node.locks == ending + len(on_paths.intersection(node.children.values()))
            locked = sum(node.tokens for node in nodes if node.locks)
            evictable = sum(node.tokens for node in nodes if not node.locks)
            assert (locked, evictable) == (memory.tree.protected_tokens, memory.tree.evictable_tokens)
            strings = {s: spelled(memory.known(s))[: h.pages] for s, h in memory.holdings.items()}
            assert locked == len({string[:end] for string in strings.values() for end in range(1, len(string) + 1)})
            assert memory.free + own + locked + evictable == memory.capacity_slots and memory.free >= 0
            if steps:
                looks.append(meter[0] == locked + own - state.batch_size * (steps - 1))
            cached.append(evictable if steps == 1 else None)
            return meter

        with mock.patch.object(RadixMemory, "advance", watch):
            run = serve("sglang", case, leap=leap)
        assert all(looks)
        assert all(
            there in (None, buckets["cached"]) for there, buckets in zip(cached, buckets_at_rows(run), strict=True)
        )
        assert all(sum(buckets.values()) == case.pool.slots for buckets in buckets_at_rows(run))
        # All is over: no sequence holds anything.
        assert not run.replica.memory.holdings and not run.replica.memory.tree.protected_tokens

    @pytest.mark.slow
    @hypothesis_settings(max_examples=30)
    @given(case=shared_cases())
    def test_4_every_request_ends_once_with_all_its_tokens(self, case):
        run = serve("sglang", case)
        tokens = summary(run)["work"]["tokens"]
        served = [r for r, refused in zip(case.requests, run.refused) if not refused]
        computed = sum(len(step.decodes) + sum(n for _, n in step.prefilled) for step in expected("sglang", case).steps)
        assert sum(tokens.values()) == computed and tokens["padding"] == 0
        assert tokens["useful"] <= sum(r.prompt_tokens + r.output_tokens - 1 for r in served)


def test_leaps_pass_over_evictions():
    """Ten of 41 slots are cached when 1 comes, the last two on an edge of their own. Of its 33 further tokens 28 find a free
    slot, the next one evicts two, one is left, and the next one evicts eight: all in one leap."""
    requests = [Request(0, 8, 3, 3), Request(5000, 3, 34, 34)]
    case = Case(requests, Pool(41, 1), Limits(64), LineCost())
    leapt, stepped = (serve("sglang", case, leap=leap) for leap in (True, False))
    assert leapt.log.rows["steps"].tolist() == [0, 2, 0, 33]
    cached = [0] * 3 + [10] * 29 + [8] * 2 + [0] * 3
    assert stepped.accounts.at_rows()["cached"].tolist() == cached
    assert leapt.accounts.at_rows()["cached"].tolist() == [0, 0, 10, 10]
    assert leapt.window.slot_steps["cached"] == stepped.window.slot_steps["cached"] == sum(cached)
    # From the finish of 0 at 129 + 28 + 2 * 114 to the arrival of 1 its string is cached, though no request runs.
    assert leapt.window.slot_ticks == stepped.window.slot_ticks
    assert leapt.window.slot_ticks["cached"] > 10 * (5000 - 500)


def calls_of(prompt: int, shared: int, ids: bool) -> int:
    """Calls of functions in a run of six requests with a token budget of 1."""
    pieces = [[(A, shared), (-1 - index, prompt - shared)] for index in range(6)]
    case = story([(0, 2, each) for each in pieces], 8 * prompt, max_num_batched_tokens=1)
    case = replace(case, limits=replace(case.limits, max_model_len=prompt + 100))
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run = serve("sglang", case, leap=False, ids=ids)
    finally:
        sys.setprofile(before)
    assert run.log.num_steps > prompt
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_the_work_of_a_prefill_in_chunks_is_proportional_to_its_tokens(share, ids):
    """Chunks of one token: twice the tokens, twice the work. Waiting requests find what the first one computes."""
    few, many = (calls_of(prompt, int(share * prompt), ids) for prompt in (150, 300))
    assert many < 2.2 * few


def test_what_two_lock_has_room_when_both_are_retracted():
    """Each has two slots of its own beside the four that they share."""
    memory, decode_step = RadixMemory(20), 5
    node, _ = memory.tree.insert([(A, 0, 4)])
    sequences = [Sequence(index, 4, 9, 9) for index in range(2)]
    for sequence in sequences:
        memory.tree.lock(node)
        memory.holdings[sequence] = Holding(node, 4, 4)
        memory.decoding[sequence] = None
        memory.phases.add(0, 1)
        sequence.lag = 4 + 2 - (decode_step - 1)
    memory.free = 20 - 4 - 2 * 2
    transaction, rooms = memory.transaction(decode_step), []
    for sequence in sequences:
        rooms.append((transaction.room, transaction.begun()))
        transaction.retract(sequence, 0)
    assert [*rooms, (transaction.room, transaction.begun())] == [(12, 2), (14, 1), (20, 0)]
