"""Engines that share experts beside those of the installed vLLM, step by step; see ``lock_step``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fragmeter.sim.cluster.lock_step import LockStepEngine
from fragmeter.sim.policy.vllm_v1 import _Cadence
from tools.live.step_log import first_difference

from . import lock_step
from .workloads import KINDS, OPTIONS, number_of_workloads

_SEEDS = number_of_workloads(6)
_KINDS = ("mixed", "bursts", "tight", "prefixes", "turns", "chunks")
_OPTIONS = ("intervals", "priorities")


def _differences(kind: str, option: str | None, asynchronous: bool, seeds: int = 6) -> tuple[dict[str, object], int]:
    differing: dict[str, object] = {}
    steps = 0
    for seed in range(seeds):
        case = lock_step.aligned(KINDS[kind](seed))
        if option is not None:
            case = OPTIONS[option](case)
        engines = 2 + seed % 2
        mine = lock_step.serve_ours(case, engines, asynchronous)
        for number, real in enumerate(lock_step.serve(case, engines, asynchronous)):
            steps += len(real.steps)
            if difference := first_difference(real, mine[number]):
                differing[f"{case.name}, engine {number}"] = difference
    return differing, steps


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("option", [None, *_OPTIONS])
def test_every_step_is_that_of_engines_that_share_experts(
    option: str | None, kind: str, asynchronous: bool, record_property: Callable[[str, object], None]
):
    differing, steps = _differences(kind, option, asynchronous, _SEEDS)
    label = f"data parallel {option or 'plain'} {'async' if asynchronous else 'sync'}"
    record_property(f"compared/{label}", [_SEEDS, steps, len(differing)])
    assert not differing


def test_steps_that_each_engine_counts_alone_are_noticed(monkeypatch):
    begin = _Cadence.begin
    monkeypatch.setattr(_Cadence, "begin", lambda cadence, state, together: begin(cadence, state, None))
    assert len(_differences("mixed", "intervals", False)[0]) > 2


def test_an_engine_that_looks_for_requests_before_its_dummy_batch_is_noticed(monkeypatch):
    monkeypatch.setattr(LockStepEngine, "_drained", lambda *given: None)
    assert len(_differences("mixed", None, True)[0]) > 2
