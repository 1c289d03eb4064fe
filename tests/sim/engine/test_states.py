"""Models with fixed-size states under vllm-v1: stories by hand, leaps against steps, the ledger against the tables.

The rules themselves are held to the real vLLM (``make test-vllm``).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import same_runs as leaps
from engine_runs import buckets_at_rows, seconds_of
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.reports.data.results import read_result
from fragmeter.sim import Settings, Workload, settings, simulate, summary, write
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.memory.accounting.kv_groups import STATE
from fragmeter.sim.memory.paged.group_cache import NULL_BLOCK
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import SettingError
from state_runs import PAGE_BYTES, STATE_BYTES, model_of, workload, workloads
from strategies import LineCost

SIZE = 16
KINDS = ("sf", "sssf", "fs", "ffs", "ssfssf", "mf", "fmm")


def chosen(kinds: str, blocks: int, **more) -> Settings:
    return settings(policy="vllm-v1", model=model_of(kinds), num_gpu_blocks_override=blocks, max_model_len=400, **more)


class Tables(Observer):
    """Block tables of every step, by request: one a group, "." for a block that is not there."""

    every_step = True

    def __init__(self) -> None:
        self.seen: list[dict[int, tuple[str, ...]]] = []

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        self.engine = engine

    def step_started(self, now, ticks, leap, plan) -> None:
        memory, state = self.engine.memory, self.engine.state
        memory.settle(state, min(1, leap[1]))
        text = {None: "."}
        self.seen.append(
            {
                sequence.index: tuple(" ".join(text.get(block, str(block)) for block in table) for table in tables)
                for sequence, tables in memory.group_tables.tables.items()
            }
        )


def tables_of(work: Workload, caching: bool, **more) -> list[dict[int, tuple[str, ...]]]:
    seen = Tables()
    served = chosen("sf", 40, enable_prefix_caching=caching, ids=True, **more)
    simulate(served, work, LineCost(), observers=[seen])
    return seen.seen


class TestStories:
    """A state group, then a full group; blocks of 16 tokens, ids from 0, the last one freed is taken next."""

    def test_without_a_cache_a_state_has_one_page_from_the_first_step_to_the_last(self):
        steps = tables_of(workload([0], [[]], [20], [14]), caching=False)
        assert steps[0] == {0: ("0", "1 2")}
        assert steps[12] == {0: ("0", "1 2")} and steps[13] == {0: ("0", "1 2 3")}

    def test_with_a_cache_chunks_end_on_blocks_and_a_state_moves_on_with_them(self):
        """40 tokens: 32, with a state that other requests can find, then 8. The state of token 32 goes with the first decode."""
        steps = tables_of(workload([0], [[]], [40], [12]), caching=True, async_scheduling=False)
        assert steps[:3] == [
            {0: (". 0", "1 2")},
            {0: (". 0 3", "1 2 4")},
            {0: (". . 3", "1 2 4")},
        ]
        # Tokens 41 to 48 fill block 2; the next one takes a page in each group, and the state before stays a step.
        assert steps[10] == {0: (". . 3 5", "1 2 4 6")} and steps[11] == {0: (". . . 5", "1 2 4 6")}

    def test_the_same_prompt_goes_on_from_the_state(self):
        work = workload([0, 10_000], [[(0, 40)], [(0, 40)]], [0, 0], [2, 2])
        run = simulate(chosen("sf", 40, enable_prefix_caching=True), work, LineCost())
        look_ups = run.replica.memory.cache_log.look_up_columns()
        assert list(zip(look_ups["index"].tolist(), look_ups["hit_tokens"].tolist())) == [(0, 0), (1, 32)]

    def test_a_chunk_ends_where_the_prefix_of_an_earlier_prompt_does(self):
        """Three prompts have 48 tokens in common. The first one is computed to its 80th token at once, with a state there alone. So
        the second one finds none, but stops at its 48th token, and the third one finds the state that it leaves there."""
        work = workload([0, 10_000, 20_000], [[(0, 48)]] * 3, [40, 41, 42], [2, 2, 2])
        run = simulate(chosen("sf", 40, enable_prefix_caching=True), work, LineCost())
        look_ups = run.replica.memory.cache_log.look_up_columns()
        assert list(zip(look_ups["index"].tolist(), look_ups["hit_tokens"].tolist())) == [(0, 0), (1, 0), (2, 48)]
        chunks = zip(run.log.chunks["index"].tolist(), run.log.chunks["tokens"].tolist())
        assert [*chunks] == [(0, 80), (1, 48), (1, 32), (2, 32)]

    def test_a_prompt_waits_a_step_for_a_state_that_is_being_computed(self):
        """Both are there at once: the second finds 32 tokens published, but their state is computed in this step."""
        steps = tables_of(workload([0, 0], [[(0, 40)], [(0, 40)]], [0, 0], [2, 2]), caching=True)
        assert [sorted(step) for step in steps[:2]] == [[0], [0, 1]]
        assert steps[1][1][0].startswith(". 0")

    def test_policies_without_kv_groups_refuse_it(self):
        with pytest.raises(SettingError, match="fixed-size state, which sarathi does not serve; use --policy vllm-v1"):
            simulate(settings(policy="sarathi", model=model_of("sf")), workload([0], [[]], [20], [4]))


def test_pages_of_states_by_hand():
    """A sequence of 20 + 13 tokens: one page of 2,048 bytes in each of three state groups, of which 1,616 are used; two
    pages in the full group, a third for the last token."""
    run = simulate(chosen("sssf", 101, enable_prefix_caching=False), workload([0], [[]], [20], [14]), LineCost())
    groups = summary(run)["kv_groups"]
    assert [group["name"] for group in groups] == ["state.0", "state.1", "state.2", "full_attention"]
    assert [group["page_bytes"] for group in groups] == [PAGE_BYTES] * 4
    for group in groups[:3]:
        assert group["mean_over_iterations_pct"] == {"state": pytest.approx(1)}
        assert group["page_padding_pct"]["mean_over_iterations"] == pytest.approx(1 - STATE_BYTES / PAGE_BYTES)
    full = groups[3]["mean_over_iterations_pct"]
    assert sum(full.values()) == pytest.approx((13 * 2 + 3) / 14)
    assert groups[3]["page_padding_pct"]["mean_over_iterations"] == 0


cases = st.tuples(
    workloads(), st.sampled_from(KINDS), st.integers(0, 12), st.booleans(), st.sampled_from([64, 80, 2048])
)


def settings_of(case, **more) -> Settings:
    work, kinds, spare, caching, budget = case
    longest = int((work.prompt_tokens + work.output_tokens).max())
    exports, layers = "m" in kinds, len(kinds) - kinds.count("f")
    fewer = min(layers, kinds.count("f"))
    full, states = -(-kinds.count("f") // fewer), -(-layers // fewer)
    blocks = full * -(-longest // SIZE) + (2 + exports) * states + 1 + spare
    return chosen(kinds, blocks, enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=8, **more)


def serve(case, **more) -> Run:
    return simulate(settings_of(case, **more), case[0], LineCost())


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(case=cases, data=st.data())
def test_leap_and_step_are_the_same_bits(case, data):
    """Invariant 6."""
    end = serve(case).log.end_ticks
    edges = sorted(data.draw(st.lists(st.integers(0, end + 1000), min_size=2, max_size=2, unique=True)))
    window = tuple(map(seconds_of, edges))
    leaps.same(serve(case, window=window), serve(case, leap=False, window=window))


class Ledger(Observer):
    """Pages of each step by what the tables say: of states, of attention, cached and free."""

    every_step = True

    def __init__(self) -> None:
        self.pages: list[tuple[int, int, int, int]] = []

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        self.engine = engine

    def step_started(self, now, ticks, leap, plan) -> None:
        memory, state = self.engine.memory, self.engine.state
        memory.settle(state, min(1, leap[1]))
        named: dict[str, set[int]] = {STATE: set(), "full": set()}
        for tables in memory.group_tables.tables.values():
            for kind, table in zip(memory.groups.kinds, tables):
                named[kind] |= {block for block in table if block is not NULL_BLOCK}
        assert not named[STATE] & named["full"]
        cached = len(set(memory.cached_block_ids().tolist()) - named[STATE] - named["full"])
        free = memory.num_blocks - len(named[STATE]) - len(named["full"]) - cached
        self.pages.append((len(named[STATE]), len(named["full"]), cached, free))


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(case=cases)
def test_the_ledger_is_what_the_tables_hold(case):
    """Invariant 1, in every step: pages of states, of attention, cached and free ones add up to the pool."""
    seen = Ledger()
    run = simulate(settings_of(case, ids=True), case[0], LineCost(), observers=[seen])
    rows = [row for row, count in zip(buckets_at_rows(run), run.log.rows["iterations"].tolist()) if count]
    held = ("live", "reserved", "block_tail")
    assert [(row["state"], sum(row[bucket] for bucket in held), row["cached"], row["free"]) for row in rows] == [
        tuple(SIZE * pages for pages in step) for step in seen.pages
    ]


@pytest.mark.slow
@hypothesis_settings(max_examples=60)
@given(case=cases)
def test_every_request_is_served(case):
    """The smallest pool counts both states of a chunk that goes on from one."""
    assert summary(serve(case))["completed"] + int(serve(case).refused.sum()) == len(case[0])


@pytest.mark.slow
def test_reports_and_bars_count_states_as_live(tmp_path):
    """The nine buckets that pages draw add up to the pool."""
    run = simulate(chosen("sf", 40, enable_prefix_caching=True), workload([0], [[]], [40], [12]), LineCost())
    write(run, tmp_path / "out", {})
    result = read_result(tmp_path / "out")
    held = result.memory[list(BUCKETS)].sum(axis=1)
    assert (held == run.log.capacity_slots).all() and "state" in summary(run)["waste"]["mean_over_time_pct"]["buckets"]
    assert sum(result.summary["waste"]["mean_over_time_pct"]["buckets"].values()) == pytest.approx(100)
    assert status(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]) == DONE
    assert status(["compare", str(tmp_path / "out"), str(tmp_path / "out")]) == DONE
