"""Policy ``vllm-v1`` beside recorded logs of the real vLLM 0.33.0: what ``test_scheduler`` compares, without vLLM."""

from __future__ import annotations

import pytest

from . import ours
from .record import NAMES, SEEDS, case_of, digest, recorded
from .workloads import KINDS, OPTIONS

#: Of three seeds two are for ``make test-all``; each has a name for synchronous and one for asynchronous scheduling.
_NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if place // 2 % 3 else pytest.param(name)
    for place, name in enumerate(NAMES)
]


@pytest.mark.parametrize("name", _NAMES)
def test_every_step_is_the_recorded_one(name: str):
    assert digest(ours.serve(*case_of(name))) == recorded()[name]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, SEEDS), marks=pytest.mark.slow)], ids=["two seeds", "all others"]
)
def test_leaps_and_block_ids_change_nothing(kind: str, asynchronous: bool, seeds: range):
    for seed in seeds:
        case = KINDS[kind](seed)
        leaps = ours.summary(case, asynchronous, leap=True, ids=False)
        assert leaps == ours.summary(case, asynchronous, leap=False, ids=False)
        assert leaps == ours.summary(case, asynchronous, leap=True, ids=True)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
@pytest.mark.parametrize("option", OPTIONS)
def test_leaps_and_block_ids_change_nothing_under_an_option(option: str, asynchronous: bool):
    for kind in KINDS:
        case = OPTIONS[option](KINDS[kind](3))
        leaps = ours.summary(case, asynchronous, leap=True, ids=False)
        assert leaps == ours.summary(case, asynchronous, leap=False, ids=False)
        assert leaps == ours.summary(case, asynchronous, leap=True, ids=True)


def test_a_step_with_another_number_of_tokens_has_another_digest():
    served = ours.serve(*case_of(NAMES[0]))
    (index, tokens), *others = served.steps[0].scheduled
    first = served.steps[0]._replace(scheduled=((index, tokens + 1), *others))
    assert digest(served._replace(steps=[first, *served.steps[1:]])) != digest(served)
