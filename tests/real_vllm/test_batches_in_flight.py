"""Pipeline stages with a batch in each, beside ``EngineCore.step_with_batch_queue`` and the scheduler of the installed vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from fragmeter.sim.engine.batch_queue import BatchQueue
from fragmeter.sim.policy.vllm_v1 import VllmV1
from tools.live.step_log import first_difference

from . import ours, server
from .workloads import KINDS, OPTIONS, Case, story

#: Kinds of workloads over layers that keep every token.
_KINDS = ("mixed", "bursts", "tight", "prefixes", "turns", "chunks")
#: Workloads of each kind, and of one test.
_SEEDS, _SEEDS_A_TEST = 10, 2
_BATCHES = [(kind, first) for kind in _KINDS for first in range(0, _SEEDS, _SEEDS_A_TEST)]


def _cases(kind: str, seeds: range) -> Iterator[Case]:
    return (KINDS[kind](seed) for seed in seeds)


def _differing(cases: Iterable[Case], stages: int, asynchronous: bool) -> tuple[int, dict[str, str]]:
    """Steps of the real scheduler, and where ours first differs, by workload."""
    steps, differing = 0, {}
    for case in cases:
        real = server.serve(case, asynchronous, parallel={"pipeline_parallel_size": stages})
        steps += len(real.steps)
        if difference := first_difference(real, ours.serve(case, asynchronous, pipeline_parallel_size=stages)):
            differing[case.name] = str(difference)[:400]
    return steps, differing


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("kind, first", _BATCHES)
def test_every_batch_is_that_of_the_real_scheduler(kind, first, stages, asynchronous, record_property):
    seeds = range(first, first + _SEEDS_A_TEST)
    _compare(kind, _cases(kind, seeds), stages, asynchronous, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("kind", ["tight", "turns"])
@pytest.mark.parametrize("first", range(0, 12, 3))
def test_every_batch_by_priority_is_that_of_the_real_scheduler(first, kind, stages, asynchronous, record_property):
    cases = map(OPTIONS["priorities"], _cases(kind, range(first, first + 3)))
    _compare(f"{kind} priorities", cases, stages, asynchronous, record_property)


def _compare(
    kind: str,
    cases: Iterable[Case],
    stages: int,
    asynchronous: bool,
    record_property: Callable[[str, object], None],
) -> None:
    workloads = [*cases]
    steps, differing = _differing(workloads, stages, asynchronous)
    mode = "async" if asynchronous else "sync"
    record_property(f"compared/{kind} {mode} {stages} stages", [len(workloads), steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}" for name, difference in differing.items())


def test_a_story_of_two_stages():
    """The second request arrives while the first is in its first stage, and joins the batch behind it. Either has a token of its own
    every 100 ticks, which is a batch through both stages."""
    served = server.serve(story(), parallel={"pipeline_parallel_size": 2})
    assert served == ours.serve(story(), pipeline_parallel_size=2)
    assert [(step.now, step.scheduled) for step in served.steps] == [
        (0, ((0, 5),)),
        (100, ((0, 1), (1, 4))),
        (200, ((0, 1), (1, 1))),
    ]


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
