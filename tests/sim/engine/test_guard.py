"""Mistakes of policies, memories and costs that are not of the package: each ends the run in one line, with status 2."""

from __future__ import annotations

import inspect
import pickle
from functools import partial
from unittest import mock

import numpy as np
import pandas as pd
import pytest

import fragmeter
import planted
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim import Workload, settings, simulate, summary
from fragmeter.sim.cluster import Cluster, simulate_cluster
from fragmeter.sim.engine import guard
from fragmeter.sim.memory.contiguous.contiguous import ContiguousMemory
from fragmeter.sim.memory.paged.paged import PagedMemory
from fragmeter.sim.policy import Limits
from fragmeter.sim.policy.orca import OrcaOracle
from fragmeter.sim.policy.registry import POLICIES
from fragmeter.sim.policy.vllm_sosp23 import VllmSosp23
from fragmeter.sim.types.errors import PluginError, SimulationFault, UserError
from planted import COSTS, MISTAKES, Mistake
from strategies import LineCost

#: Twelve blocks of four slots: a request takes up to seven at its end.
POOL = {"num_gpu_blocks_override": 12, "block_size": 4, "model": "opt-13b", "gpu": "a100-40gb", "cost": "roofline"}
TRACE = pd.DataFrame(
    {"arrival_s": [0.0, 0.0, 0.0, 9.0], "prompt_tokens": [16, 9, 12, 8], "output_tokens": [12, 9, 8, 3]}
)


def workload() -> Workload:
    return Workload(
        "four", np.array([0, 0, 0, 10**13]), TRACE["prompt_tokens"].to_numpy(), TRACE["output_tokens"].to_numpy()
    )


def flags(folder, **chosen) -> list[str]:
    """The command line of a run of the trace."""
    TRACE.to_csv(folder / "trace.csv", index=False)
    given = POOL | chosen | {"trace": folder / "trace.csv", "out": folder / "out"}
    return [
        "simulate",
        *(word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))),
    ]


def method_lines(mistake: Mistake) -> range:
    """Lines of the methods that may be named: of the class, and of those that it is derived from here."""
    kinds = [kind for kind in (mistake.where or mistake.kind).__mro__ if kind.__module__ == planted.__name__]
    lines = [inspect.getsourcelines(kind) for kind in kinds]
    return [line for source, first in lines for line in range(first, first + len(source))]


def check(error: PluginError, mistake: Mistake) -> None:
    """The error names class, file, line, and what is broken."""
    assert error.path == planted.__file__ and error.line in method_lines(mistake)
    if isinstance(mistake.breaks, str):
        assert error.rule == mistake.breaks
        return
    assert error.rule is None and isinstance(error.__cause__, mistake.breaks)
    function = getattr(mistake.kind, mistake.method)
    source, first = inspect.getsourcelines(function)
    assert first <= error.line < first + len(source)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.kind.__name__)
def test_a_mistake_of_a_policy_ends_the_run(mistake, tmp_path, capfd):
    name = f"planted:{mistake.kind.__name__}"
    assert status(flags(tmp_path, policy=name)) == MISTAKE
    error = capfd.readouterr().err
    assert error.startswith(f"fragmeter: {planted.__file__}, line ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(PluginError) as raised:
        fragmeter.simulate(policy=name, trace=TRACE, **POOL)
    assert isinstance(raised.value, UserError)
    assert f"fragmeter: {raised.value}\n" == error
    check(raised.value, mistake)
    before_the_run = mistake.method in ("__init__", "pool_size", "memory", "smallest_pool_blocks")
    over = mistake.kind in (planted.Discards, planted.CountsTwice)
    assert (raised.value.step is None) == (before_the_run or over)


def test_a_grant_of_too_much_is_named_where_blocks_have_ids():
    with pytest.raises(PluginError) as raised:
        fragmeter.simulate(policy="planted:GrantsTooMuch", trace=TRACE, record_blocks=True, **POOL)
    assert raised.value.rule == "blocks"


@pytest.mark.parametrize(
    "mistake", [each for each in MISTAKES if each.kind.__name__ in ("Raises", "Exits", "GrantsTooMuch")]
)
@pytest.mark.parametrize("router", ["round-robin", "least-outstanding-tokens"])
def test_a_mistake_of_a_policy_ends_the_run_of_a_cluster(mistake, router):
    name = f"planted:{mistake.kind.__name__}"
    with pytest.raises(PluginError) as raised:
        fragmeter.simulate(
            policy=name, trace=pd.concat([TRACE] * 2).sort_values("arrival_s"), num_replicas=2, router=router, **POOL
        )
    check(raised.value, mistake)


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("mistake", COSTS, ids=lambda mistake: mistake.kind.__name__)
def test_a_mistake_of_a_cost_ends_the_run(mistake, core):
    chosen = settings(policy="vllm-sosp23", core=core, num_gpu_blocks_override=12, block_size=4)
    with pytest.raises(PluginError) as raised:
        simulate(chosen, workload(), mistake.kind())
    check(raised.value, mistake)


def test_a_mistake_of_a_cost_is_seen_where_progress_is_reported():
    """SimPy raises a copy of an error that no process waits for."""
    with pytest.raises(PluginError) as raised:
        simulate(settings(num_gpu_blocks_override=12, block_size=4, core=False), workload(), planted.Unpriced(), print)
    assert isinstance(raised.value.__cause__, ZeroDivisionError) and raised.value.step == 0


def test_options_that_raise_are_named():
    assert fragmeter.simulate(policy="planted:Fussy", patience=4, trace=TRACE, **POOL).summary["completed"] == 4
    with pytest.raises(PluginError) as raised:
        fragmeter.simulate(policy="planted:Fussy", patience=3, trace=TRACE, **POOL)
    assert isinstance(raised.value.__cause__, LookupError) and raised.value.path == planted.__file__


@pytest.mark.parametrize("name", ["Exits", "GrantsTooMuch"])
def test_a_sweep_without_a_point_that_runs_ends_with_the_mistake(name, tmp_path, capfd):
    chosen = flags(tmp_path, policy=f"planted:{name}")
    assert status(["sweep", *chosen[1:], "--grid", "seed=1,2", "--jobs", "1"]) == MISTAKE
    assert f"policy planted:{name}" in capfd.readouterr().err
    assert not (tmp_path / "out" / "sweep.parquet").exists()


def test_an_error_survives_the_way_from_another_process():
    error = PluginError("raises KeyError: 1", "policy mine:Mine", "mine.py", 3, None, 7)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert "mine.py, line 3: policy mine:Mine in decode step 7" in str(copy)


def test_an_allocator_that_leaks_is_named():
    with pytest.raises(PluginError) as raised:
        fragmeter.simulate(policy="vllm-sosp23", allocator="planted:leaking", trace=TRACE, **POOL)
    assert raised.value.rule == "release" and raised.value.owner == "memory planted:LeakingMemory"


def test_an_exit_of_an_imported_module_is_an_error(tmp_path, monkeypatch, capfd):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert status(["simulate", "--policy", "leaves:Policy"]) == MISTAKE
    assert f"SystemExit: 0 in {tmp_path / 'leaves.py'}, line 2" in capfd.readouterr().err


def test_a_traceback_is_shown_where_it_is_asked_for(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FRAGMETER_DEBUG", "1")
    assert status(flags(tmp_path, policy="planted:Raises")) == MISTAKE
    assert 'return {}["no such key"]' in capfd.readouterr().err


@pytest.mark.slow
def test_a_policy_without_a_mistake_runs_like_one_without_checks(tmp_path):
    """Its results are those of the same class as a part of the package."""
    assert status(flags(tmp_path, policy="planted:Right")) == DONE
    right = summary(simulate(settings(policy="planted:Right", **POOL), workload()))
    own = type("Right", (planted.Right,), {"__module__": "fragmeter.sim.policy.right"})
    planted.Own = own
    assert summary(simulate(settings(policy="planted:Own", **POOL), workload())) == right
    assert simulate(settings(policy="planted:Right", **POOL), workload(), LineCost()).log.num_steps


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_of_the_package_breaks_a_rule(policy, monkeypatch):
    """Under the checks each has the results that it has without them, also where requests wait and are preempted."""
    work = Workload("many", np.arange(40) // 8 * 10**10, np.arange(40) * 7 % 61 + 4, np.arange(40) * 11 % 53 + 1)
    chosen = settings(policy=policy, model="opt-13b", gpu="a100-40gb", num_gpu_blocks_override=40, core=False)
    alone = summary(simulate(chosen, work))
    monkeypatch.setattr(guard, "is_plugin", lambda part: not isinstance(part, guard.CheckedCost))
    checked = mock.Mock(wraps=guard.Guard.of)
    monkeypatch.setattr(guard.Guard, "of", checked)
    assert summary(simulate(chosen, work)) == alone
    assert checked.call_count == 1 and guard.Guard.of(*checked.call_args.args) is not None


class TestTheLedgerOfOurOwnPolicies:
    """Mistakes planted in the package end as faults of it, before anything is written."""

    @pytest.fixture(params=["vllm-sosp23", "vllm-v1"])
    def policy(self, request):
        return request.param

    @pytest.mark.parametrize("core", [True, False])
    def test_blocks_past_the_pool(self, policy, core, monkeypatch):
        """A watermark below 0 admits what does not fit."""
        below = partial(Limits, watermark_blocks=-5)
        monkeypatch.setattr("fragmeter.sim.engine.replica.Limits", lambda watermark_blocks, **others: below(**others))
        load = Workload("many", np.zeros(6, np.int64), np.full(6, 20), np.full(6, 12))
        with pytest.raises(SimulationFault, match="blocks"):
            simulate(settings(policy=policy, core=core, num_gpu_blocks_override=12, block_size=4), load)

    @pytest.mark.parametrize("changed", ["live", "held"])
    def test_a_row_with_another_level(self, changed, monkeypatch, tmp_path):
        advance = PagedMemory.advance

        def wrong(self, state, steps):
            live, held, tail = advance(self, state, steps)
            return (held + 1, held, tail) if changed == "live" else (live, self.capacity_slots + 1, tail)

        monkeypatch.setattr(PagedMemory, "advance", wrong)
        chosen = flags(tmp_path, policy="vllm-sosp23")
        assert status([*chosen, "--no-core"]) == 1
        assert not (tmp_path / "out").exists()

    def test_a_leak(self, monkeypatch):
        release = PagedMemory.release

        def leaks(self, leaving, decode_step):
            release(self, leaving, decode_step)
            self.free -= 1

        monkeypatch.setattr(PagedMemory, "release", leaks)
        with pytest.raises(SimulationFault, match="slots are held after the last request"):
            simulate(settings(policy="vllm-sosp23", core=False, **POOL), workload())

    def test_tokens_past_a_reservation(self, monkeypatch):
        monkeypatch.setattr(ContiguousMemory, "_final", lambda self, sequence: sequence.prompt_tokens)
        with pytest.raises(SimulationFault, match="reserved = -"):
            simulate(settings(policy=OrcaOracle.name, **POOL), workload())

    def test_requests_that_vanish(self, monkeypatch):
        schedule = VllmSosp23.schedule

        def drops(self, state, transaction):
            if len(state.waiting) > 1:
                state.waiting.pop()
            return schedule(self, state, transaction)

        monkeypatch.setattr(VllmSosp23, "schedule", drops)
        for run in (simulate, lambda *given: simulate_cluster(*given, Cluster(num_replicas=2))):
            with pytest.raises(SimulationFault, match="served"):
                run(settings(policy="vllm-sosp23", core=False, **POOL), workload())
