"""Pipeline stages with a batch in each, beside ``EngineCore.step_with_batch_queue`` and the scheduler of the installed vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from fragmeter.sim.cluster.routed import RoutedEngine
from fragmeter.sim.cluster.sent import part_of
from fragmeter.sim.engine.batch_queue import BatchQueue
from fragmeter.sim.memory.paged.host_tier_memory import HostTierMemory
from fragmeter.sim.memory.paged.speculative import Progress
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.types.errors import NotSimulated, SimulationFault
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.workload.content import PromptContent
from tools.live.step_log import Difference, Served, first_difference

from . import lock_step, offloading, ours, server, speculation
from .batches import staged
from .drafts import METHODS, PACKED, drafting, drawn
from .workloads import KINDS, OPTIONS, Case, number_of_workloads, story

#: Kinds of workloads over layers that keep every token, and over several KV groups.
_PLAIN = ("mixed", "bursts", "tight", "prefixes", "turns", "chunks")
_GROUPS = ("windows", "windows_cached", "states", "block_sizes", "compressed", "rings")
#: Kinds with drafts, and with a host.
_DRAFTED = (
    "mixed",
    "tight",
    "prefixes",
    "chunks",
    "windows",
    "windows_cached",
    "states",
    "block_sizes",
    "compressed",
    "rings",
)
_OFFLOADED = ("prefixes", "turns", "windows_cached", "states", "block_sizes", "compressed", "rings")
#: Workloads of each kind, and most of one test.
_SEEDS, _SEEDS_A_TEST = 10, 10
_modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
_stages = pytest.mark.parametrize("stages", [2, 4])


def _firsts(usual: int) -> pytest.MarkDecorator:
    """The first and last seeds of each test, of as many workloads as ``WORKLOADS`` says, or as usual."""
    most = number_of_workloads(usual)
    batches = [range(first, min(first + _SEEDS_A_TEST, most)) for first in range(0, most, _SEEDS_A_TEST)]
    return pytest.mark.parametrize("seeds", batches, ids=lambda seeds: str(seeds.start))


def _cases(kind: str, seeds: Iterable[int]) -> Iterator[Case]:
    return (KINDS[kind](seed) for seed in seeds)


def _methods(kind: str) -> tuple[str, ...]:
    return tuple(method for packed, method in PACKED if packed == kind) or METHODS


def _both(
    case: Case, asynchronous: bool, copies: offloading.Copies | None
) -> tuple[Callable[[], Served], Callable[[], Served]]:
    """What serves a case: vLLM, and ours."""
    if copies is not None:
        return (
            lambda: offloading.comparable(offloading.serve(case, copies, asynchronous)[0]),
            lambda: offloading.comparable(offloading.serve_ours(case, copies, asynchronous)),
        )
    drafts = "speculative_config" in case.options
    return (
        lambda: speculation.serve(case, asynchronous)[0] if drafts else server.serve(case, asynchronous),
        lambda: ours.serve(case, asynchronous),
    )


def _differing(
    cases: Iterable[Case], stages: int, asynchronous: bool, offloads: bool = False
) -> tuple[int, dict[str, Difference]]:
    """Steps of the real scheduler, and where ours first differs, by workload."""
    steps, differing = 0, {}
    for case in cases:
        draw, copies = random.Random(case.name), None
        if offloads:
            # Hosts of few blocks and of many, and copies that are short and long beside a step.
            sizes = draw.choice([3, 20, 200, 5000]), draw.choice([1, 30, 90, 400]), draw.choice([0, 1, 30, 200])
            copies, case = offloading.Copies(*sizes), replace(case, prefix_caching=True)
            if case.block_size == 1 and 1 in case.workload.prompt_tokens:
                # vLLM looks up again a prompt of one token that it has loaded whole, and loads it again.
                continue
        real, own = _both(staged(case, stages, asynchronous), asynchronous, copies)
        try:
            served = real()
        except server.Stuck:
            with pytest.raises(SimulationFault, match="is stuck"):
                own()
            continue
        steps += len(served.steps)
        if difference := first_difference(served, own()):
            differing[case.name] = difference
    return steps, differing


def _compare(
    label: str,
    cases: Iterable[Case],
    stages: int,
    asynchronous: bool,
    record_property: Callable[[str, object], None],
    offloads: bool = False,
) -> None:
    workloads = [*cases]
    steps, differing = _differing(workloads, stages, asynchronous, offloads)
    name = f"compared/{label} {'async' if asynchronous else 'sync'} {stages} stages"
    record_property(name, [len(workloads), steps, len(differing)])
    assert steps and not differing, "\n".join(f"{name}: {str(found)[:400]}" for name, found in differing.items())


@_modes
@_stages
@_firsts(_SEEDS)
@pytest.mark.parametrize("kind", _PLAIN)
def test_every_batch_is_that_of_the_real_scheduler(kind, seeds, stages, asynchronous, record_property):
    _compare(kind, _cases(kind, seeds), stages, asynchronous, record_property)


@_modes
@_stages
@_firsts(4)
@pytest.mark.parametrize("kind", _GROUPS)
def test_every_batch_over_several_kv_groups_is_that_of_the_real_scheduler(
    kind, seeds, stages, asynchronous, record_property
):
    """Windows and states keep what the batches in flight may read."""
    _compare(kind, _cases(kind, seeds), stages, asynchronous, record_property)


@_stages
@_firsts(4)
@pytest.mark.parametrize("kind", _DRAFTED)
def test_every_batch_with_drafts_is_that_of_the_real_scheduler(kind, seeds, stages, record_property):
    methods = _methods(kind)
    cases = (drawn(kind, seed, methods[seed // 3 % len(methods)]) for seed in seeds)
    _compare(f"drafts {kind}", cases, stages, True, record_property)


@_modes
@_stages
@_firsts(4)
@pytest.mark.parametrize("kind", _OFFLOADED)
def test_every_batch_with_offloading_is_that_of_the_scheduler_with_the_connector(
    kind, seeds, stages, asynchronous, record_property
):
    _compare(f"offloading {kind}", _cases(kind, seeds), stages, asynchronous, record_property, offloads=True)


@_stages
@_firsts(3)
@pytest.mark.parametrize("kind", _OFFLOADED)
def test_every_batch_with_drafts_and_offloading_is_that_of_the_scheduler_with_the_connector(
    kind, seeds, stages, record_property
):
    # Of a draft model beside windows the host's blocks have several sizes.
    cases = (drawn(kind, seed, _methods(kind)[seed // 3 % 2]) for seed in seeds)
    _compare(f"drafts offloading {kind}", cases, stages, True, record_property, offloads=True)


@pytest.mark.slow
@_modes
@_stages
@pytest.mark.parametrize("kind", ["tight", "turns"])
@_firsts(12)
def test_every_batch_by_priority_is_that_of_the_real_scheduler(seeds, kind, stages, asynchronous, record_property):
    cases = map(OPTIONS["priorities"], _cases(kind, seeds))
    _compare(f"{kind} priorities", cases, stages, asynchronous, record_property)


@pytest.mark.slow
@_modes
@_stages
@_firsts(6)
@pytest.mark.parametrize("kind", ["mixed", "tight", "windows", "states"])
def test_every_batch_of_data_parallel_engines_is_that_of_the_real_scheduler(
    kind, seeds, stages, asynchronous, record_property
):
    """Two engines of a dense model behind ``vllm-dp``, each with its own stages; requests share nothing."""
    steps, differing = 0, {}
    for case in _cases(kind, seeds):
        none = np.zeros(len(case.workload) + 1, dtype=np.int64)
        case = replace(case, workload=replace(case.workload, content=PromptContent(none, none[:0], none[:0])))
        case = staged(case, stages, asynchronous)
        chosen = ours.settings_of(case, asynchronous, ids=True)
        for number, (own, rows) in enumerate(lock_step.observed(RoutedEngine, chosen, case, 2, "vllm-dp")):
            content = PromptContent(none[: len(rows) + 1], none[:0], none[:0])
            part = replace(part_of(case.workload, rows), content=content)
            real = server.serve(replace(case, workload=part, ends=tuple(case.ends[row] for row in rows)), asynchronous)
            steps += len(real.steps)
            if difference := first_difference(real, own):
                differing[f"{case.name}, engine {number}"] = difference
    label = f"data parallel {kind} {'async' if asynchronous else 'sync'} {stages} stages"
    record_property(f"compared/{label}", [len(seeds), steps, len(differing)])
    assert steps and not differing, "\n".join(f"{name}: {str(found)[:400]}" for name, found in differing.items())


def test_a_request_that_comes_while_batches_compute_in_vain_waits_for_the_oldest_only(record_property):
    case = drawn("states", 17, "draft_model")
    _compare("batches in vain", [case], 2, True, record_property)


def test_the_last_finish_of_all_is_told_in_a_batch_of_its_own(record_property):
    """It holds a place of the queue, so a request that comes then decodes a batch earlier."""
    case = drawn("mixed", 89, "draft_model")
    _compare("batch that tells of a finish", [case], 4, True, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10, 11])
def test_sequences_that_preempt_each_other_for_ever_are_noticed(seed):
    """vLLM starts with a pool that holds the longest sequence, but not the states that its batches in flight keep besides."""
    case = staged(KINDS["states"](seed), 2, True)
    with pytest.raises(server.Stuck):
        server.serve(case, True)
    with pytest.raises(SimulationFault, match="is stuck: no sequence decodes before it is preempted"):
        ours.serve(case, True)


def test_a_story_of_two_stages():
    """The second request arrives while the first is in its first stage, and joins the batch behind it. Either has a token of its own
    every 100 ticks, which is a batch through both stages."""
    case = staged(story(), 2, False)
    served = server.serve(case)
    assert served == ours.serve(case)
    assert [(step.now, step.scheduled) for step in served.steps] == [
        (0, ((0, 5),)),
        (100, ((0, 1), (1, 4))),
        (200, ((0, 1), (1, 1))),
    ]


def test_vllm_computes_drafts_in_place_of_the_token_in_flight_without_asynchronous_scheduling():
    """Why ours refuses them: the second batch has the two drafts alone, while the token before them is in flight."""
    case = replace(drafting(story(), "ngram", 2, [0.0, 0.0]), parallel={"pipeline_parallel_size": 2})
    served, _ = speculation.serve(case)
    assert [(step.now, step.scheduled) for step in served.steps][:2] == [(0, ((0, 5),)), (50, ((0, 2),))]
    with pytest.raises(NotSimulated, match="pipeline parallelism without asynchronous scheduling"):
        ours.serve(case)


@pytest.mark.parametrize(("size", "asynchronous"), [(1, False), (1, True), (-1, True)])
def test_another_size_of_the_queue_is_noticed(size, asynchronous, monkeypatch):
    begin: Callable[[BatchQueue, int, int], None] = BatchQueue.__init__
    monkeypatch.setattr(BatchQueue, "__init__", lambda queue, stages, most: begin(queue, stages, max(1, most + size)))
    assert len(_differing(_cases("tight", range(4)), 2, asynchronous)[1]) > 1


def test_a_sequence_that_decodes_while_its_token_is_in_flight_is_noticed(monkeypatch):
    schedule = VllmV1.schedule

    def at_once(policy, state, transaction):
        plan = schedule(policy, state, transaction)
        for sequence in (*plan.admitted, *(plan.stalls[1] if plan.stalls else ())):
            sequence.next_decode_eligible_step -= 1
        return plan

    monkeypatch.setattr(VllmV1, "schedule", at_once)
    assert len(_differing(_cases("mixed", range(4)), 4, True)[1]) > 1


def test_a_sequence_that_comes_back_before_its_token_is_noticed(monkeypatch):
    """vLLM passes over what was preempted while its last token is in flight."""
    never = property(lambda policy: 1 << 40, lambda policy, calls: None)
    monkeypatch.setattr(VllmV1, "known_calls", never, raising=False)
    assert len(_differing(_cases("tight", range(12)), 4, False)[1]) > 1


def test_windows_and_states_that_do_not_wait_for_batches_in_flight_are_noticed(monkeypatch):
    monkeypatch.setattr(Progress, "processed", property(lambda progress: progress.computed))
    assert len(_differing(_cases("windows", range(4)), 2, False)[1]) > 1
    assert len(_differing(_cases("states", range(4)), 2, False)[1]) > 1


def test_blocks_that_come_free_before_their_fence_are_noticed(monkeypatch):
    """With a connector the blocks of a sequence that was computed in vain wait for all batches that are scheduled by then."""
    defer = HostTierMemory._defer

    def at_once(memory: HostTierMemory, sequence: Sequence) -> None:
        defer(memory, sequence)
        memory._process(memory.fences.scheduled)

    monkeypatch.setattr(HostTierMemory, "_defer", at_once)
    assert _differing(_cases("prefixes", range(8)), 2, True, offloads=True)[1]
