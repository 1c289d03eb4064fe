"""Replicas that only decode, beside the installed vLLM whose connector brings the KV of prompts, and replicas that prefill, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fragmeter.sim.memory.paged.group_tables import GroupTables
from fragmeter.sim.memory.paged.paged import PagedMemory
from fragmeter.sim.policy import vllm_v1
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.types.sequence import Sequence
from tools.live.step_log import first_difference

from . import arrived
from .batches import staged
from .drafts import HYBRIDS, METHODS, PACKED, drawn
from .server import Stuck
from .test_checkpoints import RETAINING, retaining
from .workloads import KINDS, OPTIONS, Case, in_vain, number_of_workloads, short_of_blocks

_SEEDS = number_of_workloads(6)


def _case(kind: str, seed: int, method: str | None) -> Case:
    if method is None:
        return replace(KINDS[kind](seed), prefix_caching=False)
    return drawn(kind, seed, method, prefix_caching=False)


def _differences(cases: list[Case], asynchronous: bool = False) -> tuple[dict[str, object], int]:
    differing: dict[str, object] = {}
    steps = 0
    stuck = 0
    for case in cases:
        try:
            real = arrived.comparable(arrived.serve(case, asynchronous))
        except Stuck:
            # Its pool has no room for the first request, which comes whole; so says ours.
            with pytest.raises(SimulationFault, match="is stuck"):
                arrived.serve_ours(case, asynchronous)
            stuck += 1
            continue
        steps += len(real.steps)
        if difference := first_difference(real, arrived.comparable(arrived.serve_ours(case, asynchronous))):
            differing[case.name] = difference
    assert stuck <= len(cases) // 2
    return differing, steps


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("mixed", None),
        ("mixed", "draft_model"),
        ("compressed", None),
        *PACKED,
        *((kind, method) for kind in HYBRIDS for method in (None, *METHODS)),
    ],
)
def test_every_step_is_that_of_the_scheduler_with_a_connector(
    kind: str, method: str | None, record_property: Callable[[str, object], None]
):
    differing, steps = _differences([_case(kind, seed, method) for seed in range(_SEEDS)])
    record_property(f"compared/decodes {kind} {method}", [_SEEDS, steps, len(differing)])
    assert not differing


@pytest.mark.parametrize(("stages", "asynchronous"), [(1, True), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize(
    ("kind", "method", "option"),
    [
        ("mixed", None, None),
        ("tight", None, None),
        *((kind, None, None) for kind in HYBRIDS),
        ("mixed", "eagle", None),
        ("states", "draft_model", None),
        ("windows", "ngram", None),
        ("tight", None, "priorities"),
        ("windows", None, "priorities"),
    ],
)
def test_every_batch_in_flight_is_that_of_the_scheduler_with_a_connector(
    kind: str,
    method: str | None,
    option: str | None,
    stages: int,
    asynchronous: bool,
    record_property: Callable[[str, object], None],
):
    """Blocks of a sequence that a batch in flight computes come free after that batch, and it is not preempted."""
    if method is not None and not asynchronous:
        pytest.skip("is refused")
    cases = [_case(kind, seed, method) for seed in range(number_of_workloads(4))]
    if option is not None:
        cases = [*map(OPTIONS[option], cases)]
    if stages > 1:
        cases = [staged(case, stages, asynchronous) for case in cases]
    differing, steps = _differences(cases, asynchronous)
    mode = "async" if asynchronous else "sync"
    label = f"decodes in flight {kind} {method} {option} {stages} {mode}"
    record_property(f"compared/{label}", [len(cases), steps, len(differing)])
    assert not differing


@pytest.mark.parametrize("make", [in_vain, short_of_blocks])
def test_a_story_is_that_of_the_scheduler_with_a_connector(make: Callable[[], Case]):
    """``tests/sim/engine/test_deferred_frees.py`` tells them."""
    assert not _differences([make()], asynchronous=True)[0]


def _in_flight(kind: str, method: str | None, stages: int) -> list[Case]:
    cases = [_case(kind, seed, method) for seed in range(6)]
    return cases if stages == 1 else [staged(case, stages, True) for case in cases]


@pytest.mark.parametrize(("kind", "method", "stages"), [("mixed", None, 1), ("mixed", "eagle", 1), ("mixed", None, 2)])
def test_blocks_that_come_free_before_their_batch_is_over_are_noticed(monkeypatch, kind, method, stages):
    def at_once(memory: PagedMemory, sequence: Sequence) -> None:
        defer(memory, sequence)
        memory._process(memory.fences.scheduled)

    defer = PagedMemory._defer
    monkeypatch.setattr(PagedMemory, "_defer", at_once)
    assert _differences(_in_flight(kind, method, stages), asynchronous=True)[0]


@pytest.mark.parametrize(("kind", "method", "stages"), [("tight", None, 1), ("mixed", "eagle", 1), ("tight", None, 2)])
def test_sequences_of_batches_in_flight_that_are_preempted_are_noticed(monkeypatch, kind, method, stages):
    monkeypatch.setattr(vllm_v1, "_in_flight", lambda *given: False)
    assert _differences(_in_flight(kind, method, stages), asynchronous=True)[0]


def _prefills(case: Case) -> Case:
    """The requests as a replica that prefills is sent them: of one token."""
    one = np.ones(len(case.workload), dtype=np.int64)
    work = replace(case.workload, output_tokens=one, max_tokens=one)
    return replace(case, workload=work, ends=("length",) * len(one))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        ("prefixes", None),
        ("states", "ngram"),
        *((kind, beside) for kind in RETAINING for beside in (None, "retention")),
    ],
)
def test_every_step_of_a_replica_that_prefills_is_that_of_the_scheduler_with_a_connector(
    kind: str, beside: str | None, stages: int, asynchronous: bool, record_property: Callable[[str, object], None]
):
    """Without and with checkpoints within prompts (``prefix_cache_retention_interval``), or drafts, and over pipeline stages."""
    if beside == "ngram" and stages > 1 and not asynchronous:
        pytest.skip("is refused")
    differing, steps, seeds = {}, 0, range(number_of_workloads(4))
    for seed in seeds:
        if beside == "retention":
            case = retaining(kind, seed)
        else:
            case = KINDS[kind](seed) if beside is None else drawn(kind, seed, beside)
        case = replace(_prefills(case), prefix_caching=True)
        if stages > 1:
            case = staged(case, stages, asynchronous)
        real = arrived.serve_prefills(case, asynchronous)
        steps += len(real.steps)
        if difference := first_difference(real, arrived.serve_our_prefills(case, asynchronous)):
            differing[case.name] = difference
    label = f"prefills {kind} {beside} {stages} {'async' if asynchronous else 'sync'}"
    record_property(f"compared/{label}", [len(seeds), steps, len(differing)])
    assert not differing


def test_tokens_in_flight_of_a_preempted_prompt_that_are_kept_are_noticed(monkeypatch):
    """Its blocks could not be sent."""
    monkeypatch.setattr(VllmV1, "_taken_back", lambda *given: ())
    case = staged(replace(_prefills(KINDS["states"](0)), prefix_caching=True), 2, True)
    assert first_difference(arrived.serve_prefills(case, True), arrived.serve_our_prefills(case, True))


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
