"""Replicas that only decode, beside the installed vLLM whose connector brings the KV of prompts, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fragmeter.sim.memory.paged.group_tables import GroupTables
from fragmeter.sim.memory.paged.paged import PagedMemory
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.types.sequence import Sequence
from tools.live.step_log import first_difference

from . import arrived
from .drafts import COMPRESSED, HYBRIDS, METHODS, drawn
from .server import Stuck
from .workloads import KINDS, Case, number_of_workloads

_SEEDS = number_of_workloads(6)


def _case(kind: str, seed: int, method: str | None) -> Case:
    if method is None:
        return replace(KINDS[kind](seed), prefix_caching=False)
    return drawn(kind, seed, method, prefix_caching=False)


def _differences(cases: list[Case]) -> tuple[dict[str, object], int]:
    differing: dict[str, object] = {}
    steps = 0
    stuck = 0
    for case in cases:
        try:
            real = arrived.comparable(arrived.serve(case))
        except Stuck:
            # Its pool has no room for the first request, which comes whole; so says ours.
            with pytest.raises(SimulationFault, match="is stuck"):
                arrived.serve_ours(case)
            stuck += 1
            continue
        steps += len(real.steps)
        if difference := first_difference(real, arrived.comparable(arrived.serve_ours(case))):
            differing[case.name] = difference
    assert stuck <= len(cases) // 2
    return differing, steps


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("mixed", None),
        ("mixed", "draft_model"),
        ("compressed", None),
        *COMPRESSED,
        *((kind, method) for kind in HYBRIDS for method in (None, *METHODS)),
    ],
)
def test_every_step_is_that_of_the_scheduler_with_a_connector(
    kind: str, method: str | None, record_property: Callable[[str, object], None]
):
    differing, steps = _differences([_case(kind, seed, method) for seed in range(_SEEDS)])
    record_property(f"compared/decodes {kind} {method}", [_SEEDS, steps, len(differing)])
    assert not differing


def test_blocks_that_are_not_taken_group_by_group_before_the_step_are_noticed(monkeypatch):
    monkeypatch.setattr(GroupTables, "receive", lambda *given: None)
    assert _differences([_case("states", seed, None) for seed in range(6)])[0]


def test_states_of_drafts_that_are_taken_with_the_prompt_are_noticed(monkeypatch):
    receive = GroupTables.receive

    def with_drafts(tables: GroupTables, sequence: Sequence, tokens: int) -> None:
        receive(tables, sequence, tokens)
        tables.take_after_load(sequence, tokens)

    monkeypatch.setattr(GroupTables, "receive", with_drafts)
    assert _differences([_case("states", seed, "ngram") for seed in range(4, 6)])[0]


def test_drafts_past_the_end_that_count_as_computed_are_noticed(monkeypatch):
    passed = PagedMemory._pass_at_end

    def beyond(memory: PagedMemory, sequence: Sequence) -> None:
        if memory.group_tables and sequence in memory.group_tables.tables:
            memory.group_tables.skip(sequence, sequence.target_tokens + 1)
        passed(memory, sequence)

    monkeypatch.setattr(PagedMemory, "_pass_at_end", beyond)
    assert _differences([_case("windows_cached", seed, "eagle") for seed in range(6)])[0]


def test_windows_that_a_finished_sequence_gives_back_with_its_other_blocks_are_noticed(monkeypatch):
    monkeypatch.setattr(PagedMemory, "_pass_at_end", lambda *given: None)
    assert _differences([_case("windows_cached", seed, None) for seed in range(6)])[0]
