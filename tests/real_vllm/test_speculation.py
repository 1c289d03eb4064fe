"""Speculative decoding of ``vllm-v1`` beside the installed vLLM, step by step: tokens, block tables, preemptions, cached blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fragmeter.sim.memory.accounting.kv_groups import PageGroups
from fragmeter.sim.memory.paged.group_cache import GroupCache
from fragmeter.sim.memory.paged.speculative import Progress, SpeculativeMemory
from fragmeter.sim.spec.speculative import SpeculativeConfig
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.types.state import State
from tools.live.step_log import first_difference

from . import ours, speculation
from .drafts import DRAFTED, HYBRIDS, METHODS, PACKED, drawn
from .server import Stuck
from .workloads import Case, number_of_workloads

#: Kinds of workloads over one KV group, and workloads of each and of a method; of each kind over several, and under each option.
_KINDS = tuple(kind for kind in DRAFTED if kind not in HYBRIDS)
_SEEDS, _MANY, _SEEDS_A_TEST = number_of_workloads(6), number_of_workloads(200), 10
_OPTIONS = ("priorities", "intervals", "long_prefills", "combined")
_modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def _compare(label: str, cases: list[Case], asynchronous: bool, record_property: Callable[[str, object], None]) -> None:
    differing: dict[str, object] = {}
    steps = drafted = stuck = 0
    for case in cases:
        try:
            real, recorder = speculation.serve(case, asynchronous)
        except Stuck:
            with pytest.raises(SimulationFault, match="is stuck"):
                ours.serve(case, asynchronous)
            stuck += 1
            continue
        steps, drafted = steps + len(real.steps), drafted + recorder.drafted
        if difference := first_difference(real, ours.serve(case, asynchronous)):
            differing[case.name] = difference
    record_property(f"compared/{label} {'async' if asynchronous else 'sync'}", [len(cases), steps, len(differing)])
    assert not differing and stuck <= len(cases) // 2
    assert drafted


@_modes
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", _KINDS)
def test_every_step_is_that_of_the_real_scheduler(kind: str, method: str, asynchronous: bool, record_property):
    cases = [drawn(kind, seed, method) for seed in range(_SEEDS)]
    _compare(f"{kind} {method}", cases, asynchronous, record_property)


@_modes
@pytest.mark.parametrize("first", range(0, _MANY, _SEEDS_A_TEST))
@pytest.mark.parametrize("kind", HYBRIDS)
def test_every_step_over_several_kv_groups_is_that_of_the_real_scheduler(
    kind: str, first: int, asynchronous: bool, record_property
):
    """Windows and states beside drafts, and beside the drafter's layer."""
    seeds = range(first, first + _SEEDS_A_TEST)
    cases = [drawn(kind, seed, METHODS[seed // 3 % len(METHODS)]) for seed in seeds]
    _compare(f"drafts {kind}", cases, asynchronous, record_property)


@_modes
@pytest.mark.parametrize(("kind", "method"), PACKED)
def test_every_step_over_packed_blocks_is_that_of_the_real_scheduler(
    kind: str, method: str, asynchronous: bool, record_property
):
    cases = [drawn(kind, seed, method) for seed in range(_SEEDS)]
    _compare(f"{kind} {method}", cases, asynchronous, record_property)


@_modes
@pytest.mark.parametrize("first", range(0, _MANY, _SEEDS_A_TEST))
@pytest.mark.parametrize("option", _OPTIONS)
def test_every_step_under_an_option_is_that_of_the_real_scheduler(
    option: str, first: int, asynchronous: bool, record_property
):
    """Over one KV group and several."""
    seeds = range(first, first + _SEEDS_A_TEST)
    kinds = [(seed, DRAFTED[seed % len(DRAFTED)]) for seed in seeds]
    cases = [drawn(kind, seed, METHODS[seed // 3 % len(METHODS)], option) for seed, kind in kinds]
    _compare(f"drafts {option}", cases, asynchronous, record_property)


def _differing(method: str, kind: str, asynchronous: bool) -> int:
    cases = [drawn(kind, seed, method) for seed in range(6)]
    real = [speculation.serve(case, asynchronous)[0] for case in cases]
    return sum(
        first_difference(each, ours.serve(case, asynchronous)) is not None
        for each, case in zip(real, cases, strict=True)
    )


def test_a_drafter_that_does_not_look_ahead_is_noticed(monkeypatch):
    monkeypatch.setattr(SpeculativeConfig, "lookahead_tokens", 0)
    assert _differing("eagle", "mixed", asynchronous=False) > 3


def test_hashes_that_do_not_look_ahead_are_noticed(monkeypatch):
    monkeypatch.setattr(SpeculativeConfig, "hash_lookahead_tokens", 0)
    assert _differing("eagle", "prefixes", asynchronous=False) > 3


def test_a_prompts_last_block_without_a_hash_is_noticed(monkeypatch):
    monkeypatch.setattr(GroupCache, "_publish_tail", lambda *given: None)
    assert _differing("eagle", "block_sizes", asynchronous=False)


def test_drafts_that_are_known_too_early_are_noticed(monkeypatch):
    """Where steps are scheduled ahead, blocks are reserved as if all drafts in flight were accepted."""
    transaction = SpeculativeMemory.transaction
    monkeypatch.setattr(
        SpeculativeMemory, "transaction", lambda memory, *given: (memory._land(), transaction(memory, *given))[1]
    )
    assert _differing("eagle", "mixed", asynchronous=True) > 3


def test_accepted_drafts_that_are_not_gained_are_noticed(monkeypatch):
    """A request that its memory has all tokens of never ends."""
    monkeypatch.setattr(State, "accept", lambda state, drafts: None)
    with pytest.raises(SimulationFault, match="is stuck"):
        _differing("ngram", "mixed", asynchronous=False)


def test_states_without_a_block_for_each_draft_are_noticed(monkeypatch):
    """Of models with states vLLM has one more block of each group for each draft."""
    replaced = PageGroups._replace
    monkeypatch.setattr(PageGroups, "_replace", lambda groups, **given: replaced(groups, **given | {"drafts": 0}))
    assert _differing("ngram", "states", asynchronous=False) > 3


def test_windows_that_release_what_a_step_in_flight_may_lose_are_noticed(monkeypatch):
    """Where steps are scheduled ahead, blocks are released for the tokens before the step in flight."""
    monkeypatch.setattr(Progress, "processed", property(lambda progress: progress.computed))
    assert _differing("ngram", "windows", asynchronous=True) > 2
