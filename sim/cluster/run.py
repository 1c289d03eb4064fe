"""Runs a workload on several replicas to the last request, and returns the finished run.

If the router reads the state of the replicas, all share one clock: one process delivers the arrivals to it, and arrivals
end the engines' leaps (``routed``). If it does not, the replica of each request is known in advance, and the replicas run one
after another, each as if it were alone; that is faster, because one replica's data fit the processor's caches. Engines that
share experts compute their steps together (``lock_step``). The compiled core runs the replicas of an open loop that share nothing,
if it has their settings (``routed_core``).

Each replica numbers its requests in their order of arrival there. Where replicas share nothing, the result of each is that
of a single replica with these requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import simpy
from simpy.events import URGENT

from ..config.cluster import Cluster
from ..config.schedule import FleetSchedule, Lifetime
from ..config.settings import Settings, default_of
from ..config.unread import refuse_unread, refuse_unread_in_cluster
from ..cost import StepCost
from ..engine.core import CoreEngine, serves
from ..engine.engine import Alarm, Engine
from ..engine.grouping import is_grouped, smallest_pools
from ..engine.guard import of_plugins
from ..engine.leap_check import NONE, leaps_to_check, require_same
from ..engine.replica import build
from ..engine.run import (
    as_delivered,
    check_fits,
    finished,
    milestones,
    no_cycle_collection,
    require_served,
    with_leaps,
)
from ..memory.accounting.kv_groups import FULL, SLIDING, GroupClass
from ..memory.accounting.ledger import Table
from ..memory.prefix import Chains
from ..memory.prefix.tiers import FleetTiers
from ..policy.options import either
from ..policy.registry import POLICIES
from ..policy.server import CONSUMER, PRODUCER
from ..runs.cluster_run import ClusterRun
from ..runs.replica import Replica
from ..spec import gpu, model
from ..types.errors import NotSimulated, SettingError
from ..types.optional import not_none
from ..types.sequence import Sequence as Prefilled
from ..workload.closed_loop import ClosedLoop, Maker
from ..workload.content import TokenRuns
from ..workload.source import OpenLoop
from ..workload.workload import Workload
from .disaggregated import TRANSFER, KVTransfers, Link, PrefillEngine
from .lock_step import Barrier, LockStepEngine, LockStepPrefillEngine
from .routed import Mailbox, RoutedEngine
from .routed_core import Boundaries, RoutedCoreEngine
from .routing import Router, decode_router, router
from .sent import Lengths, Sent, part_of
from .users import AnsweredMailbox, UserRequests, thinking

#: Engines that a router sends requests to.
Engines = Sequence[RoutedEngine | RoutedCoreEngine]


class Fleet:
    """The engines of a cluster, before the run.

    Args:
        rows: Rows of the workload that are served, int64.
        replicas, sent: Replica and requests of each engine.
        choose: The router of arriving requests.
        schedule: Replicas that take requests over time; None if all always do.
        check_leaps: As of ``Engine``.
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
        schedule: FleetSchedule | None = None,
        check_leaps: int = NONE,
    ) -> None:
        self._schedule, self._check_leaps = schedule, check_leaps
        self.env = simpy.Environment(initial_time=0)
        self._settings, self._workload, self._rows = settings, workload, rows
        self._replicas, self._sent = replicas, sent
        self._lengths = Lengths(workload.sequences, replicas[0].max_model_len)
        self._counts, self._first = workload.num_sequences.tolist(), workload.first_sequences.tolist()
        self._request_of = np.repeat(np.arange(len(workload)), workload.num_sequences).tolist()
        self._kv_transfers: KVTransfers | None = None
        self._users: UserRequests | None = None
        self._boundaries: Boundaries | None = None
        self.engines: Sequence[Engine | CoreEngine | RoutedCoreEngine]
        self._barriers = self._lock_steps()
        apart = not (cluster.disaggregated or self._barriers or workload.users or _shares(settings))
        # All replicas have the same settings.
        self._by_core = apart and not choose.follows and serves(settings, replicas[0])
        if apart and not choose.looks:
            self.engines = self._split(choose)
            return
        engines: Engines
        if self._by_core:
            self._boundaries = boundaries = Boundaries()
            parts, count = (settings.edges, boundaries), int(workload.num_sequences[rows].sum())
            engines = [RoutedCoreEngine(self.env, place, each, *parts, count) for place, each in enumerate(replicas)]
        elif cluster.disaggregated:
            engines = self._disaggregated(cluster)
        else:
            engines = [*map(self._routed, range(len(replicas)))]
        self.engines = engines
        self._arrive_at(engines[: cluster.num_arriving] if cluster.disaggregated else engines, choose)

    def _parts(self, number: int) -> tuple[Any, ...]:
        """Arguments of an engine."""
        replica = self._replicas[number]
        leaps = self._settings.leap, self._check_leaps
        return replica.policy, replica.memory, replica.cost, self._settings.edges, *leaps

    def _lock_steps(self) -> list[Barrier]:
        """The barrier of each replica, one for all engines that share experts; none where engines share nothing."""
        count, size, cost = len(self._replicas), self._settings.data_parallel_size, self._replicas[0].cost
        if size == 1:
            return []
        stages = self._replicas[0].policy.stages
        barriers = [Barrier(self.env, size, count, cost, stages) for _ in range(count // size)]
        return [barriers[number // size] for number in range(count)]

    def _routed(self, number: int) -> RoutedEngine:
        mailbox = Mailbox() if self._workload.users is None else AnsweredMailbox(partial(self._answered, number))
        parts = self.env, number, mailbox, *self._parts(number)
        return LockStepEngine(self._barriers[number], *parts) if self._barriers else RoutedEngine(*parts)

    def _prefilling(self, number: int, transfers: KVTransfers) -> PrefillEngine:
        parts = self.env, number, partial(self._prefilled, transfers), *self._parts(number)
        return LockStepPrefillEngine(self._barriers[number], *parts) if self._barriers else PrefillEngine(*parts)

    def _split(self, choose: Router) -> list[Engine | CoreEngine]:
        """Engines with requests that are assigned in advance."""
        arrivals = self._workload.arrival_ticks[self._rows].tolist()
        for row, now in zip(self._rows.tolist(), arrivals, strict=True):
            place = choose.choose(self._first[row], now, self._taking_requests(now))
            for sequence in self._sequences_of(row):
                self._sent[place].add(sequence)
        engines: list[Engine | CoreEngine] = []
        sequences = self._workload.sequences
        for number, (part, replica) in enumerate(zip(self._sent, self._replicas, strict=True)):
            env, own = simpy.Environment(initial_time=0), part_of(sequences, np.array(part.rows, dtype=np.int64))
            refused = np.zeros(len(own), dtype=bool)
            if self._by_core:
                engines.append(CoreEngine(env, own, refused, replica, self._settings.edges))
            else:
                engines.append(Engine(env, OpenLoop(own, refused, replica.max_model_len), *self._parts(number)))
        return engines

    def _taking_requests(self, now: int) -> Sequence[int] | None:
        """Indices of the replicas that the router may choose at this time; None without a schedule, when it may choose any."""
        return None if self._schedule is None else self._schedule.taking_requests(now)

    def _disaggregated(self, cluster: Cluster) -> Engines:
        """Prefill engines, then decode engines."""
        first, last = cluster.num_arriving, self._replicas[-1]
        decoders = [*map(self._routed, range(first, cluster.size))]
        self._kv_transfers = KVTransfers(
            Lengths(self._workload.sequences, last.max_model_len),
            self._sent,
            decoders,
            decode_router(cluster, bool(self._barriers)),
            [Link(cluster.kv_transfer_bandwidth, cluster.kv_transfer_latency) for _ in range(first)],
            _prompt_bytes(self._settings, self._replicas[0]),
            remaining=int((self._workload.output_tokens[self._rows] > 1).sum()),
        )
        return [*(self._prefilling(number, self._kv_transfers) for number in range(first)), *decoders]

    def _sequences_of(self, row: int) -> range:
        """Indices of the sequences of the request at ``row``; a request with ``n`` samples has ``n`` of them."""
        return range(self._first[row], self._first[row] + self._counts[row])

    def _arrive_at(self, engines: Engines, choose: Router) -> None:
        choose.watch(engines)
        if self._workload.users is None:
            self.env.process(self._arrivals(engines, choose))
            return
        refused = np.ones(len(self._workload), dtype=bool)
        refused[self._rows] = False
        self._users = UserRequests(
            self.env,
            ClosedLoop(self._workload, refused, Maker(self._workload, self._replicas[0].max_model_len)),
            len(self._rows),
            partial(self._send, engines, choose),
            partial(self._close, engines),
        )

    def _answered(self, replica: int, finished: list[int], now: int) -> None:
        """Sequences of these numbers have finished on a replica."""
        rows = self._sent[replica].rows
        not_none(self._users).answer([self._request_of[rows[number]] for number in finished], now)

    def _prefilled(self, transfers: KVTransfers, replica: int, sequence: Prefilled, now: int) -> int | None:
        """See ``PrefillEngine``; an output of one token is an answer."""
        until = transfers(replica, sequence, now)
        if until is None and self._users is not None:
            self._answered(replica, [sequence.index], now)
        return until

    def _arrivals(self, engines: Engines, choose: Router) -> Generator[simpy.Event, None, None]:
        """Send each request to a replica at its arrival, before all other events of that tick."""
        env, alarm, now = self.env, Alarm(self.env), int(self.env.now)
        arrivals = self._workload.arrival_ticks[self._rows].tolist()
        for row, ticks in zip(self._rows.tolist(), arrivals, strict=True):
            if ticks > now:
                alarm.callbacks = []
                env.schedule(alarm, URGENT, ticks - now)
                yield alarm
                now = ticks
            self._send(engines, choose, row, now)
        self._close(engines, now)

    def _send(self, engines: Engines, choose: Router, row: int, now: int) -> None:
        """Send all sequences of a request to a replica."""
        if self._boundaries is not None:
            self._boundaries.advance(now)
        place = choose.choose(self._first[row], now, self._taking_requests(now))
        for number in self._sequences_of(row):
            sequence = self._sent[place].number(number, self._lengths.sequence(number))
            if self._kv_transfers is not None:
                sequence.output_tokens = sequence.max_tokens = 1
            engines[place].expect(sequence)
            engines[place].send(now, sequence)

    def _close(self, engines: Engines, now: int) -> None:
        for engine in engines:
            engine.close(now)

    def transfers(self) -> dict[str, np.ndarray]:
        """See ``ClusterRun``."""
        return Table(TRANSFER).columns() if self._kv_transfers is None else self._kv_transfers.columns()

    @property
    def sent_ticks(self) -> np.ndarray:
        """When each request was sent to the router, int64 [n]."""
        return self._workload.arrival_ticks if self._users is None else self._users.sent()

    def where(self) -> tuple[np.ndarray, ...]:
        """Rows of the requests of each replica, in the order in which they came."""
        request_of = np.array(self._request_of, dtype=np.int64)
        rows = (request_of[np.array(part.rows, dtype=np.int64)] for part in self._sent)
        # The sequences of a request come together.
        return tuple(each[np.diff(each, prepend=-1) != 0] for each in rows)

    def parts(self, where: tuple[np.ndarray, ...]) -> list[Workload]:
        """The requests of every replica as they came to it, of rows ``where`` each."""
        sent = self.sent_ticks
        if self._kv_transfers is None:
            return [part_of(self._workload, rows, sent[rows]) for rows in where]
        first, moved = len(where) - len(self._kv_transfers.decoders), self.transfers()
        arrived = np.zeros(len(self._workload), dtype=np.int64)
        arrived[moved["row"]] = moved["end_ticks"]
        return [
            *(part_of(self._workload, rows, sent[rows], np.ones_like(rows)) for rows in where[:first]),
            *(part_of(self._workload, rows, arrival_ticks=arrived[rows]) for rows in where[first:]),
        ]

    def run(self, progress: Callable[[int], None] | None) -> None:
        """Run all engines to their ends; see ``simulate_cluster``."""
        workload, env = self._workload, self.env
        if all(engine.env is not env for engine in self.engines):
            served = 0
            for engine, rows in zip(self.engines, self.where(), strict=True):
                if progress is not None:
                    progress(served)
                engine.env.run(until=engine.process)
                served += len(rows)
        else:
            for tick in () if progress is None else milestones(workload):
                env.run(until=tick)
                not_none(progress)(int(np.searchsorted(workload.arrival_ticks, tick)))
            env.run(until=simpy.AllOf(env, [engine.process for engine in self.engines]))
        if progress is not None:
            progress(len(workload))


#: Tokens of the blocks that a router compares prompts by, where a replica's own hold fewer.
LEAST_NAMED_TOKENS = 16


@of_plugins
def simulate_cluster(
    settings: Settings,
    workload: Workload,
    cluster: Cluster = Cluster(),
    step_cost: StepCost | None = None,
    progress: Callable[[int], None] | None = None,
    schedule: FleetSchedule | None = None,
    decode_cost: StepCost | None = None,
) -> ClusterRun:
    """Serve a workload on several replicas, to the last request.

    Args:
        settings: Settings of every replica.
        step_cost: Replaces the cost model of the settings.
        progress: Called now and then with the number of requests that have arrived, or, of replicas that run one after another,
            that are served.
        schedule: Sizes of the fleet over time; the cluster's size is then the first of them.
        decode_cost: Of the replicas of a ``Pair`` that only decode, in place of that of their settings.

    Raises:
        UserError: A request is longer than the model, a setting cannot be or would not be read, or requests of several
            sequences or with parents under a policy that shares blocks.
        SimulationFault: An invariant does not hold.
    """
    which, stepped = leaps_to_check(settings), None
    if which != NONE:
        slow, costs = replace(settings, core=False), (step_cost, decode_cost)
        stepped = _simulate(slow, workload, cluster, costs, None, schedule, which)
    with with_leaps(None if stepped is None else stepped.runs[0]):
        run = _simulate(settings, workload, cluster, (step_cost, decode_cost), progress, schedule, NONE)
    for one, other in zip(run.runs, () if stepped is None else stepped.runs, strict=stepped is not None):
        require_same(one.log, other.log, one.replica.policy)
    return run


def _simulate(
    settings: Settings,
    workload: Workload,
    cluster: Cluster,
    costs: tuple[StepCost | None, StepCost | None],
    progress: Callable[[int], None] | None,
    schedule: FleetSchedule | None,
    check_leaps: int,
) -> ClusterRun:
    """See ``simulate_cluster``; ``costs`` are its two, and ``check_leaps`` is that of ``Engine``."""
    decodes = cluster.decode_settings(settings)
    _check_separate(settings, workload)
    _check_disaggregated(settings, cluster, workload)
    _check_engines(settings, cluster, schedule)
    refuse_unread(settings, workload)
    refuse_unread_in_cluster(cluster, workload)
    if schedule is not None:
        schedule = _changing(cluster, schedule)
    arriving = cluster.num_arriving if schedule is None else len(schedule.lifetimes)
    one = build(settings, costs[0])
    outside = one.outside_ticks
    asked, workload = workload, thinking(as_delivered(workload, one))
    whole = workload.sequences.token_runs()
    sent = [Sent(workload.sequences, whole) for _ in range(arriving + (cluster.decode_replicas or 0))]
    replicas = _replicas(settings, cluster, (one.cost, costs[1]), sent, arriving)
    first = replicas[0]
    check_fits(workload, min(first.max_model_len, replicas[-1].max_model_len))
    needed = smallest_pools(first.policy, first.block_size, workload, grouped=False)
    decoding = needed if decodes is settings else _needed_to_decode(replicas[-1], workload)
    rows = np.flatnonzero(needed <= first.num_blocks)
    choose = _router(cluster, arriving, first, workload, whole, settings.data_parallel_size > 1)
    fleet = Fleet(settings, cluster, workload, rows, replicas, sent, choose, schedule, check_leaps)
    with no_cycle_collection():
        fleet.run(progress)
    end_ticks = int(max(engine.end_ticks for engine in fleet.engines))
    where = fleet.where()
    if workload.users is not None:
        asked = replace(asked, arrival_ticks=fleet.sent_ticks - outside)
    runs = []
    for number, (own, part) in enumerate(zip(where, fleet.parts(where), strict=True)):
        of_side = (settings, needed) if number < arriving else (decodes, decoding)
        engine, chosen, blocks = fleet.engines[number], *of_side
        runs.append(finished(chosen, part, False, replicas[number], engine.ledger, end_ticks, blocks[own]))
    for run in runs:
        require_served(run)
    return ClusterRun(settings, cluster, asked, tuple(runs), where, needed, fleet.transfers(), schedule)


def _changing(cluster: Cluster, schedule: FleetSchedule) -> FleetSchedule | None:
    """The schedule of a cluster; None if its size is constant."""
    if cluster.disaggregated:
        remedy = "cannot be combined with a schedule of sizes; leave it out"
        raise SettingError("prefill_replicas", cluster.prefill_replicas, remedy)
    if cluster.num_replicas != schedule.sizes[0]:
        remedy = f"the schedule begins with {schedule.sizes[0]}; give that"
        raise SettingError("num_replicas", cluster.num_replicas, remedy)
    constant = all(life == Lifetime(0, 0, None) for life in schedule.lifetimes)
    return None if constant else schedule


def _check_separate(settings: Settings, workload: Workload) -> None:
    """Refuse workloads that need a single replica."""
    reason, remedy = "needs a single replica", "leave out num_replicas, prefill_replicas and decode_replicas"
    if is_grouped(settings, workload) and workload.shares:
        reason = f"samples share blocks under {settings.policy}, which {reason}"
        raise NotSimulated("n", int(workload.num_sequences.max()), reason, remedy)
    if is_grouped(settings, workload) and workload.dialogue is not None:
        raise NotSimulated("parent", "given", reason, remedy)
    limits = settings.policy_options.queue_limits
    for name, limit in zip(("max_num_queued_reqs", "max_num_queued_tokens"), limits, strict=True):
        if limit is not None:
            raise NotSimulated(name, limit, reason, remedy)
    if (times := settings.value("api_server")) is not None:
        raise NotSimulated("api_server", times, "needs a single engine")
    if prefix := settings.policy_options.pinned_tokens:
        raise NotSimulated("shared_prefix_tokens", prefix, reason, remedy)


def _check_disaggregated(settings: Settings, cluster: Cluster, workload: Workload) -> None:
    """Refuse what cannot continue a prefill on another replica."""
    if not cluster.disaggregated:
        return
    if workload.shares:
        reason = (
            "cannot be combined with prefill_replicas and decode_replicas: vLLM's NixlConnector names the blocks of one sample"
            " to all, and frees them as the first has read them"
        )
        raise NotSimulated("n", int(workload.num_sequences.max()), reason)
    if not settings.kind.disaggregates:
        able = either(name for name, kind in POLICIES.items() if kind.disaggregates)
        remedy = f"{settings.policy} cannot go on from a prompt computed elsewhere; take {able}"
        raise SettingError("prefill_replicas", cluster.prefill_replicas, remedy)
    name = "decode_context_parallel_size"
    for side in (settings, cluster.decode_settings(settings)):
        value, ranks = side.value(name), side.tensor_parallel_size
        if value == default_of(name):
            continue
        # ``VllmConfig`` of vLLM 0.33, with a NixlConnector.
        if value != ranks:
            raise SettingError(
                name, value, f"must be tensor_parallel_size = {ranks} where prompts are computed elsewhere"
            )
        if not model(side.model).latent:
            remedy = (
                "must be 1 where prompts are computed elsewhere: vLLM sends divided KV of latent attention (MLA) alone"
            )
            raise SettingError(name, value, remedy)


def _check_engines(settings: Settings, cluster: Cluster, schedule: FleetSchedule | None) -> None:
    """Refuse a part of the engines that share experts."""
    engines, sizes = settings.data_parallel_size, {"num_replicas": cluster.num_replicas}
    if cluster.disaggregated:
        sizes = {"prefill_replicas": cluster.num_arriving, "decode_replicas": cluster.size - cluster.num_arriving}
    for field, size in sizes.items():
        if size % engines:
            remedy = f"must be a multiple of data_parallel_size {engines}: so many engines share the experts"
            raise SettingError(field, size, remedy)
    if schedule is not None and engines > 1:
        remedy = "cannot be combined with a schedule of sizes: no engine leaves those that share its experts"
        raise SettingError("data_parallel_size", engines, remedy)


def _shares(settings: Settings) -> bool:
    """Whether replicas have a tier of the prefix cache together."""
    found = settings.policy_options.offloading
    return found is not None and any(tier.shared for tier in found.tiers)


def _replicas(
    settings: Settings,
    cluster: Cluster,
    costs: tuple[StepCost, StepCost | None],
    sent: list[Sent],
    prefilling: int,
) -> list[Replica]:
    """The replicas, of which the first ``prefilling`` prefill. Those with the same settings share one cost model, which is immutable:
    the first of ``costs``, or of a ``Pair``'s decode replicas the second, or their settings' own."""
    build_one = partial(build, fleet=FleetTiers() if _shares(settings) else None)
    build_first = partial(build_one, kv_role=PRODUCER if cluster.disaggregated else None)
    first = build_first(settings, costs[0], sent[0])
    own, decode_cost = cluster.decode_settings(settings), costs[0] if type(cluster) is Cluster else costs[1]
    # Where requests only decode, their prompts come from elsewhere: nothing is cached, on the GPU or on the host.
    offloading = ("kv_offloading_size", "kv_offloading_backend", "kv_transfer_config")
    options = tuple((name, value) for name, value in own.options if name not in offloading)
    decodes = replace(own, enable_prefix_caching=False, options=options)
    found = [first, *(build_first(settings, first.cost, part) for part in sent[1:prefilling])]
    for part in sent[prefilling:]:
        found.append(build_one(decodes, decode_cost, part, kv_role=CONSUMER))
        decode_cost = found[-1].cost
    return found


def _needed_to_decode(replica: Replica, workload: Workload) -> np.ndarray:
    """As ``smallest_pools``, of a decode replica with settings of its own, which must hold every request.

    Raises:
        SettingError: It cannot.
    """
    needed = smallest_pools(replica.policy, replica.block_size, workload, grouped=False)
    if needed.max(initial=0) > replica.num_blocks:
        remedy = f"a request needs {int(needed.max())} blocks where it decodes; give the decode replicas as many"
        raise SettingError("num_gpu_blocks_override", replica.num_blocks, remedy)
    return needed


def _prompt_bytes(settings: Settings, replica: Replica) -> Callable[[int], int]:
    """Bytes of the KV of a prompt of so many tokens that is sent, over all ranks: its tokens in layers that all keep every token, a
    drafter's too; else the whole blocks of each KV group that the next token needs, as NixlConnector sends them
    (``get_exchange_clipped_blocks``)."""
    shape, layout, ranks = model(settings.model), replica.layout, settings.tensor_parallel_size
    copies = 1 if shape.has_vectors else ranks
    if layout is not None:
        classes, page_bytes = replica.policy.groups.classes(replica.block_size), replica.page_bytes * copies
        return lambda tokens: page_bytes * sum(_sent_blocks(each, tokens) for each in classes)
    dtype = settings.kind.kv_dtype(shape, gpu(settings.gpu), settings.kv_cache_dtype)
    drafts = settings.policy_options.speculative
    drafter = None if drafts is None else drafts.drafter(shape)
    slot_bytes = shape.slot_bytes(dtype) + (0 if drafter is None else drafter.slot_bytes(dtype))
    return lambda tokens: tokens * slot_bytes


def _sent_blocks(groups: GroupClass, tokens: int) -> int:
    """Blocks of the groups of a class that are sent of a prompt: of a window one more than it fills, of a state its last one."""
    blocks = -(-tokens // groups.block_size)
    if groups.kind == SLIDING:
        blocks = min(blocks, -(-groups.window_tokens // groups.block_size) + 1)
    return groups.number * (blocks if groups.kind in (FULL, SLIDING) else 1)


def _router(
    cluster: Cluster, count: int, replica: Replica, workload: Workload, whole: TokenRuns, lock_step: bool
) -> Router:
    """The router of arriving requests."""
    size = max(replica.block_size, LEAST_NAMED_TOKENS)
    names_of: Callable[[int], list[int]] = _nameless
    if cluster.router == "prefix-affine":
        names_of = Chains(whole, size).prompt_names
    most_blocks = replica.memory.capacity_slots // size
    return router(cluster.router, count, cluster, names_of, most_blocks, lock_step)


def _nameless(row: int) -> list[int]:
    """Names for a router that compares no prompts."""
    return []
