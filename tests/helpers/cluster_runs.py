"""Clusters, served the cases of single replicas, and what a router saw of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any
from unittest import mock

import simpy

from engine_runs import cached_if_known, settings_of, times_of, workload_of
from fragmeter.sim.cluster import Cluster, ClusterRun, FleetSchedule, cluster, simulate_cluster
from fragmeter.sim.cluster import run as cluster_run
from fragmeter.sim.cluster.routed import RoutedEngine
from fragmeter.sim.cluster.routing import Router
from fragmeter.sim.policy.static import FasterTransformer
from fragmeter.sim.workload.users import Users
from same_runs import same
from strategies import Case

ROUTERS = ("round-robin", "least-outstanding-tokens", "kv-aware", "prefix-affine")
#: Thresholds at which a few short requests are enough for every rule of prefix-affine.
TIGHT = {"balance_abs_threshold": 1, "balance_rel_threshold": 1.2, "cache_threshold": 0.2}


def serve_cluster(
    policy: str,
    case: Case,
    num_replicas: int,
    router: str,
    looks: bool | None = None,
    schedule: FleetSchedule | None = None,
    **switches: Any,
) -> ClusterRun:
    """Run a case on a cluster; ``looks`` says whether its router asks the replicas, where it need not."""
    chosen = settings_of(policy, case.pool, case.limits, **(cached_if_known(policy, case) | switches))
    work = workload_of(case.requests, case.limits.max_model_len, case.content)
    chosen_cluster = cluster(num_replicas=num_replicas, router=router, **TIGHT)
    longest = mock.patch.object(FasterTransformer, "max_batch_tokens", case.limits.ft_max_tokens)
    with longest, asking(looks), unrefused():
        return simulate_cluster(chosen, work, chosen_cluster, case.cost, schedule=schedule)


def serve_apart(
    policy: str,
    case: Case,
    prefill_replicas: int = 1,
    decode_replicas: int = 1,
    window: tuple[int, int] | None = None,
    link: dict[str, float] | None = None,
    users: Users | None = None,
    **switches: Any,
) -> ClusterRun:
    """Run a case with prefill and decode on different replicas; ``link`` and routers are settings of the cluster."""
    chosen = settings_of(policy, case.pool, case.limits, window, **(cached_if_known(policy, case) | switches))
    work = replace(workload_of(case.requests, case.limits.max_model_len, case.content), users=users)
    chosen_cluster = cluster(
        prefill_replicas=prefill_replicas, decode_replicas=decode_replicas, **TIGHT, **(link or {})
    )
    with unrefused():
        return simulate_cluster(chosen, work, chosen_cluster, case.cost)


@contextmanager
def unrefused() -> Iterator[None]:
    """A router may have thresholds that it does not read, and one replica may be behind any router."""
    with mock.patch.object(cluster_run, "refuse_unread_in_cluster"):
        yield


@contextmanager
def asking(looks: bool | None) -> Iterator[None]:
    """Routers that need not look at the replicas look at them all the same."""
    make = cluster_run.router

    def made(*parts: Any) -> Any:
        router = make(*parts)
        router.looks = router.looks if looks is None else looks
        return router

    with mock.patch.object(cluster_run, "router", made):
        yield


def same_cluster(one: ClusterRun, other: ClusterRun) -> None:
    """Everything that two runs of a cluster say is equal, to the last tick."""
    assert [rows.tolist() for rows in one.rows] == [rows.tolist() for rows in other.rows]
    assert one.refused.tolist() == other.refused.tolist()
    for run, counterpart in zip(one.runs, other.runs, strict=True):
        same(run, counterpart)


def all_times(run: ClusterRun) -> dict[int, tuple[int, ...]]:
    """As ``times_of``, by row of the workload."""
    return {
        int(rows[index]): times
        for rows, part in zip(run.rows, run.runs, strict=True)
        for index, times in times_of(part).items()
    }


class Watch(simpy.Environment):
    """A clock that adds up, from event to event, how many requests its engines hold."""

    engines: list[RoutedEngine]
    request_ticks = 0

    def __init__(self, initial_time: int) -> None:
        super().__init__(initial_time)
        self.engines = []

    def step(self) -> None:
        before, held = self.now, sum(engine.num_requests for engine in self.engines)
        super().step()
        if self.engines:
            self.request_ticks += held * (self.now - before)


@contextmanager
def watched() -> Iterator[list[Watch]]:
    """The clocks of the clusters that are served meanwhile."""
    clocks: list[Watch] = []
    begin = RoutedEngine.__init__

    def decode_step(initial_time: int) -> Watch:
        clocks.append(Watch(initial_time))
        return clocks[-1]

    def registered(engine: RoutedEngine, env: Watch, *parts: Any) -> None:
        begin(engine, env, *parts)
        env.engines.append(engine)

    with (
        mock.patch.object(cluster_run.simpy, "Environment", decode_step),
        mock.patch.object(RoutedEngine, "__init__", registered),
    ):
        yield clocks


#: Chooses for a row, given requests, tokens and slots of each replica, among some of them.
Scan = Callable[[int, list[tuple[int, int, int]], Sequence[int]], int]


def scan(name: str, *parts: Any) -> Scan | None:
    """The rule of a router as it is written, over all that it could see; None if it looks at nothing. The arguments are those of
    ``routing.router``."""
    if name == "round-robin":
        return None
    if name == "prefix-affine":
        return _Records(*parts[:4]).choose
    column = {"least-outstanding-tokens": 1, "kv-aware": 2}[name]
    return lambda row, seen, among: min(among, key=lambda number: seen[number][column])


class _Records:
    """prefix-affine with one record a replica, each of which is searched."""

    def __init__(
        self, num_replicas: int, thresholds: Cluster, names_of: Callable[[int], list[int]], most_blocks: int
    ) -> None:
        self.records: list[list[int]] = [[] for _ in range(num_replicas)]
        self.thresholds, self.names_of, self.most_blocks = thresholds, names_of, most_blocks

    def choose(self, row: int, seen: list[tuple[int, int, int]], among: Sequence[int]) -> int:
        names, limits, records = self.names_of(row), self.thresholds, self.records
        loads = {number: seen[number][0] for number in among}
        known = {number: len([*takewhile(records[number].__contains__, names)]) for number in among}
        uneven = max(loads.values()) - min(loads.values()) > limits.balance_abs_threshold
        if uneven and max(loads.values()) > min(loads.values()) * limits.balance_rel_threshold:
            place = min(among, key=loads.__getitem__)
        elif max(known.values()) > limits.cache_threshold * len(names):
            place = min(among, key=lambda number: (-known[number], loads[number]))
        else:
            place = min(among, key=lambda number: (len(records[number]), loads[number]))
        # The least recently used ones are first.
        kept = [name for name in records[place] if name not in names] + names[::-1]
        records[place] = kept[max(0, len(kept) - self.most_blocks) :]
        return place


class Views:
    """What routers saw: of every request its row and, of each replica, requests, tokens, and slots taken; and whether they chose
    as one that reads all replicas for each request does."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[tuple[int, int, int]]]] = []
        self.differences: list[tuple[int, int, int]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Routers that are made meanwhile tell."""
        make, make_decoding = cluster_run.router, cluster_run.decode_router

        def made(*parts: Any) -> Router:
            return self._noting(make(*parts), scan(*parts))

        def made_decoding(chosen: Cluster, *parts: Any) -> Router:
            return self._noting(make_decoding(chosen, *parts), scan(chosen.decode_router))

        with (
            mock.patch.object(cluster_run, "router", made),
            mock.patch.object(cluster_run, "decode_router", made_decoding),
        ):
            yield

    def _noting(self, router: Any, scanned: Scan | None) -> Router:
        watch, choose, watched = router.watch, router.choose, []

        def watching(replicas: list[RoutedEngine]) -> None:
            watched[:] = replicas
            watch(replicas)

        def noting(row: int, now: int, among: Any = None) -> int:
            loads = [(r.num_requests, r.outstanding_tokens(now), r.kv_tokens(now)) for r in watched]
            self.seen.append((row, loads))
            place = choose(row, now, among)
            other = scanned(row, loads, among or range(len(loads))) if scanned else place
            if place != other:
                self.differences.append((row, place, other))
            return place

        router.watch, router.choose = watching, noting
        return router
