"""``fragmeter.probe`` as the scheduler class of the real vLLM: its file against the ledger of ``vllm-v1``, step by step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fragmeter import probe
from fragmeter.sim import simulate
from fragmeter.sim.recording.probe import ProbedRun, read_probe
from tools.live.decisions import compare_decisions
from tools.live.step_log import Served, first_difference

from . import golden, ours, server
from .workloads import KINDS, ONE_SIZE, Case, number_of_workloads

#: Workloads of a kind.
_SEEDS = number_of_workloads(10)
PROBE = {"scheduler_cls": "fragmeter.probe.ProbeScheduler"}


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Engines that start have a probe, which reads the driver's clock."""
    clocks: list[server.Clock] = []

    class Watched(server.Clock):
        def __init__(self, step_ticks: int) -> None:
            super().__init__(step_ticks)
            clocks.append(self)

    with (
        mock.patch.object(server, "Clock", Watched),
        mock.patch.object(probe, "monotonic_ns", lambda: clocks[-1].now if clocks else 0),
        mock.patch.object(probe, "time_ns", lambda: 0),
        mock.patch.dict("os.environ", {probe.PATH: str(path)}),
    ):
        yield


def probed(case: Case, path: Path, asynchronous: bool = False) -> tuple[ProbedRun, Served]:
    """What the probe writes of a case, and what the driver does."""
    with recorded(path):
        served = server.serve(case, asynchronous, PROBE)
    return read_probe(path), served


def differences(case: Case, run: ProbedRun, asynchronous: bool = False) -> list[str]:
    """Buckets and steps in which the probe's file and the ledger differ."""
    chosen = ours.settings_of(case, asynchronous, leap=False)
    ledger = simulate(chosen, case.workload, ours.ConstantCost(case.step_ticks))
    runs = ledger.log.rows["ticks"] > 0
    steps = [step for step in run.steps if step.tokens]
    if asynchronous and len(steps) == runs.sum() + 1:
        # A last step that is computed in vain is no part of a simulated run.
        del steps[-1]
    if ledger.log.rows["start_ticks"][runs].tolist() != [step.begin_ns for step in steps]:
        return ["starts of steps"]
    expected = {name: slots[runs] for name, slots in ledger.accounts.at_rows().items()}
    found = {name: np.array([step.buckets[name] for step in steps]) for name in expected}
    differ = [(name, found[name] != slots) for name, slots in expected.items()]
    return [f"{name} in step {int(steps.argmax())}" for name, steps in differ if steps.any()]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ONE_SIZE)
def test_every_bucket_of_every_step_is_that_of_the_ledger(kind, asynchronous, tmp_path, record_property):
    differing, steps = {}, 0
    for seed in range(700, 700 + _SEEDS):
        case = KINDS[kind](seed)
        run, _ = probed(case, tmp_path / f"{seed}.jsonl", asynchronous)
        steps += len(run.steps)
        if found := differences(case, run, asynchronous):
            differing[case.name] = found
    name = f"probe{' ahead' * asynchronous} of {kind}"
    record_property(f"compared/{name}", [_SEEDS, steps, len(differing)])
    assert not differing


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ONE_SIZE)
def test_every_step_is_that_of_the_driver(kind, asynchronous, tmp_path):
    """Tokens, hits, evictions, times and finishes; a request that the probe sees preempted has lost its blocks."""
    for seed in range(720, 725):
        run, served = probed(KINDS[kind](seed), tmp_path / f"{seed}.jsonl", asynchronous)
        steps = [step for step in served.steps if step.scheduled]
        mine = [step for step in run.steps if step.tokens]
        assert [(step.begin_ns, step.tokens) for step in mine] == [(step.now, step.scheduled) for step in steps]
        hits = [sorted(tokens for _, tokens in step.hits) for step in served.steps]
        found = [tokens for request in run.requests for tokens in request.hit_tokens]
        assert sorted(found) == sorted(tokens for step in hits for tokens in step)
        assert sum(step.evicted for step in run.steps) == sum(step.evicted for step in served.steps)
        preempted = [index for step in served.steps for index in step.preempted]
        assert sorted(request for _, request in run.preemptions) == sorted(preempted)
        finished = [(request.finish_ns, int(request.name)) for request in run.requests]
        assert sorted(finished) == sorted(served.finished)
        if not asynchronous:
            free = [sum(step.buckets[name] for name in ("free", "cached")) // run.block_size for step in mine]
            assert free == [step.free for step in steps]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ONE_SIZE)
def test_a_replay_of_the_file_decides_as_the_server_did(kind, asynchronous, tmp_path, record_property):
    """What ``make server-check`` does with the recording of a live server; contents come from the file, too."""
    differing, steps = {}, 0
    for seed in range(740, 740 + _SEEDS):
        case, path = KINDS[kind](seed), tmp_path / f"{seed}.jsonl"
        probed(case, path, asynchronous)
        found = compare_decisions(read_probe(path, digests=True), ours.settings_of(case, asynchronous))
        steps += found.steps
        if found.difference:
            differing[case.name] = str(found.difference)
        for measured, simulated in found.waste.values():
            assert measured == pytest.approx(simulated, abs=1e-12)
    record_property(f"compared/replay{' ahead' * asynchronous} of {kind}", [_SEEDS, steps, len(differing)])
    assert not differing


def test_a_run_with_a_probe_is_the_run_without(tmp_path):
    for kind in ONE_SIZE:
        case = KINDS[kind](730)
        _, with_probe = probed(case, tmp_path / f"{kind}.jsonl.gz")
        assert first_difference(with_probe, server.serve(case)) is None


def test_a_ledger_of_another_free_queue_is_noticed(tmp_path):
    differing = 0
    for seed in range(700, 710):
        case = KINDS["prefixes"](seed)
        with server.older_free_queue():
            run, _ = probed(case, tmp_path / f"{seed}.jsonl")
        differing += bool(differences(case, run))
    assert differing > 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_ends_the_recording_and_not_the_server(asynchronous, tmp_path, caplog, monkeypatch):
    case, path = KINDS["mixed"](731), tmp_path / "probe.jsonl"
    expected = server.serve(case, asynchronous)
    calls = itertools.count()

    def fail(self: Any, *args: Any) -> None:
        if next(calls) == 5:
            raise OSError("the disk is full")

    monkeypatch.setattr(probe._Probe, "_evicting", fail)
    monkeypatch.setattr(probe._Probe, "_write", fail)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with recorded(path):
        served = server.serve(case, asynchronous, PROBE)
    assert first_difference(expected, served) is None
    warnings = [each.getMessage() for each in caplog.records if "fragmeter.probe" in each.getMessage()]
    assert warnings == ["fragmeter.probe: the recording ends: OSError('the disk is full')"]


def test_a_path_that_takes_no_file_is_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    case = KINDS["mixed"](732)
    with recorded(tmp_path / "no folder" / "probe.jsonl"):
        served = server.serve(case, False, PROBE)
    assert first_difference(server.serve(case), served) is None
    warnings = [each.getMessage() for each in caplog.records if "fragmeter.probe" in each.getMessage()]
    assert len(warnings) == 1 and "No such file or directory" in warnings[0]


def test_without_a_path_nothing_is_attached(monkeypatch):
    monkeypatch.delenv(probe.PATH, raising=False)
    case = KINDS["mixed"](733)
    assert first_difference(server.serve(case), server.serve(case, False, PROBE)) is None


def test_the_recorded_sample_is_what_the_probe_writes(tmp_path):
    """``tests/data/probe/turns.jsonl``, which tests without vLLM read."""
    golden.main(tmp_path / "turns.jsonl")
    known = Path(__file__).parents[1] / "data" / "probe" / "turns.jsonl"
    assert (tmp_path / "turns.jsonl").read_text() == known.read_text()
