"""Policy ``llama-cpp`` beside an unmodified llama-server, step by step.

Compared are the batch of each step, slot by slot; of each request its slot, the tokens that it found, computed, generated and left;
the tokens that idle slots lost to batches; and the step in which a batch lacks cells.
"""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim import Workload

from . import ours, server
from .record import real, recorded
from .served import first_difference
from .workloads import KINDS, Case

#: The error of a prompt that leaves no room for a token.
TOO_LONG = "exceed_context_size_error"
#: Loads of a kind, and of one test.
_SEEDS, _SEEDS_A_TEST = 60, 10
_BATCHES = [(kind, first) for kind in KINDS for first in range(0, _SEEDS, _SEEDS_A_TEST)]


@pytest.mark.parametrize("kind, first", _BATCHES)
def test_every_step_and_answer_is_that_of_the_real_server(kind: str, first: int, record_property):
    differing: dict[str, str] = {}
    steps = requests = 0
    for seed in range(first, first + _SEEDS_A_TEST):
        case = KINDS[kind](seed)
        theirs = server.serve(case)
        steps += len(theirs.steps)
        requests += len(theirs.answers)
        if difference := first_difference(theirs, ours.serve(case)):
            differing[case.name] = difference
    record_property(f"compared/{kind}", [_SEEDS_A_TEST, requests, steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "alone" not in kind])
def test_the_prompt_cache_in_host_memory_finds_more_tokens(kind: str, record_property):
    """It is not simulated. Loads that end because cells are lacking are left out."""
    prompts = more = fewer = 0
    for seed in range(20):
        case = KINDS[kind](seed)
        mine, theirs = ours.serve(case), server.serve(case, host_cache=True)
        if not mine.exceeded and not theirs.exceeded:
            prompts += int(case.workload.prompt_tokens.sum())
            more += sum(answer.found for answer in theirs.answers)
            fewer += sum(answer.found for answer in mine.answers)
    record_property(f"found/{kind}", [prompts, more, fewer])
    assert more > fewer > 0


def test_the_recorded_logs_are_those_of_this_server():
    assert real() == recorded()


@pytest.mark.parametrize("unified", [False, True])
def test_requests_that_are_refused_are_those_that_the_server_refuses_or_truncates(unified: bool):
    """Of a context of 256 tokens, one after the other."""
    lengths = [(255, 1), (256, 1), (255, 2), (200, 56), (200, 57), (300, 5)]
    workload = Workload(
        "lengths",
        arrival_ticks=np.arange(len(lengths)) * 100_000,
        prompt_tokens=np.array([prompt for prompt, _ in lengths]),
        output_tokens=np.array([output for _, output in lengths]),
    )
    case = Case("lengths", workload, 1, 256, 512, unified, caching=False)
    theirs, mine = server.serve(case).answers, ours.serve(case).answers
    assert [answer.error for answer in theirs] == ["", TOO_LONG, "", "", "", TOO_LONG]
    assert [answer.generated for answer in theirs] == [1, 0, 1, 56, 56, 0]
    served = [answer.generated == output for answer, (_, output) in zip(theirs, lengths, strict=True)]
    assert [not answer.error for answer in mine] == served
