"""A workload served by several replicas, to the last request, and what it leaves.

All replicas live on one clock. Where the router looks at them, one process lets requests arrive and asks it, and the
engines' leaps are cut (``routed``); where it does not, each request's replica is known beforehand, and every replica
leaps as if it were alone. Each replica numbers its requests for itself, in the order in which they arrive there, so
that what it leaves is a run like any other, of the requests that it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import simpy

from ..cost import StepCost
from ..engine.engine import Engine
from ..engine.grouping import is_grouped, pinned_tokens, smallest_pools
from ..engine.replica import Replica, build
from ..engine.run import Run, check_fits, finished, milestones, no_cycle_collection
from ..engine.settings import Settings
from ..engine.unread import refuse_unread, refuse_unread_in_cluster
from ..memory.prefix import Chains
from ..policy.options import either
from ..policy.registry import POLICIES, policy
from ..types.errors import SettingError
from ..workload.content import TokenRuns
from ..workload.users import Users
from ..workload.workload import Workload
from .config import Cluster
from .fleet import Fleet
from .routing import Router, router
from .sent import Sent

#: Tokens of the blocks that a router compares prompts by, where a replica's own hold fewer.
LEAST_NAMED_TOKENS = 16


@dataclass(frozen=True)
class ClusterRun:
    """A run that is over.

    Attributes:
        settings, cluster, workload: What was asked.
        runs: What each replica did, by its number, with the requests that it was sent, in the order in which they
            came. All end when the last one does. Replicas that only prefill come first; to them all requests are of
            one token, and to those that only decode they arrive when their KV does.
        rows: The rows of the workload that these are, int64 [requests of the replica] each.
        smallest_pool_blocks: int64 [n], the smallest pool that can ever serve each request.
        transfers: int64 columns, by the names in ``disaggregated.TRANSFER``: a record for each prompt with KV that went
            from where it was prefilled to where it was decoded.
    """

    settings: Settings
    cluster: Cluster
    workload: Workload
    runs: tuple[Run, ...]
    rows: tuple[np.ndarray, ...]
    smallest_pool_blocks: np.ndarray
    transfers: dict[str, np.ndarray]

    @property
    def refused(self) -> np.ndarray:
        """bool [n]: requests that no replica's pool can ever hold; they were turned away before the router."""
        return self.smallest_pool_blocks > self.runs[0].replica.num_blocks

    @property
    def num_arriving(self) -> int:
        """Replicas at which requests arrive: those that prefill."""
        return self.cluster.num_arriving

    def only_decodes(self, number: int) -> bool:
        """Whether requests come to a replica when they have been prefilled."""
        return number >= self.num_arriving

    def role(self, number: int) -> str:
        """What a replica does: "prefill", "decode" or "both"."""
        if not self.cluster.disaggregated:
            return "both"
        return "decode" if self.only_decodes(number) else "prefill"

    @property
    def end_ticks(self) -> int:
        """When the last request was done."""
        return self.runs[0].log.end_ticks


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
        progress: Called now and then with the number of requests that have arrived.

    Raises:
        UserError: A request is longer than the model, a setting cannot be or would not be read, or requests of
            several sequences, with parents under a policy that shares, or from users that wait for answers.
        SimulationFault: An invariant does not hold.
    """
    _check_separate(settings, workload)
    _check_disaggregated(settings, cluster)
    refuse_unread(settings, workload)
    refuse_unread_in_cluster(cluster, workload)
    whole = workload.token_runs() if workload.may_share_prefixes else None
    sent = [Sent(workload, whole) for _ in range(cluster.size)]
    replicas = _replicas(settings, cluster, step_cost, sent)
    first = replicas[0]
    check_fits(workload, first.max_model_len)
    needed = smallest_pools(first.policy, first.block_size, workload, grouped=False)
    rows = np.flatnonzero(needed <= first.num_blocks)
    fleet = Fleet(settings, cluster, workload, rows, replicas, sent, _router(cluster, first, workload, whole))
    with no_cycle_collection():
        _run(fleet.env, fleet.engines, workload, progress)
    end_ticks = int(max(engine.end_ticks for engine in fleet.engines))
    where = tuple(np.array(part.rows, dtype=np.int64) for part in sent)
    runs = tuple(
        finished(settings, part, False, replica, engine.ledger, end_ticks, needed[own])
        for own, part, replica, engine in zip(where, fleet.parts(where), replicas, fleet.engines, strict=True)
    )
    return ClusterRun(settings, cluster, workload, runs, where, needed, fleet.transfers())


def _check_separate(settings: Settings, workload: Workload) -> None:
    """Refuse what only a single replica serves."""
    remedy = "is for a single replica; leave out num_replicas and the like"
    if workload.users is not None:
        _refuse(workload.users)
    if workload.shares:
        raise SettingError("n", int(workload.num_sequences.max()), remedy)
    if is_grouped(settings, workload) and workload.dialogue is not None:
        raise SettingError("parent", "given", remedy)
    if prefix := pinned_tokens(settings.policy_options):
        raise SettingError("shared_prefix_tokens", prefix, remedy)


def _refuse(users: Users) -> None:
    """Refuse users, by what makes them wait."""
    if users.max_concurrency is not None:
        remedy = "users that wait for answers need a single replica; leave it out"
        raise SettingError("max_concurrency", users.max_concurrency, remedy)
    remedy = "turns that wait for answers are for a single replica; leave out think_time and the trace's delays"
    raise SettingError("session_id", "given", remedy)


def _check_disaggregated(settings: Settings, cluster: Cluster) -> None:
    """Refuse a policy that cannot continue a prefill on another replica."""
    if cluster.disaggregated and not policy(settings.policy).disaggregates:
        able = either(name for name, kind in POLICIES.items() if kind.disaggregates)
        remedy = f"{settings.policy} cannot go on from a prompt computed elsewhere; take {able}"
        raise SettingError("prefill_replicas", cluster.prefill_replicas, remedy)


def _replicas(settings: Settings, cluster: Cluster, step_cost: StepCost | None, sent: list[Sent]) -> list[Replica]:
    """A replica for each; they share one cost, which none of them changes."""
    first = build(settings, step_cost, sent[0])
    if cluster.disaggregated and first.layout is not None:
        remedy = "needs layers that keep every token; give --disable-hybrid-kv-cache-manager"
        raise SettingError("prefill_replicas", cluster.prefill_replicas, remedy)
    # Where requests only decode, their prompts come from elsewhere.
    decodes = replace(settings, enable_prefix_caching=False)
    prefilling = cluster.num_arriving
    return [
        first,
        *(build(settings, first.cost, part) for part in sent[1:prefilling]),
        *(build(decodes, first.cost, part) for part in sent[prefilling:]),
    ]


def _router(cluster: Cluster, replica: Replica, workload: Workload, whole: TokenRuns | None) -> Router:
    """The router of requests that arrive."""
    size = max(replica.block_size, LEAST_NAMED_TOKENS)
    names_of: Callable[[int], list[int]] = _nameless
    if cluster.router == "prefix-affine":
        names_of = Chains(whole or workload.token_runs(), size).prompt_names
    most_blocks = replica.memory.capacity_slots // size
    return router(cluster.router, cluster.num_arriving, cluster, names_of, most_blocks)


def _nameless(row: int) -> list[int]:
    """Names for a router that compares no prompts."""
    return []


def _run(
    env: simpy.Environment, engines: Sequence[Engine], workload: Workload, progress: Callable[[int], None] | None
) -> None:
    if progress is not None:
        for tick in milestones(workload):
            env.run(until=tick)
            progress(int(np.searchsorted(workload.arrival_ticks, tick)))
    env.run(until=simpy.AllOf(env, [engine.process for engine in engines]))
    if progress is not None:
        progress(len(workload))
