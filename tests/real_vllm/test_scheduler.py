"""Policy ``vllm-v1`` beside the scheduler, KV cache manager and block pool of the installed vLLM, step by step.

What is compared is ``steps.Step``: tokens of each request, preemptions, free and cached blocks, hits, evictions, block
tables; and the order in which requests finish. Whatever differs is named by the first step in which it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from vllm import __version__

from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.memory import PageGroups
from fragmeter.sim.policy.token_budget import TokenBudget
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.types.state import State
from tools.live.step_log import Difference, first_difference

from . import ours, server
from .record import real, recorded
from .workloads import EOS, KINDS, Case, number_of_workloads, story

#: Workloads of a kind, and of one test.
_SEEDS, _SEEDS_A_TEST = number_of_workloads(150), 10
_BATCHES = [(kind, first) for kind in KINDS for first in range(0, _SEEDS, _SEEDS_A_TEST)]


def _cases(kind: str, first: int) -> Iterator[Case]:
    return (KINDS[kind](seed) for seed in range(first, first + _SEEDS_A_TEST))


def test_the_release_is_the_one_that_vllm_v1_follows():
    assert __version__ == "0.33.0"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind, first", _BATCHES)
def test_every_step_is_that_of_the_real_scheduler(kind: str, first: int, asynchronous: bool, record_property):
    differing: dict[str, Difference] = {}
    steps = 0
    for case in _cases(kind, first):
        real = server.serve(case, asynchronous)
        steps += len(real.steps)
        if difference := first_difference(real, ours.serve(case, asynchronous)):
            differing[case.name] = difference
    mode = "async" if asynchronous else "sync"
    record_property(f"compared/{kind} {mode}", [_SEEDS_A_TEST, steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())


def test_the_recorded_logs_are_those_of_this_release():
    assert real() == recorded()


@pytest.mark.parametrize("caching", [False, True])
def test_an_older_free_queue_is_noticed(caching):
    """Before pull request 42656 all freed blocks went to the tail of the free queue."""
    differing = []
    for kind in KINDS:
        for case in _cases(kind, 0):
            if case.prefix_caching == caching and len(case.layers) == 1:
                newer = server.serve(case)
                with server.older_free_queue():
                    older = server.serve(case)
                differing += [case.name] if first_difference(older, newer) else []
    assert len(differing) > 5


def test_a_policy_that_frees_all_victims_first_is_noticed(monkeypatch):
    """Before any sequence takes a block, as vllm-v1 did until it was compared with vLLM."""
    monkeypatch.setattr(VllmV1, "_one_by_one", TokenBudget.schedule)
    cases = [case for seed in (0, 10) for case in _cases("tight", seed) if not case.prefix_caching]
    differing = [case.name for case in cases if first_difference(server.serve(case), ours.serve(case))]
    assert len(differing) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_are_not_scheduled_ahead_are_noticed(kind):
    """Where the real steps are scheduled ahead."""
    differing = [case for case in _cases(kind, 0) if first_difference(server.serve(case, True), ours.serve(case))]
    assert len(differing) > 5


def _release_at_once(engine: Engine) -> list[Sequence]:
    engine.memory.release(engine.state.take_finished(), engine.state.decode_step)
    return []


def test_finished_sequences_that_are_released_too_early_are_noticed(monkeypatch):
    """Blocks and places are held for one more decision."""
    monkeypatch.setattr(Engine, "_hold_finished", _release_at_once)
    assert len(_differing_ahead("tight")) > 3


def test_an_eos_that_is_known_too_early_is_noticed(monkeypatch):
    """After an EOS a token is computed in vain."""
    note_finished = State.note_finished
    monkeypatch.setattr(State, "note_finished", lambda state, expects_end: note_finished(state, lambda sequence: True))
    assert len(_differing_ahead("mixed")) > 3


def test_states_that_are_not_exported_are_noticed(monkeypatch):
    """Layers of Mamba-2 that end a chunk at the last block end of a prompt, as before 0.32."""
    monkeypatch.setattr(PageGroups, "exports", lambda *given: False)
    assert len(_differing_ahead("states")) > 2


def _differing_ahead(kind: str) -> list[str]:
    """Workloads with steps scheduled ahead that differ."""
    return [case.name for case in _cases(kind, 0) if first_difference(server.serve(case, True), ours.serve(case, True))]


def test_a_story_of_steps_one_after_the_other():
    """Two requests; the second arrives while step 1 runs, and joins step 2."""
    steps = server.serve(story()).steps
    assert [(step.now, step.scheduled) for step in steps] == [
        (0, ((0, 5),)),
        (100, ((0, 1), (1, 4))),
        (200, ((0, 1), (1, 1))),
    ]


def test_a_story_of_steps_scheduled_ahead():
    """Step 2 is scheduled before the second request arrives, so this one joins step 3. Its EOS comes out of step 4,
    after step 5 was scheduled, which computes a token of it in vain. The first request ends at its length, and no
    token is computed in vain."""
    served = server.serve(story(), asynchronous=True)
    assert [(step.now, step.scheduled) for step in served.steps] == [
        (0, ((0, 5),)),
        (100, ((0, 1),)),
        (200, ((0, 1), (1, 4))),
        (300, ((1, 1),)),
        (400, ((1, 1),)),
    ]
    assert served.finished == [(300, 0), (400, 1)]


def test_options_of_the_scheduler_reach_it():
    """A watermark of three quarters of 21 blocks, 15: the first prompt leaves 15 of 20 free, the second would leave
    14, so it waits until the first is done."""
    steps = server.serve(replace(story(prompt_tokens=17), options={"watermark": 0.75})).steps
    assert [step.scheduled for step in steps][:5] == [((0, 16),), ((0, 1),), ((0, 1),), ((0, 1),), ((1, 4),)]
    with pytest.raises(ValueError, match="watermarks"):
        server.serve(replace(story(), options={"watermarks": 0.5}))


@pytest.mark.parametrize("kind", KINDS)
def test_asynchronous_steps_compute_one_token_more_for_each_eos(kind):
    """In workloads without preemptions; and every request finishes. An EOS at the model's longest length is followed
    by no token."""
    alike = 0
    for case in _cases(kind, 0):
        if case.prefix_caching:
            continue
        ahead, behind = server.serve(case, asynchronous=True), server.serve(case)
        requests = range(len(case.workload))
        assert sorted(index for _, index in ahead.finished) == sorted(requests)
        if any(step.preempted for step in ahead.steps + behind.steps):
            continue
        computed = [sum(tokens for step in served.steps for _, tokens in step.scheduled) for served in (ahead, behind)]
        lengths = case.workload.prompt_tokens + case.workload.output_tokens
        in_vain = (case.ends[index] == EOS and lengths[index] < case.max_model_len for index in requests)
        assert computed[0] - computed[1] == sum(in_vain)
        alike += 1
    assert alike or kind in ("prefixes", "turns", "tight", "windows_cached")
