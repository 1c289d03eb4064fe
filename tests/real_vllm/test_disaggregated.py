"""Replicas that only decode, beside the installed vLLM whose connector brings the KV of prompts, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fragmeter.sim.memory.paged.group_tables import GroupTables
from fragmeter.sim.memory.paged.paged import PagedMemory
from tools.live.step_log import Served, first_difference

from . import arrived
from .drafts import drawn
from .workloads import KINDS, Case

_SEEDS = 6


def _case(kind: str, seed: int, method: str | None) -> Case:
    return replace(KINDS[kind](seed) if method is None else drawn(kind, seed, method), prefix_caching=False)


def _comparable(served: Served) -> Served:
    """What a connector brings counts as a hit there."""
    return served._replace(steps=[step._replace(hits=()) for step in served.steps])


def _differences(cases: list[Case]) -> tuple[dict[str, object], int]:
    differing: dict[str, object] = {}
    steps = 0
    for case in cases:
        real = _comparable(arrived.serve(case))
        steps += len(real.steps)
        if difference := first_difference(real, _comparable(arrived.serve_ours(case))):
            differing[case.name] = difference
    return differing, steps


@pytest.mark.parametrize(
    ("kind", "method"),
    [("mixed", None), ("mixed", "draft_model"), ("states", None), ("windows", None), ("windows_cached", None)],
)
def test_every_step_is_that_of_the_scheduler_with_a_connector(
    kind: str, method: str | None, record_property: Callable[[str, object], None]
):
    differing, steps = _differences([_case(kind, seed, method) for seed in range(_SEEDS)])
    record_property(f"compared/decodes {kind} {method}", [_SEEDS, steps, len(differing)])
    assert not differing


def test_blocks_that_are_not_taken_group_by_group_before_the_step_are_noticed(monkeypatch):
    monkeypatch.setattr(GroupTables, "receive", lambda *given: None)
    assert _differences([_case("states", seed, None) for seed in range(_SEEDS)])[0]


def test_windows_that_a_finished_sequence_gives_back_with_its_other_blocks_are_noticed(monkeypatch):
    monkeypatch.setattr(PagedMemory, "_pass_at_end", lambda *given: None)
    assert _differences([_case("windows_cached", seed, None) for seed in range(_SEEDS)])[0]
