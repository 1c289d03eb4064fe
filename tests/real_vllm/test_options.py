"""Policy ``vllm-v1`` beside the installed vLLM under the options of the scheduler that change admission; see ``test_scheduler``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from fragmeter.sim.policy.vllm_v1 import VllmV1, _Cadence, _ChunkCap
from tools.live.step_log import Difference, first_difference

from . import ours, server
from .workloads import KINDS, OPTIONS, Case, number_of_workloads

#: Workloads of a kind under each option.
_SEEDS = number_of_workloads(12)


def _cases(option: str, kinds: Iterable[str], seeds: int = 12) -> Iterator[Case]:
    return (OPTIONS[option](KINDS[kind](seed)) for kind in kinds for seed in range(seeds))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_step_is_that_of_the_real_scheduler(option: str, kind: str, asynchronous: bool, record_property):
    differing: dict[str, Difference] = {}
    steps = 0
    for case in _cases(option, (kind,), _SEEDS):
        real = server.serve(case, asynchronous)
        steps += len(real.steps)
        if difference := first_difference(real, ours.serve(case, asynchronous)):
            differing[case.name] = difference
    record_property(f"compared/{option} {'async' if asynchronous else 'sync'}", [_SEEDS, steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())


def _differ(option: str, *kinds: str) -> int:
    """Workloads that differ."""
    return sum(first_difference(server.serve(case), ours.serve(case)) is not None for case in _cases(option, kinds))


def test_a_cap_for_a_sequence_that_is_alone_is_noticed(monkeypatch):
    monkeypatch.setattr(_ChunkCap, "of", lambda cap, state: cap.least)
    assert _differ("long_prefills", "mixed", "chunks") > 2


def test_more_active_sequences_are_noticed(monkeypatch):
    _after_init(monkeypatch, lambda policy: setattr(policy, "most_running", policy.limits.max_num_seqs))
    assert _differ("active", "bursts") > 2


def test_a_reservation_of_all_known_tokens_is_noticed(monkeypatch):
    _after_init(monkeypatch, lambda policy: setattr(policy, "reserves_whole", True))
    assert _differ("first_chunks", "chunks", "tight") > 2


def test_an_interval_that_holds_while_sequences_wait_is_noticed(monkeypatch):
    monkeypatch.setattr(
        _Cadence, "_left_some", property(lambda cadence: False, lambda cadence, value: None), raising=False
    )
    assert _differ("intervals", "bursts", "tight") > 2


def test_a_preemption_of_the_last_running_sequence_is_noticed(monkeypatch):
    monkeypatch.setattr(VllmV1, "_victim", lambda policy, kept: kept[-1])
    assert _differ("priorities", "tight") > 2


def _after_init(monkeypatch: pytest.MonkeyPatch, change: Callable[[VllmV1], None]) -> None:
    """Change every new policy."""
    init = VllmV1.__init__

    def changed(policy: VllmV1, *given: Any) -> None:
        init(policy, *given)
        change(policy)

    monkeypatch.setattr(VllmV1, "__init__", changed)
