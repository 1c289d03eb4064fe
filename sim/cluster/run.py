"""A workload served by several replicas, to the last request, and what it leaves.

All replicas live on one clock. Where the router looks at them, one process lets requests arrive and asks it, and the
engines' leaps are cut (``routed``); where it does not, who gets what is known beforehand, and every replica leaps as
if it were alone. Each replica numbers its requests for itself, in the order in which they arrive there, so that what
it leaves is a run like any other, of the requests that it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import numpy as np
import simpy
from simpy.core import URGENT

from ..content import Run as TokenRun
from ..content import TokenRuns
from ..cost import StepCost
from ..engine import Alarm, Engine
from ..errors import SettingError
from ..grouping import is_grouped, smallest_pools
from ..memory.prefix import BlockNames
from ..replica import Replica, build
from ..run import Run, check_fits, edges, finished, milestones, no_cycle_collection
from ..sequence import Sequence
from ..settings import Settings
from ..source import OpenLoop
from ..workload import Workload
from .config import Cluster
from .routed import Mailbox, RoutedEngine
from .routing import Router, router

#: Tokens of the blocks that a router compares prompts by, where a replica's own hold fewer.
LEAST_NAMED_TOKENS = 16
NOWHERE = -1


@dataclass(frozen=True)
class ClusterRun:
    """A run that is over.

    Attributes:
        settings, cluster, workload: What was asked.
        runs: What each replica did, by its number, with the requests that it was sent in the order in which they came.
            All end when the last one does.
        rows: The rows of the workload that these are, int64 [requests of the replica] each.
        smallest_pool_blocks: int64 [n], the smallest pool that can ever serve each request.
    """

    settings: Settings
    cluster: Cluster
    workload: Workload
    runs: tuple[Run, ...]
    rows: tuple[np.ndarray, ...]
    smallest_pool_blocks: np.ndarray

    @property
    def refused(self) -> np.ndarray:
        """bool [n]: requests that no replica's pool can ever hold; they were turned away before the router."""
        return self.smallest_pool_blocks > self.runs[0].replica.num_blocks

    @property
    def end_ticks(self) -> int:
        """When the last request was done."""
        return self.runs[0].book.end_ticks


class Sent:
    """The requests that a replica is sent, numbered as they come: what their prompts are made of.

    Attributes:
        rows: Their rows in the workload.
    """

    def __init__(self, workload: Workload, whole: TokenRuns | None) -> None:
        self.rows: list[int] = []
        self.may_share_prefixes = workload.may_share_prefixes
        self._whole = whole

    def token_runs(self) -> Sent:
        """Itself: it answers as ``TokenRuns`` does."""
        return self

    def runs(self, request: int) -> tuple[TokenRun, ...]:
        """The prompt of the replica's request of that number."""
        return self._whole.runs(self.rows[request])

    def output_runs(self, request: int) -> tuple[TokenRun, ...]:
        """Its output."""
        return self._whole.output_runs(self.rows[request])


def simulate_cluster(
    settings: Settings,
    workload: Workload,
    cluster: Cluster = Cluster(),
    step_cost: StepCost | None = None,
    progress: Callable[[int], None] | None = None,
) -> ClusterRun:
    """Serve a workload on several replicas, to the last request.

    Args:
        settings: Of every replica.
        step_cost: Used in place of the settings' own.
        progress: Told now and then how many requests have arrived.

    Raises:
        UserError: A request is longer than the model, a setting cannot be, or requests of several sequences, with
            parents under a policy that shares, or of users who wait for answers.
        SimulationFault: An invariant does not hold.
    """
    _check_separate(settings, workload)
    whole = workload.token_runs() if workload.may_share_prefixes else None
    sent = [Sent(workload, whole) for _ in range(cluster.size)]
    replicas = _replicas(settings, step_cost, sent)
    first = replicas[0]
    check_fits(workload, first.max_model_len)
    needed = smallest_pools(first.policy, first.block_size, workload, grouped=False)
    rows = np.flatnonzero(needed <= first.num_blocks)
    choose = _router(cluster, first, workload, whole)
    env = simpy.Environment(initial_time=0)
    serve = _serve_looking if choose.looks else _serve_as_split
    engines = serve(env, settings, workload, rows, choose, replicas, sent)
    with no_cycle_collection():
        _run(env, engines, workload, progress)
    end_ticks = max(engine.end_ticks for engine in engines)
    where = [np.array(part.rows, dtype=np.int64) for part in sent]
    runs = tuple(
        finished(settings, _part(workload, own), False, replica, engine.ledger, end_ticks, needed[own])
        for own, replica, engine in zip(where, replicas, engines, strict=True)
    )
    return ClusterRun(settings, cluster, workload, runs, tuple(where), needed)


def _check_separate(settings: Settings, workload: Workload) -> None:
    """Refuse what only a single replica serves."""
    remedy = "is for a single replica; leave out num_replicas and the like"
    if workload.users is not None:
        raise SettingError("max_concurrency", workload.users.max_concurrency, "users who wait for answers are for a single replica; leave it out")
    if workload.shares:
        raise SettingError("n", int(workload.n.max()), remedy)
    if is_grouped(settings, workload):
        field, value = ("parent", "given") if workload.dialogue is not None else ("shared_prefix_tokens", settings.shared_prefix_tokens)
        raise SettingError(field, value, remedy)


def _replicas(settings: Settings, step_cost: StepCost | None, sent: list[Sent]) -> list[Replica]:
    """A replica for each; they share one cost, which nobody changes."""
    first = build(settings, step_cost, sent[0])
    return [first, *(build(settings, first.cost, part) for part in sent[1:])]


def _router(cluster: Cluster, replica: Replica, workload: Workload, whole: TokenRuns | None) -> Router:
    size = max(replica.block_size, LEAST_NAMED_TOKENS)
    names = BlockNames(whole or workload.token_runs(), size) if cluster.router == "prefix-affine" else None
    most_blocks = replica.memory.capacity_slots // size
    return router(cluster.router, cluster.num_replicas, cluster, lambda row: names.of_prompt(row), most_blocks)


def _serve_as_split(
    env: simpy.Environment,
    settings: Settings,
    workload: Workload,
    rows: np.ndarray,
    choose: Router,
    replicas: list[Replica],
    sent: list[Sent],
) -> list[Engine]:
    """Engines each of which knows beforehand what it will be sent."""
    for row in rows.tolist():
        sent[choose.choose(row, (), 0)].rows.append(row)
    engines = []
    for part, replica in zip(sent, replicas, strict=True):
        own = _part(workload, np.array(part.rows, dtype=np.int64))
        source = OpenLoop(own, np.zeros(len(own), dtype=bool), replica.max_model_len)
        parts = replica.policy, replica.memory, replica.cost, edges(settings), settings.leap
        engines.append(Engine(env, source, *parts))
    return engines


def _serve_looking(
    env: simpy.Environment,
    settings: Settings,
    workload: Workload,
    rows: np.ndarray,
    choose: Router,
    replicas: list[Replica],
    sent: list[Sent],
) -> list[RoutedEngine]:
    """Engines to which the router sends requests as they arrive."""
    engines = [
        RoutedEngine(
            env, number, Mailbox(), replica.policy, replica.memory, replica.cost, edges(settings), settings.leap
        )
        for number, replica in enumerate(replicas)
    ]
    env.process(_arrive(env, workload, rows, replicas[0].max_model_len, choose, engines, sent))
    return engines


def _arrive(
    env: simpy.Environment,
    workload: Workload,
    rows: np.ndarray,
    max_model_len: int,
    choose: Router,
    engines: list[RoutedEngine],
    sent: list[Sent],
) -> Generator[simpy.Event, None, None]:
    """Requests arrive, each before anything else that happens at its tick, and are sent to a replica."""
    prompts, outputs, arrivals = workload.prompt_tokens, workload.output_tokens, workload.arrival_ticks
    limits = max_model_len - prompts if workload.max_tokens is None else workload.max_tokens
    columns = (column[rows].tolist() for column in (arrivals, prompts, outputs, limits))
    alarm, now = Alarm(env), env.now
    for row, ticks, *lengths in zip(rows.tolist(), *columns, strict=True):
        if ticks > now:
            alarm.callbacks = []
            env.schedule(alarm, URGENT, ticks - now)
            yield alarm
            now = ticks
        place = choose.choose(row, engines, now)
        sent[place].rows.append(row)
        engines[place].send(now, Sequence(len(sent[place].rows) - 1, *lengths))
    for engine in engines:
        engine.close(now)


def _part(workload: Workload, rows: np.ndarray) -> Workload:
    """Some requests, without what their prompts are made of."""
    columns = (getattr(workload, field) for field in ("arrival_ticks", "prompt_tokens", "output_tokens", "max_tokens"))
    return Workload(workload.name, *(None if column is None else column[rows] for column in columns))


def _run(
    env: simpy.Environment, engines: list[Engine], workload: Workload, progress: Callable[[int], None] | None
) -> None:
    if progress is not None:
        for tick in milestones(workload):
            env.run(until=tick)
            progress(int(np.searchsorted(workload.arrival_ticks, tick)))
    env.run(until=simpy.AllOf(env, [engine.process for engine in engines]))
    if progress is not None:
        progress(len(workload))
