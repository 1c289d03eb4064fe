"""Windows and prefix caching together: leaps against steps, the ledger against a walk over all slots, and a story.

The rules themselves are held to the real vLLM (``make test-vllm``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import same_runs as leaps
import schedulers
from engine_runs import engine_to_step, settings_of
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.paged.group_cache import NULL_BLOCK
from fragmeter.sim.runs.run import Run
from hybrid_runs import COUNTS, model_of
from oracle import Limits, Pool
from oracle.hybrid import Groups
from oracle.slots import BUCKETS, CACHED, FREE, SlotMap, classify_slot
from shared_prefixes import SharedCase, of_pieces, shared_cases
from strategies import LineCost


@st.composite
def cases(draw: st.DrawFn) -> tuple[SharedCase, Groups]:
    """Prompts that share prefixes, over a pool that holds from one of them on; some end at their declared lengths."""
    case = draw(shared_cases())
    ends = draw(st.lists(st.booleans(), min_size=len(case.requests), max_size=len(case.requests)))
    requests = [
        replace(request, max_tokens=request.output_tokens) if at_length else request
        for request, at_length in zip(case.requests, ends, strict=True)
    ]
    full, sliding = draw(st.sampled_from(COUNTS))
    size = case.pool.block_size
    longest = max(request.prompt_tokens + request.output_tokens for request in case.requests)
    pages = (full + sliding) * (-(-longest // size) + draw(st.integers(1, 4))) + draw(st.sampled_from([1, 2, 7, 60]))
    # A window of the longest sequence is none.
    window = draw(st.integers(1, max(1, longest // 2)))
    limits = replace(case.limits, max_model_len=longest + 1)
    return replace(case, requests=requests, pool=Pool(pages, size), limits=limits), Groups(full, sliding, window)


def settings_for(case: SharedCase, groups: Groups, **switches):
    chosen = settings_of("vllm-v1", case.pool, case.limits, switches.pop("window", None))
    return replace(chosen, model=model_of(groups), enable_prefix_caching=True, **switches)


def serve(case: SharedCase, groups: Groups, **switches) -> Run:
    return simulate(settings_for(case, groups, **switches), case.workload, case.cost)


def look_ups(run: Run) -> list[tuple[int, int, int]]:
    """(request, tokens known, tokens found) of every admission."""
    return [*zip(*(column.tolist() for column in run.replica.memory.cache_log.look_up_columns().values()))]


@pytest.mark.slow
@hypothesis_settings(max_examples=80)
@given(drawn=cases(), ahead=st.booleans(), data=st.data())
def test_leap_and_step_are_the_same_bits(drawn, ahead, data):
    """Invariant 6."""
    end = serve(*drawn, async_scheduling=ahead).log.end_ticks
    window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 1000), min_size=2, max_size=2, unique=True))))
    leapt, stepped = (serve(*drawn, window=window, async_scheduling=ahead, leap=leap) for leap in (True, False))
    leaps.same(leapt, stepped)
    assert look_ups(leapt) == look_ups(stepped)


class Walk:
    """One engine, stopped wherever it waits: tables of all groups, references and the free queue are read."""

    def __init__(self, case: SharedCase, groups: Groups, leap: bool, ahead: bool) -> None:
        chosen = settings_for(case, groups, leap=leap, async_scheduling=ahead)
        self.engine = engine_to_step(chosen, case.cost, case.workload, leap)
        self.case, self.env, self.memory = case, self.engine.env, self.engine.memory

    def moments(self):
        """When, for how long, whether a sequence runs, and the slots of every bucket."""
        while True:
            self.env.step()
            if not self.engine.process.is_alive:
                return
            state, kept = self.engine.state, self.memory.group_tables
            kept.grow_until(state.decode_step + bool(state.running))
            self.check_references()
            yield self.env.now, self.env.peek(), any(map(any, kept.tables.values())), self.buckets()

    def check_references(self) -> None:
        """Invariant 2: as many references as table entries, and in the queue just those blocks that have none."""
        kept, pool = self.memory.group_tables, self.memory.cache.pool
        named = Counter(
            block for tables in kept.tables.values() for table in tables for block in table if block is not NULL_BLOCK
        )
        assert pool.reference_counts == [named[block] for block in range(pool.num_blocks)]
        assert sorted([*named, *pool.free_ids]) == list(range(pool.num_blocks))
        assert sum(self.memory.cache.shared) == sum(named.values()) - len(named)

    def buckets(self) -> dict[str, int]:
        """Invariant 3 in passing: a block in two tables is full, at the same place of both, in the same group."""
        size, pool, state = self.case.pool.block_size, self.memory.cache.pool, self.engine.state
        places: dict[int, tuple[int, int, str]] = {}
        for sequence, tables in self.memory.group_tables.tables.items():
            request, running = self.case.requests[sequence.index], sequence in state.running
            computed = sequence.held_tokens(state.decode_step) + 1 if running else sequence.computed_tokens
            for group, table in enumerate(tables):
                end = len(table) * size
                for i in (i for i in range(end) if table[i // size] is not NULL_BLOCK):
                    bucket = classify_slot(i, computed, request.prompt_tokens + request.output_tokens, computed, end)
                    slot = table[i // size] * size + i % size
                    assert places.setdefault(slot, (group, i, bucket)) == (group, i, bucket)
        slots = SlotMap(pool.num_blocks * size)
        for slot, (_, _, bucket) in places.items():
            slots.put(slot, bucket)
        hashed = {*pool.hashed_ids().tolist()}
        for block in pool.free_ids:
            for slot in range(block * size, (block + 1) * size):
                slots.put(slot, FREE if block not in hashed else CACHED)
        return slots.census()


@pytest.mark.slow
@hypothesis_settings(max_examples=80)
@given(drawn=cases(), leap=st.booleans(), ahead=st.booleans())
def test_the_ledger_is_what_a_walk_over_all_slots_finds(drawn, leap, ahead):
    """Invariant 1: the buckets add up to the pool. Step by step the walk's sums over time are those of the ledger."""
    walked = [*Walk(*drawn, leap, ahead).moments()]
    run = serve(*drawn, leap=leap, async_scheduling=ahead)
    ledger, capacity = schedulers.buckets_at_rows(run), run.log.capacity_slots
    assert all(sum(buckets.values()) == capacity and min(buckets.values()) >= 0 for buckets in ledger)
    starts, ran = run.log.rows["start_ticks"].tolist(), run.log.rows["iterations"].tolist()
    assert [(at, buckets) for at, until, busy, buckets in walked if busy] == [
        (start, buckets) for start, count, buckets in zip(starts, ran, ledger) if count
    ]
    window = run.accounts.window()
    assert sum(window.slot_ticks.values()) == capacity * (window.end_ticks - window.start_ticks)
    if not leap:
        assert window.slot_ticks == {
            bucket: sum(buckets[bucket] * (until - at) for at, until, _, buckets in walked) for bucket in BUCKETS
        }


def found(pieces: list[list[tuple[int, int]]], window: int) -> list[tuple[int, int, int]]:
    """Look-ups of requests that come one after the other, each when the one before is done; blocks of 2 tokens."""
    arrivals = [10_000 * place for place in range(len(pieces))]
    requests, content = of_pieces(arrivals, pieces, [0] * len(pieces), [2] * len(pieces))
    case = SharedCase(requests, Pool(60, 2), Limits(40, 64, 8), LineCost(), content)
    return look_ups(serve(case, Groups(1, 1, window)))


class TestStories:
    """One full group and one with a window of 4 tokens, which needs the two blocks before the token to compute."""

    WHOLE = [(0, 6), (1, 3)]

    def test_the_end_of_the_same_prompt_is_found(self):
        """All but the last token: blocks 0 to 3, of which the sliding group has 2 and 3."""
        assert found([self.WHOLE, self.WHOLE], 4) == [(0, 9, 0), (1, 9, 8)]

    def test_a_shorter_prefix_is_found_from_the_third_time_on(self):
        """The full group has its three blocks at once, the sliding one only block 2 of blocks 1 and 2, which it needs.
        The second request computes both, and publishes them, as its look-up met a longer prefix in the full group."""
        others = [[(0, 6), (name, 9)] for name in (3, 4)]
        assert found([self.WHOLE, *others], 4) == [(0, 9, 0), (1, 15, 0), (2, 15, 6)]

    def test_a_window_of_one_token_needs_no_block_and_finds_none(self):
        """As nothing is published in its group, and a prefix is what all groups have."""
        assert found([self.WHOLE, self.WHOLE], 1) == [(0, 9, 0), (1, 9, 0)]
