"""Policy ``llama-cpp`` beside recorded logs of llama.cpp's server: what ``test_server`` compares, without the server."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fragmeter.sim.policy import llama_cpp

from . import ours
from .record import NAMES, digest, recorded
from .workloads import KINDS


@pytest.mark.parametrize("name", NAMES)
def test_every_step_and_answer_is_the_recorded_one(name: str):
    kind, _, seed = name.partition("/")
    assert digest(ours.serve(KINDS[kind](int(seed)))) == recorded()[name]


@pytest.mark.slow
def test_requests_that_take_slots_in_order_of_arrival_are_noticed(monkeypatch):
    """As they did here until they were compared with the server."""
    monkeypatch.setattr(llama_cpp, "reversed", iter, raising=False)
    assert len(_differing()) > 5


@pytest.mark.slow
def test_slots_that_are_chosen_for_more_similar_prompts_only_are_noticed(monkeypatch):
    monkeypatch.setattr(llama_cpp, "SLOT_PROMPT_SIMILARITY", Fraction(1, 2))
    assert len(_differing()) > 5


def _differing() -> list[str]:
    """Loads with another log than the recorded one."""
    known = recorded()
    cases = (KINDS[name.partition("/")[0]](int(name.partition("/")[2])) for name in NAMES)
    return [case.name for case in cases if digest(ours.serve(case)) != known[case.name]]


def test_another_answer_has_another_digest():
    served = ours.serve(KINDS["split alone"](0))
    first, *others = served.answers
    assert digest(served._replace(answers=[first._replace(slot=first.slot + 1), *others])) != digest(served)
