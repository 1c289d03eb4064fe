"""A load that changes over a day: the fleet hour by hour, its start-up times, its cost, and its attainment over the whole day.

    busiest step   the constant fleet: the plan for its rate, as without a curve
    other steps    the smallest fleet that takes their rate; fleets take what 90 % of seeds do, with 95 % confidence, divided by the
                   step time that decides whether the constant fleet is enough (``chance``)
    schedule       at any time the largest fleet that is wanted within the next start-up time, so that replicas take requests
                   when a busier step begins; they are paid for from their order until they have drained
    attainment     one simulated day, from the first request to the last, with the schedule and with the constant fleet

The rates that up to ``_MOST_SIZES`` smaller fleets take are searched for, and those of sizes between them are interpolated:
a replica of a larger fleet takes at least as much as one of a smaller fleet. Where runs have too few requests to fill a replica, no
rate counts at which they are bursts (``fleet.known_rate``), so that steps may have more replicas than they need.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import Any, NamedTuple

import numpy as np

from ...sim.cluster import Cluster, ClusterRun, cluster_times, simulate_cluster
from ...sim.config.schedule import FleetSchedule
from ...sim.config.settings import Settings
from ...sim.metrics.requests import RequestTimes, request_times
from ...sim.types import ticks
from ...sim.types.errors import SettingError
from ...traces.arrivals.pacing import RateCurve
from ..runs.pool_use import pool_use, usage_over_spans
from ..runs.slo_check import Goal, compiled_cost
from .fleet import serve
from .load import Load

#: Smaller fleets with a search for their highest rates, at most.
_MOST_SIZES = 8
_PER_HOUR = 3600 * ticks.PER_SECOND


class Day(NamedTuple):
    """A day of steps of constant rate, as plain numbers.

    Attributes:
        start_s: Start of each step, rising from 0.
        rates: Requests/s of each step.
        end_s: End of the last step, which is as long as the one before it.
    """

    start_s: tuple[float, ...]
    rates: tuple[float, ...]
    end_s: float

    @classmethod
    def of(cls, curve: RateCurve, path: str) -> Day:
        """The day of a rate curve.

        Raises:
            SettingError: It has a single step, or no requests.
        """
        starts, rates = tuple(curve.start_s.tolist()), tuple(curve.request_rate.tolist())
        if len(starts) < 2:
            raise SettingError("rate_curve", path, "has one rate; give --request-rate, or a row for each hour")
        if not max(rates):
            raise SettingError("rate_curve", path, "has no requests; give rates above 0")
        return cls(starts, rates, 2 * starts[-1] - starts[-2])

    @property
    def busiest(self) -> float:
        """The highest rate, requests/s."""
        return max(self.rates)

    @property
    def spans_s(self) -> list[tuple[float, float]]:
        """Start and end of each step."""
        return list(pairwise((*self.start_s, self.end_s)))


def sizes_below(most: int) -> list[int]:
    """Sizes of fleets, up to ``_MOST_SIZES``, evenly below ``most``."""
    return sorted({max(1, round(most * part / (_MOST_SIZES + 1))) for part in range(1, _MOST_SIZES + 1)} - {most})


def replicas_for(rates: Sequence[float], takes: Mapping[int, float], most: int) -> list[int]:
    """The smallest fleet for each rate.

    Args:
        rates: Requests/s.
        takes: Rates that fleets of some sizes take, requests/s; of ``most`` at least the highest of ``rates``.
    """
    known = sorted(takes)
    each = np.interp(range(1, most + 1), known, [takes[size] / size for size in known])
    able = np.maximum.accumulate(each * np.arange(1, most + 1))
    return [min(most, 1 + int(np.searchsorted(able, rate))) for rate in rates]


def schedule_of(day: Day, replicas: Sequence[int], startup_s: float) -> FleetSchedule:
    """When how many replicas are wanted, so that each step has its own from its start on.

    Raises:
        SettingError: A fleet that cannot be.
    """
    starts = [round(start * ticks.PER_SECOND) for start in day.start_s]
    startup = round(startup_s * ticks.PER_SECOND)
    times = sorted({0, *starts, *(start - startup for start in starts if start > startup)})
    sizes = [max(replicas[bisect_right(starts, now) - 1 : bisect_right(starts, now + startup)]) for now in times]
    kept = [place for place in range(len(times)) if not place or sizes[place] != sizes[place - 1]]
    return FleetSchedule(tuple(times[place] for place in kept), tuple(sizes[place] for place in kept), startup)


class ServedStep(NamedTuple):
    """What a fleet served in one step of a day.

    Attributes:
        requests: That arrived.
        attained: Share of them that meet the objectives; None without any.
        concurrency: Requests in flight a replica, mean over time.
        kv_cache_usage, peak_kv_cache_usage: Mean and highest share of the KV cache in use.
        replica_hours: Paid for.
    """

    requests: int
    attained: float | None
    concurrency: float
    kv_cache_usage: float
    peak_kv_cache_usage: float
    replica_hours: float


@dataclass(frozen=True)
class ServedDay:
    """What a fleet served on a whole day, and in each of its steps."""

    requests: int
    attained: float
    steps: tuple[ServedStep, ...]
    replica_hours: float


class Targets(NamedTuple):
    """Requests in flight and KV cache in use a replica."""

    concurrency: float
    kv_cache_usage: float


def served_day(
    settings: Settings,
    load: Load,
    goal: Goal,
    seed: int,
    cluster: Cluster,
    day: Day,
    replicas: tuple[int, ...],
    startup_s: float,
) -> ServedDay:
    """Serve a whole day.

    Args:
        cluster: Its router counts; the fleet is of ``replicas`` in each step.

    Raises:
        UserError, SimulationFault: As ``simulate_cluster``.
    """
    day = Day(*day)
    work = load.day(seed, day.start_s, day.rates, day.end_s)
    schedule = schedule_of(day, replicas, startup_s)
    fleet = Cluster(num_replicas=schedule.sizes[0], router=cluster.router)
    run = simulate_cluster(settings, work, fleet, compiled_cost(settings), schedule=schedule)
    times = cluster_times(run)
    met = np.zeros(len(work), dtype=bool)
    met[times.index] = goal.objectives.met(times)["all"]
    edges = [round(start * ticks.PER_SECOND) for start in (*day.start_s, day.end_s)]
    first = np.searchsorted(work.arrival_ticks, edges)
    held = _held(times, np.array(edges))
    attained = [float(met[low:high].mean()) if high > low else None for low, high in pairwise(first.tolist())]
    in_system = [
        float(ticks_held) / (late - early) for ticks_held, (early, late) in zip(held, pairwise(edges), strict=True)
    ]
    usage = [usage_over_spans(part, edges) for part in run.runs if len(part.log.rows["ticks"])]
    paid = _paid_ticks(run, schedule, edges)
    used, busy = (np.sum(ticks_of, axis=0) for ticks_of in zip(*((each.used_ticks, each.busy_ticks) for each in usage)))
    columns = (
        np.diff(first).tolist(),
        attained,
        [number / size for number, size in zip(in_system, replicas, strict=True)],
        (used / np.maximum(busy, 1)).tolist(),
        np.max([each.peak for each in usage], axis=0).tolist(),
        [each / _PER_HOUR for each in paid],
    )
    steps = tuple(map(ServedStep, *columns))
    return ServedDay(len(work), float(met.mean()), steps, sum(paid) / _PER_HOUR)


def _held(times: RequestTimes, edges: np.ndarray) -> np.ndarray:
    """Requests in the system, integrated over each span between two edges, in request ticks (Little's law)."""
    since_arrival, since_finish = (_elapsed(np.sort(each), edges) for each in (times.arrival_ticks, times.finish_ticks))
    return np.diff(since_arrival - since_finish)


def _elapsed(ascending: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Ticks from each time to each edge that is later, summed; exact floats up to rounding of the sums."""
    before = np.concatenate([[0.0], np.cumsum(ascending.astype(np.float64))])
    count = np.searchsorted(ascending, edges)
    return count * edges.astype(np.float64) - before[count]


def _paid_ticks(run: ClusterRun, schedule: FleetSchedule, edges: Sequence[int]) -> list[int]:
    """Replica ticks of each step, from order to the end of the last request, at least to the end of the day. The last step has
    what is served after it."""
    last = [int(request_times(part).finish_ticks.max(initial=0)) for part in run.runs]
    end = max(edges[-1], run.end_ticks)
    spans = np.array(schedule.paid_spans(last, end), dtype=np.int64)
    # Of all time before an edge; the last edge is the end.
    before = [int((np.minimum(spans, edge)[:, 1] - np.minimum(spans, edge)[:, 0]).sum()) for edge in (*edges[:-1], end)]
    return np.diff(before).tolist()


def full_load(settings: Settings, load: Load, goal: Goal, seed: int, cluster: Cluster, rate: float) -> Targets:
    """The targets of autoscalers: where a fleet takes as much as it can."""
    served = serve(settings, load.draw(seed, cluster.size).at(rate), cluster)
    runs = served.run.runs if isinstance(served.run, ClusterRun) else (served.run,)
    times = served.times
    arrivals = np.sort(times.arrival_ticks)
    # The middle of the arrivals: before it the fleet fills, after it it drains.
    edges = np.array([arrivals[len(arrivals) // 4], arrivals[3 * len(arrivals) // 4]])
    concurrency = _held(times, edges).item() / float(edges[1] - edges[0]) / cluster.size
    usage = fsum(pool_use(run).mean_usage for run in runs) / len(runs)
    return Targets(concurrency, usage)


class PlannedStep(NamedTuple):
    """A step of a planned day.

    Attributes:
        start_s, end_s, request_rate: The load.
        replicas: Of the fleet that follows it.
        served, constant: What that fleet served, and the fleet of the busiest step.
        price, constant_price: What they cost.
    """

    start_s: float
    end_s: float
    request_rate: float
    replicas: int
    served: ServedStep
    constant: ServedStep
    price: float
    constant_price: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "start_s": self.start_s,
            "end_s": self.end_s,
            "request_rate": self.request_rate,
            "replicas": self.replicas,
            **self.served._asdict(),
            "price": self.price,
            "attained_by_constant_fleet": self.constant.attained,
            "constant_price": self.constant_price,
        }


@dataclass(frozen=True)
class DayPlan:
    """The plan of a day.

    Attributes:
        day: The load.
        replicas: Replicas of each step.
        takes: Rates that fleets of some sizes take, requests/s.
        startup_s: Time from the order of a replica until it takes requests.
        following, constant: ``served_day`` with the schedule, and with the fleet of the busiest step throughout.
        targets: ``full_load`` of the largest fleet.
        replica_hour: Price of a replica for an hour.
        short_runs: Whether ``takes`` are lower bounds, because runs of smaller fleets are bursts at the rates that they take.
        full_rate: Requests/s of ``targets``.
        attainment: Share of the requests that should meet the objectives.
    """

    day: Day
    replicas: tuple[int, ...]
    takes: Mapping[int, float]
    startup_s: float
    following: ServedDay
    constant: ServedDay
    targets: Targets
    replica_hour: float
    short_runs: bool
    full_rate: float
    attainment: float

    @property
    def bills(self) -> tuple[float, float]:
        """Price of the day that follows the curve, and of the constant fleet."""
        return self._bill(self.following), self._bill(self.constant)

    def _bill(self, served: ServedDay) -> float:
        return served.replica_hours * self.replica_hour

    @property
    def constant_replicas(self) -> int:
        """Of the fleet of the busiest step."""
        return max(self.takes)

    def steps(self) -> list[PlannedStep]:
        """The steps of the day."""
        served = zip(self.following.steps, self.constant.steps, strict=True)
        return [
            PlannedStep(*span, rate, size, *both, *(each.replica_hours * self.replica_hour for each in both))
            for span, rate, size, both in zip(self.day.spans_s, self.day.rates, self.replicas, served, strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        followed, constant = self.bills
        return {
            "startup_seconds": self.startup_s,
            "steps": [step.as_dict() for step in self.steps()],
            "constant_replicas": self.constant_replicas,
            "requests": self.following.requests,
            "attainment": self.attainment,
            "attained": self.following.attained,
            "attained_by_constant_fleet": self.constant.attained,
            "replica_hours": self.following.replica_hours,
            "constant_replica_hours": self.constant.replica_hours,
            "price": followed,
            "constant_price": constant,
            "rate_by_replicas": {str(size): rate for size, rate in sorted(self.takes.items())},
            "rates_are_lower_bounds": self.short_runs,
            "autoscaler_targets": self.targets._asdict() | {"request_rate": self.full_rate},
        }
