"""Policy ``vllm-v1`` beside the installed vLLM under the options of the scheduler that change admission; see ``test_scheduler``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fragmeter.sim.policy.vllm_v1 import VllmV1

from . import ours, server
from .steps import Difference, first_difference
from .workloads import KINDS, OPTIONS, Case

#: Workloads of a kind under each option.
_SEEDS = 12


def _cases(option: str, kinds: Iterator[str] | tuple[str, ...] = tuple(KINDS), seeds: int = _SEEDS) -> Iterator[Case]:
    return (OPTIONS[option](KINDS[kind](seed)) for kind in kinds for seed in range(seeds))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_step_is_that_of_the_real_scheduler(option: str, kind: str, asynchronous: bool, record_property):
    differing: dict[str, Difference] = {}
    steps = 0
    for case in _cases(option, (kind,)):
        real = server.serve(case, asynchronous)
        steps += len(real.steps)
        if difference := first_difference(real, ours.serve(case, asynchronous)):
            differing[case.name] = difference
    record_property(f"compared/{option} {'async' if asynchronous else 'sync'}", [_SEEDS, steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())
