"""Faults planted into plans, and into what writes them: the replay finds them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.moves import Moves
from fragmeter.sim.memory.contiguous.contiguous import ContiguousMemory
from fragmeter.sim.memory.prefix import BlockPool, Chain, Chains
from fragmeter.sim.memory.prefix.block_tables import BlockTables
from fragmeter.sim.recording.plans import Plan, record
from fragmeter.sim.types.sequence import Grant, Sequence
from plan_cases import (
    caching_case,
    caching_plan,
    copying_plan,
    swapping_case,
    swapping_plan,
    with_stale_table,
    with_swapped_ids,
    without_move,
)  # fmt: skip
from plan_replay import Replay, replay


def fails(plan: Plan) -> bool:
    """Whether a row finds in its table something else than it should."""
    try:
        replay(plan)
    except AssertionError:
        return True
    return False


def rows_of_two_blocks(plan: Plan) -> list[int]:
    """Rows with something in their first two blocks."""
    return np.flatnonzero(plan.context_lens > plan.meta["block_size"]).tolist()


class TestTheCases:
    """In them happens what is to be tested."""

    def test_a_swapping_plan_has_everything(self):
        settings, workload = swapping_case()
        plan, evictions = swapping_plan(), simulate(settings, workload).log.evictions["swapped"].tolist()
        assert evictions.count(0) and evictions.count(1), "preemptions of both kinds"
        assert len(plan.swap_outs) and len(plan.swap_ins) and len(plan.copies)
        assert prefix_hits(plan) and is_shuffled(plan)

    def test_a_caching_plan_has_hits_and_preemptions(self):
        settings, workload = caching_case()
        plan, run = caching_plan(), simulate(settings, workload)
        assert len(run.log.evictions["swapped"]) and prefix_hits(plan) and is_shuffled(plan)
        assert len(run.log.chunks["index"])

    def test_a_copying_plan_copies(self):
        assert len(copying_plan().copies) > 20


def prefix_hits(plan: Plan) -> int:
    """Prefills that begin with tokens that are there."""
    steps = [plan.step(step) for step in range(plan.num_steps)]
    return sum(int((step.context_lens > step.query_tokens)[step.decodes :].sum()) for step in steps)


def is_shuffled(plan: Plan) -> bool:
    """Whether the first table is not the first blocks in order."""
    table = plan.block_table(0, 0).tolist()
    return table != list(range(min(table), min(table) + len(table)))


@pytest.mark.parametrize("kind", ["swap_out", "swap_in", "copy"])
def test_a_skipped_move(kind):
    plan = swapping_plan()
    moves = int(getattr(plan, f"{kind}_offsets")[-1])
    assert moves > 10
    assert all(fails(without_move(plan, kind, place)) for place in range(moves))


def test_a_skipped_copy_of_a_piece():
    plan = copying_plan()
    assert all(fails(without_move(plan, "copy", place)) for place in range(len(plan.copies)))


@pytest.mark.slow
@pytest.mark.parametrize("plan_of", [swapping_plan, caching_plan])
def test_two_swapped_ids(plan_of):
    plan = plan_of()
    rows = rows_of_two_blocks(plan)
    assert len(rows) > 50
    assert all(fails(with_swapped_ids(plan, row)) for row in rows)


@pytest.mark.parametrize("plan_of", [swapping_plan, caching_plan])
def test_a_stale_table(plan_of):
    """The table of a row as it stood when the sequence was computed last, where it changed by more than growth."""
    plan, last, stale = plan_of(), {}, []
    for row, sequence in enumerate(plan.sequence.tolist()):
        table = plan.block_ids[slice(*plan.table_offsets[row : row + 2])].tolist()
        before, old = last.get(sequence, (row, table))
        common = min(len(old), -(-int(plan.context_lens[row]) // plan.meta["block_size"]))
        if old[:common] != table[:common]:
            stale.append((row, before))
        last[sequence] = row, table
    assert len(stale) >= 5
    assert all(fails(with_stale_table(plan, row, before)) for row, before in stale)


class OutOfOrder(Replay):
    """A replay that takes the moves of a step in another order, or after its writes."""

    def __init__(self, plan: Plan, order: str) -> None:
        super().__init__(plan)
        self._order = order

    def run(self) -> None:
        for step in range(self.plan.num_steps):
            rows = range(*self.plan.row_offsets[step : step + 2].tolist())
            if self._order == "writes first":
                self.write(rows)
            self.move(step)
            if self._order != "writes first":
                self.write(rows)
            for row in rows:
                assert self.found(row) == self.held(row)

    def move(self, step: int) -> None:
        if self._order == "moves late":
            step -= 1
        if step >= 0:
            super().move(step)


@pytest.mark.parametrize("order", ["writes first", "moves late"])
def test_the_wrong_order(order):
    with pytest.raises(AssertionError):
        OutOfOrder(swapping_plan(), order).run()


class TestBugsInTheTables:
    """As they would come about: the plan says what the tables did, and that is wrong."""

    def test_no_copy_on_write(self):
        settings, workload = swapping_case()
        with mock.patch.object(BlockPool, "is_shared", return_value=False):
            assert fails(recorded_anyhow(settings, workload))

    def test_a_hit_of_another_prefix(self):
        """Blocks that are named by their place alone."""
        settings, workload = caching_case()
        path_of, only = Chains.path_of, Chain(1, [])
        with mock.patch.object(Chains, "path_of", lambda self, runs: [(only, path_of(self, runs)[-1][1])]):
            assert fails(recorded_anyhow(settings, workload))

    def test_a_beam_that_goes_on_from_the_wrong_one(self):
        settings, workload = swapping_case()
        replace = BlockTables.replace

        def replace_by_another(tables: BlockTables, dead: Sequence, parent: Sequence) -> int:
            others = [member for member in dead.group.members if member not in (dead, parent)]
            return replace(tables, dead, others[0] if others else parent)

        with mock.patch.object(BlockTables, "replace", replace_by_another):
            assert fails(recorded_anyhow(settings, workload))

    def test_a_piece_that_is_copied_from_the_wrong_parent(self):
        record = ContiguousMemory.record_copy

        def record_the_wrong_way(memory: ContiguousMemory, source: Grant, target: Grant, tokens: int) -> None:
            record(memory, target, source, tokens)

        with mock.patch.object(ContiguousMemory, "record_copy", record_the_wrong_way):
            assert fails(copying_plan())

    def test_moves_that_are_forgotten(self):
        with mock.patch.object(Moves, "clear", lambda self: None):
            assert fails(swapping_plan())


def recorded_anyhow(settings, workload) -> Plan:
    return record(settings, workload, shuffle_ids=True)[1]
