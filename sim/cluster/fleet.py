"""The engines of a cluster on one clock: arrivals, and the routing of each."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import simpy
from simpy.events import URGENT

from ..engine.engine import Alarm, Engine
from ..engine.replica import Replica
from ..engine.run import edges
from ..engine.settings import Settings
from ..memory.accounting.ledger import Table
from ..spec import model
from ..workload.source import OpenLoop
from ..workload.workload import Workload
from .config import Cluster
from .disaggregated import TRANSFER, HandOver, Link, PrefillEngine
from .routed import Mailbox, RoutedEngine
from .routing import Router, decode_router
from .sent import Lengths, Sent, part_of


class Fleet:
    """The engines of a cluster, on one clock, about to serve.

    Args:
        rows: Rows of the workload that are served, int64.
        replicas, sent: Of each engine.
        choose: The router of requests that arrive.
    """

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        workload: Workload,
        rows: np.ndarray,
        replicas: list[Replica],
        sent: list[Sent],
        choose: Router,
    ) -> None:
        self.env = simpy.Environment(initial_time=0)
        self._settings, self._workload, self._rows = settings, workload, rows
        self._replicas, self._sent = replicas, sent
        self._lengths = Lengths(workload, replicas[0].max_model_len)
        self._hand_over: HandOver | None = None
        self.engines: Sequence[Engine]
        if not cluster.disaggregated and not choose.looks:
            self.engines = self._split(choose)
            return
        every = range(len(replicas))
        engines = self._disaggregated(cluster) if cluster.disaggregated else [*map(self._routed, every)]
        self.engines = engines
        self._arrive_at(engines[: cluster.num_arriving], choose)

    def _parts(self, number: int) -> tuple[Any, ...]:
        """What an engine serves with."""
        replica = self._replicas[number]
        return replica.policy, replica.memory, replica.cost, edges(self._settings), self._settings.leap

    def _routed(self, number: int) -> RoutedEngine:
        return RoutedEngine(self.env, number, Mailbox(), *self._parts(number))

    def _split(self, choose: Router) -> list[Engine]:
        """Engines each of which knows beforehand what it will be sent."""
        for row in self._rows.tolist():
            self._sent[choose.choose(row, (), 0)].add(row)
        engines = []
        for number, (part, replica) in enumerate(zip(self._sent, self._replicas, strict=True)):
            own = part_of(self._workload, np.array(part.rows, dtype=np.int64))
            source = OpenLoop(own, np.zeros(len(own), dtype=bool), replica.max_model_len)
            engines.append(Engine(self.env, source, *self._parts(number)))
        return engines

    def _disaggregated(self, cluster: Cluster) -> list[RoutedEngine]:
        """Engines that prefill, and then those that decode."""
        first, chosen = cluster.num_arriving, self._settings
        decoders = [self._routed(number) for number in range(first, cluster.size)]
        dtype = "fp16" if chosen.kv_cache_dtype == "auto" else chosen.kv_cache_dtype
        self._hand_over = HandOver(
            self._lengths,
            self._sent,
            decoders,
            decode_router(cluster),
            [Link(cluster.kv_transfer_bandwidth, cluster.kv_transfer_latency) for _ in range(first)],
            model(chosen.model).slot_bytes(dtype),
            to_come=int((self._workload.output_tokens[self._rows] > 1).sum()),
        )
        prefill = [PrefillEngine(self.env, number, self._hand_over, *self._parts(number)) for number in range(first)]
        return [*prefill, *decoders]

    def _arrive_at(self, engines: list[RoutedEngine], choose: Router) -> None:
        self.env.process(self._arrivals(engines, choose))

    def _arrivals(self, engines: list[RoutedEngine], choose: Router) -> Generator[simpy.Event, None, None]:
        """Requests arrive, each before anything else that happens at its tick, and are sent to a replica."""
        env, alarm, now = self.env, Alarm(self.env), int(self.env.now)
        arrivals = self._workload.arrival_ticks[self._rows].tolist()
        prefills = self._hand_over is not None
        for row, ticks in zip(self._rows.tolist(), arrivals, strict=True):
            if ticks > now:
                alarm.callbacks = []
                env.schedule(alarm, URGENT, ticks - now)
                yield alarm
                now = ticks
            place = choose.choose(row, engines, now)
            sequence = self._sent[place].number(row, self._lengths.sequence(row))
            if prefills:
                sequence.output_tokens = 1
            engines[place].expect(sequence)
            engines[place].send(now, sequence)
        for engine in engines:
            engine.close(now)

    def transfers(self) -> dict[str, np.ndarray]:
        """See ``ClusterRun``."""
        return Table(TRANSFER).columns() if self._hand_over is None else self._hand_over.columns()

    def parts(self, where: tuple[np.ndarray, ...]) -> list[Workload]:
        """The requests of every replica as they came to it, of rows ``where`` each."""
        if self._hand_over is None:
            return [part_of(self._workload, rows) for rows in where]
        first, moved = len(where) - len(self._hand_over.decoders), self.transfers()
        arrived = np.zeros(len(self._workload), dtype=np.int64)
        arrived[moved["row"]] = moved["end_ticks"]
        return [
            *(part_of(self._workload, rows, output_tokens=np.ones_like(rows)) for rows in where[:first]),
            *(part_of(self._workload, rows, arrival_ticks=arrived[rows]) for rows in where[first:]),
        ]
