"""Results of a replica or a fleet at its recommended rate, and the limit that prevents a higher rate.

At 1.15 times the highest rate of a seed, the run misses its goal. Two results of that run show the limit. The first is
the objective that most requests miss. The second is the cause for which requests wait, by time: ``max_num_seqs``
sequences already run, the KV cache lacks the blocks of another prompt, or neither, which leaves the step time.
Preemptions also indicate memory. Neither shows whether more memory helps: overload fills any KV cache in the end, also
where steps are the cause, and a policy that reserves memory for outputs makes requests wait while blocks are free. So
memory counts as the limit if the same run with twice the blocks has at most half the misses, and only then. In a fleet
divided into prefill and decode, the missed objective shows which of them limits it: TTFT is of the prefill replicas,
TPOT and the end-to-end latency are of the decode replicas.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from math import fsum, inf
from typing import Any

import numpy as np

from ...sim import Run, Settings, Workload, simulate, summary
from ...sim.cluster import Cluster
from ...sim.memory.accounting.ledger import of_class
from ...sim.metrics.registry import OF_REQUESTS, key
from ...sim.types.optional import not_none
from ..runs.near_saturation import MOST_REQUESTS, LatencyRange, LoadClass, Saturation, ServedLoad, saturation
from ..runs.slo_check import Goal, SloCheck, by_load, check_run, check_times, compiled_cost
from .fleet import Served, serve
from .load import Load

#: Shares of the recommended rate at which latency and price are reported beside those at the rate itself, for the picture.
SHARES = (0.25, 0.5, 0.75)
#: Rate, relative to the recommended rate, at which the limit is determined; the check of the recommendation uses it too.
BEYOND = 1.15
#: Times the blocks of the run that confirms memory as the limit, and the share of the misses that it may have at most.
_ROOMY, _CURED = 2, 0.5
#: Share of the queueing time above which a cause counts as the limit.
_MOSTLY = 0.5
_TIMES = tuple(key(statistic, name) for name in OF_REQUESTS for statistic in ("median", "p90", "p99"))
_RATES = (
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "mean_batch",
    "num_gpu_blocks",
    "block_size",
)


@dataclass(frozen=True)
class Bottleneck:
    """What prevents a higher rate.

    Attributes:
        objective: The one that most requests miss at ``BEYOND`` times the highest rate; None where the run meets the goal.
        missed: Shares of the counted requests that miss each.
        cause: "max_num_seqs", "memory" or "steps"; of a divided fleet "prefill" or "decode".
        preemptions: In that run.
        waiting: Shares of its time in which requests wait (``waiting_shares``).
        load: Of several loads the one that the objective is of.
    """

    objective: str | None
    missed: dict[str, float]
    cause: str
    preemptions: int = 0
    waiting: dict[str, float] = field(default_factory=dict)
    load: str | None = None

    @property
    def name(self) -> str:
        """The objective, or that there is none, in a table."""
        return (self.objective or "throughput").upper()

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        load = {} if self.load is None else {"load": self.load}
        rest = {"cause": self.cause, "preemptions": self.preemptions, "waiting": self.waiting}
        return {"objective": self.objective, "missed": self.missed, **load, **rest}


@dataclass(frozen=True)
class Point:
    """A rate of a replica and its latencies."""

    request_rate: float
    tokens_per_s_per_user: float
    p90_ttft_ms: float


@dataclass(frozen=True)
class Detail:
    """Results at the recommended rate.

    Attributes:
        attained: Share of the counted requests that meet the objectives; of several loads ``attained_by_load`` has each.
        metrics: Of the run's summary, ``_RATES`` and ``_TIMES``.
        near_saturation: Latencies with other step times, where they are a range.
        kv_cache_pct: Of the pool the share in use, mean over time.
        buckets_pct, paper_view_pct: Contents of the pool.
        cache_worth: Worth of the cached blocks; None where prompts share nothing.
        curve: At ``SHARES`` of the rate and at it; empty of an infinite rate.
    """

    attained: float
    metrics: dict[str, Any]
    preemptions: int
    refused_requests: int
    load: LoadClass
    near_saturation: LatencyRange | None
    kv_cache_pct: float
    buckets_pct: dict[str, float]
    paper_view_pct: dict[str, float]
    cache_worth: dict[str, Any] | None
    limit: Bottleneck
    curve: tuple[Point, ...]
    attained_by_load: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON data, the metrics among the others."""
        data = asdict(self) | {"limit": self.limit.as_dict(), "curve": list(map(asdict, self.curve))}
        by_load, metrics = data.pop("attained_by_load"), data.pop("metrics")
        first = {"attained": data.pop("attained")} | ({} if by_load is None else {"attained_by_load": by_load})
        return first | metrics | data


def detail(
    settings: Settings, load: Load, goal: Goal, seed: int, cluster: Cluster, rate: float, highest: float
) -> Detail:
    """The run of one seed at a rate, and its limit.

    An infinite rate (all requests at once) has no shares of the recommended rate.

    Args:
        cluster: The fleet.
        rate: Of the fleet, requests/s.
        highest: The seed's own highest rate, with one replica; of a fleet divided into prefill and decode, its own.

    Raises:
        UserError, SimulationFault: As ``simulate``.
    """
    drawn, one = load.draw(seed, cluster.size), load.draw(seed)
    shares = SHARES if rate < inf else ()
    summaries = {share: serve(settings, drawn.at(rate * share), cluster).summary() for share in shares}
    work = drawn.at(rate)
    served = serve(settings, work, cluster)
    summaries[1.0] = whole = served.summary()
    ledger = whole["waste"]["mean_over_time_pct"]
    load_class, near = _saturation(settings, work, served, cluster)
    if cluster.disaggregated:
        beyond = drawn.at(highest * BEYOND)
        found = limit_of_split(serve(settings, beyond, cluster), beyond, goal)
    else:
        found = limit_of(settings, one.at(highest * BEYOND), goal)
    return Detail(
        attained=check_times(work, served.times, goal).attained,
        attained_by_load=_attained_by_load(work, served, goal) if goal.loads else None,
        metrics={name: whole[name] for name in (*_RATES, *_TIMES)},
        preemptions=sum(whole["preemptions"].values()),
        refused_requests=whole["refused"],
        load=load_class,
        near_saturation=near,
        kv_cache_pct=100 - ledger["buckets"]["free"] - ledger["buckets"]["cached"],
        buckets_pct=ledger["buckets"],
        paper_view_pct=ledger["paper_view"],
        cache_worth=served.cache_worth(),
        limit=found,
        curve=tuple(_point(rate / cluster.size * share, summaries[share]) for share in (*shares, 1.0) if shares),
    )


def _attained_by_load(work: Workload, served: Served, goal: Goal) -> dict[str, float]:
    return {not_none(each.load): each.attained for each in by_load(work, served.times, goal)}


def _saturation(settings: Settings, work: Workload, served: Served, cluster: Cluster) -> Saturation:
    """How near a served load is to saturation. Fleets serve in proportion more requests again than a replica."""
    found = replace(ServedLoad.of(served.run, work, cluster.size), times=served.times)
    return saturation(
        settings, found, lambda changed: serve(changed, work, cluster).times, most=MOST_REQUESTS * cluster.size
    )


def _point(rate: float, metrics: dict[str, Any]) -> Point:
    tpot = metrics["median_tpot_ms"]
    return Point(rate, 1000 / tpot if tpot else 0.0, metrics["p90_ttft_ms"])


def limit_of(settings: Settings, work: Workload, goal: Goal) -> Bottleneck:
    """As ``limit``, of a replica with too high a load. A run with twice the blocks shows whether memory is the cause."""
    cost = compiled_cost(settings)
    beyond = simulate(settings, work, cost)
    found = limit(beyond, goal)
    if found.cause != "memory" and found.objective is None:
        return found
    roomy = replace(settings, num_gpu_blocks_override=_ROOMY * beyond.replica.num_blocks)
    relieved = simulate(roomy, work, cost)
    missed, still = (1 - check_run(run, goal).attained for run in (beyond, relieved))
    if still <= _CURED * missed:
        return replace(found, cause="memory")
    # With room for more sequences their number may be what they wait for.
    is_number = "max_num_seqs" in (found.cause, limit(relieved, goal).cause)
    return replace(found, cause="max_num_seqs" if is_number else "steps")


def limit(beyond: Run, goal: Goal) -> Bottleneck:
    """The objective that a run misses, and the cause."""
    preemptions, waits = sum(summary(beyond)["preemptions"].values()), waiting_shares(beyond)
    found = _limit(check_run(beyond, goal), preemptions)
    return replace(found, cause=_cause(waits, preemptions), waiting=waits)


def limit_of_split(beyond: Served, work: Workload, goal: Goal) -> Bottleneck:
    """As ``limit``, of a fleet divided into prefill and decode: the cause is the part that the objective is of."""
    found = _limit(check_times(work, beyond.times, goal), sum(beyond.summary()["preemptions"].values()))
    return replace(found, cause="prefill" if found.objective == "ttft" else "decode")


def _limit(found: SloCheck, preemptions: int) -> Bottleneck:
    """Without its cause."""
    missed = {name: number / found.counted for name, number in found.missed.items()}
    objective = None if found.meets else max(missed, key=missed.__getitem__)
    return Bottleneck(objective, missed, "", preemptions, load=found.load)


def _cause(waits: dict[str, float], preemptions: int) -> str:
    queued = fsum(waits.values())
    for cause in ("max_num_seqs", "memory"):
        if queued and waits[cause] > _MOSTLY * queued:
            return cause
    return "memory" if preemptions else "steps"


def waits_for_windows(run: Run) -> float:
    """Of the share ``memory`` of ``waiting_shares`` that in which windows lack, in a pool of their own."""
    rows, ticks = run.log.rows, run.log.rows["ticks"] / max(run.log.end_ticks, 1)
    waits = (rows["waiting"] > 0) & (rows["batch_size"] < run.replica.policy.limits.max_num_seqs)
    return float(ticks[waits & _lacks_windows(run)].sum())


def _lacks_windows(run: Run) -> np.ndarray:
    """Whether a pool of windows lacks those of another request, bool [rows]."""
    log, policy = run.log, run.replica.policy
    if not (room := policy.windows_to_admit(run.workload, log.block_size)):
        return np.zeros(len(log.rows["waiting"]), dtype=np.bool_)
    lacks: np.ndarray = not_none(log.second_pool).capacity_slots - log.rows[of_class("held", 1)] < room
    return lacks


def waiting_shares(run: Run) -> dict[str, float]:
    """Shares of the run's time in which requests wait for ``max_num_seqs``, for memory, and for the step to end.

    The keys are ``max_num_seqs``, ``memory`` and ``steps``.
    """
    run_log, limits = run.log, run.replica.policy.limits
    rows, ticks = run_log.rows, run_log.rows["ticks"] / max(run_log.end_ticks, 1)
    queued = rows["waiting"] > 0
    num_seqs = queued & (rows["batch_size"] >= limits.max_num_seqs)
    room = run.replica.policy.slots_to_admit(run.workload, run_log.block_size, rows["batch_size"])
    memory = queued & ~num_seqs & ((run_log.capacity_slots - rows["held"] < room) | _lacks_windows(run))
    steps = queued & ~num_seqs & ~memory
    return {
        name: float(ticks[some].sum())
        for name, some in (("max_num_seqs", num_seqs), ("memory", memory), ("steps", steps))
    }
