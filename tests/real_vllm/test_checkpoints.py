"""Policy ``vllm-v1`` beside the installed vLLM with checkpoints of windows and states within a prompt; see ``test_scheduler``."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fragmeter.sim.memory.paged.group_cache import _Seeker
from tools.live.step_log import first_difference

from . import offloading, ours, server
from .workloads import KINDS, Case, number_of_workloads, with_options

#: Kinds with windows or states.
RETAINING = ("windows_cached", "states", "block_sizes")
_SEEDS = number_of_workloads(4)


def retaining(kind: str, seed: int) -> Case:
    """A case with checkpoints every few blocks."""
    case = KINDS[kind](seed)
    blocks = random.Random(f"retention/{case.name}").choice([1, 1, 2, 3, 5, 8])
    tokens = blocks * server.started(case).scheduler.block_size
    return with_options(case, {"prefix_cache_retention_interval": tokens})


@pytest.mark.parametrize("kind", RETAINING)
def test_every_step_is_that_of_the_real_scheduler(kind, record_property):
    differing, steps = {}, 0
    for seed in range(_SEEDS):
        case, asynchronous = retaining(kind, seed), bool(seed % 2)
        real = server.serve(case, asynchronous)
        steps += len(real.steps)
        if difference := first_difference(real, ours.serve(case, asynchronous)):
            differing[case.name] = difference
    record_property(f"compared/retention/{kind}", [_SEEDS, steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", RETAINING)
def test_every_step_beside_offloading_is_that_of_the_real_scheduler(kind, asynchronous, record_property):
    differing, loaded = {}, 0
    for seed in range(_SEEDS):
        case, draw = replace(retaining(kind, seed), prefix_caching=True), random.Random(seed)
        copies = offloading.Copies(draw.choice([3, 20, 5000]), draw.choice([1, 30, 90]), draw.choice([0, 30, 200]))
        real, recorder = offloading.serve(case, copies, asynchronous)
        loaded += recorder.loaded
        found = offloading.comparable(offloading.serve_ours(case, copies, asynchronous))
        if difference := first_difference(offloading.comparable(real), found):
            differing[case.name] = difference
    record_property(f"compared/retention offloading {kind}", [_SEEDS, loaded, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())


def test_a_cache_without_these_checkpoints_is_noticed(monkeypatch):
    monkeypatch.setattr(_Seeker, "retains", lambda seeker, at: False)
    cases = (retaining(kind, seed) for kind in ("windows_cached", "states") for seed in range(4))
    assert any(first_difference(server.serve(case), ours.serve(case)) for case in cases)
