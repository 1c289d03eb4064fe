"""Router ``vllm-dp`` beside the client and the coordinator of the installed vLLM.

A run with our router is replayed: the real coordinator's loop gets, in virtual time, what the engines counted at the end of every single
step (leaps are off), and the real client chooses the engine of each request, with what the coordinator has published until then. Some
loads are run a second time over vLLM's own schedulers, which count for themselves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import zmq
from vllm.v1.engine import EngineCoreOutputs, coordinator
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.metrics.stats import SchedulerStats

from fragmeter.sim import settings
from fragmeter.sim.cluster import ClusterRun, cluster, simulate_cluster
from fragmeter.sim.cluster.coordinator import Coordinator
from fragmeter.sim.cluster.routed import RoutedEngine
from fragmeter.sim.cluster.routing import VllmDataParallel
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.workload.workload import Workload

from .workloads import number_of_workloads

SECOND = 10**12
#: What engines counted: tick, engine, waiting, running, usage of the KV cache.
Report = tuple[int, int, int, int, float]


class Done(Exception):
    """Nothing is left to replay."""


class Replay:
    """The real client and coordinator over recorded events; also the poller, the sockets and the clock of the coordinator."""

    def __init__(self, run: ClusterRun, reports: list[Report], lock_step: bool) -> None:
        engines = len(run.runs)
        self.now, self.chosen, self._begun = 0, [], False
        self._lock_step, self._reports = lock_step, reports
        self._steps = {tick: step for step, tick in enumerate(sorted({report[0] for report in reports}))}
        self._arrivals = [*enumerate(run.workload.arrival_ticks.tolist())]
        self._finishes = sorted(
            (tick, int(row))
            for rows, part in zip(run.rows, run.runs, strict=True)
            for row, tick in zip(rows, request_times(part).finish_ticks, strict=True)
        )
        self._last = [(0, 0)] * engines
        self.client: Any = object.__new__(DPLBAsyncMPClient)
        self.client.core_engines = [bytes([number]) for number in range(engines)]
        self.client.lb_engines = [[0, 0, 0.0] for _ in range(engines)]
        self.client.engine_inflight, self.client.reqs_in_flight = Counter(), {}
        self.client.streaming_reqs, self.client.client_count, self.client.eng_start_index = set(), 1, 0

    def dispatched(self) -> list[int]:
        """The engine of each request."""
        with (
            mock.patch.multiple(
                coordinator,
                make_zmq_socket=self._socket,
                time=SimpleNamespace(time=self._time),
                set_process_title=mock.Mock(),
            ),
            mock.patch.object(coordinator.zmq, "Poller", lambda: self),
        ):
            real = coordinator.DPCoordinatorProc(len(self._last), enable_wave_coordination=self._lock_step)
            with pytest.raises(Done):
                real.process_input_socket("front", "output", "back")
        return self.chosen

    def _time(self) -> Fraction:
        # Long after 1970, on a whole millisecond.
        return 1000 + Fraction(self.now, SECOND)

    @contextmanager
    def _socket(self, path: str, **kwargs: Any) -> Iterator[Any]:
        socket = mock.Mock(recv=lambda: b"\x01")
        if path == "front":
            socket.send = self._published
        elif path == "output":
            socket.recv, self._output = self._received, socket
        yield socket

    def register(self, socket: Any, flags: int) -> None:
        """See ``poll``."""

    def poll(self, timeout: int) -> list[tuple[Any, int]]:
        """Let time pass up to the next report, at most by ``timeout`` milliseconds."""
        if not self._begun:
            # It publishes as it starts, before all reports.
            self._begun = True
            return []
        while self._reports and self._last[self._reports[0][1]] == self._reports[0][2:4]:
            # An engine reports when its counts change.
            self._reports.pop(0)
        until = self.now + timeout * SECOND // 1000
        reported = bool(self._reports) and self._reports[0][0] <= until
        self._pass(self._reports[0][0] if reported else until)
        return [(self._output, zmq.POLLIN)] if reported else []

    def _pass(self, until: int) -> None:
        """Requests that arrive by a tick, and those that finish before each of them."""
        while self._arrivals and self._arrivals[0][1] <= until:
            row, tick = self._arrivals.pop(0)
            while self._finishes and self._finishes[0][0] < tick:
                name = str(self._finishes.pop(0)[1])
                self.client.engine_inflight[self.client.reqs_in_flight.pop(name)] -= 1
            request = SimpleNamespace(
                request_id=str(row), resumable=False, data_parallel_rank=None, pooling_params=None
            )
            self.chosen.append(self.client.get_core_engine_for_request(request)[0])
        if not self._arrivals:
            raise Done
        self.now = until

    def _received(self) -> bytes:
        tick, engine, waiting, running, usage = self._reports.pop(0)
        self._last[engine] = waiting, running
        stats = SchedulerStats(running, waiting, kv_cache_usage=usage, step_counter=self._steps[tick])
        return msgspec.msgpack.encode(EngineCoreOutputs(engine_index=engine, scheduler_stats=stats))

    def _published(self, message: bytes) -> None:
        counts, _, _ = msgspec.msgpack.decode(message)
        if counts is not None:
            self.client.lb_engines = counts


@contextmanager
def recorded() -> Iterator[list[Report]]:
    """What engines count as each step begins; of ``vllm-real`` what vLLM's scheduler counts, and requests on their way to it."""
    reports, report = [], RoutedEngine.report

    def reported(engine: RoutedEngine) -> Any:
        found = report(engine)
        if found is not None and engine._begins:
            counts = found[2]
            core = getattr(engine.memory, "core", None)
            if core is not None:
                running, waiting = core.scheduler.get_request_counts()
                usage = core.scheduler.get_kv_cache_usage()
                counts = (waiting + len(engine._mailbox), running, usage)
            reports.append((found[0], engine.number, *counts))
        return found

    with mock.patch.object(RoutedEngine, "report", reported):
        yield reports


def load(seed: int, engines: int) -> Workload:
    """Bursts and Poisson arrivals, some of them at one tick or on a millisecond."""
    draw = random.Random(seed)
    count, rate = draw.randint(20, 120), engines * draw.choice((2, 6, 20))
    ticks, arrivals = 0, []
    for _ in range(count):
        gap = draw.choice((0, 1, 1, 1, 20)) * draw.expovariate(rate)
        ticks += round(gap * SECOND) if draw.random() < 0.8 else round(gap * 1000) * SECOND // 1000
        arrivals.append(ticks)
    outputs = np.array([draw.choice((1, draw.randint(1, 90))) for _ in range(count)])
    prompts = np.array([draw.randint(1, 400) for _ in range(count)])
    declared = outputs if draw.random() < 0.5 else outputs + 10
    return Workload(str(seed), np.array(arrivals), prompts, outputs, declared)


def served(seed: int, policy: str = "vllm-v1", **switches: Any) -> tuple[ClusterRun, list[Report], bool]:
    draw = random.Random(-1 - seed)
    engines, lock_step = draw.randint(2, 8), draw.random() < 0.3 and policy == "vllm-v1"
    chosen = {"model": "opt-13b", "gpu": "a100-40gb"}
    if lock_step:
        chosen = {"model": "mixtral-8x7b", "gpu": "h200", "data_parallel_size": engines, "enable_expert_parallel": True}
    limits = {
        "num_gpu_blocks_override": draw.choice((70, 100, 400)),
        "max_num_seqs": draw.choice((4, 16)),
        "max_num_batched_tokens": draw.choice((128, 512)),
        "max_model_len": 1000,
        "enable_prefix_caching": False,
        "outside_ms": 0.0,
    }
    with recorded() as reports:
        run = simulate_cluster(
            settings(policy=policy, **chosen, **limits, **switches),
            load(seed, engines),
            cluster(num_replicas=engines, router="vllm-dp"),
        )
    return run, reports, lock_step


def places(run: ClusterRun) -> list[int]:
    found = [0] * len(run.workload)
    for number, rows in enumerate(run.rows):
        for row in rows.tolist():
            found[row] = number
    return found


def differs(seed: int) -> bool:
    """Whether a request goes elsewhere than by vLLM."""
    single, reports, lock_step = served(seed, leap=False)
    leaping = served(seed)[0]
    theirs = Replay(single, reports, lock_step).dispatched()
    return not places(single) == places(leaping) == theirs


def test_requests_go_where_vllms_client_sends_them():
    assert [seed for seed in range(8) if differs(seed)] == []


@pytest.mark.slow
@pytest.mark.parametrize("fifty", range(0, number_of_workloads(200), 50))
def test_two_hundred_loads_go_where_vllms_client_sends_them(fifty, record_property):
    differing = [seed for seed in range(fifty, fifty + 50) if differs(seed)]
    record_property(f"compared/loads of vllm-dp/{fifty}", [50, 0, len(differing)])
    assert differing == []


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_vllms_own_schedulers_count_alike(seed):
    real, reports, _ = served(seed, "vllm-real")
    theirs = Replay(real, reports, False).dispatched()
    ours, _, lock_step = served(seed)
    assert not lock_step and places(ours) == places(real) == theirs


def without_increments(router: VllmDataParallel) -> None:
    router._known = [[*counts] for counts in router._coordinator._counts]


#: Wrong rules, each of which some of the loads notice.
PLANTED = {
    "fresh counts": (VllmDataParallel, "_load", lambda load: lambda self, number: without_increments(self) or load(self, number)),
    "no turns": (VllmDataParallel, "choose", lambda choose: lambda self, *given: (setattr(self, "_start", 0), choose(self, *given))[1]),
    "no requests in flight": (
        VllmDataParallel, "_load", lambda load: lambda self, number: sum(self._known[number][:2]),
    ),
    "200 ms": (Coordinator, "_wait", lambda wait: lambda self, now: (wait(self, now), setattr(self, "_due", self._due + 10**11))[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_rule_is_noticed(name):
    kind, method, wrong = PLANTED[name]
    with mock.patch.object(kind, method, wrong(getattr(kind, method))):
        assert any(map(differs, range(40)))
