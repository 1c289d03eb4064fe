"""Limits of the API server under ``vllm-v1`` beside the installed vLLM, which judges with its own ``check_admission``."""

from __future__ import annotations

import random

import pytest

from fragmeter.sim.engine.queue_limits import LimitedLoop
from tools.live.step_log import Difference, first_difference

from . import ours, server
from .workloads import KINDS, Case, number_of_workloads, with_options

#: Workloads of a kind.
_SEEDS = number_of_workloads(12)

_finish = LimitedLoop.finish


def _limited(case: Case) -> Case:
    """Either limit, or both; few requests and tokens."""
    draw = random.Random(f"limits/{case.name}")
    requests, tokens = draw.choice([1, 2, 5, 20]), draw.choice([1, 30, 200, 1000])
    which = draw.choice(["requests", "tokens", "both"])
    options = {"max_num_queued_reqs": requests} if which != "tokens" else {}
    return with_options(case, options | ({"max_num_queued_tokens": tokens} if which != "requests" else {}))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_and_every_rejection_is_that_of_the_real_server(kind: str, asynchronous: bool, record_property):
    differing: dict[str, Difference] = {}
    steps = some = 0
    for case in (_limited(KINDS[kind](seed)) for seed in range(_SEEDS)):
        real, found = server.serve(case, asynchronous), ours.serve(case, asynchronous)
        steps += len(real.steps)
        some += bool(real.rejected)
        if difference := first_difference(real, found):
            differing[case.name] = difference
    record_property(f"compared/limits {'async' if asynchronous else 'sync'}", [_SEEDS, steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())
    assert some > 2


def test_answers_that_are_known_before_their_step_ends_are_noticed(monkeypatch):
    monkeypatch.setattr(LimitedLoop, "finish", lambda loop, leaving, now: _finish(loop, leaving, now - 100))
    cases = [_limited(KINDS[kind](seed)) for kind in ("mixed", "chunks") for seed in range(12)]
    assert sum(first_difference(server.serve(case), ours.serve(case)) is not None for case in cases) > 2
