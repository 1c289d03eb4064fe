"""Decode replicas whose steps are scheduled ahead: blocks that a step in flight writes come free after it. vLLM's own scheduler is beside
them in ``tests/real_vllm/test_disaggregated.py``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.real_vllm import ours
from tests.real_vllm.workloads import KINDS, OPTIONS, Case, in_vain, short_of_blocks

from fragmeter.sim import simulate
from fragmeter.sim.engine import engine
from fragmeter.sim.engine.leap_check import first_difference
from fragmeter.sim.memory.paged.fences import Fences
from fragmeter.sim.memory.paged.paged import PagedMemory
from fragmeter.sim.policy.server import CONSUMER
from fragmeter.sim.runs.integrals import Accounts
from fragmeter.sim.runs.run_log import RunLog
from fragmeter.sim.types.sequence import Sequence


def _story(case: Case) -> list[tuple[int, tuple[tuple[int, int], ...], tuple[int, ...]]]:
    """When each step starts, what it computes, and what it preempts."""
    with ours.side(CONSUMER):
        return [(step.now, step.scheduled, step.preempted) for step in ours.serve(case, asynchronous=True).steps]


def test_a_sequence_that_is_computed_in_vain_keeps_its_blocks_for_a_decision_more():
    """Request 0 ends at 200, and is computed in vain up to 300. The step at 300 was decided before: request 2 enters at 400."""
    assert _story(in_vain()) == [
        (0, ((0, 1), (1, 1)), ()),
        (100, ((0, 1), (1, 1)), ()),
        (200, ((0, 1), (1, 1)), ()),
        (300, ((1, 1),), ()),
        (400, ((1, 1), (2, 1)), ()),
        # It takes the last blocks of request 2, which was not computed in the step before.
        (500, ((1, 1),), (2,)),
        (600, ((2, 10),), ()),
    ]


def test_a_sequence_that_the_step_in_flight_computes_is_not_preempted():
    """Request 2 finds no second block at 100 and stalls; at 200 no step in flight computes it, and it gives way."""
    assert _story(short_of_blocks())[:3] == [
        (0, ((0, 1), (1, 1), (2, 1)), ()),
        (100, ((0, 1), (1, 1)), ()),
        (200, ((0, 1), (1, 1)), (2,)),
    ]


def _log(case: Case, **chosen: bool) -> RunLog:
    with ours.side(CONSUMER):
        wanted = ours.settings_of(case, True, core=False, **chosen)
        return simulate(wanted, case.workload, ours.ConstantCost(case.step_ticks)).log


def test_blocks_that_wait_are_held_and_what_they_keep_is_live():
    """As those of a sequence that is computed: in the step at 200 requests 0 and 1 have two blocks each, and six tokens."""
    log = _log(in_vain(), leap=False)
    found = zip(*(log.rows[name].tolist() for name in ("start_ticks", "held", "live")), strict=True)
    assert [row for row in found if row[0] in (100, 200, 300)] == [(100, 16, 10), (200, 16, 12), (300, 8, 7)]


def _differing(kinds: Iterable[str], seeds: Iterable[int], option: str | None = None) -> list[tuple[str, object]]:
    """Workloads in which leaps and steps differ."""
    found = []
    for kind in kinds:
        for seed in seeds:
            case = replace(KINDS[kind](seed), prefix_caching=False)
            if option is not None:
                case = OPTIONS[option](case)
            stepped = _log(case, leap=False)
            Accounts(stepped).require_conserved()
            for ids in (False, True):
                if difference := first_difference(_log(case, ids=ids), stepped):
                    found.append((case.name, difference))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "tight", "windows", "windows_cached", "states", "block_sizes", "compressed"])
@pytest.mark.parametrize("option", [None, "priorities"])
def test_leap_and_step_are_the_same_bits(kind, option):
    """Invariants 1 and 6, with block ids and without."""
    assert not _differing([kind], range(20), option)


def test_leap_and_step_are_the_same_bits_of_a_few():
    assert not _differing(["mixed", "windows"], [0])


def test_leaps_over_steps_in_which_blocks_come_free_are_noticed(monkeypatch):
    monkeypatch.setattr(engine, "_for_one_step", lambda first_step: first_step)
    assert _differing(["tight"], range(6))


def test_blocks_that_come_free_only_at_the_next_ending_are_noticed(monkeypatch):
    """In a leap that is longer than its steps one by one."""
    monkeypatch.setattr(engine.Engine, "_free_deferred", lambda engine, first_step: first_step)
    assert _story(in_vain())[4] != (400, ((1, 1), (2, 1)), ())


def test_blocks_that_come_free_at_once_are_noticed(monkeypatch):
    defer = PagedMemory._defer

    def at_once(memory: PagedMemory, sequence) -> None:
        defer(memory, sequence)
        memory._process(memory.fences.scheduled)

    monkeypatch.setattr(PagedMemory, "_defer", at_once)
    assert _story(in_vain())[3] == (300, ((1, 1), (2, 1)), ())


def test_blocks_come_free_once_the_batches_before_their_fence_are_over():
    fences, (first, second, third) = Fences(), (Sequence(number, 1, 1, 1) for number in range(3))
    for sequence, fences.scheduled in ((first, 2), (second, 2), (third, 4)):
        fences.defer(sequence, ())
    freed = {batches: [sequence for sequence, _ in fences.process(batches)] for batches in range(1, 5)}
    assert freed == {1: [], 2: [first, second], 3: [], 4: [third]} and not fences.deferred
