"""Engine cores of the installed vLLM that share experts, step for step: ``DPEngineCoreProc.run_busy_loop`` without its processes.

Each engine is an ``EngineCore``. What the loop adds are ``_should_throttle_prefills`` and ``_has_global_unfinished_reqs``, both vLLM's,
and the dummy batch of an engine that computes nothing. All steps take as long, so that each engine has a clock of its own.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType, SimpleNamespace
from unittest import mock

import numpy as np
from vllm.v1.engine.core import DPEngineCoreProc

from fragmeter.sim import Settings
from fragmeter.sim.cluster import cluster, simulate_cluster
from fragmeter.sim.cluster.lock_step import LockStepEngine
from fragmeter.sim.cluster.routed import RoutedEngine
from tools.live.step_log import Served, StepLog

from . import ours, server
from .workloads import Case

#: A model whose experts engines share.
_WITH_EXPERTS = "mixtral-8x7b"


def aligned(case: Case) -> Case:
    """The case with arrivals at ends of steps: none comes within a dummy batch, which ours leaves out once no engine has work."""
    work, ticks = case.workload, case.step_ticks
    return replace(case, workload=replace(work, arrival_ticks=-(-work.arrival_ticks // ticks) * ticks))


class _Rank:
    """One engine, which is sent the rows of a case; there they are numbered from 0."""

    def __init__(self, case: Case, rows: range, asynchronous: bool) -> None:
        self.engine = engine = server.started(case, asynchronous)
        engine.scheduler.local_prefill_interval = 1
        engine.prefill_schedule_interval = case.options.get("prefill_schedule_interval", 1)
        engine._should_throttle_prefills = MethodType(DPEngineCoreProc._should_throttle_prefills, engine)
        engine.step_counter, engine.dp_sync_interval, engine.dp_group = 0, 16, None
        engine.pending_pause = False
        self.case, self.clock, self.finished = case, server.Clock(case.step_ticks), []
        self.prompts, self.outputs = server.tokens_of(case.workload)
        engine.model_executor.attach(engine, [self.outputs[row] for row in rows], self.clock)
        self.rows, self.requests = rows, []

    @property
    def next_arrival(self) -> int | None:
        row = self.rows[len(self.requests) :][:1]
        return int(self.case.workload.arrival_ticks[row[0]]) if row else None

    def step(self) -> bool:
        """One turn of the loop; whether requests are unfinished after it."""
        engine, clock = self.engine, self.clock
        while self.next_arrival is not None and self.next_arrival <= clock.now:
            row = self.rows[len(self.requests)]
            request = server._request(self.case, row, self.prompts[row], self.outputs[row], engine)
            request.request_id = str(len(self.requests))
            self.requests.append(request)
            engine.add_request(request)
        executed = False
        if engine.scheduler.has_requests() or engine.batch_queue:
            answers, executed = engine.step_fn()
            for answer in (answers or {}).values():
                self.finished += [
                    (clock.now, int(one.request_id)) for one in answer.outputs if one.finish_reason is not None
                ]
        if not executed:
            # A dummy batch, after all that is in flight.
            clock.wait_until(clock.free_at + self.case.step_ticks)
        return engine.scheduler.has_unfinished_requests()

    def served(self) -> Served:
        counts = tuple(request.num_preemptions for request in self.requests)
        return Served(self.engine.model_executor.steps, self.finished, (), counts)


def _stop_together(ranks: list[_Rank], unfinished: bool) -> bool:
    """Whether all go on; they ask each other whether any has requests."""
    states = SimpleNamespace(sync_dp_state=lambda *given, **named: (unfinished, False))
    goes_on = []
    for rank in ranks:
        with mock.patch.object(rank.engine, "vllm_config", SimpleNamespace(parallel_config=states)):
            goes_on.append(DPEngineCoreProc._has_global_unfinished_reqs(rank.engine, unfinished))
    return all(goes_on)


def serve(case: Case, engines: int, asynchronous: bool) -> list[Served]:
    """What each of the installed vLLM's engines does with the requests of a case, which go round in turn."""
    ranks = [_Rank(case, range(len(case.workload))[number::engines], asynchronous) for number in range(engines)]
    while arrivals := [rank.next_arrival for rank in ranks if rank.next_arrival is not None]:
        now = max(min(arrivals), *(rank.clock.now for rank in ranks))
        for rank in ranks:
            rank.clock.wait_until(now)
            rank.engine.step_counter = 0
        running = True
        while running:
            # Each steps, whether or not another has work.
            unfinished = [rank.step() for rank in ranks]
            running = _stop_together(ranks, any(unfinished))
    return [rank.served() for rank in ranks]


def serve_ours(case: Case, engines: int, asynchronous: bool) -> list[Served]:
    """What our engines do with it."""
    chosen = ours.settings_of(case, asynchronous, ids=True, model=_WITH_EXPERTS, gpu="h200", data_parallel_size=engines)
    return [served for served, _ in observed(LockStepEngine, chosen, case, engines, "round-robin")]


def observed(
    kind: type[RoutedEngine], chosen: Settings, case: Case, engines: int, router: str
) -> list[tuple[Served, np.ndarray]]:
    """What each of our engines, of a class, does with the requests of a case step by step, and the rows that it is sent."""
    logs: list[StepLog] = []
    init = kind.__init__

    def begin(engine: RoutedEngine, *given: object) -> None:
        init(engine, *given)
        log = StepLog()
        log._engine, engine._observers = engine, (log,)
        engine.leap = False
        logs.append(log)

    with mock.patch.object(kind, "__init__", begin):
        run = simulate_cluster(
            replace(chosen, leap=False),
            case.workload,
            cluster(num_replicas=engines, router=router),
            ours.ConstantCost(case.step_ticks),
        )
    return [(log.served(part), rows) for log, part, rows in zip(logs, run.runs, run.rows, strict=True)]
