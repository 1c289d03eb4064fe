"""Policy ``sglang`` beside recorded logs of the real SGLang 0.5.23: what ``test_scheduler`` compares, without SGLang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.sim import simulate
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.types.errors import SettingError

from . import cards, ours
from .record import NAMES, case_of, digest, recorded, recorded_defaults, recorded_models
from .workloads import KINDS, or_nothing, shrunk


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_the_recorded_one(name: str):
    assert digest(or_nothing(ours.serve, case_of(name), SettingError)) == recorded()[name]


def test_defaults_of_sixteen_cards_are_the_recorded_ones():
    assert cards.ours() == recorded_defaults()


def test_defaults_of_models_are_the_recorded_ones():
    assert cards.ours_of_models() == recorded_models()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_leaps_and_slot_ids_change_nothing(kind: str, overlaps: bool):
    # Not 1: in one buffer with states that workload ends stuck, as with SGLang.
    case = replace(KINDS[kind](3), overlaps=overlaps)
    assert kind != "states" or case.states

    def result(**others: object) -> object:
        cost = ours.ConstantCost(case.step_ticks)
        with ours.linked_at(case):
            return summary(simulate(ours.settings_of(case, **others), case.workload, cost))

    with ours.pools_of(case):
        assert result() == result(leap=False)
        # A tree with a host has no ids.
        assert case.hicache_ratio or result() == result(ids=True)


def test_a_step_with_another_number_of_tokens_has_another_digest():
    served = ours.serve(case_of(NAMES[0]))
    first, *others = served.steps
    assert digest(served._replace(steps=[first._replace(free=first.free + 1), *others])) != digest(served)


def test_a_difference_is_shrunk_to_the_requests_that_make_it():
    """Said to be of the requests 2 and 5."""
    case = KINDS["lpm"](3)
    both = set(case.workload.prompt_tokens[[2, 5]].tolist())
    small = shrunk(case, lambda each: both <= set(each.workload.prompt_tokens.tolist()))
    assert set(small.workload.prompt_tokens.tolist()) == both and len(small.workload) == len(both)
