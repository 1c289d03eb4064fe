"""Speculative decoding of ``vllm-v1`` beside the installed vLLM, step by step: tokens, block tables, preemptions, cached blocks."""

from __future__ import annotations

import random

import pytest

from fragmeter.experiments.live.step_log import first_difference
from fragmeter.sim.memory.paged.speculative import SpeculativeMemory
from fragmeter.sim.spec.speculative import SpeculativeConfig
from fragmeter.sim.types.state import State

from . import ours, speculation
from .workloads import KINDS, Case

#: Kinds of workloads over one KV group, and workloads of each.
_KINDS = ("mixed", "bursts", "tight", "prefixes", "turns", "chunks")
_SEEDS = 6


def _case(kind: str, seed: int, method: str) -> Case:
    """Up to five drafts, of which none, all, or 60 % of those behind accepted ones are accepted."""
    draw = random.Random(f"{kind}/{seed}/{method}")
    drafts = draw.choice([1, 2, 3, 5])
    rate = (0.0, 0.6, 1.0)[seed % 3]
    return speculation.drafting(KINDS[kind](seed), method, drafts, [rate**place for place in range(1, drafts + 1)])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("method", ["ngram", "eagle", "draft_model"])
@pytest.mark.parametrize("kind", _KINDS)
def test_every_step_is_that_of_the_real_scheduler(kind: str, method: str, asynchronous: bool, record_property):
    differing: dict[str, object] = {}
    steps = drafted = 0
    for seed in range(_SEEDS):
        case = _case(kind, seed, method)
        real, recorder = speculation.serve(case, asynchronous)
        steps, drafted = steps + len(real.steps), drafted + recorder.drafted
        if difference := first_difference(real, ours.serve(case, asynchronous)):
            differing[case.name] = difference
    record_property(f"compared/{kind} {method} {'async' if asynchronous else 'sync'}", [_SEEDS, steps, len(differing)])
    assert not differing
    assert drafted


def _differing(method: str, kind: str, asynchronous: bool) -> int:
    cases = [_case(kind, seed, method) for seed in range(_SEEDS)]
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


def test_drafts_that_are_known_too_early_are_noticed(monkeypatch):
    """Where steps are scheduled ahead, blocks are reserved as if all drafts in flight were accepted."""
    land = SpeculativeMemory._land
    monkeypatch.setattr(
        SpeculativeMemory, "progress", lambda memory, *given: (land(memory), _progress(memory, *given))[1]
    )
    assert _differing("eagle", "mixed", asynchronous=True) > 3


_progress = SpeculativeMemory.progress


def test_accepted_drafts_that_are_not_gained_are_noticed(monkeypatch):
    monkeypatch.setattr(State, "accept", lambda state, drafts: None)
    assert _differing("ngram", "mixed", asynchronous=False) > 3
