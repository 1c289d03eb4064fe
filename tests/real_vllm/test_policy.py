"""Policy ``vllm-real``, which runs the installed vLLM in our engine, beside ``vllm-v1``: equal summaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fragmeter.sim import simulate
from fragmeter.sim.memory.paged.paged import PagedTransaction
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.policy.options import VllmServeOptions
from fragmeter.sim.policy.registry import policy
from fragmeter.sim.real_vllm.core import Core, Scheduled
from fragmeter.sim.types.errors import SettingError, UserError

from . import ours, server
from .workloads import KINDS, ONE_SIZE, Case, number_of_workloads

#: Ticks of the cases' clock, in which a step takes about a hundred, are so many of ours: a step of the fitted cost
#: takes milliseconds.
_TICKS = 60_000_000
#: Workloads of a kind.
_SEEDS = number_of_workloads(12)
#: Histograms of the lives of blocks, which only the cache of ``vllm-v1`` logs.
_LIVES = "vllm:kv_block_"


def _cases(kind: str, seeds: int = 12) -> Iterator[Case]:
    return (KINDS[kind](seed) for seed in range(500, 500 + seeds))


def _summary(case: Case, policy: str, asynchronous: bool = True, **options: Any) -> dict[str, Any]:
    """The summary of a case under a policy, with step times of the fitted cost."""
    work = ours.scaled(case.workload, _TICKS)
    # No operation of a fitted cost computes states.
    cost = "roofline" if any(layer.kind == "state" for layer in case.layers) else "fitted"
    chosen = ours.settings_of(case, asynchronous, policy=policy, gpu="a100-40gb", cost=cost, **options)
    found = summary(simulate(chosen, work))
    if found["prefix_cache"]:
        found["prefix_cache"] = {
            name: value for name, value in found["prefix_cache"].items() if not name.startswith(_LIVES)
        }
    return found


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(ONE_SIZE)))
def test_blocks_of_several_sizes_are_refused(kind):
    with pytest.raises(UserError, match="vllm-v1"):
        _summary(next(iter(_cases(kind, 1))), "vllm-real", False)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ONE_SIZE)
def test_summaries_equal_those_of_vllm_v1(kind: str, asynchronous: bool, record_property):
    differing = {}
    steps = 0
    for case in _cases(kind, _SEEDS):
        real, mine = _summary(case, "vllm-real", asynchronous), _summary(case, "vllm-v1", asynchronous)
        steps += real["num_steps"]
        if real != mine:
            differing[case.name] = [name for name in mine if real.get(name) != mine[name]]
    mode = "async" if asynchronous else "sync"
    record_property(f"compared/{mode} summaries of {kind}", [_SEEDS, steps, len(differing)])
    assert not differing


def test_scheduling_is_asynchronous_by_default():
    assert policy("vllm-real").options_type() == VllmServeOptions(async_scheduling=True)


def test_steps_that_are_not_scheduled_ahead_are_noticed(monkeypatch):
    """vLLM gets the tokens of a step before it schedules the next one."""
    schedule, end_steps = Core.schedule, Core.end_steps
    finished: set[int] = set()

    def schedule_late(core: Core) -> Scheduled:
        finished.update(end_steps(core, in_flight=0))
        return schedule(core)

    def take_finished(core: Core, in_flight: int) -> set[int]:
        found = finished.copy()
        finished.clear()
        return found

    monkeypatch.setattr(Core, "schedule", schedule_late)
    monkeypatch.setattr(Core, "end_steps", take_finished)
    for kind in ONE_SIZE:
        assert sum(_summary(case, "vllm-real") != _summary(case, "vllm-v1") for case in _cases(kind)) > 2, kind


def test_a_policy_that_admits_without_room_for_the_whole_prompt_is_noticed(monkeypatch):
    monkeypatch.setattr(PagedTransaction, "lacking", lambda self, sequence, tokens: self.blocks_of(tokens))
    kinds = ("chunks", "mixed", "tight", "bursts")
    cases = [case for kind in kinds for case in _cases(kind) if not case.prefix_caching]
    # The compiled core would not see the change.
    assert sum(_summary(case, "vllm-real") != _summary(case, "vllm-v1", core=False) for case in cases) > 2


def test_a_release_with_another_free_queue_is_noticed():
    cases = list(_cases("prefixes"))
    with server.older_free_queue():
        older = [_summary(case, "vllm-real") for case in cases]
    assert sum(one != _summary(case, "vllm-v1") for one, case in zip(older, cases, strict=True)) > 2


def test_a_watermark_reaches_vllm():
    case = replace(KINDS["mixed"](510), num_blocks=24, block_size=16, prefix_caching=False)
    found = [_summary(case, "vllm-real", watermark=share)["mean_ttft_ms"] for share in (0.0, 0.5)]
    assert found == [_summary(case, "vllm-v1", watermark=share)["mean_ttft_ms"] for share in (0.0, 0.5)]
    assert found[0] < found[1]


def test_what_vllm_refuses_is_one_line():
    """The pool is smaller than a request of the model's longest length."""
    case = replace(KINDS["mixed"](500), num_blocks=2, block_size=1)
    with pytest.raises(
        SettingError, match=r"^policy = 'vllm-real': vLLM refuses the settings: .*max seq len"
    ) as refused:
        _summary(case, "vllm-real")
    assert "\n" not in str(refused.value)


def test_blocks_are_not_recorded():
    case = KINDS["mixed"](500)
    with pytest.raises(SettingError, match="records no blocks and no plans; use --policy vllm-v1"):
        simulate(ours.settings_of(case, policy="vllm-real", ids=True), case.workload)
