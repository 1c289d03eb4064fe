"""Preemptions that our metrics count beside those of the installed vLLM, in all and of each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice

import pytest

from fragmeter.reports.data.probed import read_probed
from fragmeter.sim import simulate
from fragmeter.sim.memory.accounting.ledger import COMPLETE, Ledger
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.residencies import residencies_table
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.types.sequence import Sequence
from tools.live.step_log import first_difference

from . import ours, server
from .test_probe import probed
from .workloads import KINDS, Case, number_of_workloads

#: Workloads of a mode, and of one test.
_CASES, _CASES_A_TEST = number_of_workloads(512), 64


def _cases(first: int, count: int) -> Iterator[Case]:
    """Workloads of every kind in turn, none of which another test compares."""
    named = enumerate(cycle(KINDS.values()))
    return (make(1000 + number // len(KINDS)) for number, make in islice(named, first, first + count))


def _counted(case: Case, asynchronous: bool) -> tuple[dict[int, int], int]:
    """Preemptions of each request, and in all, in a run that leaps: the compiled core serves it where it can."""
    run = simulate(ours.settings_of(case, asynchronous), case.workload, ours.ConstantCost(case.step_ticks))
    times = request_times(run)
    of_request = zip(times.index.tolist(), (times.recomputed + times.swapped).tolist())
    return {request: count for request, count in of_request if count}, sum(summary(run)["preemptions"].values())


def _differing(cases: Iterator[Case], asynchronous: bool) -> tuple[int, dict[str, str]]:
    """vLLM's steps, and the workloads that differ."""
    steps, differing = 0, {}
    for case in cases:
        real = server.serve(case, asynchronous)
        counts = {request: count for request, count in enumerate(real.preemptions) if count}
        # vLLM's own events.
        assert counts == Counter(request for step in real.steps for request in step.preempted)
        steps += len(real.steps)
        if (found := _counted(case, asynchronous)) != (counts, sum(counts.values())):
            differing[case.name] = f"{found} in place of {counts}"
    return steps, differing


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("first", range(0, _CASES, _CASES_A_TEST))
def test_counts_are_those_of_vllm(first, asynchronous, record_property):
    steps, differing = _differing(_cases(first, _CASES_A_TEST), asynchronous)
    mode = "async" if asynchronous else "sync"
    record_property(f"compared/preemptions {mode}", [_CASES_A_TEST, steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())


def test_a_log_without_preemptions_of_requests_that_are_complete_is_noticed(monkeypatch):
    """Those with their last token in the step that runs."""
    evict = Ledger.evict

    def forgetting(ledger: Ledger, sequence: Sequence, swapped: int, decode_step: int, now: int) -> None:
        if swapped != COMPLETE:
            evict(ledger, sequence, swapped, decode_step, now)

    monkeypatch.setattr(Ledger, "evict", forgetting)
    cases = [KINDS["tight"](seed) for seed in range(1000, 1030)]
    found = (first_difference(server.serve(case, True), ours.serve(case, True)) for case in cases)
    assert sum(difference is not None and difference.field == "preemptions" for difference in found) > 5


def test_the_tables_of_a_probe_count_as_a_run_does(tmp_path):
    """Preemptions of each request, and how residencies end; requests are in another order."""
    preempted = 0
    cases = (KINDS[kind](seed) for kind in ("tight", "mixed") for seed in range(1000, 1015))
    for number, case in enumerate(cases):
        # A probe leaves the recording of an earlier one alone.
        recording = tmp_path / f"probe-{number}.jsonl"
        probed(case, recording, asynchronous=True)
        server_side = read_probed(recording)
        run = simulate(ours.settings_of(case, True), case.workload, ours.ConstantCost(case.step_ticks))
        table, ended = server_side.requests, server_side.residencies["ended"]
        assert server_side.summary["preemptions"] == summary(run)["preemptions"]
        assert sorted(table["recomputed"]) == sorted(request_times(run).recomputed)
        assert len(server_side.preemptions) == table["recomputed"].sum()
        finished = (residencies_table(run)["ended"] == "finished").sum()
        assert (ended == "finished").sum() == finished == len(case.workload)
        preempted += table["recomputed"].sum()
    assert preempted > 50
