"""``VllmV1`` counts blocks at once where the order of the running sequences decides nothing: its loop, which goes through
them one by one, decides the same."""

from __future__ import annotations

import pytest

from fragmeter.sim.memory.paged.transaction import PagedTransaction
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.types.errors import Overdrawn, PluginError
from fragmeter.sim.types.sequence import StepPlan
from fragmeter.sim.types.state import State
from real_vllm import ours
from real_vllm.record import digest
from real_vllm.workloads import KINDS, OPTIONS, Case

_MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def _served(case: Case, asynchronous: bool) -> tuple[str, object]:
    return digest(ours.serve(case, asynchronous)), ours.summary(case, asynchronous, leap=True, ids=False)


def _without_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for drafts: every step is the loop's, and no decode is passed over within its block. The memory is the same."""
    schedule = VllmV1.schedule

    def by_the_loop(policy: VllmV1, state: State, transaction: PagedTransaction) -> StepPlan:
        with monkeypatch.context() as while_deciding:
            while_deciding.setattr(VllmV1, "_in_lockstep", property(lambda policy: False))
            return schedule(policy, state, transaction)

    monkeypatch.setattr(VllmV1, "schedule", by_the_loop)


@_MODES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seeds", [[40], pytest.param([41, 42], marks=pytest.mark.slow)], ids=["one seed", "two others"]
)
def test_counting_at_once_decides_as_the_loop(kind: str, asynchronous: bool, seeds: list[int], monkeypatch):
    cases = [KINDS[kind](seed) for seed in seeds]
    counted = [_served(case, asynchronous) for case in cases]
    _without_shortcuts(monkeypatch)
    assert [_served(case, asynchronous) for case in cases] == counted


@pytest.mark.slow
@_MODES
@pytest.mark.parametrize("option", OPTIONS)
def test_counting_at_once_decides_as_the_loop_under_options(option: str, asynchronous: bool, monkeypatch):
    cases = [OPTIONS[option](KINDS[kind](44)) for kind in ("tight", "prefixes", "states", "windows_cached")]
    counted = [_served(case, asynchronous) for case in cases]
    _without_shortcuts(monkeypatch)
    assert [_served(case, asynchronous) for case in cases] == counted


def test_a_shortcut_with_too_few_blocks_is_noticed(monkeypatch):
    """Counting at once where a sequence lacks a block takes blocks that are not there.

    The error names a plug-in where another test has loaded one: then code outside of the package is a plug-in's.
    """
    monkeypatch.setattr(
        VllmV1, "_one_by_one", lambda policy, state, transaction: policy._fill(state, transaction, None)
    )
    with pytest.raises((Overdrawn, PluginError), match="are taken and 0 are free"):
        _served(KINDS["tight"](40), False)
