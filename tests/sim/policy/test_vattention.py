"""vAttention: decisions are those of vllm-v0; pages stay mapped until a sequence needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import buckets_at_rows, evictions_of, residencies_of, serve, steps_of, times_of
from fragmeter.experiments.story.one_second_step import OneSecondStep
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory import DeferredMemory
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.state import State
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.workload import Workload
from strategies import Case, crowded_cases, long_cases, medium_cases, small_cases
from textbook import Scene, run_scene

# Six page groups of four tokens. Prompt + true output: S1 11, S2 11, S3 11, S4 18, S5 4.
# 3: S3 needs two groups and takes over S1's three: the third is spare. 5: S2 grows, into one of the two unmapped
# groups, as the spare one is S3's. 7: S3 grows into it. 9: S2 grows into the last unmapped group, S3's three are
# deferred. 11: S4 needs four. No region left so many; it takes S3's three, of equals the one left first, and as nothing
# is unmapped one of S2's three is. 15: S4 grows, again at the cost of S2's. 16: S5 needs one: S2's last one will do.
LOG = (
    "1: prefill S1:9 S2:2 | live 11 reserved 4 block_tail 1 free 8",
    "2: decode S1 S2 | live 13 reserved 2 block_tail 1 free 8",
    "3: prefill S3:5 | pause S2 | live 8 reserved 4 cached 4 free 8",
    "4: decode S2 S3 | live 10 reserved 2 cached 4 free 8",
    "5: decode S2 S3 | live 12 reserved 4 cached 4 free 4",
    "6: decode S2 S3 | live 14 reserved 2 cached 4 free 4",
    "7: decode S2 S3 | live 16 reserved 3 block_tail 1 free 4",
    "8: decode S2 S3 | live 18 reserved 1 block_tail 1 free 4",
    "9: decode S2 | live 9 reserved 2 block_tail 1 cached 12",
    "10: decode S2 | live 10 reserved 1 block_tail 1 cached 12",
    "11: prefill S4:13 | live 13 reserved 3 cached 8",
    "12: decode S4 | live 14 reserved 2 cached 8",
    "13: decode S4 | live 15 reserved 1 cached 8",
    "14: decode S4 | live 16 cached 8",
    "15: decode S4 | live 17 reserved 1 block_tail 2 cached 4",
    "16: prefill S5:3 | live 3 reserved 1 cached 20",
)
# By iteration, from 1: the tables, deferred regions and spare groups once they change.
TABLES = {
    1: ({0: [0, 1, 2], 1: [3]}, [], {}),
    3: ({1: [3], 2: [0, 1]}, [], {2: [2]}),
    5: ({1: [3, 4], 2: [0, 1]}, [], {2: [2]}),
    7: ({1: [3, 4], 2: [0, 1, 2]}, [], {}),
    9: ({1: [3, 4, 5]}, [[0, 1, 2]], {}),
    11: ({3: [0, 1, 2, 5]}, [[3, 4]], {}),
    15: ({3: [0, 1, 2, 5, 4]}, [[3]], {}),
    16: ({4: [3]}, [[0, 1, 2, 5, 4]], {}),
}
SCENE = Scene(
    "Pages that stay mapped",
    "",
    settings(policy="vattention", num_gpu_blocks_override=6, block_size=4, max_model_len=24, watermark=0.0),
    Workload(
        "five",
        arrival_ticks=np.array([0, 0, 2, 10, 15]) * PER_SECOND,
        prompt_tokens=np.array([9, 2, 5, 13, 3]),
        output_tokens=np.array([2, 9, 6, 5, 1]),
        max_tokens=np.array([2, 9, 6, 5, 1]),
    ),
)

cases = st.one_of(small_cases(), medium_cases(), crowded_cases(), long_cases())


def without_host(case: Case) -> Case:
    """vAttention has no swap space, so the other has none either."""
    return replace(case, pool=replace(case.pool, host_blocks=0))


class TestTheLog:
    def test_worked_out_by_hand(self):
        assert run_scene(SCENE).log == LOG

    def test_of_vllm_v0_differs_in_what_is_cached_only(self):
        lines = run_scene(replace(SCENE, settings=replace(SCENE.settings, policy="vllm-v0"))).log
        assert [line.split(" | live")[0] for line in lines] == [line.split(" | live")[0] for line in LOG]
        assert lines != LOG and not any("cached" in line for line in lines)

    def test_of_page_groups(self):
        seen = {}
        iterations = iter(range(1, 17))

        def look(memory: DeferredMemory, state: State, steps: int) -> None:
            memory.tables.grow_until(state.decode_step + (steps > 0))
            kept, regions = memory.tables.tables, memory.tables.regions
            spare = {sequence.index: list(pages) for sequence, pages in regions.spare.items()}
            tables = {sequence.index: list(table) for sequence, table in kept.items()}
            seen[next(iterations)] = (tables, [list(region) for region in regions.deferred], spare)

        watched(look, lambda: simulate(replace(SCENE.settings, ids=True, leap=False), SCENE.workload, OneSecondStep()))
        shown = 1
        for iteration in range(1, 17):
            shown = iteration if iteration in TABLES else shown
            assert seen[iteration] == TABLES[shown]


def watched(look: Callable[[DeferredMemory, State, int], None], run: Callable[[], Run]) -> Run:
    """A run with looks at its memory whenever steps have passed."""
    advance = DeferredMemory.advance

    def watch(memory: DeferredMemory, state: State, steps: int):
        look(memory, state, steps)
        return advance(memory, state, steps)

    with mock.patch.object(DeferredMemory, "advance", watch):
        return run()


class TestDecisions:
    @pytest.mark.slow
    @hypothesis_settings(max_examples=40)
    @given(cases, st.booleans())
    def test_are_those_of_vllm_v0_tick_for_tick(self, case, leap):
        case = without_host(case)
        here, there = serve("vattention", case, leap=leap), serve("vllm-v0", case, leap=leap)
        assert here.log.end_ticks == there.log.end_ticks
        for of in (steps_of, residencies_of, evictions_of, times_of):
            assert of(here) == of(there)
        assert here.refused.tolist() == there.refused.tolist()
        mine, theirs = here.accounts.window(), there.accounts.window()
        for sums, others in ((mine.slot_steps, theirs.slot_steps), (mine.slot_ticks, theirs.slot_ticks)):
            assert others == sums | {"cached": 0, "free": sums["free"] + sums["cached"]}


def by_start(run: Run) -> dict[tuple[int, bool], dict[str, int]]:
    """The buckets of every row by the tick at which it starts, and whether it computes anything."""
    rows = run.log.rows
    starts = zip(rows["start_ticks"].tolist(), (rows["iterations"] > 0).tolist())
    return dict(zip(starts, buckets_at_rows(run), strict=True))


class TestLeaps:
    @pytest.mark.slow
    @hypothesis_settings(max_examples=30)
    @given(cases, st.data())
    def test_are_the_same_bits_as_steps(self, case, data):
        """Invariant 6, and 1: the buckets add up to the capacity, none is negative."""
        end = serve("vattention", case).log.end_ticks
        window = tuple(sorted(data.draw(st.lists(st.integers(0, end + 999), min_size=2, max_size=2, unique=True))))
        leapt, stepped = (serve("vattention", case, window, leap=leap) for leap in (True, False))
        for of in (steps_of, residencies_of, evictions_of, times_of, summary):
            assert of(leapt) == of(stepped)
        assert leapt.window == stepped.window and leapt.accounts.window() == stepped.accounts.window()
        single = by_start(stepped)
        for start, buckets in by_start(leapt).items():
            assert buckets == single[start]
            assert sum(buckets.values()) == case.pool.slots and min(buckets.values()) >= 0
        total = stepped.accounts.window()
        assert sum(total.slot_steps.values()) == case.pool.slots * total.num_steps

    def test_end_where_mapped_pages_change_hands(self):
        """The scene above: before S3 grows into its spare group in 7, and before S4 takes a group of S2's in 15; else
        at prefills (no steps, as none decodes) and at finishes."""
        run = simulate(SCENE.settings, SCENE.workload, OneSecondStep())
        assert run.log.rows["steps"].tolist() == [0, 1, 0, 3, 2, 2, 0, 3, 1, 0]

    def test_are_long_while_pages_are_left_unmapped(self):
        """The second request takes over four groups, and grows into three others while hundreds are unmapped."""
        chosen = settings(policy="vattention", num_gpu_blocks_override=300, block_size=16, watermark=0.0)
        columns = {"prompt_tokens": np.array([60, 60]), "output_tokens": np.array([3, 45]), "max_tokens": None}
        run = simulate(chosen, Workload("two", np.array([0, 9]) * PER_SECOND, **columns), OneSecondStep())
        assert run.log.rows["steps"].tolist() == [0, 2, 0, 44]
        assert run.accounts.at_rows()["cached"].tolist() == [0, 0, 0, 0]


class TestTheLedger:
    @pytest.mark.slow
    @hypothesis_settings(max_examples=40)
    @given(cases)
    def test_is_that_of_the_rules_followed_region_by_region(self, case):
        run = serve("vattention", without_host(case), leap=False)
        expected = cached_blocks(serve("vllm-v0", without_host(case), leap=False))
        rows = zip(buckets_at_rows(run), expected, strict=True)
        assert all(buckets["cached"] == blocks * case.pool.block_size for buckets, blocks in rows)
        # A page is unmapped only to be mapped again at once.
        free = [buckets["free"] for buckets in buckets_at_rows(run)]
        assert free == sorted(free, reverse=True)

    @pytest.mark.slow
    @hypothesis_settings(max_examples=40)
    @given(cases, st.booleans())
    def test_is_what_lies_in_the_tables(self, case, leap):
        """Invariants 1 to 3 in every step, those within a leap included."""
        size, num_blocks, looks = case.pool.block_size, case.pool.num_blocks, []

        def look(memory: DeferredMemory, state: State, steps: int) -> None:
            kept = memory.tables
            for decode_step in range(state.decode_step, state.decode_step + max(1, steps)):
                kept.grow_until(decode_step + (steps > 0))
                computed = {sequence: decode_step - (not steps) + sequence.lag for sequence in state.running}
                assert {s: len(table) for s, table in kept.tables.items()} == {
                    s: -(-tokens // size) for s, tokens in computed.items()
                }
                named = Counter(page for table in kept.tables.values() for page in table)
                cached = [page for pages in (*kept.regions.deferred, *kept.regions.spare.values()) for page in pages]
                named.update(cached)
                assert kept.pool.reference_counts == [named[page] for page in range(num_blocks)]
                assert sorted([*named.elements(), *kept.pool.free_ids]) == [*range(num_blocks)]
                assert kept.regions.spare.keys() <= kept.tables.keys() and all(kept.regions.deferred)
                seen = {"live": sum(computed.values()), "cached": len(cached) * size}
                seen["free"] = len(kept.pool.free_ids) * size
                looks.append((seen, decode_step == state.decode_step))

        run = watched(look, lambda: serve("vattention", case, leap=leap, ids=True))
        first = [seen for seen, begins in looks if begins]
        assert first == [{name: row[name] for name in ("live", "cached", "free")} for row in buckets_at_rows(run)]
        levels = [seen["cached"] for seen, _ in looks]
        assert all(begins or level == levels[i - 1] for i, (level, (_, begins)) in enumerate(zip(levels, looks)))
        assert levels == [row["cached"] for row in buckets_at_rows(serve("vattention", case, leap=False))]


def cached_blocks(run: Run) -> list[int]:
    """Mapped and unused page groups in every row, by docs/policies/other-servers.md from another policy's steps and residencies alone."""
    run_log, size = run.log, run.replica.block_size
    left: list[int] = []
    mapped: dict[int, int] = {}
    tokens, lag, levels = {}, {}, []
    evictions = list(zip(run_log.evictions["ticks"].tolist(), run_log.evictions["index"].tolist()))
    ends = np.where(
        np.isin(np.arange(len(run_log.residency_end)), run_log.evictions["residency"]), -1, run_log.residency_end
    ).tolist()
    residencies = list(
        zip(
            run_log.residencies["start_ticks"].tolist(),
            run_log.residencies["index"].tolist(),
            run_log.residency_lag.tolist(),
            ends,
        )
    )
    end_step = {}

    def need(index: int) -> int:
        return -(-tokens[index] // size)

    def grow(index: int) -> None:
        while mapped[index] < need(index):
            if sum(left) + sum(mapped.values()) == run.replica.num_blocks:
                if left:
                    left[0] -= 1
                    left[:] = left if left[0] else left[1:]
                else:
                    mapped[next(other for other in mapped if mapped[other] > need(other))] -= 1
            mapped[index] += 1

    rows = run_log.rows
    for start, decode_step, steps in zip(
        rows["start_ticks"].tolist(), run_log.row_step.tolist(), rows["steps"].tolist()
    ):
        while evictions and evictions[0][0] <= start:
            left.append(mapped.pop(evictions.pop(0)[1]))
        for index in mapped:
            tokens[index] = decode_step - 1 + lag[index]
        while residencies and residencies[0][0] <= start and (steps == 0) and rows["prefill_tokens"][len(levels)]:
            _, index, lag[index], end_step[index] = residencies.pop(0)
            tokens[index] = decode_step - 1 + lag[index]
            enough = [pages for pages in left if pages >= need(index)]
            mapped[index] = min(enough) if enough else max(left, default=0)
            if left:
                left.remove(mapped[index])
            grow(index)
        for index in mapped:
            tokens[index] += steps
        for index in mapped:
            grow(index)
        levels.append(sum(left) + sum(mapped.values()) - sum(map(need, mapped)))
        for index in sorted(index for index in mapped if end_step[index] == decode_step + steps):
            left.append(mapped.pop(index))
    return levels
