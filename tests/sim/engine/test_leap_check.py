"""Leaps that are checked: of policies, memories and costs that promise too much, and of every policy under every option."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from core_loads import columns
from fragmeter.sim.cluster import Cluster, simulate_cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine import leap_check
from fragmeter.sim.engine.run import serve_checked, simulate
from fragmeter.sim.memory.paged.paged import PagedMemory
from fragmeter.sim.policy.options import option_names
from fragmeter.sim.policy.registry import POLICIES
from fragmeter.sim.policy.sarathi import Sarathi
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import PluginError, SimulationFault
from fragmeter.sim.workload.workload import Workload
from leap_loads import check_policy
from paths import ROOT
from same_runs import same
from strategies import COSTS, LineCost
from wrong_leaps import EndlessLine

#: Requests that arrive in steps and between them, some of which wait.
WORK = Workload("twelve", np.arange(12) * 700, np.arange(12) % 5 * 3 + 4, 30 - np.arange(12) % 7)
#: What each class of ``wrong_leaps`` gets wrong: the first field that differs.
WRONG = {
    "AdmitsAFew": "admitted",
    "AdmitsInALeap": "admitted",
    "PreemptsInALeap": "preempted",
    "SleepsInALeap": "admitted",
    "GrowsTooLittleInALeap": "room",
    "CountsCalls": "admitted",
}


def run_of(policy: str, cost=LineCost(), **switches) -> Run:
    chosen = {"num_gpu_blocks_override": 20, "block_size": 4, **switches}
    return simulate(settings(policy=policy, **chosen), WORK, cost)


def first_event(one: Run, other: Run) -> int:
    """Decode step of the first admission or preemption that only one of two runs has."""
    found: list[set[tuple[int, ...]]] = []
    for run in (one, other):
        log = run.log
        # A first step that prefills counts as the one before it in no policy here.
        admitted = zip(log.residencies["start_step"].tolist(), log.residencies["index"].tolist())
        preempted = zip(log.evictions["decode_step"].tolist(), log.evictions["index"].tolist())
        found.append({(step, 0, index) for step, index in admitted} | {(step, 1, index) for step, index in preempted})
    return min(found[0] ^ found[1])[0]


@pytest.mark.parametrize(("kind", "field"), WRONG.items())
def test_a_wrong_leap_is_named_with_its_step_and_field(kind, field):
    with pytest.raises(PluginError) as raised:
        run_of(f"wrong_leaps:{kind}", check_leaps=True)
    assert raised.value.rule == "leap" and raised.value.what.startswith(f"{field}: ")
    assert raised.value.owner.endswith("GrowsTooLittle" if field == "room" else kind)
    stepped = run_of(f"wrong_leaps:{kind}", leap=False)
    if kind in ("AdmitsAFew", "AdmitsInALeap", "SleepsInALeap", "CountsCalls"):
        # Without a check both runs end well.
        assert raised.value.step == first_event(run_of(f"wrong_leaps:{kind}", check_leaps=False), stepped)
    elif kind == "PreemptsInALeap":
        assert raised.value.step in stepped.log.evictions["decode_step"]


def test_a_line_past_its_end_is_named_with_its_step():
    right, wrong = run_of("vllm-sosp23", EndlessLine(knee_tokens=60), leap=False), EndlessLine(knee_tokens=60)
    assert run_of("vllm-sosp23", wrong).log.end_ticks != right.log.end_ticks
    with pytest.raises(PluginError) as raised:
        run_of("vllm-sosp23", wrong, check_leaps=True)
    assert raised.value.rule == "leap" and raised.value.what.startswith("ticks: ")
    # Of the step it says what it takes.
    log = right.log
    assert f"takes {log.rows['ticks'][int(np.flatnonzero(log.row_step == raised.value.step)[-1])]}," in str(
        raised.value
    )


@pytest.mark.parametrize("kind", [kind for kind in WRONG if kind not in ("GrowsTooLittleInALeap", "CountsCalls")])
def test_a_policy_of_another_package_is_checked_without_being_asked(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PluginError) as raised:
        run_of(f"wrong_leaps:{kind}")
    assert raised.value.rule == "leap"


@pytest.mark.parametrize("router", ["round-robin", "least-outstanding-tokens"])
def test_replicas_of_a_cluster_are_checked(router, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = settings(policy="wrong_leaps:AdmitsAFew", num_gpu_blocks_override=20, block_size=4)
    together = replace(WORK, arrival_ticks=WORK.arrival_ticks // 4200 * 4200)
    with pytest.raises(PluginError) as raised:
        simulate_cluster(chosen, together, Cluster(num_replicas=2, router=router), LineCost())
    assert raised.value.rule == "leap" and raised.value.what.startswith("admitted: ")


@pytest.mark.parametrize("most", [1, 2])
def test_the_option_of_the_example_is_right_in_every_mode(most, monkeypatch):
    """It is the option of ``AdmitsAFew``, with its promise taken back where others wait behind."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "extending")
    chosen = {"policy": "a_few_a_step:AFewAStep", "max_admitted_per_step": most}
    checked, stepped = run_of(**chosen, check_leaps=True), run_of(**chosen, leap=False)
    leapt = run_of(**chosen, check_leaps=False)
    for run in (checked, leapt):
        same(run, stepped)
    assert np.unique(leapt.log.residencies["start_step"], return_counts=True)[1].max() == most
    assert (leapt.log.rows["steps"] > 1).any()


def test_the_first_leaps_are_checked_and_then_one_in_so_many(monkeypatch):
    """Of a right policy a leap that is checked is a row for each of its steps, in a run beside that of the results."""
    monkeypatch.setattr(leap_check, "FIRST_LEAPS", 3)
    monkeypatch.setattr(leap_check, "ONE_IN", 4)
    chosen = settings(policy="wrong_leaps:Right", num_gpu_blocks_override=20, block_size=4)
    checked, run = serve_checked(chosen, WORK, LineCost()), simulate(chosen, WORK, LineCost())
    same(run, checked)
    leaps, left = (int((each.log.rows["steps"] > 1).sum()) for each in (run, checked))
    assert leaps > 12 and left == leaps - 3 - leaps // 4


def test_no_byte_of_a_result_depends_on_the_checks(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(leap_check, "FIRST_LEAPS", 7)
    some, none, every = (
        run_of("wrong_leaps:Right", **which) for which in ({}, {"check_leaps": False}, {"check_leaps": True})
    )
    assert columns(some) == columns(none) == columns(every)


@pytest.mark.parametrize("first", [0, 1000])
def test_a_wrong_leap_is_seen_where_it_is_checked(first, monkeypatch):
    monkeypatch.setattr(leap_check, "FIRST_LEAPS", first)
    monkeypatch.setattr(leap_check, "ONE_IN", 1000)
    if first:
        with pytest.raises(PluginError):
            run_of("wrong_leaps:AdmitsAFew")
    else:
        run_of("wrong_leaps:AdmitsAFew")


@pytest.mark.parametrize("policy", POLICIES)
def test_leaps_of_every_policy_are_right_under_every_option(policy):
    served = [*check_policy(policy, 1, seed=3)]
    assert [each.option for each in served] == [None, *option_names(POLICIES[policy].options_type)]
    assert [each.why for each in served if each.chosen is None] == []


@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-sosp23", "sarathi", "tgi"])
@pytest.mark.parametrize("cost", COSTS)
def test_leaps_of_replicas_are_right(policy, cost):
    """A leap in which a request arrives ends there, and prompts that go to another replica give blocks back in one."""
    rng = np.random.default_rng(list(COSTS).index(cost))
    arrivals = np.cumsum(rng.integers(0, 2, 40) * rng.integers(0, 900, 40))
    work = Workload("forty", arrivals, rng.integers(1, 40, 40), rng.integers(1, 40, 40))
    chosen = settings(policy=policy, num_gpu_blocks_override=40, block_size=4, check_leaps=True)
    for cluster in (
        Cluster(num_replicas=2, router="least-outstanding-tokens"),
        Cluster(prefill_replicas=1, decode_replicas=1),
    ):
        if not cluster.disaggregated or POLICIES[policy].disaggregates:
            simulate_cluster(chosen, work, cluster, COSTS[cost])


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_leaps_of_every_policy_are_right_under_every_option_at_length(policy):
    assert all(each.chosen is not None for each in check_policy(policy, 40, seed=4))


class TestPlantedInThePackage:
    """What a contributor to the package could break: the property above notices."""

    def refused(self, policy: str, field: str) -> None:
        with pytest.raises(SimulationFault, match=rf"policy {policy}, decode step \d+: {field}: "):
            for _ in check_policy(policy, 6, seed=3):
                pass

    def test_an_admission(self, monkeypatch):
        queue = VllmV1._queue
        monkeypatch.setattr(VllmV1, "_queue", lambda self, state: islice(queue(self, state), 1))
        self.refused("vllm-v1", "(admitted|chunks)")

    @pytest.mark.slow
    def test_a_horizon(self, monkeypatch):
        horizon = Sarathi.horizon
        monkeypatch.setattr(Sarathi, "horizon", lambda self, *asked: min(asked[2], 2 * horizon(self, *asked)))
        self.refused("sarathi", "preempted")

    def test_a_leap_that_leaks(self, monkeypatch):
        advance = PagedMemory.advance

        def leaks(self, state, steps):
            self.free -= steps > 1
            return advance(self, state, steps)

        monkeypatch.setattr(PagedMemory, "advance", leaks)
        with pytest.raises(SimulationFault, match="policy sarathi: a run with leaps fails, and one in steps does not"):
            run_of("sarathi", check_leaps=True)

    def test_a_level(self, monkeypatch):
        advance = PagedMemory.advance

        def one_block_more(self, state, steps):
            live, held, *others = advance(self, state, steps)
            return live, held + self.block_size * (steps > 1), *others

        monkeypatch.setattr(PagedMemory, "advance", one_block_more)
        with pytest.raises(SimulationFault, match=r"policy sarathi, decode step \d+: held: "):
            run_of("sarathi", check_leaps=True)


def test_which_leaps_are_checked():
    chosen = settings(policy="wrong_leaps:AdmitsAFew")
    every, none = replace(chosen, check_leaps=True), replace(chosen, check_leaps=False)
    found = [leap_check.leaps_to_check(each) for each in (chosen, every, none, replace(every, leap=False))]
    assert found == [leap_check.SOME, leap_check.ALL, leap_check.NONE, leap_check.NONE]
    assert leap_check.leaps_to_check(settings(policy="tgi")) == leap_check.NONE
    assert leap_check.leaps_to_check(settings(policy="tgi", allocator="planted:leaking")) == leap_check.SOME
